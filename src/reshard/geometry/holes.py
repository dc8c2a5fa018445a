"""Holes: the addresses of a space that no link covers, as ranges.

Theory. Read in a grid, the links are boxes. Digit by digit, outermost first, the borders of the
boxes cut the space into slabs in which the same boxes are present throughout; the holes of a slab
are those of its cross-section, once for every value of the digit. On the innermost digit the
question is one of intervals. Equal cross-sections are solved once. Where strides have so little in
common that a grid would walk them, all runs are swept once, in order.

So the holes are a tree whose size follows the number of boxes, however many holes there are: a
single strided block may leave 2**40. The tree knows how many they are and how many elements they
have, and gives the first ones at once. Only who asks for all pays for all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from reshard.errors import UnsupportedError
from reshard.geometry.chains import run_counts
from reshard.geometry.folding import expanded_runs
from reshard.geometry.grid import MOST_BOXES, BoxTable, Grid
from reshard.geometry.links import Link
from reshard.geometry.notation import ranges_text
from reshard.geometry.ordering import Ints
from reshard.geometry.tables import LinkTable

MOST_HOLES = 1 << 23
"""More ranges than these are counted, and not listed: they would take a gigabyte."""

WALKED = 8
"""Where links are walked into more than so many boxes each, their runs are swept instead."""

Ranges = tuple[Ints, Ints]
"""Starts and stops, ascending."""


def gaps(table: LinkTable, total: int) -> list[range]:
    """Return the addresses of ``[0, total)`` that no link covers, as maximal ranges, ascending.

    Raises
    ------
    UnsupportedError
        When there are more than :data:`MOST_HOLES`.

    Examples
    --------
    >>> gaps(LinkTable.of([Link(1, 0, ((2, 4, 1), (2, 1, 1)))]), 8)
    [range(0, 1), range(3, 5), range(7, 8)]
    """
    return holes_of(table, total).listed()


def holes_of(table: LinkTable, total: int) -> Holes:
    """Return the addresses of ``[0, total)`` that no link covers, without listing them.

    >>> holes = holes_of(LinkTable.of([Link(0, 0, ((2**40, 2, 1),))]), 2**41)
    >>> len(holes) == holes.numel == 2**40, holes.start
    (True, 1)
    """
    if not total:
        return Holes(_Section.of([]))
    if not len(table):
        return Holes(_line(0, total))
    whole = LinkTable.of([Link(0, 0, ((total, 1, 1),) if total > 1 else ())])
    grid = Grid.of([table])
    walks = float(grid.walks(table).sum())
    if WALKED * len(table) < walks and run_counts(table).sum() <= MOST_BOXES:
        return Holes(_between_runs(table, total))
    spaces, boxes = grid.boxes(whole), grid.boxes(table)
    every = np.arange(len(boxes))
    found = [
        _Slabs(grid, boxes).holes(grid.digits - 1, every, spaces.lo[k], spaces.hi[k])
        for k in range(len(spaces))
    ]
    parts = [_Part(0, 1, 0, section) for section in found if section.count]
    return Holes(_Section.of(sorted(parts, key=lambda part: part.start)))


def _between_runs(table: LinkTable, total: int) -> _Section:
    """The holes between all runs, in one sweep: for strides that no grid reads without walking."""
    runs, _ = expanded_runs(table)
    start = np.clip(runs.near, 0, total)
    stop = np.clip(runs.near + runs.extent.prod(axis=1), 0, total)
    order = np.argsort(start)
    reached = np.maximum.accumulate(np.append(0, stop[order]))
    until = np.append(start[order], total)
    open_ = reached < until
    return _Section.of_line(reached[open_], until[open_])


class Holes(Collection[range]):
    """Maximal ranges of addresses, ascending; as many as they may be."""

    __slots__ = ("_root",)

    def __init__(self, root: _Section) -> None:
        self._root = root

    def __len__(self) -> int:
        return self._root.count

    def __iter__(self) -> Iterator[range]:
        return _touching_joined(self._root.ranges(0))

    def __contains__(self, item: object) -> bool:
        return any(item == hole for hole in self)

    @property
    def numel(self) -> int:
        """Number of addresses in all ranges."""
        return self._root.numel

    @property
    def start(self) -> int:
        """The first address; there is one."""
        return self._root.start

    def listed(self) -> list[range]:
        """Return all ranges.

        Raises
        ------
        UnsupportedError
            When there are more than :data:`MOST_HOLES`.
        """
        if len(self) > MOST_HOLES:
            raise UnsupportedError(
                "too many holes to list",
                expected=f"at most {MOST_HOLES}",
                found=f"{len(self)}: {self}",
            )
        start, stop = _joined(*self._root.listed())
        return [range(a, b) for a, b in zip(start.tolist(), stop.tolist(), strict=True)]

    def __str__(self) -> str:
        return ranges_text(self, self.numel)


def listed(holes: Collection[range]) -> Collection[range]:
    """Return holes as a list, where they are not listed yet."""
    return holes.listed() if isinstance(holes, Holes) else holes


def holes_text(holes: Collection[range]) -> str:
    """Write the first three holes."""
    return str(holes) if isinstance(holes, Holes) else ranges_text(holes)


def _touching_joined(ranges: Iterator[tuple[int, int]]) -> Iterator[range]:
    """Join ascending ranges that touch, one by one."""
    held = next(ranges, None)
    if held is None:
        return
    start, stop = held
    for begin, end in ranges:
        if begin != stop:
            yield range(start, stop)
            start = begin
        stop = end
    yield range(start, stop)


def _joined(start: Ints, stop: Ints) -> Ranges:
    """Join ascending ranges that touch."""
    new = np.ones(len(start), bool)
    new[1:] = start[1:] != stop[:-1]
    first = np.flatnonzero(new)
    return start[first], stop[np.append(first[1:], len(start)) - 1] if len(first) else stop


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A section, from ``at`` on, ``times`` times, a stride apart; it has holes."""

    at: int
    times: int
    stride: int
    section: _Section

    @property
    def start(self) -> int:
        return self.at + self.section.start

    @property
    def stop(self) -> int:
        return self.at + (self.times - 1) * self.stride + self.section.stop

    @property
    def count(self) -> int:
        one = self.section
        touching = one.stop == one.start + self.stride
        return self.times * one.count - (self.times - 1) * touching


