"""Adapting: what users hold, as states, so that nobody writes a map by hand.

=======================  ==========================================================================
what is given            what it becomes
=======================  ==========================================================================
a ``LiveState``          itself
None                     nothing: the rank only takes part
a dictionary of tensors  their weights: a ``DTensor`` by its mesh and placements, another as whole
a module, or a pair of   its parameters and buffers, and what the optimizer keeps for them
it and its optimizer
a DeepSpeed engine       its masters, what its optimizer keeps, its counters
=======================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from reshard.errors import UsageError
from reshard.live.deciding import WEIGHTS
from reshard.live.dtensors import tensor_shards
from reshard.live.engines import engine_state, is_engine
from reshard.live.states import LiveState
from reshard.live.trainers import trainer_state


def state_of(thing: object, *, target: bool = False) -> LiveState:
    """Return the state that something a user holds stands for.

    Parameters
    ----------
    thing
        One of those above.
    target
        Whether it is to be filled: an optimizer that has not stepped then makes its states.

    Raises
    ------
    UsageError
        When it is nothing that a state can be made from.

    Examples
    --------
    >>> [shard.key for shard in state_of({"w": torch.zeros(3)}).shards]
    [('w', 'fp32')]
    """
    if thing is None:
        return LiveState()
    if isinstance(thing, LiveState):
        return thing
    if isinstance(thing, Mapping) and all(isinstance(t, torch.Tensor) for t in thing.values()):
        return LiveState(
            tuple([s for name, t in thing.items() for s in tensor_shards(name, WEIGHTS, t)])
        )
    if isinstance(thing, nn.Module) and not is_engine(thing):
        return trainer_state(thing)
    if is_engine(thing):
        return engine_state(thing, fresh=target)
    if isinstance(thing, tuple) and len(thing) == 2 and isinstance(thing[0], nn.Module):
        return trainer_state(thing[0], thing[1], fresh=target)
    raise UsageError(
        "no state can be made from this",
        expected="a LiveState, tensors by name, a module, (module, optimizer) or an engine",
        found=type(thing).__name__,
        next_step="describe its tensors with reshard.live.Shard",
    )
