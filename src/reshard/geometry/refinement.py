"""Refinement: how blocks of several owners overlap, and their parts of one set of owners each.

Theory. P5 wants every element of a piece to be held by the same ranks. Blocks of one address
space are read in a grid (:mod:`reshard.geometry.grid`), where they are boxes. Boxes with equal
bounds form one *class*. Real layouts either repeat a box or stay clear of it, so nearly always
no two classes overlap, and the owners of a class are those of its boxes.

Where classes do cross, the crossing ones alone are compressed: the borders of all of them cut
each axis into intervals, their products are *cells*, and no cell is cut by any class. A cell's
owners are those of all classes around it. Nothing here depends on the number of elements.

Blocks of several spaces (the shards of several ranks) are handled at once by giving each block
the number of its space.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.errors import UnsupportedError
from reshard.geometry.grid import MOST_BOXES, BoxTable, Grid
from reshard.geometry.joins import overlaps_among
from reshard.geometry.ordering import (
    Ints,
    beside,
    classes_of,
    expanded,
    places_of,
    rows_of,
    starts_of,
)
from reshard.geometry.tables import (
    LinkTable,
    concatenated,
)


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Lists of integers in one array: list ``g`` is ``items[start[g]:start[g + 1]]``."""

    start: Ints
    items: Ints

    @property
    def counts(self) -> Ints:
        """Length of each list."""
        return np.diff(self.start)

    def of(self, index: int) -> tuple[int, ...]:
        """Return one list."""
        return tuple(self.items[self.start[index] : self.start[index + 1]].tolist())

    def gathered(self, index: Ints) -> tuple[Ints, Ints]:
        """Return the items of several lists in one, and how many each gave."""
        counts = self.counts[index]
        return self.items[expanded(self.start[:-1][index], counts)], counts


def grouped(label: Ints, items: Ints, groups: int) -> Groups:
    """Return, for each label, the sorted distinct items that stand beside it.

    >>> grouped(np.array([1, 0, 1]), np.array([7, 5, 7]), 2).items.tolist()
    [5, 7]
    """
    order = np.lexsort((items, label))
    label, items = label[order], items[order]
    new = np.ones(len(order), bool)
    new[1:] = (label[1:] != label[:-1]) | (items[1:] != items[:-1])
    return Groups(np.searchsorted(label[new], np.arange(groups + 1)), items[new])


