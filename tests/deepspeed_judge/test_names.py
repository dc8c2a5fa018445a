"""A run goes on as one whose parameters are cut otherwise: fused and separate, moments too.

Real DeepSpeed trains and resumes; the oracle of the states is plain indexing of the truth.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import reshard
from reshard.formats.deepspeed.writing import NativeOptions
from tests.deepspeed_judge.judge import SEED, Judge, differences, recipe_of
from tests.truth import States, case_named

pytestmark = pytest.mark.deepspeed

SEPARATE = "golden/llama_z3_tp2dp2_fp32"
GROUPS, SHARE, WIDTH = 2, 2, 4
OTHER_SEED = 7
NOISE = 1e-5
"""Losses are about 5; data ranks add up in another order than tensor ranks."""

RULES = """
sides = ["separate", "fused"]
sizes = { g = 2, d = 4 }
keep = ["*"]

[[join]]
separate = { q = "{at:*}.q_proj.weight", k = "{at:*}.k_proj.weight", v = "{at:*}.v_proj.weight" }
fused = "{at:*}.linear_qkv.weight"
axes = { q = "(g r d) h", k = "(g d) h", v = "(g d) h", fused = "(g [q k v]) h" }
"""


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    file = tmp_path / "fused.toml"
    file.write_text(RULES)
    return file


def fused(states: States) -> States:
    """The states of the fused model, by plain indexing."""
    made: States = {}
    for name, kept in states.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            continue
        if not name.endswith("q_proj.weight"):
            made[name] = kept
            continue
        parts = [states[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
        made[name.replace("q_proj", "linear_qkv")] = {
            state: torch.cat(
                [
                    part[state][group * rows : (group + 1) * rows]
                    for group in range(GROUPS)
                    for part, rows in zip(parts, (SHARE * WIDTH, WIDTH, WIDTH), strict=True)
                ]
            )
            for state in kept
        }
    return made


@pytest.mark.parametrize("stage", [1, 2])
def test_separate_goes_on_as_fused(judge: Judge, rules: Path, tmp_path: Path, stage: int) -> None:
    case = case_named(SEPARATE)
    out = tmp_path / "native" / "step3"
    report = reshard.convert(
        case.path,
        out,
        to="deepspeed",
        options=NativeOptions(stage=stage, dp=2),
        names=rules,
        verify=True,
    )
    assert report.sound
    recipe = recipe_of(case).spread(world=2, tp=1, stage=stage)
    recipe = replace(recipe, model="fused_llama")
    resumed = judge.lab.run("resume", recipe, out.parent, None, OTHER_SEED, False, world=2)
    assert differences(fused(case.truth().full), resumed.held.full) == []
    assert resumed.losses == pytest.approx(case.topology["next_losses"], abs=NOISE)


def test_separate_goes_on_as_fused_through_universal(
    judge: Judge, rules: Path, tmp_path: Path
) -> None:
    case = case_named(SEPARATE)
    out = tmp_path / "run" / "step3_universal"
    assert reshard.convert(case.path, out, names=rules, verify=True).sound
    recipe = replace(recipe_of(case).spread(world=2, tp=1, stage=1), model="fused_llama")
    resumed = judge.lab.run("resume", recipe, out.parent, None, SEED, True, world=2)
    assert differences(fused(case.truth().full), resumed.held.full) == []
    assert resumed.losses == pytest.approx(case.topology["next_losses"], abs=NOISE)


def test_fused_goes_on_as_separate(judge: Judge, rules: Path, tmp_path: Path) -> None:
    case = case_named(SEPARATE)
    base = recipe_of(case).spread(world=2, tp=1, stage=2)
    trained = judge.lab.run(
        "train", replace(base, model="fused_llama"), tmp_path / "fused", SEED, world=2
    )
    out = tmp_path / "separate" / "step3"
    report = reshard.convert(
        tmp_path / "fused",
        out,
        to="deepspeed",
        options=NativeOptions(stage=3, dp=2),
        names=rules,
        verify=True,
    )
    assert report.sound
    recipe = base.spread(stage=3)
    resumed = judge.lab.run("resume", recipe, out.parent, None, OTHER_SEED, False, world=2)
    assert differences(trained.held.full, fused(resumed.held.full)) == []
    assert resumed.losses == pytest.approx(trained.next_losses, abs=NOISE)
