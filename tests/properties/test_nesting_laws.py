"""Nesting: maps inside maps are index arrays indexed by index arrays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import InvalidMapError, UsageError
from reshard.geometry import AffinePiece, ParamAffineMap, cut_flat_range, intersect, locate, nest
from tests.properties import dense_oracle as dense
from tests.properties.strategies import SETTINGS, Case, a_map, a_view, cases, respelled


def inner_maps(
    case: Case, outer: ParamAffineMap, *, scaled: bool = False
) -> dict[int, ParamAffineMap]:
    """A random map of every non-empty shard, over holders 10, 11, … that are all distinct."""
    made: dict[int, ParamAffineMap] = {}
    first = 10
    for rank, shape in outer.shard_shapes.items():
        size = dense.size(shape)
        if not size:
            continue
        rnd = case.random(f"inner {rank}")
        cut = a_map(rnd, size, rnd.randint(1, 3), scaled=scaled)
        made[rank] = renamed(cut, first)
        first += len(cut.ranks)
    return made


def renamed(one: ParamAffineMap, by: int) -> ParamAffineMap:
    """The same map over other ranks."""
    return ParamAffineMap(
        one.logical_shape,
        {rank + by: shape for rank, shape in one.shard_shapes.items()},
        {
            rank + by: [piece.held_by(r + by for r in piece.locations) for piece in owned]
            for rank, owned in one.pieces_by_rank.items()
        },
    )


def chained(
    outer: ParamAffineMap, inner: dict[int, ParamAffineMap]
) -> dict[tuple[int, int], tuple[int, float]]:
    """What is in each element of each holder, one index array after the other."""
    shards = dense.places(outer)
    return {
        (holder, d): (shards[rank, at][0], scale * shards[rank, at][1])
        for rank, cut in inner.items()
        for (holder, d), (at, scale) in dense.places(cut).items()
    }


@SETTINGS
@given(cases)
def test_nesting_composes_index_arrays(case: Case) -> None:
    outer = case.map(scaled=True)
    inner = inner_maps(case, outer, scaled=True)
    whole = nest(outer, inner)
    assert dense.places(whole) == chained(outer, inner)
    assert whole.logical_shape == outer.logical_shape
    assert set(whole.ranks) == {rank for cut in inner.values() for rank in cut.ranks}


@SETTINGS
@given(cases)
def test_nested_maps_are_valid_with_exact_locations(case: Case) -> None:
    outer = case.map(scaled=True)
    whole = nest(outer, inner_maps(case, outer))
    assert not dense.broken(whole)
    whole.validate()
    assert whole.canonical() == whole


@SETTINGS
@given(cases)
def test_nesting_does_not_depend_on_spelling(case: Case) -> None:
    outer = case.map()
    inner = inner_maps(case, outer)
    rnd = case.random("spelling")
    other = {rank: respelled(rnd, cut) for rank, cut in reversed(inner.items())}
    assert nest(respelled(rnd, outer), other).same_elements(nest(outer, inner))


@SETTINGS
@given(cases)
def test_a_shard_that_is_left_out_leaves_its_elements_out(case: Case) -> None:
    outer = case.map()
    inner = inner_maps(case, outer)
    inner.pop(case.random("gone").choice(list(inner)))
    whole = nest(outer, inner)
    assert dense.places(whole) == chained(outer, inner)
    assert dense.broken(whole, partial=True) == set()


@SETTINGS
@given(cases)
def test_locate_gives_exact_locations_whatever_was_said(case: Case) -> None:
    one, rnd = case.map(), case.random("said")
    said = {
        rank: [piece.held_by(rnd.sample(range(9), rnd.randint(1, 4))) for piece in owned]
        for rank, owned in respelled(rnd, one).pieces_by_rank.items()
    }
    found = locate(one.logical_shape, one.shard_shapes, said)
    assert dense.relation(found) == dense.relation(one)
    assert found.same_elements(one)


def a_block(draw: st.DrawFn) -> tuple[tuple[int, ...], AffinePiece]:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    rows, step = [], 1
    for n in reversed(shape):
        rows.append(step)
        step *= n
    sources = tuple(draw(st.integers(0, 50)) for _ in shape)
    return shape, AffinePiece(shape, draw(st.integers(0, 9)), sources, 0, tuple(rows[::-1]), (0,))


blocks = st.composite(a_block)


@SETTINGS
@given(st.data(), blocks())
def test_a_flat_range_of_a_block_is_at_most_2n_minus_1_pieces(
    data: st.DataObject, block: tuple[tuple[int, ...], AffinePiece]
) -> None:
    shape, piece = block
    lo = data.draw(st.integers(0, piece.numel))
    hi = data.draw(st.integers(lo, piece.numel))
    parts = cut_flat_range(piece, lo, hi)
    assert len(parts) <= 2 * len(shape) - 1
    assert within(piece, lo, hi) == sorted(e for part in parts for e in dense.elements(part))


def within(piece: AffinePiece, lo: int, hi: int) -> list[tuple[int, int]]:
    return sorted((s, d - lo) for s, d in dense.elements(piece) if lo <= d < hi)


@SETTINGS
@given(cases)
def test_a_flat_range_of_any_piece_has_its_elements(case: Case) -> None:
    rnd = case.random("range")
    for _, piece in case.map(scaled=True).pieces():
        lo = rnd.randint(0, 50)
        hi = rnd.randint(0, 50)
        parts = cut_flat_range(piece, lo, hi)
        assert within(piece, lo, hi) == sorted(e for part in parts for e in dense.elements(part))
        assert {(p.locations, p.scale) for p in parts} <= {(piece.locations, piece.scale)}


@SETTINGS
@given(cases)
def test_pieces_meet_in_the_elements_that_both_have(case: Case) -> None:
    rnd = case.random("pieces")
    one, other = (
        AffinePiece(shape, offset, strides, 0, tuple(7**k for k in range(len(shape)))[::-1], (0,))
        for shape, offset, strides in (a_view(rnd, case.total), a_view(rnd, case.total))
    )
    theirs = {s for s, _ in dense.elements(other)}
    expected = sorted(e for e in dense.elements(one) if e[0] in theirs)
    assert sorted(e for part in intersect(one, other) for e in dense.elements(part)) == expected


def test_what_does_not_nest_is_refused() -> None:
    def flat(size: int, rank: int) -> ParamAffineMap:
        piece = AffinePiece((size,), 0, (1,), 0, (1,), (rank,))
        return ParamAffineMap((size,), {rank: (size,)}, {rank: [piece]})

    outer = ParamAffineMap(
        (4,),
        {0: (2,), 1: (2,)},
        {r: [AffinePiece((2,), 2 * r, (1,), 0, (1,), (r,))] for r in (0, 1)},
    )
    with pytest.raises(InvalidMapError, match="another number of elements"):
        nest(outer, {0: flat(3, 0)})
    with pytest.raises(UsageError, match="no such outer rank"):
        nest(outer, {2: flat(2, 0)})
    with pytest.raises(UsageError, match="two ranks"):
        nest(outer, {0: flat(2, 5), 1: flat(2, 5)})
