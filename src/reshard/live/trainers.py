"""Models and optimizers of torch as states: FSDP2, tensor parallelism, DDP, or one process alone.

Theory. ``named_parameters`` names each parameter, a ``DTensor`` says by itself how it is cut, and
the optimizer keeps its states in the form of the parameter they belong to. What it keeps otherwise
(steps, settings of groups) goes by name. An optimizer that has not stepped yet keeps nothing; as a
target it first makes its states in a step without gradients and learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from reshard.live.deciding import WEIGHTS
from reshard.live.dtensors import tensor_shards
from reshard.live.settings import take_settings, told_settings
from reshard.live.states import LiveState, Shard

OPTIMIZER = "optimizer"
"""Key of what the optimizer keeps beside its tensors."""


def trainer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, fresh: bool = False
) -> LiveState:
    """Return the state of a model, and of its optimizer if one is given.

    Parameters
    ----------
    model
        Its parameters and persistent buffers.
    optimizer
        What it keeps for them.
    fresh
        Let an optimizer that has not stepped make its states first, as a target needs them.
    """
    parameters = dict(model.named_parameters())
    kept = model.state_dict().keys()
    buffers = {name: one for name, one in model.named_buffers() if name in kept}
    shards = [s for n, t in {**parameters, **buffers}.items() for s in tensor_shards(n, WEIGHTS, t)]
    if optimizer is None:
        return LiveState(tuple(shards))
    if fresh:
        make_states(optimizer)
    names = {id(parameter): name for name, parameter in parameters.items()}
    shards += _optimizer_shards(optimizer, names)
    values = {OPTIMIZER: told_settings(_members(optimizer, names))}

    def accept(told: Mapping[str, Any]) -> None:
        if OPTIMIZER in told:
            take_settings(told[OPTIMIZER], _members(optimizer, names))

    return LiveState(tuple(shards), values, accept)


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer make the states of all its parameters, without changing a parameter."""
    members = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if all(optimizer.state.get(member) for member in members):
        return
    gradients = [member.grad for member in members]
    rates = [group["lr"] for group in optimizer.param_groups]
    for member in members:
        member.grad = torch.zeros_like(member)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if torch.is_tensor(group["lr"]) else 0.0
    optimizer.step()
    for member, gradient in zip(members, gradients, strict=True):
        member.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _optimizer_shards(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterator[Shard]:
    for group in optimizer.param_groups:
        for member in group["params"]:
            for state, value in optimizer.state.get(member, {}).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    yield from tensor_shards(names[id(member)], state, value)


def _members(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[list[str], dict[str, Any], dict[str, Any]]]:
    for group in optimizer.param_groups:
        for member in group["params"]:
            yield [names[id(member)]], group, optimizer.state.get(member, {})