class Arrangement:
    """How the near sides of some links overlap.

    Parameters
    ----------
    table
        Links in normal form, none empty.
    owners
        The owner of each row, non-negative.
    spaces
        The address space of each row; all the same when left out.
    """

    __slots__ = ("_box_class", "_boxes", "_cells", "_grid", "_owners", "_space", "_table")

    def __init__(self, table: LinkTable, owners: Ints, spaces: Ints | None = None) -> None:
        self._table = table
        self._space = np.zeros(len(table), np.int64)
        if spaces is not None:
            self._space = places_of(spaces)[0]
        self._grid = Grid.of([table], self._space)
        self._boxes = self._grid.boxes(table, self._space)
        bounds = _columns(self._boxes.lo, self._boxes.hi, self._space[self._boxes.row])
        order, label = classes_of(bounds)
        self._box_class = np.empty(len(order), np.int64)
        self._box_class[order] = label
        first = order[starts_of(label)]
        classes = self._boxes.take(first)
        self._owners = grouped(self._box_class, owners[self._boxes.row], len(first))
        self._cells = _Cells.of(classes, self._space[classes.row], self._owners)

    @property
    def crossing_rows(self) -> NDArray[np.bool_]:
        """Rows some part of which is also in a box with other bounds."""
        marked = np.zeros(len(self._table), bool)
        marked[self._boxes.row[self._cells.crossing[self._box_class]]] = True
        return marked

    def volume(self) -> int:
        """Return the number of addresses that the links cover together."""
        return int(self._cells.distinct_volume())

    def parts(self, rows: Ints | None = None) -> tuple[LinkTable, Ints, Groups]:
        """Return parts of rows that each lie in one set of owners.

        A row that lies in one set as a whole is returned whole.

        Returns
        -------
        parts
            Links in normal form.
        row
            The row that each part is of, ascending.
        owners
            The owners of each part, ascending.
        """
        boxes, kinds = self._boxes, self._box_class
        chosen = np.arange(len(boxes))
        if rows is not None:
            wanted = np.zeros(len(self._table), bool)
            wanted[rows] = True
            chosen = np.flatnonzero(wanted[boxes.row])
        whole = self._whole_rows()
        lead = chosen[whole[boxes.row[chosen]]]
        lead = lead[_firsts(boxes.row[lead])]
        cut = chosen[~whole[boxes.row[chosen]]]
        lo, hi, cells, counts = self._cells.inside(kinds[cut])
        cut = np.repeat(cut, counts)
        pieces = BoxTable(
            lo, hi, boxes.far_at(cut, lo), rows_of(boxes.far_stride, cut), boxes.row[cut]
        )
        cut_links = self._grid.links(pieces, self._space[pieces.row])
        first_cell = self._cells.first_cell(kinds[lead])
        table = concatenated(
            [self._table.take(boxes.row[lead]), self._still(cut_links, pieces.row)]
        )
        row = np.concatenate([boxes.row[lead], pieces.row])
        order = np.argsort(row, kind="stable")
        cells = np.concatenate([first_cell, cells])[order]
        return table.take(order), row[order], _picked(self._cells.owners, cells)

    def _whole_rows(self) -> NDArray[np.bool_]:
        """Rows whose boxes do not cross others and all have the same owners."""
        whole = ~self.crossing_rows
        row, kinds = self._boxes.row, self._box_class
        lead = np.zeros(len(self._table), np.int64)
        lead[row] = np.arange(len(row))
        other = lead[row]
        differs = self._owners.counts[kinds] != self._owners.counts[kinds[other]]
        alike = np.flatnonzero(~differs & (other != np.arange(len(row))))
        mine, counts = self._owners.gathered(kinds[alike])
        theirs, _ = self._owners.gathered(kinds[other[alike]])
        whole[row[differs]] = False
        whole[row[np.repeat(alike, counts)[mine != theirs]]] = False
        return whole

    def _still(self, parts: LinkTable, row: Ints) -> LinkTable:
        """Give parts back the repetitions (near stride 0) that boxes leave out."""
        table = self._table
        still = (table.extent > 1) & (table.near_stride == 0)
        columns = np.flatnonzero(still.any(axis=0))
        if not len(columns) or not len(row):
            return parts
        extent = rows_of(np.where(still, table.extent, 1)[:, columns], row)
        zeros = np.zeros_like(extent)
        return LinkTable(
            parts.near,
            parts.far,
            beside(parts.extent, extent),
            beside(parts.near_stride, zeros),
            beside(parts.far_stride, rows_of(table.far_stride[:, columns], row)),
        ).normalised()


