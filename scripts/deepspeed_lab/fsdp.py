"""Jobs that train with FSDP2, with and without tensor parallelism, and save and load with DCP.

The model, its data, its groups and its optimizer are those of the DeepSpeed runs, so a run that
changes hands goes on with the losses that it would have had.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from scripts.deepspeed_lab.engine import batch, parameter_groups
from scripts.deepspeed_lab.models import build_model
from scripts.deepspeed_lab.recipe import TAG, Recipe
from scripts.deepspeed_lab.results import Sharded, States

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj")
"""Linears of a Llama layer that are cut by rows of their weight, with ``mlp.up_proj``."""

ROWS = ("self_attn.o_proj", "mlp.down_proj")
"""Those that are cut by columns of their weight."""


class Run:
    """One rank of a training run."""

    def __init__(self, recipe: Recipe, seed: int, *, flattened: bool) -> None:
        self.recipe = recipe
        self.options = StateDictOptions(flatten_optimizer_state_dict=flattened)
        shape = (recipe.dp, recipe.tp)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        self.model = build_model(recipe, seed=seed)
        if recipe.tp > 1:
            _cut_llama(self.model, self.mesh["tp"])
        for layer in _layers(self.model):
            fully_shard(layer, mesh=self.mesh["dp"])
        fully_shard(self.model, mesh=self.mesh["dp"])
        self.optimizer = torch.optim.AdamW(parameter_groups(recipe, self.model), lr=1e-2)

    def steps(self, steps: range) -> list[float]:
        """Train; the loss of each step, averaged over the data-parallel ranks."""
        losses = []
        for step in steps:
            row = self.mesh.get_local_rank("dp")
            input_ids, labels = batch(step, row, self.recipe.dp)
            output = self.model(input_ids=input_ids, labels=labels)
            loss = output if torch.is_tensor(output) else output.loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            mean = loss.detach().float().reshape(1).clone()
            distributed.all_reduce(mean)
            losses.append(mean.item() / self.recipe.world)
        return losses

    def tree(self, name: str) -> dict[str, Any]:
        """The state dicts in the tree of that name; `dcp.load` fills it in place."""
        model = dict(get_model_state_dict(self.model, options=self.options))
        optim: Any = get_optimizer_state_dict(self.model, self.optimizer, options=self.options)
        if name == "torchtitan":
            return {**model, "optimizer": optim}
        return {"model": model, "optim": optim}

    def take(self, tree: dict[str, Any], name: str) -> None:
        """Set model and optimizer from a filled tree."""
        key = "optimizer" if name == "torchtitan" else "optim"
        model = tree["model"] if "model" in tree else {k: v for k, v in tree.items() if k != key}
        set_model_state_dict(self.model, model, options=self.options)
        set_optimizer_state_dict(self.model, self.optimizer, tree[key], options=self.options)

    def held(self) -> tuple[States, dict[str, torch.Tensor]]:
        """Full optimizer states and weights by name, and everything in the model by name."""
        options = StateDictOptions()
        model = get_model_state_dict(self.model, options=options)
        optim: Any = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        weights = {name: _full(tensor) for name, tensor in model.items()}
        states = {
            name: {
                "fp32": weights[name],
                **{state: _full(value) for state, value in kept.items() if state != "step"},
            }
            for name, kept in optim["state"].items()
        }
        return states, weights


def train_fsdp(recipe: Recipe, folder: Path, seed: int, tree: str) -> Sharded:
    """Train three steps, save under ``folder``, read the truth, train three more."""
    run = Run(recipe, seed, flattened=tree == "torchtitan")
    run.steps(range(3))
    state_dict_saver.save(run.tree(tree), checkpoint_id=str(folder / TAG))
    states, weights = run.held()
    return Sharded(states, weights, run.steps(range(3, 6)))


def resume_fsdp(recipe: Recipe, folder: Path, seed: int, tree: str) -> Sharded:
    """Load a DCP folder into a fresh run, read what it then holds, train steps 3 to 5."""
    run = Run(recipe, seed, flattened=tree == "torchtitan")
    filled = run.tree(tree)
    state_dict_loader.load(filled, checkpoint_id=str(folder))
    run.take(filled, tree)
    states, weights = run.held()
    return Sharded(states, weights, run.steps(range(3, 6)))


def _cut_llama(model: nn.Module, mesh: Any) -> None:
    plan: dict[str, ParallelStyle] = {
        **{name: ColwiseParallel() for name in (*COLUMNS, "mlp.up_proj")},
        **{name: RowwiseParallel() for name in ROWS},
    }
    for layer in _layers(model):
        parallelize_module(layer, mesh, plan)


def _layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a Llama; our own model is one unit."""
    found: Any = getattr(getattr(model, "model", None), "layers", ())
    return list(found)


def _full(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()
