"""Runs that change hands between DeepSpeed and FSDP2, by way of DCP: the next losses are equal.

DeepSpeed → DCP → FSDP2 on 2 and on 4 ranks and on a 2×2 mesh with tensor parallelism; and back:
FSDP2 → DCP → universal or native → DeepSpeed. Every state that the resumed run holds is bit-equal
to the truth; losses are equal to those of the run that was never interrupted, within the noise of
adding gradients in another order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import reshard
from reshard.formats.dcp.options import TREES, DcpOptions
from reshard.formats.deepspeed.writing import NativeOptions
from reshard.formats.dtypes import DTYPES
from scripts.deepspeed_lab.recipe import TAG, Recipe
from scripts.deepspeed_lab.results import Resumed, Sharded
from tests.deepspeed_judge.judge import Judge, differences, recipe_of
from tests.truth import case_named

pytestmark = pytest.mark.deepspeed

CLOSE = 5e-6
"""Losses are around 5; another number of ranks adds the same gradients in another order."""


def spread(recipe: Recipe, *, world: int, tp: int = 1) -> Recipe:
    """The same run, under another topology of FSDP2."""
    return recipe.spread(world=world, tp=tp, stage=1)


@dataclass(frozen=True, slots=True)
class Onward:
    """A golden case of DeepSpeed, and the FSDP2 run that goes on with it."""

    case: str
    world: int
    tp: int = 1
    tree: str = "get_state_dict"
    limit: int = 4 << 30

    def __str__(self) -> str:
        return f"{self.case}->fsdp{self.world}tp{self.tp}-{self.tree}"


ONWARD = [
    Onward("odd_z1_dp2_fp32", 2),
    Onward("odd_z1_dp2_fp32", 4, tree="torchtitan", limit=3000),
    Onward("llama_z1_tp2dp2_fp32", 2),
    Onward("llama_z3_tp2dp2_fp32", 4, tp=2, limit=3000),
]


@pytest.mark.parametrize("onward", ONWARD, ids=str)
def test_fsdp2_goes_on_where_deepspeed_stopped(
    judge: Judge, tmp_path: Path, onward: Onward
) -> None:
    case = case_named(f"golden/{onward.case}")
    options = DcpOptions(tree=TREES[onward.tree], max_shard_bytes=onward.limit)
    reshard.convert(case.path, tmp_path / "dcp", to="dcp", options=options)
    assert reshard.verify(case.path, tmp_path / "dcp").equal
    recipe = spread(recipe_of(case), world=onward.world, tp=onward.tp)
    # Another seed: what the checkpoint does not restore would show.
    resumed: Sharded = judge.lab.run(
        "resume_fsdp", recipe, tmp_path / "dcp", 7, onward.tree, world=recipe.world
    )
    truth = case.truth()
    assert differences(truth.full, resumed.full) == []
    for name, tensor in truth.frozen.items():
        assert resumed.model[name].equal(tensor), name
    assert resumed.losses == pytest.approx(case.topology["next_losses"], abs=CLOSE, rel=0)


@dataclass(frozen=True, slots=True)
class Back:
    """An FSDP2 run, and the DeepSpeed run that goes on with it."""

    model: str
    world: int
    tp: int
    tree: str
    stage: int
    dp: int
    native: bool

    def __str__(self) -> str:
        kind = "native" if self.native else "universal"
        return (
            f"{self.model}-fsdp{self.world}tp{self.tp}-{self.tree}->{kind}-z{self.stage}dp{self.dp}"
        )


BACK = [
    Back("llama", 4, 1, "get_state_dict", stage=1, dp=2, native=False),
    Back("llama", 4, 2, "torchtitan", stage=3, dp=4, native=False),
    Back("llama", 4, 2, "get_state_dict", stage=2, dp=2, native=True),
    Back("odd", 4, 1, "get_state_dict", stage=1, dp=2, native=True),
]


@pytest.mark.parametrize("back", BACK, ids=str)
def test_deepspeed_goes_on_where_fsdp2_stopped(judge: Judge, tmp_path: Path, back: Back) -> None:
    # ZeRO-3 shares one step between groups (see `loader_fault`), so one group there.
    recipe = Recipe(back.model, world=back.world, stage=1, tp=back.tp, two_groups=back.stage < 3)
    trained: Sharded = judge.lab.run(
        "train_fsdp", recipe, tmp_path, 42, back.tree, world=recipe.world
    )
    out = tmp_path / "out" / "converted"
    if back.native:
        native = NativeOptions(stage=back.stage, dp=back.dp, dtype=DTYPES["float32"])
        reshard.convert(tmp_path / TAG, out, to="deepspeed", options=native)
    else:
        reshard.convert(tmp_path / TAG, out)
    assert reshard.verify(tmp_path / TAG, out).equal
    target = replace(recipe, world=back.dp, tp=1, stage=back.stage)
    resumed: Resumed = judge.lab.run(
        "resume", target, tmp_path / "out", None, 42, not back.native, world=target.world
    )
    assert differences(trained.full, resumed.held.full) == []
    assert resumed.losses == pytest.approx(trained.losses, abs=CLOSE, rel=0)
