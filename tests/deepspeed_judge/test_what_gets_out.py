"""What ``zero_to_fp32.py`` and ``reshard.read`` get out of a checkpoint: docs/safetensors.md."""

from __future__ import annotations

import numpy as np
import pytest

import reshard
from scripts.deepspeed_lab.workers import JobError
from tests.deepspeed_judge.judge import Judge
from tests.truth import ROOT, case_named, cases

pytestmark = pytest.mark.deepspeed

ROWS = {
    "ZeRO-1 with a frozen parameter": ("without it", ["golden/odd_z1_dp2_fp32"]),
    "ZeRO-2, ZeRO-3, with frozen parameters, buffers, ties": (
        "all, as fp32",
        ["golden/odd_z2_dp2_bf16", "golden/odd_z3_dp4_bf16"],
    ),
    "ZeRO-0, BF16_Optimizer": (
        "error",
        ["golden/odd_z0_dp2_fp32", "golden/odd_z1_dp2_bf16opt"],
    ),
    "tensor parallel (TP2 × DP2, ZeRO-1 and 3)": (
        "error",
        ["golden/llama_z1_tp2dp2_fp32", "golden/llama_z3_tp2dp2_fp32"],
    ),
    "experts (AutoEP, ZeRO-1 and 3; native MoE)": (
        "error",
        [
            "0.19.8/mixtral_ep2_z1_fp32",
            "0.19.8/mixtral_ep2_z3_fp32",
            "0.19.8/native_moe_ep2_z1_fp32",
        ],
    ),
    "pipelines": ("error", ["0.19.8/pipe_pp2dp2_z1_fp32"]),
}
"""Row of the page -> what it says, and the checkpoints that show it."""

THERE = {case.name for case in cases()}


def test_the_page_says_what_is_tested() -> None:
    page = (ROOT / "docs" / "safetensors.md").read_text(encoding="utf-8")
    for row, (outcome, _) in ROWS.items():
        assert f"| {row} | {outcome} | all |" in page
    table = page.split("| checkpoint | `zero_to_fp32.py` | reshard |")[1].split("\n\n")[0]
    assert len(table.strip().splitlines()) == 1 + len(ROWS)


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        pytest.param(name, outcome, id=name)
        for outcome, names in ROWS.values()
        for name in names
        if name in THERE
    ],
)
def test_what_gets_out(judge: Judge, name: str, outcome: str) -> None:
    case = case_named(name)
    truth = case.truth()
    ours = reshard.read(case.path)
    wanted = {name: states["fp32"] for name, states in truth.full.items()} | truth.frozen
    assert wanted.keys() <= ours.keys()
    for weight, tensor in () if case.has_experts else wanted.items():  # those: tests/conversion
        assert np.array_equal(ours[weight].astype(np.float32), tensor.float().numpy()), weight
    if outcome == "error":
        with pytest.raises(JobError):
            judge.weights_by_zero_to_fp32(case.path)
        return
    theirs = judge.weights_by_zero_to_fp32(case.path)
    lost = set(truth.frozen) if outcome == "without it" else set()
    assert lost or outcome != "without it"
    assert wanted.keys() - theirs.keys() == lost
