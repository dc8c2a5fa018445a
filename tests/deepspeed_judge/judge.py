"""The judge: real DeepSpeed, in several processes on the CPU, loading what reshard wrote.

It knows nothing of reshard. What an engine holds is read from its live flat partitions and put
together by :mod:`scripts.deepspeed_lab.states`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from scripts.deepspeed_lab.client import Lab
from scripts.deepspeed_lab.recipe import TAG, Recipe
from scripts.deepspeed_lab.results import Resumed
from tests.truth import CHECKPOINTS, Case, States

SEED = 42
"""The seed that every case was initialised with. DeepSpeed never restores frozen parameters and
buffers from a universal folder, so the resumed model must get the same ones by itself."""


class Judge:
    """Asks DeepSpeed; one server process for the whole session."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    def resume(
        self,
        case: Case,
        root: Path,
        tag: str | None = None,
        *,
        world: int | None = None,
        tp: int | None = None,
        stage: int | None = None,
        dtype: str | None = None,
        zero: Mapping[str, Any] | None = None,
        seed: int = SEED,
    ) -> Resumed:
        """Load the universal folder ``root/tag`` under another topology; train steps 3 to 5.

        What is not given is as in the case, except that ZeRO's options are DeepSpeed's defaults.
        ``tag=None`` follows ``latest_universal``.
        """
        recipe = recipe_of(case).spread(world=world, tp=tp, stage=stage, dtype=dtype, zero=zero)
        return self._resume(recipe, root, tag, seed, universal=True)

    def resume_native(self, case: Case, root: Path, tag: str | None = None) -> Resumed:
        """Load the checkpoint ``root/tag`` as DeepSpeed loads its own, same topology."""
        return self._resume(recipe_of(case), root, tag, SEED, universal=False)

    def _resume(
        self, recipe: Recipe, root: Path, tag: str | None, seed: int, *, universal: bool
    ) -> Resumed:
        arguments = (recipe, root, tag, seed, universal)
        resumed: Resumed = self.lab.run("resume", *arguments, world=recipe.world)
        return resumed

    def convert_with_deepspeed(
        self, tag_path: Path, destination: Path, *, inject: bool = True, strict: bool = True
    ) -> None:
        """Run DeepSpeed's own ``ds_to_universal``.

        ``inject`` is its hidden flag for checkpoints without universal info, which plain
        ZeRO-1/2 checkpoints are.
        """
        self.lab.run("convert_with_deepspeed", tag_path, destination, inject, strict, world=0)

    def weights_by_zero_to_fp32(self, folder: Path) -> dict[str, torch.Tensor]:
        """What ``zero_to_fp32.py`` gets out of a checkpoint."""
        found: dict[str, torch.Tensor] = self.lab.run("weights_by_zero_to_fp32", folder, world=0)
        return found


def recipe_of(case: Case) -> Recipe:
    """Return how the case was trained, with its model: ours, or the one beside the checkpoints."""
    if case.name.startswith("golden/"):
        return Recipe.from_topology(case.topology)
    return Recipe.from_topology(case.topology, models_file=CHECKPOINTS / "gen" / "models.py")


def read_universal(folder: Path) -> States:
    """Read the tensors of a universal folder, whoever wrote it."""
    states: States = {}
    for file in sorted((folder / "zero").rglob("*.pt")):
        if file.stem in ("step", "optimizer_state"):
            continue
        name = file.parent.relative_to(folder / "zero").as_posix()
        kept = torch.load(file, weights_only=False)
        tensor = kept["param"] if isinstance(kept, dict) else kept
        states.setdefault(name, {})[file.stem] = tensor
    return states


def differences(expected: States, found: States) -> list[str]:
    """Compare bit for bit; one line for each state that is missing, extra or different."""
    lines = [f"{name}/{state}: extra" for name, state in _keys(found) - _keys(expected)]
    for name, state in _keys(expected):
        want, have = expected[name][state], found.get(name, {}).get(state)
        if have is None:
            lines.append(f"{name}/{state}: missing")
        elif have.shape != want.shape:
            lines.append(f"{name}/{state}: {tuple(have.shape)} instead of {tuple(want.shape)}")
        elif not same_bits(want, have):
            lines.append(f"{name}/{state}: {int((want != have).sum())} elements differ")
    return sorted(lines)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two fp32 tensors are equal to the last bit (NaN payloads, signs of zero)."""
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


def _keys(states: States) -> set[tuple[str, str]]:
    return {(name, state) for name, kept in states.items() for state in kept}


__all__ = ["TAG", "Judge", "differences", "read_universal", "recipe_of", "same_bits"]