@dataclass(frozen=True, slots=True, eq=False)
class _Section:
    """Holes: a line of ranges, or parts of other sections in order."""

    count: int
    numel: int
    start: int
    stop: int
    line: Ranges | None
    parts: Sequence[_Part] = ()

    @classmethod
    def of(cls, parts: Sequence[_Part]) -> _Section:
        """Return the section of some parts, ascending."""
        if not parts:
            return cls(0, 0, 0, 0, None)
        touching = sum(a.stop == b.start for a, b in pairwise(parts))
        count = sum(part.count for part in parts) - touching
        numel = sum(part.times * part.section.numel for part in parts)
        return cls(count, numel, parts[0].start, parts[-1].stop, None, parts)

    @classmethod
    def of_line(cls, start: Ints, stop: Ints) -> _Section:
        """Return the section of some ranges, ascending, no two of which touch."""
        if not len(start):
            return cls.of([])
        numel = int((stop - start).sum())
        return cls(len(start), numel, int(start[0]), int(stop[-1]), (start, stop))

    def ranges(self, base: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges one by one; some touch."""
        if self.line is not None:
            for start, stop in zip(*self.line, strict=True):
                yield base + int(start), base + int(stop)
        for part in self.parts:
            for time in range(part.times):
                yield from part.section.ranges(base + part.at + time * part.stride)

    def listed(self) -> Ranges:
        """Return all ranges; some touch."""
        if self.line is not None:
            return self.line
        starts, stops = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for part in self.parts:
            start, stop = part.section.listed()
            base = part.at + np.arange(part.times, dtype=np.int64)[:, None] * part.stride
            starts.append((base + start).reshape(-1))
            stops.append((base + stop).reshape(-1))
        return np.concatenate(starts), np.concatenate(stops)


def _line(start: int, stop: int) -> _Section:
    return _Section.of_line(np.array([start]), np.array([stop]))


class _Slabs:
    """The recursion of :func:`holes_of` for one part of the space."""

    __slots__ = ("_boxes", "_grid", "_known")

    def __init__(self, grid: Grid, boxes: BoxTable) -> None:
        self._grid = grid
        self._boxes = boxes
        self._known: dict[tuple[int, bytes], _Section] = {}

    def holes(self, digit: int, active: Ints, lo: Ints, hi: Ints) -> _Section:
        """Return the holes of the digits up to ``digit``, in addresses."""
        key = (digit, active.tobytes())
        if key not in self._known:
            if digit:
                self._known[key] = self._slabs(digit, active, lo, hi)
            else:
                self._known[key] = self._line(active, lo, hi)
        return self._known[key]

    def _line(self, active: Ints, lo: Ints, hi: Ints) -> _Section:
        start = np.clip(self._boxes.lo[active, 0], lo[0], hi[0])
        stop = np.clip(self._boxes.hi[active, 0], lo[0], hi[0])
        order = np.argsort(start, kind="stable")
        reached = np.maximum.accumulate(np.append(lo[:1], stop[order]))
        until = np.append(start[order], hi[0])
        open_ = reached < until
        return _Section.of_line(reached[open_], until[open_])

    def _slabs(self, digit: int, active: Ints, lo: Ints, hi: Ints) -> _Section:
        box_lo, box_hi = self._boxes.lo[active, digit], self._boxes.hi[active, digit]
        borders = np.unique(
            np.clip(np.concatenate([box_lo, box_hi, [lo[digit], hi[digit]]]), lo[digit], hi[digit])
        )
        stride = int(self._grid.strides[0, digit])
        parts = []
        for first, last in pairwise(borders.tolist()):
            here = active[(box_lo <= first) & (box_hi >= last)]
            section = self.holes(digit - 1, here, lo, hi)
            if section.count == 1 and section.numel == stride:  # nothing is covered throughout
                parts.append(_Part(first * stride, 1, 0, _line(0, (last - first) * stride)))
            elif section.count:
                parts.append(_Part(first * stride, last - first, stride, section))
        return _Section.of(parts)
