"""Files of ranks that disagree: the odd one is named, however many the others are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import reshard
from reshard.errors import CheckpointError
from reshard.formats.deepspeed.grid import require_one_value
from reshard.formats.deepspeed.records import ParallelDegrees
from tests.truth import case_named

ADVICE = "files of different saves lie in one folder; move the stale ones away"


def refusal(values: dict[str, object]) -> CheckpointError:
    with pytest.raises(CheckpointError) as refused:
        require_one_value(values, "it")
    return refused.value


@pytest.mark.parametrize("odd", [0, 7, 63])
def test_one_of_sixty_four_is_named(odd: int) -> None:
    values: dict[str, object] = {f"ckpt/rank_{rank}.pt": "ZeRO-1" for rank in range(64)}
    values[f"ckpt/rank_{odd}.pt"] = "ZeRO-2"
    said = f"rank_{odd}.pt: 'ZeRO-2'; 63 others: 'ZeRO-1'"
    assert str(refusal(values)) == (
        f"ranks disagree on it: ckpt/rank_{odd}.pt: found {said}; next: {ADVICE}"
    )


@pytest.mark.parametrize(
    ("stated", "file", "found"),
    [
        ([3, 7], "r0", "r0: 3; r1: 7"),
        ([3, 7, 3], "r1", "r1: 7; 2 others: 3"),
        ([3, 7, 7, 3], "r0", "r0, r3: 3; r1, r2: 7"),
        ([3] * 5 + [7] * 6, "r0", "r0, r1, r2 and 2 more: 3; 6 others: 7"),
        ([1] * 5 + [2] * 5, "r0", "r0, r1, r2 and 2 more: 1; r5, r6, r7 and 2 more: 2"),
        ([1, 2, 3, 4, 5, 9, 9], "r0", "r0: 1; r1: 2; r2: 3; 2 other values; 2 others: 9"),
        ([True, 1, 1], "r0", "r0: True; 2 others: 1"),
        (
            [ParallelDegrees(1, 2), ParallelDegrees(2, 1)],
            "r0",
            "r0: pp 1, tp 2; r1: pp 2, tp 1",
        ),
    ],
)
def test_they_are_told_by_value_the_fewest_first(
    stated: list[object], file: str, found: str
) -> None:
    error = refusal({f"r{rank}": value for rank, value in enumerate(stated)})
    assert (error.file, error.found) == (file, found)


def test_what_agrees_is_let_through() -> None:
    require_one_value({}, "it")
    require_one_value({"r0": [1, 2.0], "r1": [1, 2.0]}, "it")


def test_a_folder_with_one_file_of_another_save_points_at_it(tmp_path: Path) -> None:
    tag = shutil.copytree(case_named("golden/odd_z3_dp4_bf16").tag_path, tmp_path / "step3")
    odd = tag / "zero_pp_rank_2_mp_rank_00_model_states.pt"
    content = torch.load(odd, weights_only=False)
    content["global_steps"] = 99
    torch.save(content, odd)
    with pytest.raises(CheckpointError) as refused:
        reshard.open_checkpoint(tag)
    assert str(refused.value) == (
        f"ranks disagree on global_steps: {odd}: found {odd.name}: 99; 3 others: 3; next: {ADVICE}"
    )
