"""Jobs in which a run goes on under another trainer of the same processes, moved live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from reshard import AffinePiece, ParamAffineMap, live
from scripts.deepspeed_lab.engine import make_engine, run_steps, tp_rank
from scripts.deepspeed_lab.fsdp import Run
from scripts.deepspeed_lab.recipe import Recipe
from scripts.deepspeed_lab.results import States
from scripts.deepspeed_lab.states import probe_layout

Losses = tuple[list[float], list[float], str]


class Trainer:
    """An engine of DeepSpeed, or FSDP2 (stage -1) with tensor parallelism where asked for."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self.recipe = recipe
        self.run: Any = None
        if recipe.stage < 0:
            self.run = Run(recipe, seed, flattened=False)
        else:
            self.layout = probe_layout(recipe)
            self.engine = make_engine(recipe, seed=seed)

    def steps(self, steps: range) -> list[float]:
        """Train; the losses."""
        if self.run is not None:
            losses: list[float] = self.run.steps(steps)
            return losses
        return run_steps(self.engine, self.recipe, steps)

    def held(self, *, fresh: bool) -> object:
        """What :func:`reshard.live.move` takes."""
        if self.run is not None:
            return (self.run.model, self.run.optimizer)
        if self.layout is None:
            return self.engine
        maps = {
            name: _map_of(self.layout.shape[name], self.layout.index[name, tp_rank(self.recipe)])
            for name, _ in self.engine.module.named_parameters()
        }
        return live.engine_state(self.engine, maps=maps, fresh=fresh)


def _map_of(shape: tuple[int, ...], index: torch.Tensor) -> ParamAffineMap:
    """The map of a shard that is known by the index of each of its elements."""
    pieces = [AffinePiece((), at, (), n, (), (0,)) for n, at in enumerate(index.tolist())]
    return ParamAffineMap(shape, {0: (len(index),)}, {0: pieces}).canonical()


def hand_over(source: Recipe, target: Recipe) -> Losses:
    """Train three steps, move everything into a trainer of another seed, and train both on.

    The losses of the run that goes on where it was, those of the other, and the plan in words.
    """
    torch.set_num_threads(1)
    first = Trainer(source, 42)
    first.steps(range(3))
    second = Trainer(target, 7)
    moved = live.move(first.held(fresh=False), second.held(fresh=True), timeout=60.0)
    return first.steps(range(3, 6)), second.steps(range(3, 6)), moved.explain()


def take_from_disk(target: Recipe, folder: Path) -> tuple[States, list[float]]:
    """Fill an FSDP2 run of another seed from a checkpoint; what it then holds, and its losses."""
    torch.set_num_threads(1)
    run = Run(target, 7, flattened=False)
    live.load(folder, (run.model, run.optimizer))
    states, _ = run.held()
    return states, run.steps(range(3, 6))
