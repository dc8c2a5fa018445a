"""The canonical form: the same elements, one spelling, nothing merged that is not alike."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given

from reshard.geometry import AffinePiece, ParamAffineMap, canonicalise, coalesce
from tests.properties import dense_oracle as dense
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
    one, rnd = case.map(scaled=True), case.random("spelling")
    for spell in (respelled, exploded):
        assert spell(rnd, one).canonical() == one.canonical(), spell.__name__


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
