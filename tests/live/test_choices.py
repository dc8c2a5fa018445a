"""Who sends: the exact balance, a cost of links, a choice of one's own; rounding and padding."""

from __future__ import annotations

from tests.live.ranks import Crews

DTYPES = ["float32", "bfloat16", "float64", "uint8", "float32"]
SIZES = [4, 2, 8, 1, 4]
WANTED = [33 * (7 + number) * size for number, size in enumerate(SIZES)]
"""Bytes of each tensor that a rank wants."""


def test_the_busiest_of_three_holders_sends_a_third(crews: Crews) -> None:
    answers = crews.done("replicas_to_rows", "", DTYPES, world=5)
    assert all(one["right"] for one in answers)
    sent = answers[0]["sent"]
    # ranks 3 and 4 have nothing; 0 to 2 have what they want
    assert sum(sent.values()) == answers[0]["least"] == 2 * sum(WANTED)
    ideal = -(-2 * sum(WANTED) // 3)
    assert answers[0]["busiest"] == ideal
    assert ideal <= max(sent.values()) <= 1.01 * ideal
    assert len({one["said"] for one in answers}) == 1
    assert f"no choice beats {ideal}" in answers[0]["said"]


def test_of_several_holders_only_the_cheapest_send(crews: Crews) -> None:
    answers = crews.done("replicas_to_rows", "near", DTYPES, world=5)
    assert all(one["right"] for one in answers)
    assert answers[0]["sent"] == {2: 2 * sum(WANTED)}


def test_a_choice_of_ones_own_is_kept(crews: Crews) -> None:
    answers = crews.done("replicas_to_rows", "mine", DTYPES, world=5)
    assert all(one["right"] for one in answers)
    assert answers[0]["sent"] == {1: 2 * sum(WANTED)}


def test_rounding_is_to_nearest_and_padding_is_neither_read_nor_written(crews: Crews) -> None:
    for one in crews.done("rounded_and_narrowed", world=3):
        assert one == {"rows": True, "padding": True}


def test_a_plan_runs_again_unless_values_would_be_stale(crews: Crews) -> None:
    assert crews.done("run_again", world=3) == [[True, True, True]] * 3