@dataclass(frozen=True, slots=True, eq=False)
class _Cells:
    """The cells of some classes: a class that crosses no other is one cell."""

    lo: Ints
    hi: Ints
    crossing: NDArray[np.bool_]
    """Whether each class crosses others."""
    of_class: Groups
    """Cell rows of each class; ``lo`` and ``hi`` are by these rows."""
    owners: Groups
    """Owners by cell row."""
    first: NDArray[np.bool_]
    """Whether a cell row is the first with its bounds."""

    @classmethod
    def of(cls, classes: BoxTable, space: Ints, owners: Groups) -> _Cells:
        count = len(classes)
        i, j = overlaps_among(classes.lo, classes.hi, space)
        crossing = np.zeros(count, bool)
        crossing[i] = crossing[j] = True
        if not crossing.any():
            own = Groups(np.arange(count + 1), np.arange(count))
            return cls(classes.lo, classes.hi, crossing, own, owners, np.ones(count, bool))
        return cls._compressed(classes, space, owners, crossing)

    @classmethod
    def _compressed(
        cls, classes: BoxTable, space: Ints, owners: Groups, crossing: NDArray[np.bool_]
    ) -> _Cells:
        rows = np.flatnonzero(crossing)
        lo, hi = rows_of(classes.lo, rows), rows_of(classes.hi, rows)
        cell_of, cell_lo, cell_hi = _compressed_cells(lo, hi, space[rows])
        counts = np.ones(len(classes), np.int64)
        counts[rows] = np.bincount(cell_of, minlength=len(rows))
        start = np.concatenate([[0], np.cumsum(counts)])
        kind = np.repeat(np.arange(len(classes)), counts)
        all_lo, all_hi = rows_of(classes.lo, kind), rows_of(classes.hi, kind)
        cut = crossing[kind]
        all_lo[cut], all_hi[cut] = cell_lo, cell_hi
        order, label = classes_of(_columns(all_lo, all_hi, space[kind]))
        cell = np.empty(len(order), np.int64)
        cell[order] = label
        held, times = owners.gathered(kind)
        sets = grouped(np.repeat(cell, times), held, int(label[-1]) + 1)
        first = np.zeros(len(order), bool)
        first[order[starts_of(label)]] = True
        return cls(
            all_lo,
            all_hi,
            crossing,
            Groups(start, np.arange(len(cell))),
            _picked(sets, cell),
            first,
        )

    def distinct_volume(self) -> int:
        return int((self.hi - self.lo).prod(axis=1)[self.first].sum())

    def inside(self, kinds: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the cells of some classes: bounds, cell rows, and how many each class has."""
        cells, counts = self.of_class.gathered(kinds)
        return rows_of(self.lo, cells), rows_of(self.hi, cells), cells, counts

    def first_cell(self, kinds: Ints) -> Ints:
        return self.of_class.items[self.of_class.start[:-1][kinds]]


def _firsts(values: Ints) -> Ints:
    order = np.argsort(values, kind="stable")
    return order[np.flatnonzero(np.diff(values[order], prepend=-1))]


def _columns(lo: Ints, hi: Ints, space: Ints) -> list[Ints]:
    return [space, *lo.T, *hi.T]


def _picked(groups: Groups, index: Ints) -> Groups:
    items, counts = groups.gathered(index)
    return Groups(np.concatenate([[0], np.cumsum(counts)]), items)


def _compressed_cells(lo: Ints, hi: Ints, space: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut boxes at the borders of all boxes of their space.

    Returns, for each cell, the box that it is of (ascending), and its bounds.
    """
    axes, boxes = lo.shape[1], len(lo)
    first, steps, borders = [], [], []
    for axis in range(axes):
        border = np.concatenate([lo[:, axis], hi[:, axis]])
        order, label = classes_of([np.concatenate([space, space]), border])
        place = np.empty(2 * boxes, np.int64)
        place[order] = label
        first.append(place[:boxes])
        steps.append(place[boxes:] - place[:boxes])
        borders.append(border[order[starts_of(label)]])
    counts = np.prod(steps, axis=0)
    if counts.astype(float).sum() > MOST_BOXES:
        raise UnsupportedError(
            "too many pieces cross each other", expected=f"at most {MOST_BOXES} cells"
        )
    box = np.repeat(np.arange(len(lo)), counts)
    rest = expanded(np.zeros_like(counts), counts)
    cell_lo = np.empty((len(box), axes), np.int64, order="F")
    cell_hi = np.empty_like(cell_lo)
    for axis in range(axes):
        rest, step = np.divmod(rest, steps[axis][box])
        at = first[axis][box] + step
        cell_lo[:, axis], cell_hi[:, axis] = borders[axis][at], borders[axis][at + 1]
    return box, cell_lo, cell_hi
