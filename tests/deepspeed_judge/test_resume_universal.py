"""Real DeepSpeed loads what reshard wrote, under other topologies, and goes on as if uninterrupted.

Each pair is a checkpoint and a target: another data-parallel degree, another ZeRO stage (which
DeepSpeed's own converter cannot do), another tensor-parallel degree. Every state that the resumed
engines hold must be bit-equal to the truth, and the next losses must be those of the run that was
never interrupted, wherever DeepSpeed's own loader is right (see :func:`loader_fault`).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest

from tests.deepspeed_judge.conftest import Converted
from tests.deepspeed_judge.judge import Judge, differences
from tests.truth import Case, case_named

pytestmark = pytest.mark.deepspeed

Target: TypeAlias = dict[str, Any]
"""Arguments of ``Judge.resume``; what is missing is as in the source."""

Z1, Z2, Z3 = {"stage": 1}, {"stage": 2}, {"stage": 3}
DP1, DP2, DP4 = {"world": 1}, {"world": 2}, {"world": 4}
TP1, TP2, TP3, TP4 = ({"tp": tp, "world": tp} for tp in (1, 2, 3, 4))
TP1_DP2, TP2_DP2 = {"tp": 1, "world": 2}, {"tp": 2, "world": 4}
SAME: Target = {}

# Not here: runs with DeepSpeed's own Adam or with Muon, whose kernels are compiled where they run.
PAIRS: dict[str, list[Target]] = {
    "golden/odd_z1_dp2_fp32": [SAME, DP1, DP4, Z2, Z3, Z3 | DP4],
    "golden/odd_z1_dp2_unused": [DP1, Z2 | DP4],
    "golden/odd_z1_dp2_sgdm": [DP1, Z2 | DP4],
    "golden/odd_z1_dp2_bf16opt": [SAME, DP1, DP4],
    "golden/odd_z2_dp2_bf16": [SAME, Z1 | DP4, Z3 | DP1],
    "golden/odd_z2_dp2_round_robin": [SAME, Z1 | DP1, Z3],
    "golden/odd_z3_dp2_one_group": [SAME, DP1, DP4, Z1, Z2 | DP1],
    "golden/odd_z3_dp2_sub_groups": [SAME, Z1 | DP1, Z2],
    "golden/odd_z3_dp4_bf16": [DP1, Z1 | DP2],
    "golden/odd_z3_dp2_offload": [DP1, Z2],
    "golden/odd_z3_dp2_sgdm": [Z1 | DP1],
    "golden/llama_z1_tp2dp2_fp32": [SAME, TP2, TP1_DP2, TP4, Z3, Z3 | TP1_DP2],
    "golden/llama_z2_tp2dp2_bf16": [SAME, TP1, Z3],
    "golden/llama_z3_tp2dp2_fp32": [SAME, TP1_DP2, Z1, Z1 | TP1, Z1 | TP4],
    "golden/llama_z1_tp2_uneven": [TP1, TP3, Z3],
    "golden/llama_z1_tp4_empty_shards": [TP1, TP2_DP2],
    "golden/llama_z1_tp2_tied_bias": [TP1, Z2 | TP2_DP2],
    "golden/llama_z1_tp2_frozen": [TP1, Z3],
    "golden/llama_z3_tp2dp2_frozen": [TP1_DP2, Z1 | TP2],
    "0.19.8/plain_z1_dp2_fp32": [DP1, DP4, Z2, Z3],
    "0.19.8/plain_z3_dp2_fp32": [DP4, Z1, Z2],
    "0.19.8/plain_1group_z3_dp2": [DP1, Z1],
    "0.19.8/plain_amsgrad_z1_dp2": [DP1],
    "0.19.8/plain_sched_z1_dp2": [DP1, Z2 | DP4],
    "0.19.8/plain_nz_sched_z3_1group": [DP1, Z2],
    "0.19.8/plain_autocast_z2_dp2": [SAME, DP1],
    "0.19.8/plain_fp16forced_z1_dp2": [SAME, DP1, Z3],
    "0.19.8/plain_fp16forced_z3_dp2": [Z2 | DP1],
    "0.19.8/plain_lion_z1_dp2": [DP1],
    "0.19.8/plain_elastic_z1_dp2": [DP1],
    "0.19.8/llama_z1_dp2_fp32": [TP2],
    "0.19.8/llama_z3_dp2_fp32": [Z1 | TP2],
    "0.19.8/llama_tp2dp2_z1_fp32": [TP2, TP1_DP2, TP4, Z3],
    "0.19.8/llama_tp2dp2_z3_fp32": [Z1, Z1 | TP1],
    "0.19.8/llama_1group_z3_tp2dp2": [TP1_DP2],
    "0.19.8/codegenfused_tp4_z1_fp32": [TP1, TP2],
    "0.19.8/yuan_tp2_z1_fp32": [TP1, TP4],
    "0.19.8/megatron_tp2dp2_z1_fp32": [TP1_DP2, TP4, TP2],
    "0.12.6/plain_z1_dp2_fp32": [DP1, Z3],
    "0.12.6/plain_1group_z3_dp2": [DP1, Z1 | DP1],
    "0.14.5/plain_1group_z3_dp2": [DP1, Z2],
    "0.16.9/megatron_tp2dp2_z1_fp32": [TP1_DP2],
    "0.18.9/plain_rr_z2_dp2": [Z1 | DP1],
}

LOSS_TOLERANCE = {"fp32": 5e-6, "fp16": 3e-3, "bf16": 1e-2}
"""Losses are around 5 to 12. Another number of ranks adds the same gradients in another order and,
in half precision, ZeRO-3 rounds elsewhere than ZeRO-1 and 2 do (from the very first step of a new
run: 8.4214 against 8.4225 for the odd model in bf16)."""


def loader_fault(case: Case, target: Target) -> str | None:
    """Say why DeepSpeed itself does not go on exactly, although every state it holds is right."""
    if target.get("stage", case.stage) == 3 and case.groups > 1:
        return (
            "ZeRO-3 shares one `step` tensor between all groups, so that it grows by their number, "
            "and gives every group the hyperparameters of the first"
        )
    return None


def tolerance(case: Case, target: Target) -> float:
    """Return how far the losses may be from the uninterrupted run's."""
    if not target:
        return 0.0
    return LOSS_TOLERANCE["bf16" if "torch_autocast" in case.topology["ds_config"] else case.dtype]


