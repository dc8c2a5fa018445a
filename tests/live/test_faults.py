"""What goes wrong on one rank is a clear error on all, and the source is as it was."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.live.ranks import Crews

CONTRADICTIONS = {
    "shape": (
        r"ranks disagree on the shape of a tensor: rank 1, parameter w, state fp32: "
        r"expected \(192, 192\), as rank 0, found \(192, 195\)"
    ),
    "dtype": (
        r"ranks disagree on the element type of a tensor: rank 1, parameter w, state fp32: "
        r"expected float32, as rank 0, found float64"
    ),
    "budget": r"different settings: budget: rank 1: expected 67108864, as rank 0, found 4096",
    "plan": r"ranks made different plans: rank 1: expected [0-9a-f]{32}, as rank 0, found",
    "value": r"source ranks disagree on a value: step: rank 1: expected 7, as rank 0, found 8",
    "missing": (
        r"refused \(a target rank wants elements that no source rank holds: rank 0, parameter w, "
        r"state fp32: expected 12288 elements, found 8192"
    ),
    "wide": r"ranks disagree on the shape of a tensor: rank 1",
    "name": r"no rank holds a tensor that is wanted: parameter v, state fp32",
    "state": r"the target does not keep a state of a parameter that the source keeps: parameter w, "
    r"state momentum; next: ",
    "rounding": (
        r"source and target disagree on the element type of a tensor: parameter w, state fp32: "
        r"expected float32, found bfloat16; next: rounding=True"
    ),
    "shared": r"refused \(source and target share memory on a rank: parameter w.*rank 1",
    "unplain": r"refused \(a value that is no tensor is not plain: .*Tensor.*rank 1",
    "scaled": r"a scaled optimizer state cannot be moved alone: .*parameter w, state exp_avg",
    "nothing": r"refused \(no state can be made from this: .*found object.*rank 1",
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_contradiction_is_the_same_error_on_all_before_a_byte_moves(
    crews: Crews, case: str
) -> None:
    answers = crews.done("move_contradicting", case, world=3)
    errors = {answer["error"] for answer in answers}
    assert len(errors) == 1, errors
    assert re.search(CONTRADICTIONS[case], errors.pop())
    assert {answer["kind"] for answer in answers} == {"TransferError"}
    assert all(answer["untouched"] for answer in answers)


def test_a_flipped_byte_is_told_on_all_ranks_with_its_sender(crews: Crews) -> None:
    answers: list[dict[str, Any]] = crews.done("move_faulty", "flip", 2, 3, 1 << 12, 60.0, world=4)
    (error,) = {answer["error"] for answer in answers}
    assert re.search(
        r"a message arrived damaged: from rank 2, 1024 bytes of w \(fp32\): rank [013]: "
        r"expected digest [0-9a-f]{16}, found [0-9a-f]{16} \(1 messages in all\)",
        error,
    )
    assert all(answer["intact"] for answer in answers)


def test_without_a_fault_everything_arrives(crews: Crews) -> None:
    answers = crews.done("move_faulty", "", 2, 3, 1 << 10, 60.0, world=4)
    assert [(one["error"], one["arrived"], one["intact"]) for one in answers] == [
        ("", True, True)
    ] * 4


@pytest.mark.parametrize("what", ["kill", "hang"])
def test_a_lost_rank_is_an_error_on_every_other_in_time(crews: Crews, what: str) -> None:
    answers = crews.run("move_faulty", what, 1, 5, 1 << 12, 3.0, world=4)
    alive = [answer for rank, answer in enumerate(answers) if rank != 1]
    for answer in alive:
        assert re.search(
            r"a rank of the group was lost, or did not answer in time: rank \d: expected ranks "
            r"[\d, ]+ within 3 s, found ",
            answer["error"],
        )
        assert answer["intact"]
        assert not answer["arrived"]
    assert (answers[1] is None) == (what == "kill")
