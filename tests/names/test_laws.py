"""Joins by axes against dense arrays that NumPy reshapes, transposes and concatenates."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from reshard.errors import UsageError
from reshard.geometry import AffinePiece, ParamAffineMap
from reshard.geometry.join import Join, inverted, spelled_join
from reshard.geometry.spelling import Spelling, extents, solved

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A join as text, and what it says as lists of axes."""

    outer: tuple[str, ...]
    """Axes of the whole before the chain."""
    after: tuple[str, ...]
    """Axes of the whole behind it."""
    parts: dict[str, tuple[str, ...]]
    """Axes of each part, in its order."""
    sizes: dict[str, int]
    whole_text: str
    part_texts: dict[str, str]


def grouped(draw: st.DrawFn, tokens: list[str]) -> str:
    """Tokens as dims: each alone, or several in parentheses."""
    dims, at = [], 0
    while at < len(tokens):
        count = draw(st.integers(1, len(tokens) - at))
        dim = tokens[at : at + count]
        dims.append(dim[0] if count == 1 else f"({' '.join(dim)})")
        at += count
    return " ".join(dims)


@st.composite
def joins(draw: st.DrawFn) -> Drawn:
    outer = tuple(f"o{n}" for n in range(draw(st.integers(0, 2))))
    after = tuple(f"t{n}" for n in range(draw(st.integers(0, 2))))
    counted = draw(st.sampled_from([(), *((axis,) for axis in outer)]))
    labels = [f"part{n}" for n in range(draw(st.integers(1, 3)))]
    parts, sizes = {}, {}
    for label in labels:
        inner = [f"{label}_{n}" for n in range(draw(st.integers(0, 2)))]
        shared = [axis for axis in (*outer, *after) if axis not in counted]
        parts[label] = tuple(draw(st.permutations([*inner, *shared])))
    for axis in {*outer, *after, *(axis for axes in parts.values() for axis in axes)}:
        sizes[axis] = draw(st.integers(1, 3))
    tokens = [*outer, f"[{' '.join(labels)}]", *after]
    texts = {label: grouped(draw, list(axes)) for label, axes in parts.items()}
    return Drawn(outer, after, parts, sizes, grouped(draw, tokens), texts)


def made(drawn: Drawn) -> tuple[Join, Spelling, dict[str, Spelling]]:
    whole = Spelling.of(drawn.whole_text)
    parts = {label: Spelling.of(text) for label, text in drawn.part_texts.items()}
    return spelled_join(whole, parts, drawn.sizes), whole, parts


def tensors(join: Join) -> list[Ints]:
    start, found = 0, []
    for shape in join.map.shard_shapes.values():
        count = prod(shape)
        found.append(np.arange(start, start + count).reshape(shape))
        start += count
    return found


def dense(drawn: Drawn, join: Join, values: list[Ints]) -> Ints:
    """The whole, axis by axis: no strides, no pieces."""
    sizes = drawn.sizes
    blocks = []
    for label, axes in drawn.parts.items():
        inner = [axis for axis in axes if axis not in (*drawn.outer, *drawn.after)]
        missing = [axis for axis in drawn.outer if axis not in axes]
        of_label = [
            value.reshape([sizes[axis] for axis in axes])
            for (own, _), value in zip(join.parts, values, strict=True)
            if own == label
        ]
        stack = np.stack(of_label).reshape(
            [*(sizes[axis] for axis in missing), *(sizes[axis] for axis in axes)]
        )
        order = [*missing, *axes]
        wanted = [*drawn.outer, *inner, *drawn.after]
        ordered = stack.transpose([order.index(axis) for axis in wanted])
        lead = [sizes[axis] for axis in drawn.outer]
        tail = [sizes[axis] for axis in drawn.after]
        blocks.append(ordered.reshape([*lead, prod(sizes[axis] for axis in inner), *tail]))
    return np.concatenate(blocks, axis=len(drawn.outer))


@given(joins())
def test_a_join_is_what_numpy_makes(drawn: Drawn) -> None:
    join, _, _ = made(drawn)
    join.validate()
    values = tensors(join)
    whole = join.map.rebuild(dict(enumerate(values)))
    assert np.array_equal(np.asarray(whole).ravel(), dense(drawn, join, values).ravel())


@given(joins())
def test_there_and_back_is_the_identity(drawn: Drawn) -> None:
    join, _, _ = made(drawn)
    values = tensors(join)
    whole = np.asarray(join.map.rebuild(dict(enumerate(values))))
    back = inverted([join])
    for part, value in zip(join.parts, values, strict=True):
        assert np.array_equal(back[part].map.rebuild({0: whole}), value)
    assert inverted([back[part] for part in join.parts])[("0", ())].map.same_elements(join.map)


@given(joins(), st.data())
def test_it_goes_through_the_maps_of_its_parts(drawn: Drawn, data: st.DataObject) -> None:
    """Parts that are cut into flat ranges, as ZeRO cuts them."""
    join, _, _ = made(drawn)
    values, held, bytes_of = tensors(join), [], {}
    for number, value in enumerate(values):
        cut = data.draw(st.integers(0, value.size))
        ranges = [(0, cut), (cut, value.size - cut)]
        pieces = {
            rank: [AffinePiece((n,), at, (1,), 0, (1,), (rank,))] if n else []
            for rank, (at, n) in enumerate(ranges)
        }
        shapes = {rank: (n,) for rank, (_, n) in enumerate(ranges)}
        held.append(ParamAffineMap(value.shape, shapes, pieces))
        for rank, (at, n) in enumerate(ranges):
            bytes_of[number, rank] = value.ravel()[at : at + n]
    composed, origins = join.through(held)
    found = composed.rebuild({rank: bytes_of[origin] for rank, origin in enumerate(origins)})
    assert np.array_equal(found, join.map.rebuild(dict(enumerate(values))))


@given(joins())
def test_extents_follow_from_shapes(drawn: Drawn) -> None:
    _, whole, parts = made(drawn)
    shapes = [(parts[label], extents(parts[label], {}, drawn.sizes)) for label in parts]
    known = {
        axis: drawn.sizes[axis]
        for axis in drawn.sizes
        if not any((axis,) in spelling.dims for spelling in parts.values())
    }
    found = solved(shapes, parts, known)
    assert all(found[axis] == drawn.sizes[axis] for axis in found)
    assert set(found) == set(drawn.sizes)
    assert extents(whole, parts, found) == extents(whole, parts, drawn.sizes)


@pytest.mark.parametrize(
    "text", ["(a b", "a)", "[a", "[]", "a a", "[a] [b]", "[(a b)]", "a-b", "[a [b]]"]
)
def test_what_is_no_spelling_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a spelling of dims"):
        Spelling.of(text)


def test_an_extent_that_does_not_divide_is_refused() -> None:
    parts = {label: Spelling.of("f h") for label in ("gate", "up")}
    with pytest.raises(UsageError, match="an extent is not what the spelling of its dim says"):
        solved([(Spelling.of("[gate up] h"), (7, 3))], parts, {})
