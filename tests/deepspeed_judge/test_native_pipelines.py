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


STARTS = {1: (0,), 2: (0, 3), 3: (0, 2, 4), 4: (0, 2, 4, 5)}
"""How DeepSpeed cuts six layers uniformly (`partition_uniform`)."""


def converted(source: Path, folder: Path, grid: PipeRecipe) -> Path:
    options = NativeOptions(
        stage=grid.stage, dp=grid.dp, tp=grid.tp, pp=grid.pp, stage_starts=STARTS[grid.pp]
    )
    reshard.convert(source, folder / TAG, to="deepspeed", options=options, fsync=False)
    return folder


DEGREES = [(2, 2, 2), (2, 1, 3), (1, 2, 2), (1, 1, 4), (4, 1, 1), (3, 1, 1), (2, 2, 1)]
WITHOUT_ZERO = [(2, 2, 2), (1, 1, 2), (3, 1, 1)]
GRIDS = [
    *(PipeRecipe(pp, tp, dp) for pp, tp, dp in DEGREES),
    *(PipeRecipe(pp, tp, dp, stage=0) for pp, tp, dp in WITHOUT_ZERO),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_deepspeed_goes_on_from_there(
    grid: PipeRecipe, judge: Judge, trained: Run, tmp_path: Path
) -> None:
    held, source = trained
    goes_on(judge, held, converted(source, tmp_path, grid), grid, source)


def test_a_universal_folder_becomes_a_pipeline_again(
    judge: Judge, trained: Run, tmp_path: Path
) -> None:
    held, source = trained
    universal = tmp_path / "u" / "step3_universal"
    reshard.convert(source, universal, fsync=False)
    grid = PipeRecipe(2, 1, 1)
    goes_on(judge, held, converted(universal, tmp_path, grid), grid, source)


def goes_on(judge: Judge, held: Piped, folder: Path, grid: PipeRecipe, source: Path) -> None:
    """DeepSpeed holds the same after loading, and its losses are those of the first run."""
    assert reshard.verify(source, folder / TAG).equal
    after: Piped = judge.lab.run(
        "resume_pipeline_natively", grid, folder, OTHER_SEED, world=grid.world, timeout=120
    )
    assert differences(held.full, after.full) == []
    assert held.untrained.keys() == after.untrained.keys()
    assert all(torch.equal(held.untrained[name], after.untrained[name]) for name in held.untrained)
    losses = zip(held.losses, after.losses, strict=True)
    noise = 0.0 if (grid.pp, grid.tp, grid.dp) == (2, 2, 2) else 5e-6
    if grid.dp != 3:  # four rows do not divide by three
        assert max(abs(one - other) for one, other in losses) <= noise


def test_there_and_back(trained: Run, tmp_path: Path) -> None:
    """Over other grids and back, without ZeRO in between."""
    _, source = trained
    without = converted(source, tmp_path / "without", PipeRecipe(2, 1, 1, 0))
    there = converted(without, tmp_path / "there", PipeRecipe(1, 1, 3))
    further = converted(there, tmp_path / "further", PipeRecipe(1, 2, 1))
    assert reshard.verify(source, further / TAG).equal
