"""Which rectangles of a sheet a strided block covers.

Theory. A tensor is drawn as a *sheet* of `rows × columns` elements in row-major order. A strided
block of it is, nearly always, a product: a set of row intervals times a set of column intervals,
and each set is a *progression*: `start`, nested levels of `(number, step)`, and a `width`. Axes
whose stride is a multiple of the columns step through rows; the others step inside a row. A block
that runs over the end of a row is cut into head, body and tail, the body being whole rows; a stride
that fits neither way is written out, up to a limit, and beyond it there is no product.

A block of 1,024 interleaved bands cannot be drawn as 1,024 bands. Then fewer, wider ones are drawn
(:func:`zoomed`): one level of `n` periods becomes one of `m` periods, everything inside it larger
by `n / m`. The area of every holder, the order inside a period, and what lies outside stay as they
are; blocks that interleave share their periods, so they stay beside each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

MOST_WRITTEN_OUT = 64
"""Steps of an axis that fits neither rows nor columns, each drawn by itself."""

MOST_BANDS = 24
"""Bands of one block along one side of a sheet; more are drawn as fewer."""

Axis = tuple[int, int]
"""`(number, step)`."""


@dataclass(frozen=True, slots=True)
class Progression:
    """Intervals along one side of a sheet."""

    start: float
    """Where the first one begins."""
    levels: tuple[tuple[int, float], ...]
    """`(number, step)`, the outermost first."""
    width: float
    """Length of each interval."""

    @property
    def count(self) -> int:
        """Number of intervals."""
        return prod(number for number, _ in self.levels)

    def intervals(self) -> Iterator[tuple[float, float]]:
        """Yield `(start, length)` of each, ascending where levels nest."""
        starts = [self.start]
        for number, step in self.levels:
            starts = [start + k * step for start in starts for k in range(number)]
        return ((start, self.width) for start in starts)


@dataclass(frozen=True, slots=True)
class Lattice:
    """The product of row intervals and column intervals."""

    rows: Progression
    columns: Progression

    @property
    def count(self) -> int:
        """Number of rectangles."""
        return self.rows.count * self.columns.count

    @property
    def area(self) -> float:
        """Number of elements covered."""
        return self.count * self.rows.width * self.columns.width


@dataclass(frozen=True, slots=True)
class Sheet:
    """The two-dimensional view in which a tensor is drawn."""

    rows: int
    columns: int
    """Extents."""
    split: int
    """How many leading dims make up the rows."""


def sheet_of(shape: Sequence[int]) -> Sheet:
    """Return the view that is nearest to a square; a vector is one row.

    Examples
    --------
    >>> sheet_of((97, 32)), sheet_of((8, 64, 32)), sheet_of((64, 32, 3, 3))
    (Sheet(rows=97, columns=32, split=1), Sheet(rows=512, columns=32, split=2), \
Sheet(rows=64, columns=288, split=1))
    >>> sheet_of((7,)), sheet_of(())
    (Sheet(rows=1, columns=7, split=0), Sheet(rows=1, columns=1, split=0))
    """
    cuts = range(1, len(shape)) if len(shape) > 1 else range(1)
    views = (Sheet(prod(shape[:cut]), prod(shape[cut:]), cut) for cut in cuts)
    return min(views, key=_elongation)


def _elongation(sheet: Sheet) -> float:
    short, long = sorted((max(1, sheet.rows), max(1, sheet.columns)))
    return long / short


# ------------------------------------------------------------------------------- block to bands


def lattices(
    shape: Sequence[int], offset: int, strides: Sequence[int], columns: int
) -> list[Lattice] | None:
    """Return what a strided block covers of a sheet, None when that is no short list of products.

    Parameters
    ----------
    shape, offset, strides
        The block, in elements of the row-major tensor.
    columns
        Of the sheet.

    Examples
    --------
    >>> for part in lattices((10,), 6, (1,), 8):
    ...     print(part.rows.start, part.columns)
    0 Progression(start=6, levels=(), width=2)
    1 Progression(start=0, levels=(), width=8)
    """
    if 0 in shape:
        return []
    try:
        return list(_parts(offset, _merged(shape, strides), columns))
    except _IrregularError:
        return None


class _IrregularError(Exception):
    """The block is no short list of products."""


def _merged(shape: Sequence[int], strides: Sequence[int]) -> list[Axis]:
    """Axes that move, the widest step first, neighbours that step as one joined."""
    axes = sorted(
        ((n, s) for n, s in zip(shape, strides, strict=True) if n > 1),
        key=lambda axis: axis[1],
        reverse=True,
    )
    merged: list[Axis] = []
    for number, step in axes:
        if merged and merged[-1][1] == number * step:
            merged[-1] = (merged[-1][0] * number, step)
        else:
            merged.append((number, step))
    return merged


def _parts(offset: int, axes: list[Axis], columns: int) -> Iterator[Lattice]:
    down = [(n, s // columns) for n, s in axes if s and s % columns == 0]
    across = [(n, s) for n, s in axes if not (s and s % columns == 0)]
    row, column = divmod(offset, columns)
    if column + _span(across) < columns:
        yield Lattice(_progression(row, down), _progression(column, across))
        return
    (number, step), inner = across[0], across[1:]
    if columns % step == 0 and column % step + _span(inner) < step:
        for shift, part in _at_row_ends(number, step, column, columns):
            kept = [(n, s * columns) for n, s in down]
            yield from _parts(offset + shift, _ordered([*kept, *part, *inner]), columns)
    elif number <= MOST_WRITTEN_OUT:
        rest = [*((n, s * columns) for n, s in down), *inner]
        for k in range(number):
            yield from _parts(offset + k * step, rest, columns)
    else:
        raise _IrregularError


def _ordered(axes: list[Axis]) -> list[Axis]:
    return sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[1], reverse=True)


def _at_row_ends(
    number: int, step: int, column: int, columns: int
) -> Iterator[tuple[int, list[Axis]]]:
    """Cut an axis that runs over rows: `(offset, axes)` of head, whole rows and tail."""
    a_row = columns // step
    head = min(number, -(-(columns - column) // step)) % a_row
    whole, tail = divmod(number - head, a_row)
    if head:
        yield 0, [(head, step)]
    if whole:
        yield head * step, [(whole, columns), (a_row, step)]
    if tail:
        yield (number - tail) * step, [(tail, step)]


def _span(axes: Iterable[Axis]) -> int:
    return sum((number - 1) * step for number, step in axes)


def _progression(start: int, axes: list[Axis]) -> Progression:
    if axes and axes[-1][1] == 1:
        return Progression(start, tuple(axes[:-1]), axes[-1][0])
    return Progression(start, tuple(axes), 1)


# ------------------------------------------------------------------------------- fewer, wider


def zoomed(
    progressions: Sequence[Progression], unit: float, *, least: float, most: int = MOST_BANDS
) -> list[Progression]:
    """Return progressions that can be drawn, those that interleave still beside each other.

    Parameters
    ----------
    progressions
        All that are drawn along one side.
    unit
        Points that one element takes.
    least
        Points that a band should be wide.
    most
        Bands that one progression may have.

    Examples
    --------
    >>> even, odd = (Progression(start, ((1000, 2),), 1) for start in (0, 1))
    >>> zoomed([even, odd], unit=0.1, least=2.0)
    [Progression(start=0.0, levels=((24, 83.33...),), width=41.66...), \
Progression(start=41.66..., levels=((24, 83.33...),), width=41.66...)]
    """
    done = list(progressions)
    for depth in range(max((len(p.levels) for p in done), default=0)):
        for members in _sharing_periods(done, depth).values():
            _widen(done, members, depth, unit, least, most)
    return done


def _sharing_periods(
    progressions: Sequence[Progression], depth: int
) -> dict[tuple[object, ...], list[int]]:
    """Indices of progressions with the same steps."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, progression in enumerate(progressions):
        if depth < len(progression.levels):
            groups.setdefault((progression.levels, progression.width), []).append(index)
    return groups


def _widen(
    done: list[Progression],
    members: list[int],
    depth: int,
    unit: float,
    least: float,
    most: int,
) -> None:
    model = done[members[0]]
    number, step = model.levels[depth]
    others = model.count // number
    fit = int(number * model.width * unit / least)
    fewer = max(1, min(number, fit, most // others))
    if fewer == number:
        return
    factor = number / fewer
    base = -1.0
    for index in sorted(members, key=lambda i: done[i].start):
        start = done[index].start
        if base < 0 or start >= base + step:
            base = start
        levels = (
            *model.levels[:depth],
            (fewer, step * factor),
            *((n, s * factor) for n, s in model.levels[depth + 1 :]),
        )
        done[index] = replace(
            done[index],
            start=base + (start - base) * factor,
            levels=levels,
            width=model.width * factor,
        )
