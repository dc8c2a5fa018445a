"""A refusal says which property is broken, by which ranks, in which piece, at which offset."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from reshard.errors import (
    CompositionError,
    InvalidMapError,
    ReplicaMismatchError,
    ReshardError,
    UsageError,
)
from reshard.geometry import (
    AffinePiece,
    ParamAffineMap,
    Segment,
    TransferPlan,
    compose,
    follow,
)


def run(source: int, length: int, dest: int, *locations: int, **more: Any) -> AffinePiece:
    return AffinePiece((length,), source, (1,), dest, (1,), locations, **more)


@dataclass(frozen=True)
class Wrong:
    """A map of 8 elements over shards of 4 or 8, and what is to be said of it."""

    pieces: dict[int, list[AffinePiece]]
    broken: str
    ranks: tuple[int, ...]
    piece: int | None
    offset: int
    shard: int = 4


WRONG = {
    "reaches outside F": Wrong(
        {0: [run(0, 4, 0, 0)], 1: [run(4, 3, 0, 1), run(8, 1, 3, 1)]}, "bounds", (1,), 1, 8
    ),
    "reaches outside its shard": Wrong(
        {0: [run(0, 4, 0, 0)], 1: [run(4, 4, 1, 1)]}, "bounds", (1,), 0, 4
    ),
    "written twice": Wrong(
        {0: [run(0, 4, 0, 0)], 1: [run(4, 3, 0, 1), run(6, 2, 2, 1)]}, "write-once", (1,), 1, 2
    ),
    "written by no piece": Wrong(
        {0: [run(0, 4, 0, 0)], 1: [run(4, 2, 0, 1), run(6, 1, 3, 1)]}, "write-once", (1,), None, 2
    ),
    "held by no rank": Wrong(
        {0: [run(0, 4, 0, 0)], 1: [run(3, 4, 0, 1)]}, "P5", (0,), 0, 3
    ),
    "several elements of F go to one": Wrong(
        {0: [AffinePiece((2, 4), 0, (4, 1), 0, (0, 1), (0,))], 1: [run(4, 4, 0, 1)]},
        "P3", (0,), 0, 0,
    ),
    "the locations are not the ranks": Wrong(
        {0: [run(0, 4, 0, 0)], 1: [run(4, 4, 0, 0, 1)]}, "P5", (1,), 0, 4
    ),
    "several scales": Wrong(
        {0: [run(0, 8, 0, 0, 1)], 1: [run(0, 8, 0, 0, 1, scale=0.5)]}, "P5", (1,), 0, 0, shard=8
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_refused_map_is_described_by_attributes_and_in_words(name: str) -> None:
    case = WRONG[name]
    one = ParamAffineMap((8,), dict.fromkeys((0, 1), (case.shard,)), case.pieces)
    with pytest.raises(InvalidMapError) as caught:
        one.validate("model.w")
    refused = caught.value
    assert refused.broken == case.broken
    assert refused.parameter == "model.w"
    if name != "several scales":
        found = (refused.ranks, refused.piece, refused.offset)
        assert found == (case.ranks, case.piece, case.offset)
    assert refused.offset == case.offset
    assert "model.w" in str(refused)
    assert f"offset {case.offset}" in str(refused)
    assert "\n" not in str(refused)


def test_an_element_that_nobody_holds_is_named() -> None:
    pieces = {0: [run(0, 3, 0, 0)], 1: [run(5, 3, 0, 1)]}
    one = ParamAffineMap((8,), {0: (3,), 1: (3,)}, pieces)
    with pytest.raises(InvalidMapError) as refused:
        one.validate()
    assert (refused.value.broken, refused.value.offset) == ("P1", 3)
    assert "[3, 5)" in str(refused.value)
    one.validate(partial=True)


@pytest.mark.parametrize(
    ("fields", "broken"),
    [
        (((4,), 0, (1, 1), 0, (1,), (0,)), "form"),
        (((4,), 0, (1,), 0, (), (0,)), "form"),
        (((-4,), 0, (1,), 0, (1,), (0,)), "form"),
        (((4,), -1, (1,), 0, (1,), (0,)), "form"),
        (((4,), 0, (-1,), 0, (1,), (0,)), "form"),
        (((4,), 0, (1,), 0, (1,), ()), "form"),
        (((4,), 0, (1,), 0, (1,), (-1,)), "form"),
        (((4.0,), 0, (1,), 0, (1,), (0,)), "form"),
        (((True,), 0, (1,), 0, (1,), (0,)), "form"),
        (((4,), False, (1,), 0, (1,), (0,)), "form"),
        (((4,), 0, (np.True_,), 0, (1,), (0,)), "form"),
        (((4,), 0, (1,), 0, (np.float64(1),), (0,)), "form"),
        (((4,), 0, (1,), 0, (1,), (True,)), "form"),
        (((4,), 0, (1,), 0, (1,), (0,), True), "form"),
        (((4,), 2**62, (1,), 0, (1,), (0,)), "form"),
        (((4,), 0, (1,), 0, (1,), (0,), 0.0), "P3"),
        (((4,), 0, (1,), 0, (1,), (0,), float("nan")), "P3"),
        (((4,), 0, (1,), 0, (1,), (0,), float("inf")), "P3"),
        (((4,), 0, (1,), 0, (1,), (0,), "2"), "form"),
    ],
)
def test_a_malformed_piece_is_refused_when_it_is_built(
    fields: tuple[Any, ...], broken: str
) -> None:
    with pytest.raises(InvalidMapError) as refused:
        AffinePiece(*fields)
    assert refused.value.broken == broken


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint64, torch.tensor])
def test_integers_of_every_library_become_plain_ones(kind: Any) -> None:
    shape: Any = np.array([2, 3])
    ranks: Any = [kind(0)]
    strides = (kind(9), kind(1))
    piece = AffinePiece(shape, kind(4), strides, kind(0), (kind(3), kind(1)), ranks)
    assert piece == AffinePiece((2, 3), 4, (9, 1), 0, (3, 1), (0,))
    numbers = (*piece.shape, piece.source_offset, *piece.dest_strides, *piece.locations)
    assert {type(number) for number in numbers} == {int}
    one = ParamAffineMap([kind(6)], {kind(0): [kind(6)]}, {})
    assert {type(n) for n in (*one.logical_shape, *one.ranks, *one.shard_shapes[0])} == {int}


def test_pieces_of_a_rank_without_a_shard_are_refused() -> None:
    with pytest.raises(InvalidMapError) as refused:
        ParamAffineMap((4,), {0: (4,)}, {0: [], 3: [run(0, 4, 0, 3)]})
    assert (refused.value.broken, refused.value.ranks) == ("form", (3,))


def test_every_error_survives_pickling_with_its_text() -> None:
    """Workers raise in other processes."""
    errors: list[ReshardError] = [
        ReplicaMismatchError("differ", ranks=[0, 1], offset=3),
        CompositionError("no source", rank=2),
    ]
    one = ParamAffineMap((8,), {0: (4,)}, {0: [run(0, 4, 0, 0)]})
    with pytest.raises(InvalidMapError) as refused:
        one.validate("w")
    for error in (*errors, refused.value):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))


# ------------------------------------------------------------------ moving bytes


def halves(*, replicated: bool = False) -> ParamAffineMap:
    if replicated:
        pieces = {r: [run(0, 8, 0, 0, 1)] for r in (0, 1)}
        return ParamAffineMap((8,), {0: (8,), 1: (8,)}, pieces)
    return ParamAffineMap((8,), {0: (4,), 1: (4,)}, {0: [run(0, 4, 0, 0)], 1: [run(4, 4, 0, 1)]})


def test_replicas_that_differ_only_in_a_nan_payload_or_the_sign_of_zero_are_refused() -> None:
    for other in (np.float32(-0.0), np.uint32(0x7FC00001).view(np.float32)):
        same = np.zeros(8, np.float32)
        if np.isnan(other):
            same[5] = np.uint32(0x7FC00000).view(np.float32)
        different = same.copy()
        different[5] = other
        with pytest.raises(ReplicaMismatchError) as refused:
            halves(replicated=True).rebuild({0: same, 1: different})
        assert (refused.value.ranks, refused.value.offset) == ((0, 1), 5)


@pytest.mark.parametrize(
    "move",
    [
        lambda: halves().extract(np.zeros(7), 0),
        lambda: halves().extract(np.zeros(8), 2),
        lambda: halves().rebuild({0: np.zeros(4), 1: np.zeros(5)}),
        lambda: halves().rebuild({0: np.zeros(4), 1: np.zeros(4, np.float32)}),
        lambda: halves().rebuild({}),
        lambda: halves().rebuild({0: np.zeros(4), 1: np.zeros(4), 2: np.zeros(4)}),
        lambda: halves().rebuild({0: torch.zeros(4), 1: torch.zeros(4).half()}),
        lambda: compose(halves(), halves()).apply({0: np.zeros(4)}),
        lambda: compose(halves(), halves()).apply({0: np.zeros(4), 1: np.zeros(3)}),
    ],
)
def test_shards_that_do_not_fit_are_refused(move: Any) -> None:
    with pytest.raises(UsageError):
        move()


# ------------------------------------------------------------------ composing


def test_maps_of_tensors_of_different_sizes_do_not_compose() -> None:
    other = ParamAffineMap((4,), {0: (4,)}, {0: [run(0, 4, 0, 0)]})
    with pytest.raises(CompositionError):
        compose(other, halves())
    with pytest.raises(CompositionError, match="does not start where"):
        follow(compose(other, other), compose(halves(), halves()))


@pytest.mark.parametrize(
    ("pair", "line"),
    [
        ((1, 2), "the target is no map: expected a ParamAffineMap, found 1"),
        ((None, []), "the target is no map: expected a ParamAffineMap, found None"),
    ],
)
def test_what_is_no_map_does_not_compose(pair: Any, line: str) -> None:
    with pytest.raises(CompositionError) as caught:
        compose(*pair)
    assert str(caught.value) == line
    with pytest.raises(CompositionError, match="the source is no map"):
        compose(halves(), pair[1])


def test_a_policy_that_names_a_rank_without_the_element_is_refused() -> None:
    with pytest.raises(CompositionError) as refused:
        compose(halves(), halves(replicated=True), choose=lambda *_: 7)
    assert refused.value.rank == 7


def test_a_target_element_without_a_source_is_named() -> None:
    source = ParamAffineMap((8,), {0: (4,)}, {0: [run(0, 4, 0, 0)]})
    with pytest.raises(CompositionError) as refused:
        compose(halves(), source)
    assert (refused.value.rank, refused.value.found) == (1, "[0, 4)")


@pytest.mark.parametrize(
    ("segments", "said"),
    [
        ([Segment((4,), 0, 0, (1,), 0, 0, (1,))], "not accounted for"),
        ([Segment((4,), 0, 0, (1,), 0, 0, (1,)), Segment((4,), 0, 0, (1,), 0, 3, (1,))], "twice"),
        ([Segment((8,), 0, 1, (1,), 0, 0, (1,))], "leaves its source"),
        ([Segment((8,), 0, 0, (1,), 0, 1, (1,))], "leaves its target"),
        ([Segment((8,), 1, 0, (1,), 0, 0, (1,))], "unknown source"),
        ([Segment((8,), 0, 0, (1,), 1, 0, (1,))], "unknown target"),
        ([Segment((2, 4), 0, 0, (4, 1), 0, 0, (0, 1))], "twice"),
        ([Segment((8, 0), 0, 0, (1, 1), 0, 0, (1, 1))], "copies nothing"),
    ],
)
def test_a_plan_that_does_not_prove_says_why(segments: list[Segment], said: str) -> None:
    with pytest.raises(CompositionError, match=said):
        TransferPlan({0: (8,)}, {0: (8,)}, segments, {}).verify()


def test_a_target_that_writes_an_element_twice_is_refused_before_it_is_planned() -> None:
    twice = ParamAffineMap((8,), {0: (8,)}, {0: [run(0, 8, 0, 0), run(0, 4, 4, 0)]})
    with pytest.raises(CompositionError, match="writes an element of a shard twice"):
        compose(twice, halves())
