"""Pipelines in native form: DeepSpeed's ordinary loader takes them on any grid that is known.

DeepSpeed trains the source here, pp2 x tp2 x dp2. Its embedding is tied to its head across stages,
the head has no layer file, and frozen vectors and buffers are in the layer files only.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import pytest
import torch

import reshard
from reshard.formats.deepspeed.writing import NativeOptions
from scripts.deepspeed_lab.results import Piped
from scripts.deepspeed_lab.topologies import PipeRecipe
from tests.deepspeed_judge.judge import SEED, TAG, Judge, differences

pytestmark = pytest.mark.deepspeed

OTHER_SEED = 5
Run: TypeAlias = tuple[Piped, Path]


@pytest.fixture(scope="module")
def trained(judge: Judge, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("pipeline")
    recipe = PipeRecipe(pp=2, tp=2, dp=2)
    held = judge.lab.run("train_pipeline", recipe, folder, SEED, world=recipe.world, timeout=120)
    return held, folder


def converted(source: Path, folder: Path, grid: PipeRecipe) -> Path:
    options = NativeOptions(stage=1, dp=grid.dp, tp=grid.tp, pp=grid.pp)
    reshard.convert(source, folder / TAG, to="deepspeed", native=options, fsync=False)
    return folder


@pytest.mark.parametrize(
    "grid",
    [PipeRecipe(2, 2, 2), PipeRecipe(2, 1, 3), PipeRecipe(1, 2, 2), PipeRecipe(1, 1, 4)],
    ids=str,
)
def test_deepspeed_goes_on_from_there(
    grid: PipeRecipe, judge: Judge, trained: Run, tmp_path: Path
) -> None:
    held, source = trained
    folder = converted(source, tmp_path, grid)
    assert reshard.verify(source, folder / TAG).equal
    after: Piped = judge.lab.run(
        "resume_pipeline_natively", grid, folder, OTHER_SEED, world=grid.world, timeout=120
    )
    assert differences(held.full, after.full) == []
    assert held.untrained.keys() == after.untrained.keys()
    assert all(torch.equal(held.untrained[name], after.untrained[name]) for name in held.untrained)
    losses = zip(held.losses, after.losses, strict=True)
    noise = 0.0 if grid == PipeRecipe(2, 2, 2) else 5e-6
    if grid.dp != 3:  # four rows do not divide by three
        assert max(abs(one - other) for one, other in losses) <= noise


def test_there_and_back(trained: Run, tmp_path: Path) -> None:
    _, source = trained
    there = converted(source, tmp_path / "there", PipeRecipe(1, 1, 3))
    assert reshard.verify(source, there / TAG).equal
