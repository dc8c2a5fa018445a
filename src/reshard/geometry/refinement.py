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
from reshard.geometry.joins import FEW_PAIRS_PER_BOX, overlaps_among
from reshard.geometry.links import Link, meet
from reshard.geometry.ordering import (
    BATCH,
    Ints,
    batches,
    beside,
    classes_of,
    expanded,
    groups_of,
    places_of,
    rows_of,
    starts_of,
)
from reshard.geometry.pairs import some_share, touching_pairs
from reshard.geometry.tables import (
    LinkTable,
    clusters,
    concatenated,
    folding_rows,
    outermost_expanded,
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


FEW_LINKS = 12
"""So few links are compared pair by pair."""
FEW_STEPS = 8
"""Outermost dimensions of at most so many steps are expanded to tell whether links are apart,"""
FEW_WALKS = 8
"""So many boxes for each link are always walked;"""
BOXES_A_MEETING = 64
"""more are, too, where meeting two links would take longer than walking so many boxes."""
SPARSE = 4
"""where they step by more than so many times what is inside them."""


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


def names_once(table: LinkTable, spaces: Ints | None = None) -> bool:
    """Tell whether links name no address of a space twice; exact.

    Links whose spans touch no other span are plain. A long step of few blocks makes a span
    long for no reason, so those are expanded first. What still touches is read in grids, one for
    each cluster of touching spans.

    >>> names_once(LinkTable.of([Link(0, 0, ((3, 4, 1),)), Link(1, 0, ((3, 4, 1),))]))
    True
    >>> names_once(LinkTable.of([Link(0, 0, ((3, 4, 1),)), Link(4, 0, ((3, 3, 1),))]))
    False
    """
    space = np.zeros(len(table), np.int64) if spaces is None else spaces
    table, space = _crowded(table, space)
    if len(table) <= BATCH:
        return _apart(table, space)
    return all(_apart(table.take(rows).trimmed(), space[rows]) for rows in batches(space))


def _crowded(table: LinkTable, space: Ints) -> tuple[LinkTable, Ints]:
    """Return the links that share their cluster or fold on themselves, and the clusters."""
    cluster, crowded = clusters(table, space)
    rows = np.flatnonzero(crowded)
    return table.take(rows), cluster[rows]


def _apart(table: LinkTable, space: Ints) -> bool:
    """Tell whether crowded links share no address of their cluster."""
    while len(table):
        if not table.dims:  # single elements, some at one place
            return False
        if len(table) <= FEW_LINKS and not len(folding_rows(table)):
            return _none_meet(table.links(), space.tolist())
        if _few_share(space):
            return _apart_in_grids(table, space)
        steps = np.where(_sparse(table), table.extent[:, 0], 1)
        if steps.sum() > 2 * len(table) + FEW_STEPS or (steps == 1).all():
            return _apart_in_grids(table, space)
        again, table = outermost_expanded(table, steps)
        table, space = _crowded(table, space[again])
    return True


def _apart_in_grids(table: LinkTable, space: Ints) -> bool:
    """Tell whether links share no address of their space, each space in a grid of its own.

    What the grid would have to walk for long is met with whatever it touches.
    """
    if table.repeats():
        return False
    # Spaces without a link have no number.
    space = (np.cumsum(np.bincount(space) > 0) - 1)[space]
    grid = Grid.of([table], space)
    walks = grid.walks(table, space)
    if walks.sum() > FEW_WALKS * len(table):
        pairs = touching_pairs(table, space)
        odd = walks > 1
        mixed = odd[pairs[0]] | odd[pairs[1]]
        if walks.sum() > min(MOST_BOXES, BOXES_A_MEETING * int(mixed.sum() + odd.sum())):
            if some_share(table, (pairs[0][mixed], pairs[1][mixed]), odd):
                return False
            rows = np.flatnonzero(~odd)
            table, space = table.take(rows), space[rows]
    boxes = grid.boxes(table, space)
    lo, key = boxes.lo, space[boxes.row]
    if not len(boxes):
        return True
    _, label = groups_of([key, *lo.T])
    return int(label[-1]) + 1 == len(boxes) and not len(overlaps_among(lo, boxes.hi, key)[0])


def _few_share(space: Ints) -> bool:
    """Tell whether the links of each space are so few that all pairs may be looked at."""
    sizes = np.bincount(space)
    return int((sizes * (sizes - 1) // 2).sum()) <= FEW_PAIRS_PER_BOX * len(space)


def _sparse(table: LinkTable) -> NDArray[np.bool_]:
    """Mark rows whose outermost dimension is a few steps over much more than lies inside it."""
    inside = ((table.extent[:, 1:] - 1) * table.near_stride[:, 1:]).sum(axis=1) + 1
    few = (table.extent[:, 0] > 1) & (table.extent[:, 0] <= FEW_STEPS)
    return np.asarray(few & (table.near_stride[:, 0] > SPARSE * inside))


def _none_meet(links: list[Link], spaces: list[int]) -> bool:
    """Tell whether no two links of one space share an address, by looking at each pair."""
    return not any(
        spaces[i] == spaces[k] and meet(links[i], links[k])
        for i in range(len(links))
        for k in range(i)
    )


def table_layers(table: LinkTable, spaces: Ints) -> tuple[LinkTable, Ints, Ints]:
    """Cut links so that those of equal depth name each address of a space at most once.

    Depth 0 has, for every address, the first link that names it; depth 1 the second, and so on.

    Returns
    -------
    tuple
        The parts, the row that each is of, and its depth.

    Examples
    --------
    >>> table = LinkTable.of([Link(0, 0, ((4, 1, 1),)), Link(2, 9, ((4, 1, 1),))])
    >>> parts, row, depth = table_layers(table, np.array([0, 0]))
    >>> parts.near.tolist(), row.tolist(), depth.tolist()
    ([0, 2, 2, 4], [0, 0, 1, 1], [0, 0, 1, 0])
    """
    rows = np.arange(len(table))
    depth = np.zeros(len(table), np.int64)
    if names_once(table, spaces):
        return table, rows, depth
    parted = [_unfolded(link) for link in table.links()]
    rows = np.repeat(rows, [len(links) for links in parted])
    simple = LinkTable.of([link for links in parted for link in links])
    parts, of, owners = Arrangement(simple, np.arange(len(simple)), spaces[rows]).parts()
    # The owners of a part ascend; the depth is how many come before its own row.
    earlier = np.repeat(of, owners.counts) > owners.items
    depth = np.bincount(np.repeat(np.arange(len(of)), owners.counts), earlier, len(of))
    return parts, rows[of], depth.astype(np.int64)


def _folding_dim(link: Link) -> int | None:
    """Return a dimension that steps by less than the ones inside it reach, if there is one."""
    reach = 1
    for index in range(len(link.dims) - 1, -1, -1):
        n, s, _ = link.dims[index]
        if s < reach:
            return index
        reach += (n - 1) * s
    return None


def _unfolded(link: Link) -> list[Link]:
    """Cut a link into ones whose dimensions are nested, which name no address twice."""
    index = _folding_dim(link)
    if index is None:
        return [link]
    n, s, f = link.dims[index]
    rest = link.dims[:index] + link.dims[index + 1 :]
    return [
        part
        for i in range(n)
        for part in _unfolded(Link(link.near + i * s, link.far + i * f, rest))
    ]
