"""The canonical form: the same elements, one spelling, nothing merged that is not alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from random import Random

import pytest
from hypothesis import given

from reshard.geometry import AffinePiece, ParamAffineMap, canonicalise, coalesce
from tests.properties import dense_oracle as dense
from tests.properties.recuts import bands, recut_map
from tests.properties.strategies import SETTINGS, Case, cases, exploded, respelled


@SETTINGS
@given(cases)
def test_it_says_the_same_of_every_element_and_is_idempotent(case: Case) -> None:
    one = case.map(scaled=True)
    once = one.canonical()
    assert dense.relation(once) == dense.relation(one)
    assert once.canonical() == once == canonicalise(one)
    assert str(once.canonical()) == str(once)


@SETTINGS
@given(cases)
def test_equal_elements_have_one_form_however_they_are_spelled(case: Case) -> None:
    """The form that their runs have, wherever that is no larger than what was spelled."""
    one, rnd = case.map(scaled=True), case.random("spelling")
    form = exploded(rnd, one).canonical()
    for spelled in (one, respelled(rnd, one)):
        for rank, owned in spelled.canonical().pieces_by_rank.items():
            listed = [piece for piece in spelled.pieces_by_rank[rank] if piece.numel]
            of_runs = form.pieces_by_rank[rank]
            assert len(owned) <= len(listed)
            assert owned == of_runs or _is_larger(of_runs, listed)


def _is_larger(form: Sequence[AffinePiece], listed: Sequence[AffinePiece]) -> bool:
    """Whether some group, of pieces of one set of holders and scale, has more pieces in a form."""
    groups = [Counter((p.locations, p.scale) for p in pieces) for pieces in (form, listed)]
    return any(count > groups[1][kind] for kind, count in groups[0].items())


@SETTINGS
@given(cases)
def test_no_run_is_left_that_begins_where_another_of_its_kind_ends(case: Case) -> None:
    for owned in case.map(scaled=True).canonical().pieces_by_rank.values():
        runs = [
            p for p in owned if p.source_strides == p.dest_strides and set(p.dest_strides) <= {1}
        ]
        for first, second in permutations(runs, 2):
            ends = (first.source_stop, first.dest_stop, first.locations, first.scale)
            begins = (second.source_offset, second.dest_offset, second.locations, second.scale)
            assert ends != begins, f"{first} and {second}"


@SETTINGS
@given(cases)
def test_no_unit_no_empty_and_no_mergeable_dimension_is_left(case: Case) -> None:
    for _, piece in case.map(scaled=True).canonical().pieces():
        assert min(piece.shape, default=2) > 1
        assert coalesce(piece) == piece


def test_neighbours_with_other_locations_or_scale_stay_apart() -> None:
    def vector(locations: tuple[int, ...], scale: float) -> ParamAffineMap:
        first = AffinePiece((4,), 0, (1,), 0, (1,), (0, 1))
        second = AffinePiece((4,), 4, (1,), 4, (1,), locations, scale)
        return ParamAffineMap((8,), {0: (8,)}, {0: [second, first]})

    counts = [
        len(vector(*kind).canonical().pieces_by_rank[0])
        for kind in (((0, 1), 1.0), ((0,), 1.0), ((0, 1), 0.5))
    ]
    assert counts == [1, 2, 2]


def test_runs_fold_into_as_many_dimensions_as_they_have() -> None:
    rows = [
        AffinePiece((4,), 100 * i + 7 * j, (1,), 40 * i + 4 * j, (1,), (0,))
        for i in range(5)
        for j in range(10)
    ]
    (piece,) = ParamAffineMap((500,), {0: (200,)}, {0: rows[::-1]}).canonical().pieces_by_rank[0]
    assert piece == AffinePiece((5, 10, 4), 0, (100, 7, 1), 0, (40, 4, 1), (0,))


@pytest.mark.parametrize("rows", [9, 28])
def test_of_up_to_2048_runs_no_cut_however_crooked_changes_the_form(rows: int) -> None:
    for seed in range(8):
        rnd = Random(seed)
        one = bands(rnd, rows)
        form = one.canonical()
        assert len(form.pieces_by_rank[0]) <= len(one.pieces_by_rank[0])
        for depth in (1, 2):
            assert recut_map(rnd, one, depth, straight=False).canonical() == form


@pytest.mark.parametrize("rows", [5_000, 128_256])
def test_of_any_number_of_runs_straight_cuts_do_not_change_the_form(rows: int) -> None:
    for seed in range(8):
        rnd = Random(seed)
        one = bands(rnd, rows)
        form = one.canonical()
        assert len(form.pieces_by_rank[0]) <= len(one.pieces_by_rank[0])
        for depth in (1, 2, 4):
            assert recut_map(rnd, one, depth, straight=True).canonical() == form


@pytest.mark.parametrize("rows", [700, 5_000, 2**40])
def test_for_any_size_and_any_cut_the_form_of_a_form_is_itself(rows: int) -> None:
    for seed in range(4):
        rnd = Random(seed)
        one = bands(rnd, rows)
        form = recut_map(rnd, one, 3, straight=False).canonical()
        assert form.canonical() == form
        assert sum(piece.numel for _, piece in form.pieces()) == dense.size(one.shard_shapes[0])


def test_ten_thousand_rows_fold_like_the_block_that_they_are() -> None:
    """A list of single rows is recovered as the two bands that it was made of."""
    rows = [
        AffinePiece((5,), 64 * i + 20 * k, (1,), 10 * i + 5 * k, (1,), (0,))
        for i in range(5_000)
        for k in range(2)
    ]
    listed = ParamAffineMap((320_000,), {0: (50_000,)}, {0: Random(0).sample(rows, len(rows))})
    (folded,) = listed.canonical().pieces_by_rank[0]
    assert folded == AffinePiece((5_000, 2, 5), 0, (64, 20, 1), 0, (10, 5, 1), (0,))


def scattered_blocks(rnd: Random) -> ParamAffineMap:
    """Blocks of a matrix chosen at random, 1800 to 2048 rows of blocks in all, in one shard."""
    pieces: list[AffinePiece] = []
    count = at = 0
    for band in range(12):
        height = rnd.randint(20, 40)
        for column in sorted(rnd.sample(range(12), 6)):
            if count + height <= 2048:
                width = rnd.choice([3, 4, 5])
                offset = 60 * 40 * band + 5 * column
                pieces.append(AffinePiece((height, width), offset, (60, 1), at, (width, 1), (0,)))
                count, at = count + height, at + height * width
    return ParamAffineMap((60 * 40 * 12,), {0: (at,)}, {0: pieces})


def test_up_to_2048_runs_have_one_form_also_where_cuts_make_more_of_them() -> None:
    for seed in range(6):
        rnd = Random(seed)
        one = scattered_blocks(rnd)
        form = one.canonical()
        for straight in (True, False):
            assert recut_map(rnd, one, 2, straight=straight).canonical() == form
