"""The canonical form: the same elements, one spelling, nothing merged that is not alike."""

from __future__ import annotations

from hypothesis import given

from reshard.geometry import AffinePiece, ParamAffineMap, canonicalise, coalesce
from tests.properties import dense_oracle as dense
from tests.properties.strategies import SETTINGS, Case, cases, exploded, respelled


@SETTINGS
@given(cases)
def test_it_says_the_same_of_every_element(case: Case) -> None:
    one = case.map(scaled=True)
    assert dense.relation(one.canonical()) == dense.relation(one)


@SETTINGS
@given(cases)
def test_it_is_idempotent(case: Case) -> None:
    once = case.map(scaled=True).canonical()
    assert once.canonical() == once
    assert str(once.canonical()) == str(once)
    assert canonicalise(once) == once


@SETTINGS
@given(cases)
def test_it_does_not_depend_on_how_pieces_are_cut_turned_or_listed(case: Case) -> None:
    one = case.map(scaled=True)
    assert respelled(case.random("spelling"), one).canonical() == one.canonical()


@SETTINGS
@given(cases)
def test_equal_elements_have_one_form(case: Case) -> None:
    one = case.map(scaled=True)
    assert exploded(case.random("order"), one).canonical() == one.canonical()


@SETTINGS
@given(cases)
def test_it_has_no_more_pieces_than_were_given(case: Case) -> None:
    one = case.map(scaled=True)
    given_pieces = sum(1 for _, piece in one.pieces() if piece.numel)
    assert sum(1 for _ in one.canonical().pieces()) <= given_pieces


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
        AffinePiece((4,), 100 * i + 10 * j, (1,), 40 * i + 4 * j, (1,), (0,))
        for i in range(5)
        for j in range(10)
    ]
    (piece,) = ParamAffineMap((500,), {0: (200,)}, {0: rows[::-1]}).canonical().pieces_by_rank[0]
    assert piece == AffinePiece((50, 4), 0, (10, 1), 0, (4, 1), (0,))
