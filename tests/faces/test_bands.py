"""Bands cover exactly the elements of a block; fewer, wider ones keep areas and order."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard.cli.pictures.bands import Lattice, Progression, lattices, sheet_of, zoomed


@st.composite
def blocks(draw: st.DrawFn) -> tuple[tuple[int, ...], int, tuple[int, ...], int, int]:
    """`(shape, offset, strides, rows, columns)`: axes that nest, as those of a valid piece do."""
    columns = draw(st.integers(1, 12))
    shape: list[int] = []
    strides: list[int] = []
    least = 1
    for _ in range(draw(st.integers(0, 3))):
        stride = least * draw(st.integers(1, 4))
        number = draw(st.integers(1, 5))
        strides.insert(0, stride)
        shape.insert(0, number)
        least = stride * number
    offset = draw(st.integers(0, 30))
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    order = draw(st.permutations(range(len(shape))))
    return (
        tuple(shape[k] for k in order),
        offset,
        tuple(strides[k] for k in order),
        last // columns + 1,
        columns,
    )


def elements(shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> list[int]:
    indices = itertools.product(*map(range, shape))
    return sorted(offset + sum(i * s for i, s in zip(at, strides, strict=True)) for at in indices)


def painted(
    parts: list[Lattice], rows: int, columns: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    sheet = np.zeros((rows, columns), dtype=np.int64)
    for part in parts:
        for y, height in part.rows.intervals():
            for x, width in part.columns.intervals():
                sheet[int(y) : int(y + height), int(x) : int(x + width)] += 1
    return sheet


@given(blocks())
def test_bands_cover_every_element_of_a_block_once(
    block: tuple[tuple[int, ...], int, tuple[int, ...], int, int],
) -> None:
    shape, offset, strides, rows, columns = block
    parts = lattices(shape, offset, strides, columns)
    assert parts is not None
    expected = np.zeros(rows * columns, dtype=np.int64)
    np.add.at(expected, elements(shape, offset, strides), 1)
    assert np.array_equal(painted(parts, rows, columns).ravel(), expected)
    assert sum(part.area for part in parts) == prod(shape)


def test_a_stride_that_fits_nowhere_and_is_long_is_not_drawn() -> None:
    assert lattices((1000, 2), 0, (7, 3), 10) is None
    assert lattices((0, 4), 0, (4, 1), 4) == []


@given(
    st.integers(2, 6),
    st.integers(1, 5),
    st.integers(25, 2000),
    st.floats(0.01, 3),
    st.integers(0, 9),
)
def test_zooming_keeps_areas_and_neighbours(
    ranks: int, width: int, periods: int, unit: float, first: int
) -> None:
    step = ranks * width
    real = [Progression(first + r * width, ((periods, step),), width) for r in range(ranks)]
    wide = zoomed(real, unit, least=2.0)
    total = periods * width
    for progression in wide:
        assert progression.count <= 24
        assert np.isclose(progression.count * progression.width, total)
        assert progression.width * unit >= 2.0 or progression.count == 1
    marks = sorted(interval for progression in wide for interval in progression.intervals())
    assert np.isclose(marks[0][0], first)
    for (start, length), (after, _) in itertools.pairwise(marks):
        assert np.isclose(start + length, after)
    assert np.isclose(sum(marks[-1]), first + periods * step)


def test_the_outer_level_is_zoomed_and_the_inside_of_a_head_stays() -> None:
    heads = Progression(0, ((1024, 96), (3, 32)), 8)
    (drawn,) = zoomed([heads], unit=0.01, least=2.0)
    (outer, inner) = drawn.levels
    assert inner[0] == 3
    assert outer[0] * outer[1] == 1024 * 96
    assert drawn.width / inner[1] == 8 / 32


def test_what_fits_is_left_alone() -> None:
    few = [Progression(0, ((8, 16),), 8), Progression(8, ((8, 16),), 8)]
    assert zoomed(few, unit=1.0, least=2.0) == few


def test_a_sheet_has_all_elements_and_is_as_square_as_it_can_be() -> None:
    for shape in ((), (7,), (5, 3), (8, 64, 32), (64, 32, 3, 3), (0, 4), (2, 0)):
        sheet = sheet_of(shape)
        assert sheet.rows * sheet.columns == prod(shape)
        assert prod(shape[: sheet.split]) == sheet.rows
