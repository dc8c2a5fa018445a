"""Equality: two maps are the same when they say the same of every element, at any size."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings

from reshard.geometry import AffinePiece, ParamAffineMap
from tests.properties import dense_oracle as dense
from tests.properties.recuts import bands, part, recut_map
from tests.properties.strategies import (
    SETTINGS,
    Case,
    cases,
    damaged,
    examples,
    exploded,
    respelled,
)


@SETTINGS
@given(cases)
def test_other_spellings_are_the_same(case: Case) -> None:
    one, rnd = case.map(scaled=True), case.random("spelling")
    for other in (one, respelled(rnd, one), exploded(rnd, one), one.canonical()):
        assert one.same_elements(other)
        assert other.same_elements(one)


@settings(SETTINGS, max_examples=examples(200))
@given(cases)
def test_a_damaged_map_is_the_same_exactly_when_it_says_the_same(case: Case) -> None:
    one = case.map(scaled=True)
    other = damaged(case.random("damage"), respelled(case.random("spelling"), one))
    if "write-once" in dense.broken(other, partial=True) or "P3" in dense.broken(other):
        return
    alike = one.shard_shapes == other.shard_shapes and dense.relation(one) == dense.relation(other)
    assert one.same_elements(other) == alike == other.same_elements(one)


@SETTINGS
@given(cases)
def test_same_elements_and_equal_canonical_forms_are_one_question(case: Case) -> None:
    one, other = case.map("one"), case.map("two")
    assert one.same_elements(other) == (one.canonical() == other.canonical())


@pytest.mark.parametrize("rows", [5_000, 2**40])
def test_of_any_size_crooked_cuts_are_the_same_and_moved_pieces_are_not(rows: int) -> None:
    for seed in range(8):
        rnd = Random(seed)
        one = bands(rnd, rows)
        cut = recut_map(rnd, one, 3, straight=False)
        assert cut.same_elements(one)
        assert not _two_exchanged(one).same_elements(cut)


def _two_exchanged(one: ParamAffineMap) -> ParamAffineMap:
    """The same map, but for two rows of a piece that are where the other should be."""
    piece, *rest = one.pieces_by_rank[0]
    axis, n = 0, piece.shape[0]
    first, second = part(piece, axis, 0, 1), part(piece, axis, 1, 1)
    moved = [
        AffinePiece(
            taker.shape,
            taker.source_offset,
            taker.source_strides,
            giver.dest_offset,
            giver.dest_strides,
            taker.locations,
        )
        for taker, giver in ((first, second), (second, first))
    ]
    pieces = [*moved, part(piece, axis, 2, n - 2), *rest]
    return ParamAffineMap(one.logical_shape, one.shard_shapes, {0: pieces})


def test_a_map_that_writes_twice_is_the_same_as_itself_and_not_as_another() -> None:
    piece = AffinePiece((2,), 0, (1,), 0, (1,), (0,))
    twice = ParamAffineMap((2,), {0: (2,)}, {0: [piece, piece]})
    once = ParamAffineMap((2,), {0: (2,)}, {0: [piece]})
    assert twice.same_elements(twice)
    assert not twice.same_elements(ParamAffineMap((2,), {0: (3,)}, {0: [piece, piece]}))
    assert not once.same_elements(ParamAffineMap((2, 1), {0: (2,)}, {0: [piece]}))
