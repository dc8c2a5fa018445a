"""DeepSpeed trains without ZeRO, reshard writes for every stage, DeepSpeed's own loader goes on.

Without ZeRO DeepSpeed keeps neither names nor ties. What it held when it saved is the truth: every
state must be bit-equal after loading, and the next losses must be those of the first run.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import reshard
from scripts.deepspeed_lab.results import Trained
from tests.deepspeed_judge.judge import SEED, Judge, differences, recipe_of
from tests.formats.native.sources import converted
from tests.truth import case_named

pytestmark = pytest.mark.deepspeed

OTHER_SEED = 7
LARGEST_NOISE = {"fp32": 5e-6, "bf16": 0.03}
"""Stages round and add up in another order: bf16 has 8 bits, and losses are around 10."""

Cell: TypeAlias = dict[str, Any]
CELLS: dict[str, list[Cell]] = {
    "golden/odd_z1_dp2_fp32": [{"stage": 3, "dp": 4}],
    "golden/odd_z2_dp2_bf16": [{"stage": 0, "dp": 2}, {"stage": 2, "dp": 1}, {"stage": 3, "dp": 2}],
    "golden/llama_z1_tp2dp2_fp32": [
        {"stage": 0, "dp": 4},
        {"stage": 1, "dp": 1, "tp": 4, "kv_heads": 2},
        {"stage": 3, "dp": 2, "tp": 2},
    ],
    "golden/llama_z2_tp2dp2_bf16": [{"stage": 1, "dp": 4}],
}


@pytest.fixture(scope="module")
def trained(judge: Judge, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function: a case's run without ZeRO, what it held and its folder."""

    @functools.cache
    def run(name: str) -> tuple[Trained, Path]:
        recipe = recipe_of(case_named(name)).spread(stage=0)
        folder = tmp_path_factory.mktemp("zero0")
        return judge.lab.run("train", recipe, folder, SEED, world=recipe.world), folder

    return run


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        pytest.param(name, cell, id=f"{name}->{'-'.join(f'{k}{v}' for k, v in cell.items())}")
        for name, targets in CELLS.items()
        for cell in targets
    ],
)
def test_deepspeed_goes_on_from_there(
    name: str, cell: Cell, judge: Judge, trained: Any, tmp_path: Path
) -> None:
    before, source = trained(name)
    folder = converted(source, tmp_path, **cell)
    assert reshard.verify(source, folder).equal
    dp, tp = cell["dp"], cell.get("tp", 1)
    recipe = recipe_of(case_named(name)).spread(world=dp * tp, tp=tp, stage=cell["stage"])
    after = judge.lab.run("resume", recipe, folder, None, OTHER_SEED, False, world=recipe.world)
    assert differences(before.held.full, after.held.full) == []
    assert after.held.groups == before.held.groups
    steps = [{step for rank in one.held.steps for step in rank} for one in (before, after)]
    assert steps[0] == steps[1]
    spread = max(abs(a - b) for a, b in zip(after.losses, before.next_losses, strict=True))
    assert spread <= LARGEST_NOISE[case_named(name).dtype]


def test_the_same_topology_gives_the_same_losses(
    judge: Judge, trained: Any, tmp_path: Path
) -> None:
    name = "golden/llama_z1_tp2dp2_fp32"
    before, source = trained(name)
    folder = converted(source, tmp_path, stage=0, dp=2, tp=2)
    recipe = recipe_of(case_named(name)).spread(stage=0)
    after = judge.lab.run("resume", recipe, folder, None, OTHER_SEED, False, world=recipe.world)
    assert after.losses == before.next_losses
