"""Holes: the addresses of a space that no link covers, as ranges.

Theory. Read in a grid, the links are boxes. Digit by digit, outermost first, the borders of the
boxes cut the space into slabs in which the same boxes are present throughout; the holes of a slab
are those of its cross-section, once for every value of the digit. On the innermost digit the
question is one of intervals. Equal cross-sections are solved once. The cost follows the number of
boxes and of holes.
"""

from __future__ import annotations

import numpy as np

from reshard.geometry.grid import BoxTable, Grid
from reshard.geometry.links import Link
from reshard.geometry.ordering import Ints
from reshard.geometry.tables import LinkTable

Ranges = tuple[Ints, Ints]
"""Starts and stops, ascending."""


def gaps(table: LinkTable, total: int) -> list[range]:
    """Return the addresses of ``[0, total)`` that no link covers, as maximal ranges, ascending.

    >>> gaps(LinkTable.of([Link(1, 0, ((2, 4, 1), (2, 1, 1)))]), 8)
    [range(0, 1), range(3, 5), range(7, 8)]
    """
    if not total:
        return []
    if not len(table):
        return [range(total)]
    whole = LinkTable.of([Link(0, 0, ((total, 1, 1),) if total > 1 else ())])
    grid = Grid.of([table])
    spaces, boxes = grid.boxes(whole), grid.boxes(table)
    found = [
        _Slabs(grid, boxes).holes(
            grid.digits - 1, np.arange(len(boxes)), spaces.lo[k], spaces.hi[k]
        )
        for k in range(len(spaces))
    ]
    start = np.concatenate([starts for starts, _ in found])
    stop = np.concatenate([stops for _, stops in found])
    order = np.argsort(start, kind="stable")
    start, stop = _joined(start[order], stop[order])
    return [range(a, b) for a, b in zip(start.tolist(), stop.tolist(), strict=True)]


def _joined(start: Ints, stop: Ints) -> Ranges:
    """Join ascending ranges that touch."""
    new = np.ones(len(start), bool)
    new[1:] = start[1:] != stop[:-1]
    first = np.flatnonzero(new)
    return start[first], stop[np.append(first[1:], len(start)) - 1] if len(first) else stop


class _Slabs:
    """The recursion of :func:`gaps` for one part of the space."""

    __slots__ = ("_boxes", "_grid", "_known")

    def __init__(self, grid: Grid, boxes: BoxTable) -> None:
        self._grid = grid
        self._boxes = boxes
        self._known: dict[tuple[int, bytes], Ranges] = {}

    def holes(self, digit: int, active: Ints, lo: Ints, hi: Ints) -> Ranges:
        """Return the holes of the digits up to ``digit``, in addresses."""
        key = (digit, active.tobytes())
        if key not in self._known:
            if digit:
                self._known[key] = self._slabs(digit, active, lo, hi)
            else:
                self._known[key] = self._line(active, lo, hi)
        return self._known[key]

    def _line(self, active: Ints, lo: Ints, hi: Ints) -> Ranges:
        start = np.clip(self._boxes.lo[active, 0], lo[0], hi[0])
        stop = np.clip(self._boxes.hi[active, 0], lo[0], hi[0])
        order = np.argsort(start, kind="stable")
        reached = np.maximum.accumulate(np.append(lo[:1], stop[order]))
        until = np.append(start[order], hi[0])
        open_ = reached < until
        return reached[open_], until[open_]

    def _slabs(self, digit: int, active: Ints, lo: Ints, hi: Ints) -> Ranges:
        box_lo, box_hi = self._boxes.lo[active, digit], self._boxes.hi[active, digit]
        borders = np.unique(
            np.clip(np.concatenate([box_lo, box_hi, [lo[digit], hi[digit]]]), lo[digit], hi[digit])
        )
        stride = int(self._grid.strides[0, digit])
        starts, stops = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for first, last in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            here = active[(box_lo <= first) & (box_hi >= last)]
            start, stop = self.holes(digit - 1, here, lo, hi)
            values = np.arange(first, last, dtype=np.int64)[:, None] * stride
            if not len(here) and self._fills(digit, lo, hi):
                values, start, stop = values[:1], start[:1], start[:1] + (last - first) * stride
            starts.append((values + start).reshape(-1))
            stops.append((values + stop).reshape(-1))
        return np.concatenate(starts), np.concatenate(stops)

    def _fills(self, digit: int, lo: Ints, hi: Ints) -> bool:
        """Tell whether the lower digits take all their values in this part of the space."""
        return bool((lo[:digit] == 0).all() and (hi[:digit] == self._grid.radices[0, :digit]).all())