def pairs() -> list[Any]:
    """Return all pairs, each as a parameter of the test with an id that one can read."""
    found = []
    for name, targets in PAIRS.items():
        for target in targets:
            spread = "-".join(f"{key}{value}" for key, value in target.items()) or "same"
            found.append(pytest.param(name, target, id=f"{name}->{spread}"))
    return found


@pytest.mark.parametrize(("name", "target"), pairs())
def test_deepspeed_holds_the_truth_and_goes_on(
    judge: Judge, converted: Converted, name: str, target: Target
) -> None:
    case = case_named(name)
    truth = case.truth()
    resumed = judge.resume(case, converted(case), f"{case.tag}_universal", **target)
    assert resumed.held.drift == []
    assert differences(truth.full, resumed.held.full) == []
    assert {step for rank in resumed.held.steps for step in rank} == truth.steps
    assert resumed.global_steps == 3
    assert resumed.client_state == {"iteration": 3}
    if truth.param_groups and target.get("stage", case.stage) < 3:
        assert resumed.held.groups == truth.param_groups
    if loader_fault(case, target) is None:
        expected = pytest.approx(case.topology["next_losses"], abs=tolerance(case, target), rel=0)
        assert resumed.losses == expected


@pytest.mark.parametrize("name", ["golden/odd_z1_dp2_fp32", "golden/llama_z3_tp2dp2_fp32"])
def test_latest_universal_leads_to_it(judge: Judge, converted: Converted, name: str) -> None:
    case = case_named(name)
    resumed = judge.resume(case, converted(case))
    assert differences(case.truth().full, resumed.held.full) == []


def test_frozen_parameters_and_buffers_are_what_the_new_model_had(
    judge: Judge, converted: Converted
) -> None:
    """Pins a fault of DeepSpeed's loader: when it is mended, the docs must say so."""
    case = case_named("golden/odd_z1_dp2_fp32")
    resumed = judge.resume(case, converted(case), f"{case.tag}_universal", seed=7)
    assert differences(case.truth().full, resumed.held.full) == []
    assert not resumed.held.frozen["gate"].equal(case.truth().frozen["gate"])
    assert not resumed.held.buffers["shift"].equal(case.truth().buffers["shift"])
