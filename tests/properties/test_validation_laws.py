"""Validation accepts exactly the maps that the definitions accept."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from reshard.errors import InvalidMapError, UnsupportedError, UsageError
from reshard.geometry import AffinePiece, ParamAffineMap, disjointness, grid, refinement
from reshard.geometry.holes import holes_of
from tests.properties import dense_oracle as dense
from tests.properties.strategies import (
    SETTINGS,
    Case,
    cases,
    damaged,
    examples,
    exploded,
    respelled,
)


def assert_judged_alike(one: ParamAffineMap, *, partial: bool) -> None:
    wrong = dense.broken(one, partial=partial)
    if not wrong:
        one.validate(partial=partial)
        return
    with pytest.raises(InvalidMapError) as refused:
        one.validate("w", partial=partial)
    assert refused.value.broken in wrong
    assert refused.value.parameter == "w"


@SETTINGS
@given(cases)
def test_valid_maps_are_accepted_however_they_are_spelled(case: Case) -> None:
    one = case.map(scaled=True)
    assert not dense.broken(one)
    for same in (one, respelled(case.random("r"), one), exploded(case.random("e"), one)):
        same.validate()
        same.validate(partial=True)


@settings(SETTINGS, max_examples=examples(200))
@given(cases)
def test_damaged_maps_are_judged_as_the_dense_oracle_judges(case: Case) -> None:
    one = damaged(case.random("damage"), case.map(scaled=True))
    assert_judged_alike(one, partial=False)
    assert_judged_alike(one, partial=True)


@SETTINGS
@given(cases)
def test_what_twice_damaged_maps_are_is_judged_alike(case: Case) -> None:
    one = damaged(case.random("one"), damaged(case.random("two"), case.map()))
    assert_judged_alike(respelled(case.random("spelling"), one), partial=False)


@settings(SETTINGS, max_examples=examples(200))
@given(cases)
def test_pieces_that_no_grid_reads_are_judged_alike(case: Case) -> None:
    """The same by meeting pieces in pairs; only ranks that hold an element twice are beyond it."""
    one = damaged(case.random("damage"), case.map(scaled=True))
    with pytest.MonkeyPatch.context() as patch:
        for module in (disjointness, grid, refinement):
            patch.setattr(module, "MOST_BOXES", 0)
        patch.setattr(disjointness, "FEW_WALKS", 0)
        said = verdict(one)
    wrong = dense.broken(one, partial=True)
    if said == "beyond":
        held = [[s for p in owned for s, _ in dense.elements(p)] for owned in owners(one)]
        assert wrong or any(map(dense.repeats, held))
    else:
        assert said in (wrong or {"valid"})


def verdict(one: ParamAffineMap) -> str:
    """What validation says of a partial map: the property that is broken, valid, or beyond it."""
    try:
        one.validate(partial=True)
    except InvalidMapError as refused:
        return refused.broken
    except UnsupportedError:
        return "beyond"
    return "valid"


def owners(one: ParamAffineMap) -> list[tuple[AffinePiece, ...]]:
    return list(one.pieces_by_rank.values())


def thinned(case: Case) -> ParamAffineMap:
    """A map that lost some of its pieces."""
    rnd, one = case.random("thin"), case.map()
    pieces = {
        rank: [piece for piece in owned if rnd.random() < 0.6]
        for rank, owned in respelled(rnd, one).pieces_by_rank.items()
    }
    return ParamAffineMap(one.logical_shape, one.shard_shapes, pieces)


@SETTINGS
@given(cases)
def test_uncovered_offsets_are_the_holes_as_maximal_ranges(case: Case) -> None:
    one = thinned(case)
    assert one.uncovered_offsets() == dense.ranges(set(range(case.total)) - set(dense.holders(one)))
    assert case.map().uncovered_offsets() == []


@SETTINGS
@given(cases)
def test_holes_are_counted_and_gone_through_without_a_list(case: Case) -> None:
    one = thinned(case)
    expected = dense.ranges(set(range(case.total)) - set(dense.holders(one)))
    holes = holes_of(one.table.link, one.numel)
    assert list(holes) == expected
    assert (len(holes), holes.numel) == (len(expected), sum(map(len, expected)))
    assert not expected or holes.start == expected[0].start


@SETTINGS
@given(cases)
def test_holders_are_the_ranks_that_hold_an_element(case: Case) -> None:
    one = thinned(case)
    held = dense.holders(one)
    for offset in range(case.total):
        assert one.holders(offset) == tuple(sorted(held.get(offset, ())))
    for offset in (-1, case.total):
        with pytest.raises(UsageError):
            one.holders(offset)
