"""Pipelines with experts: DeepSpeed's ordinary loader goes on from what reshard writes.

Such pipelines have no files of layers. The embedding is tied to the head across stages, and layers
of DeepSpeed's own have different numbers of experts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

import reshard
from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.writing import NativeOptions, lay_out_deepspeed
from reshard.formats.registry import open_checkpoint
from scripts.deepspeed_lab.results import Mixed
from scripts.deepspeed_lab.topologies import PipeRecipe
from tests.deepspeed_judge.judge import SEED, TAG, Judge, differences

pytestmark = pytest.mark.deepspeed

PLAIN, WITH_TP = PipeRecipe(2, 1, 2, ep=2), PipeRecipe(2, 2, 1, ep=2)
AUTO = PipeRecipe(2, 1, 2, ep=2, auto=True)
WITHOUT_ZERO = PipeRecipe(2, 1, 2, stage=0, ep=2)
PAIRS = [
    (PLAIN, PLAIN),
    (PLAIN, PipeRecipe(3, 1, 1)),
    (WITH_TP, PipeRecipe(1, 1, 2)),
    (AUTO, PipeRecipe(1, 1, 4, ep=4, auto=True)),
    (AUTO, PipeRecipe(1, 1, 2, stage=0, auto=True)),
    (WITHOUT_ZERO, WITHOUT_ZERO),
]
MORE = [
    (PLAIN, PipeRecipe(1, 1, 4, ep=4)),
    (WITH_TP, WITH_TP),
    (WITH_TP, PipeRecipe(3, 1, 1, stage=0)),
    (AUTO, AUTO),
    (AUTO, PipeRecipe(3, 1, 1, auto=True)),
    (WITHOUT_ZERO, PipeRecipe(1, 1, 4, ep=4)),
]
"""Only with ``RESHARD_MATRIX=1`` (``make test-matrix``)."""

STARTS = {1: (0,), 2: (0, 3), 3: (0, 2, 4)}
Run: TypeAlias = tuple[Mixed, Path]


@pytest.fixture(scope="module")
def trained(judge: Judge, tmp_path_factory: pytest.TempPathFactory) -> Callable[[PipeRecipe], Run]:
    """Train each source once."""
    done: dict[PipeRecipe, Run] = {}

    def train(recipe: PipeRecipe) -> Run:
        if recipe not in done:
            folder = tmp_path_factory.mktemp("pipeline")
            held = judge.lab.run("train_expert_pipeline", recipe, folder, SEED, world=recipe.world)
            done[recipe] = held, folder
        return done[recipe]

    return train


def converted(source: Path, folder: Path, grid: PipeRecipe) -> Path:
    options = NativeOptions(
        stage=grid.stage,
        dp=grid.dp,
        tp=grid.tp,
        pp=grid.pp,
        ep=grid.ep,
        stage_starts=STARTS[grid.pp],
    )
    reshard.convert(source, folder / TAG, to="deepspeed", options=options, fsync=False)
    return folder


def goes_on(judge: Judge, before: Mixed, folder: Path, grid: PipeRecipe, noise: float) -> None:
    after: Mixed = judge.lab.run(
        "resume_expert_pipeline_natively", grid, folder, SEED + 1, world=grid.world
    )
    assert differences(before.full, after.full) == []
    weights = [
        {name: {"weight": held} for name, held in run.weights.items()} for run in (before, after)
    ]
    assert differences(*weights) == []
    losses = zip(before.losses, after.losses, strict=True)
    assert max(abs(one - other) for one, other in losses) <= noise


@pytest.mark.parametrize(
    ("source", "grid"), [*PAIRS, *(MORE if os.environ.get("RESHARD_MATRIX") else [])], ids=str
)
def test_deepspeed_goes_on_from_there(
    source: PipeRecipe,
    grid: PipeRecipe,
    judge: Judge,
    trained: Callable[[PipeRecipe], Run],
    tmp_path: Path,
) -> None:
    before, folder = trained(source)
    out = converted(folder, tmp_path, grid)
    assert reshard.verify(folder, out / TAG).equal
    goes_on(judge, before, out, grid, noise=0.0 if grid == source else 5e-6)


def test_a_universal_folder_becomes_one_again(
    judge: Judge, trained: Callable[[PipeRecipe], Run], tmp_path: Path
) -> None:
    before, folder = trained(PLAIN)
    universal = tmp_path / "u" / "step3_universal"
    reshard.convert(folder, universal, fsync=False)
    out = converted(universal, tmp_path / "o", PLAIN)
    assert reshard.verify(folder, out / TAG).equal
    goes_on(judge, before, out, PLAIN, noise=0.0)


def test_what_deepspeed_does_not_train_is_refused(trained: Callable[[PipeRecipe], Run]) -> None:
    source = open_checkpoint(trained(PLAIN)[1])
    bare = NativeOptions(stage=1, dp=1, pp=3, stage_starts=(0, 3, 5))
    with pytest.raises(UnsupportedError, match=r"on some of its stages only: .*without experts"):
        lay_out_deepspeed(source, tag="t", options=bare)
    auto = open_checkpoint(trained(AUTO)[1])
    with pytest.raises(UnsupportedError, match=r"no AutoEP on the tensor ranks .* --tp 1"):
        lay_out_deepspeed(auto, tag="t", options=NativeOptions(stage=1, dp=1, tp=2, pp=2, ep=2))
    with pytest.raises(UnsupportedError, match="no pipeline under ZeRO-2 and 3"):
        lay_out_deepspeed(source, tag="t", options=NativeOptions(stage=2, dp=1, pp=2))
