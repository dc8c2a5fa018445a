"""The judge itself must be right: it passes what is right and notices what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts.deepspeed_lab.workers import JobError
from tests.deepspeed_judge.judge import TAG, Judge, differences, read_universal
from tests.truth import Case, by_name, case_named

pytestmark = pytest.mark.deepspeed

RIGHT_BY_DEEPSPEED = [
    "golden/odd_z1_dp2_fp32",
    "golden/odd_z2_dp2_bf16",
    "golden/llama_z1_tp2dp2_fp32",
    "golden/llama_z3_tp2dp2_fp32",
]
"""Cases that DeepSpeed's own converter gets right."""


@pytest.mark.parametrize("name", RIGHT_BY_DEEPSPEED)
def test_what_deepspeed_converts_itself_is_accepted(
    judge: Judge, name: str, tmp_path: Path
) -> None:
    case = case_named(name)
    judge.convert_with_deepspeed(case.tag_path, tmp_path / "u")
    truth, written = case.truth().full, read_universal(tmp_path / "u")
    assert differences(truth, {name: written[name] for name in truth}) == []
    assert differences(truth, judge.resume(case, tmp_path, "u", world=case.tp).held.full) == []


def test_one_wrong_element_is_noticed(judge: Judge, tmp_path: Path) -> None:
    case = case_named("golden/llama_z1_tp2dp2_fp32")
    judge.convert_with_deepspeed(case.tag_path, tmp_path / "u")
    file = tmp_path / "u/zero/model.layers.0.self_attn.o_proj.weight/exp_avg.pt"
    kept = torch.load(file, weights_only=True)
    kept["param"][1, 3] += 1
    torch.save(kept, file)
    resumed = judge.resume(case, tmp_path, "u", world=2, tp=2)
    assert differences(case.truth().full, resumed.held.full) == [
        "model.layers.0.self_attn.o_proj.weight/exp_avg: 1 elements differ"
    ]


@pytest.mark.parametrize(
    "case",
    by_name(
        case_named(f"golden/{name}")
        for name in ("odd_z1_dp2_fp32", "odd_z3_dp4_bf16", "llama_z3_tp2dp2_frozen")
    ),
)
def test_a_native_resume_repeats_the_uninterrupted_run(judge: Judge, case: Case) -> None:
    resumed = judge.resume_native(case, case.path)
    assert differences(case.truth().full, resumed.held.full) == []
    assert resumed.losses == case.topology["next_losses"]


def test_an_error_of_a_worker_is_reported(judge: Judge, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="latest_universal"):
        judge.resume(case_named("golden/odd_z1_dp2_fp32"), tmp_path)


def test_a_job_that_hangs_is_ended_and_the_next_one_runs(judge: Judge) -> None:
    with pytest.raises(JobError, match="no answer after"):
        judge.lab.run("hang", world=2, timeout=1.0)
    case = case_named("golden/odd_z1_dp2_fp32")
    assert judge.resume_native(case, case.path).losses == case.topology["next_losses"]


def test_tag_is_the_one_of_the_recipes() -> None:
    assert case_named("golden/odd_z1_dp2_fp32").tag == TAG
