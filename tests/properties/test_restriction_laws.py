"""Restricting a map to a range of F: the rest of the algebra goes through it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given

from reshard.errors import UsageError
from reshard.geometry import ParamAffineMap, compose, restrict
from tests.properties import dense_oracle as dense
from tests.properties.strategies import SETTINGS, Case, cases


def with_shape(one: ParamAffineMap, shape: tuple[int, ...]) -> ParamAffineMap:
    """The same map of another view of F."""
    return ParamAffineMap(shape, one.shard_shapes, one.pieces_by_rank)


def renumbered(shape: tuple[int, ...], dim: int, start: int, length: int) -> dict[int, int]:
    """Offsets in F that are in a window, with their offset in the narrowed tensor."""
    numbers = np.arange(dense.size(shape)).reshape(shape)
    kept = np.take(numbers, range(start, start + length), dim).reshape(-1)
    return {int(offset): index for index, offset in enumerate(kept)}


@SETTINGS
@given(cases)
def test_narrow_keeps_the_elements_of_the_window_and_renumbers_them(case: Case) -> None:
    one = case.map(scaled=True)
    assume(one.logical_shape)
    window = case.window(one.logical_shape)
    kept = renumbered(one.logical_shape, *window)
    small = one.narrow(*window)
    dim, _, length = window
    assert small.logical_shape[dim] == length
    assert small.shard_shapes == one.shard_shapes
    assert dense.relation(small) == {
        (rank, d, kept[s], locations, scale)
        for rank, d, s, locations, scale in dense.relation(one)
        if s in kept
    }
    small.validate(partial=True)
    assert small.canonical() == small


@SETTINGS
@given(cases)
def test_restrict_keeps_the_same_elements_where_they_are(case: Case) -> None:
    one = case.map(scaled=True)
    assume(one.logical_shape)
    window = case.window(one.logical_shape)
    kept = renumbered(one.logical_shape, *window)
    part = restrict(one, *window)
    assert part.logical_shape == one.logical_shape
    assert dense.relation(part) == {e for e in dense.relation(one) if e[2] in kept}


@SETTINGS
@given(cases)
def test_narrowing_twice_is_narrowing_once(case: Case) -> None:
    one = case.map(scaled=True)
    assume(one.logical_shape)
    dim, start, length = case.window(one.logical_shape)
    rnd = case.random("inner")
    first = rnd.randint(0, length)
    count = rnd.randint(0, length - first)
    twice = one.narrow(dim, start, length).narrow(dim, first, count)
    assert twice == one.narrow(dim, start + first, count)
    whole = one.narrow(dim, 0, one.logical_shape[dim])
    assert whole == one.canonical()


@SETTINGS
@given(cases)
def test_restriction_commutes_with_composition(case: Case) -> None:
    source = case.map("source", scaled=True)
    shape = source.logical_shape
    assume(shape)
    target = with_shape(case.map("target", scaled=True), shape)
    window = case.window(shape)
    kept = renumbered(shape, *window)
    wanted = dense.places(target)
    inside = {place for place, (s, _) in wanted.items() if s in kept}
    whole = compose(target, source)
    part = compose(target.narrow(*window), source.narrow(*window), partial=True)
    part.verify()
    expected = {copy for copy in dense.copies(whole) if copy[:2] in inside}
    assert set(dense.copies(part)) == expected
    assert len(dense.copies(part)) == len(expected)
    assert dense.same_copies(part, compose(target, restrict(source, *window), partial=True))


@SETTINGS
@given(cases)
def test_elements_outside_the_window_are_named_as_unfilled(case: Case) -> None:
    source = case.map("source")
    shape = source.logical_shape
    assume(shape)
    target = with_shape(case.map("target"), shape)
    window = case.window(shape)
    kept = renumbered(shape, *window)
    plan = compose(target, restrict(source, *window), partial=True)
    outside: dict[int, list[int]] = {}
    for (rank, d), (s, _) in dense.places(target).items():
        if s not in kept:
            outside.setdefault(rank, []).append(d)
    assert dict(plan.unfilled) == {r: tuple(dense.ranges(ds)) for r, ds in outside.items()}


@pytest.mark.parametrize("window", [(2, 0, 1), (-1, 0, 1), (0, 0, 5), (0, -1, 2), (1, 4, -1)])
def test_a_window_outside_of_the_tensor_is_refused(window: tuple[int, int, int]) -> None:
    one = ParamAffineMap((4, 4), {}, {})
    for cut in (one.narrow, lambda *where: restrict(one, *where)):
        with pytest.raises(UsageError):
            cut(*window)
