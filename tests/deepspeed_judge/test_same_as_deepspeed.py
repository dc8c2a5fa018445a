"""Wherever DeepSpeed's own converter is right, reshard writes the same tensors; where it is wrong
or stops, reshard is right."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import reshard
from reshard.errors import CheckpointError, UnknownLayoutError
from scripts.deepspeed_lab.workers import JobError
from tests.deepspeed_judge.conftest import Converted
from tests.deepspeed_judge.judge import Judge, differences, read_universal
from tests.formats.edited import nothing, with_info
from tests.truth import Case, by_name, case_named, cases, dense

pytestmark = pytest.mark.deepspeed

WRITTEN_TODAY = [case for case in dense() if case.version >= (0, 19) and case.model != "muon"]
"""Muon's momentum is not cut as the weights are: see tests/conversion."""

SILENTLY_WRONG = {
    "golden/odd_z2_dp2_round_robin": "round-robin partitions are read in the original order",
    "0.19.8/plain_rr_z1_dp2": "the same",
    "0.19.8/plain_rr_z2_dp2": "the same",
    "0.19.8/llama_rr_z2_dp2": "the same",
    "0.19.8/plain_amsgrad_z1_dp2": "max_exp_avg_sq is dropped",
}

STOPS = {
    "golden/odd_z1_dp2_sgdm": "exp_avg",
    "golden/odd_z3_dp2_sgdm": "exp_avg",
    "golden/llama_z1_tp4_empty_shards": "NoneType",
    "golden/llama_z1_tp2_frozen": "Unused patterns",
    "golden/llama_z3_tp2dp2_frozen": "Unused patterns",
    "0.19.8/plain_sgdm_z1_dp2": "exp_avg",
    "0.19.8/plain_sgdm_z3_dp2": "exp_avg",
    "0.19.8/plain_lion_z1_dp2": "exp_avg",
    "0.19.8/plain_elastic_z1_dp2": "'list' object has no attribute 'get'",
    "0.19.8/llama_tp4_kv2_z1_fp32": "NoneType",
    "0.19.8/llama_tp2_frozen_z1_fp32": "Unused patterns",
    "0.19.8/llama_tp2_frozen_z3_fp32": "Unused patterns",
}
"""Cases that DeepSpeed's converter cannot convert, and what it says."""


@pytest.mark.parametrize(
    "case", by_name(case for case in WRITTEN_TODAY if case.name not in SILENTLY_WRONG | STOPS)
)
def test_the_same_tensors(judge: Judge, converted: Converted, case: Case, tmp_path: Path) -> None:
    judge.convert_with_deepspeed(case.tag_path, tmp_path / "theirs")
    ours = read_universal(converted(case) / f"{case.tag}_universal")
    theirs = read_universal(tmp_path / "theirs")
    truth = case.truth().full
    flat = {
        name: {s: t.reshape(truth[name][s].shape) for s, t in theirs[name].items()}
        for name in truth
    }
    assert differences(flat, {name: ours[name] for name in truth}) == []


@pytest.mark.parametrize("name", SILENTLY_WRONG)
def test_right_where_deepspeed_is_silently_wrong(
    judge: Judge, converted: Converted, name: str, tmp_path: Path
) -> None:
    case = case_named(name)
    truth = case.truth().full
    judge.convert_with_deepspeed(case.tag_path, tmp_path / "theirs")
    theirs = read_universal(tmp_path / "theirs")
    ours = read_universal(converted(case) / f"{case.tag}_universal")
    assert differences(truth, {name: theirs[name] for name in truth}) != []
    assert differences(truth, {name: ours[name] for name in truth}) == []


@pytest.mark.parametrize(("name", "complaint"), STOPS.items())
def test_right_where_deepspeed_stops(
    judge: Judge, converted: Converted, name: str, complaint: str, tmp_path: Path
) -> None:
    case = case_named(name)
    truth = case.truth().full
    with pytest.raises(JobError, match=complaint):
        judge.convert_with_deepspeed(case.tag_path, tmp_path / "theirs")
    ours = read_universal(converted(case) / f"{case.tag}_universal")
    assert differences(truth, {name: ours[name] for name in truth}) == []


def test_the_lists_name_cases_that_exist() -> None:
    there = {case.name for case in cases()}
    places = {name.split("/")[0] for name in there}
    listed = [name for name in SILENTLY_WRONG | STOPS if name.split("/")[0] in places]
    assert [name for name in listed if name not in there] == []


def test_left_over_ranks_of_a_larger_run(judge: Judge, tmp_path: Path) -> None:
    """DeepSpeed puts them into the tensors of ZeRO-3 and says nothing; reshard names them."""
    case = case_named("golden/odd_z3_dp2_one_group")
    tag = Path(shutil.copytree(case.tag_path, tmp_path / case.tag))
    for file in case.tag_path.glob("*zero_pp_rank_1_*"):
        stale = tag / file.name.replace("rank_1_", "rank_2_", 1)
        torch.save(torch.load(file, weights_only=False), stale)
    judge.convert_with_deepspeed(tag, tmp_path / "theirs")
    theirs, truth = read_universal(tmp_path / "theirs"), case.truth().full
    flat = {name: {s: t.reshape(-1) for s, t in states.items()} for name, states in truth.items()}
    assert differences(flat, {name: theirs[name] for name in truth}) != []
    with pytest.raises(CheckpointError, match="a file of a rank that this checkpoint does not"):
        reshard.convert(tag, tmp_path / "ours")


def test_tensor_parallel_files_that_say_nothing(judge: Judge, tmp_path: Path) -> None:
    """``--inject_missing_state`` doubles what is replicated; reshard asks for the layouts."""
    case = case_named("golden/llama_z1_tp2dp2_fp32")
    tag = with_info(case, tmp_path, nothing)
    judge.convert_with_deepspeed(tag, tmp_path / "theirs", inject=True)
    theirs, norm = read_universal(tmp_path / "theirs"), "model.norm.weight"
    assert theirs[norm]["fp32"].tolist() == 2 * case.truth().full[norm]["fp32"].tolist()
    with pytest.raises(UnknownLayoutError):
        reshard.convert(tag, tmp_path / "ours")
