"""A real ``transformers.Trainer`` saves, ``--drop-in`` writes its folder anew, the trainer goes on.

What its engines hold after ``train(resume_from_checkpoint=...)`` must be bit-equal to what those of
the first run held when it saved, and its log must go on as that of the uninterrupted run: learning
rates and epochs exactly, losses exactly on the same ranks, else within the noise of re-ordering.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from reshard.cli import main
from scripts.deepspeed_lab.results import Coached
from scripts.deepspeed_lab.topologies import TrainerRecipe
from tests.deepspeed_judge.judge import SEED, Judge, differences

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate"),
]

NOISE = {"fp32": 5e-6, "bf16": 0.01}

ZERO2 = TrainerRecipe(world=2, stage=2)
ZERO3 = TrainerRecipe(world=2, stage=3, dtype="bf16", trainers_optimizer=True)

ALWAYS = [
    (ZERO2, TrainerRecipe(world=3, stage=3)),
    (ZERO3, TrainerRecipe(world=1, stage=2, dtype="bf16", trainers_optimizer=True)),
]
WHOLE = [
    *ALWAYS,
    (ZERO2, ZERO2),
    (ZERO2, TrainerRecipe(world=1, stage=1)),
    (ZERO2, TrainerRecipe(world=4, stage=2)),
    (ZERO3, ZERO3),
    (ZERO3, TrainerRecipe(world=3, stage=2, dtype="bf16", trainers_optimizer=True)),
    (ZERO3, TrainerRecipe(world=4, stage=3, dtype="bf16", trainers_optimizer=True)),
    (ZERO3, TrainerRecipe(world=1, stage=3, dtype="bf16", trainers_optimizer=True)),
]


@pytest.fixture(scope="module")
def coached(judge: Judge, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function: the run of a recipe, and the folder that it saved after three steps."""

    @functools.cache
    def run(recipe: TrainerRecipe) -> tuple[Coached, Path]:
        folder = tmp_path_factory.mktemp("trainer")
        result = judge.lab.run("run_trainer", recipe, folder, SEED, None, world=recipe.world)
        return result, folder / "checkpoint-3"

    return run


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(*pair, id=f"{pair[0]}->{pair[1]}".replace(" ", "-"))
        for pair in (WHOLE if os.environ.get("RESHARD_MATRIX") else ALWAYS)
    ],
)
def test_the_trainer_goes_on(
    source: TrainerRecipe, target: TrainerRecipe, judge: Judge, coached: Any, tmp_path: Path
) -> None:
    before, folder = coached(source)
    out = tmp_path / folder.name
    topology = ["--to", "deepspeed", "--stage", str(target.stage), "--dp", str(target.world)]
    arguments = ["convert", str(folder), str(out), *topology, "--drop-in", "--verify", "--quiet"]
    assert main(arguments) == 0
    assert files(out) == files(folder) - (set() if source.world == target.world else rng(folder))
    after: Coached = judge.lab.run(
        "run_trainer", target, tmp_path / "on", SEED + 1, out, world=target.world
    )
    assert differences(before.held.full, after.held.full) == []
    assert after.held.groups == before.held.groups
    assert (after.rates, after.epochs) == (before.rates, before.epochs)
    limit = 0.0 if source == target else NOISE[source.dtype]
    assert max(abs(a - b) for a, b in zip(after.losses, before.losses, strict=True)) <= limit


def files(folder: Path) -> set[str]:
    """The trainer's own files: what lies beside DeepSpeed's tag folder."""
    return {path.name for path in folder.iterdir() if path.is_file()} - {"reshard_manifest.json"}


def rng(folder: Path) -> set[str]:
    """Files of single ranks."""
    return {path.name for path in folder.glob("rng_state_*.pth")}
