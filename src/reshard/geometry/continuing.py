"""Continuing: links that go on where others end become one.

Theory. Near addresses are distinct within a group, so at most one link of a group begins at an
address, and where a link would go on is looked up, not searched for. What is joined:

* runs whose steps of (1, 1) run on (:func:`runs_joined`);
* links with equal dimensions, one of them longer, that run on along it;
* a link and a block that is its next or previous step along some dimension.

Tables are sorted by group and near offset, before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.chains import flat_columns, run_dims
from reshard.geometry.index_math import MAX_OFFSET
from reshard.geometry.ordering import Ints, beside, classes_of, order_by, places_of, starts_of
from reshard.geometry.tables import LinkTable

Flags = NDArray[np.bool_]
"""An array of truth values."""


def in_order(table: LinkTable, group: Ints) -> tuple[LinkTable, Ints]:
    """Return rows sorted by group and near offset."""
    same = group[1:] == group[:-1]
    if ((group[1:] > group[:-1]) | (same & (table.near[1:] > table.near[:-1]))).all():
        return table, group
    order = order_by([group, table.near])
    return table.take(order), group[order]


def runs_joined(table: LinkTable, group: Ints) -> tuple[LinkTable, Ints]:
    """Join rows whose runs continue each other by (1, 1), all other dimensions being equal."""
    length = np.where(run_dims(table), table.extent, 1).prod(axis=1)
    one = np.ones_like(length)
    found = _followed(table, _Begins(table.near, group), length, (one, one), _without_runs)
    if found is None:
        return table, group
    first, total, kept = found
    base, step = _without_runs(table.take(first)), one[first]
    grown = LinkTable(
        base.near,
        base.far,
        beside(base.extent, total),
        beside(base.near_stride, step),
        beside(base.far_stride, step),
    )
    return table.replaced(first, grown).take(kept).trimmed(), group[kept]


def _without_runs(table: LinkTable) -> LinkTable:
    """Return the table with runs cut to their first elements."""
    run = run_dims(table)
    return LinkTable(
        table.near,
        table.far,
        np.where(run, 1, table.extent),
        np.where(run, 0, table.near_stride),
        np.where(run, 0, table.far_stride),
    )


def _followed(
    table: LinkTable,
    begins: _Begins,
    count: Ints,
    step: tuple[Ints, Ints],
    others: Callable[[LinkTable], LinkTable],
) -> tuple[Ints, Ints, Ints] | None:
    """Find chains of rows, each beginning where ``count`` steps of the one before it end.

    Rows that follow each other agree in their step and in the dimensions that ``others`` leaves;
    rows with a count of 0 follow none.

    Returns
    -------
    tuple, optional
        The first row of each chain, the steps of the whole chain, and all rows but those that
        follow another; nothing when there are no chains.
    """
    s, f = step
    rows, after = begins.at(np.where(count > 0, table.near + count * s, -1))
    fits = (count[after] > 0) & (table.far[after] == (table.far + count * f)[rows])
    fits &= (s[after] == s[rows]) & (f[after] == f[rows])
    rows, after = rows[fits], after[fits]
    fits = _alike(others(table.take(rows)), others(table.take(after)))
    rows, after = rows[fits], after[fits]
    if not len(rows):
        return None
    kept = np.ones(len(count), bool)
    kept[after] = False
    return *_chain_totals(rows, after, count), np.flatnonzero(kept)


def _chain_totals(rows: Ints, after: Ints, count: Ints) -> tuple[Ints, Ints]:
    """Return the first row of each chain, in which ``after`` follow ``rows``, and its count."""
    root = np.arange(len(count))
    root[after] = rows
    while (root[root] != root).any():
        root = root[root]
    linked = np.union1d(rows, after)
    order, label = classes_of([root[linked]])
    start = starts_of(label)
    return root[linked[order[start]]], np.add.reduceat(count[linked[order]], start)


def continued(table: LinkTable, group: Ints) -> tuple[LinkTable, Ints]:
    """Join links along a dimension that they share, or that one has and its neighbour lacks."""
    begins = _Begins(table.near, group)
    for dim in range(table.dims):
        if dim < table.dims and (table.extent[:, dim] > 1).any():
            before = len(group)
            table, group = _joined_along(table, group, begins, dim)
            if len(group) != before:
                begins = _Begins(table.near, group)
    if ((table.extent > 1) & ~run_dims(table)).any():
        table, group = _absorbed(table, group, begins)
    return table, group


def _joined_along(
    table: LinkTable, group: Ints, begins: _Begins, dim: int
) -> tuple[LinkTable, Ints]:
    """Join rows that differ only in the extent of one dimension and continue each other there."""
    count = np.where(run_dims(table)[:, dim], 0, table.extent[:, dim])
    count[count == 1] = 0
    step = table.near_stride[:, dim], table.far_stride[:, dim]
    if not count.any():
        return table, group
    found = _followed(table, begins, count, step, partial(_without, dim=dim))
    if found is None:
        return table, group
    first, total, kept = found
    base = table.take(first)
    base.extent[:, dim] = total
    return table.replaced(first, base).take(kept).trimmed(), group[kept]


def _absorbed(table: LinkTable, group: Ints, begins: _Begins) -> tuple[LinkTable, Ints]:
    """Add to a link the neighbour that is its next or previous step along some dimension."""
    taken = np.zeros(len(table), bool)
    near, far, extent = table.near.copy(), table.far.copy(), table.extent.copy(order="K")
    for dim in range(table.dims):
        for row, other in _neighbours(table, begins, dim):
            if not taken[row] and not taken[other]:
                taken[row] = taken[other] = True
                extent[row, dim] += 1
                near[row], far[row] = min(near[row], near[other]), min(far[row], far[other])
                extent[other] = 0
    kept = np.flatnonzero((extent != 0).all(axis=1))
    if len(kept) == len(table):
        return table, group
    grown = LinkTable(near, far, extent, table.near_stride, table.far_stride)
    return in_order(grown.take(kept).normalised(), group[kept])


def _neighbours(table: LinkTable, begins: _Begins, dim: int) -> Iterator[tuple[int, int]]:
    """Yield rows and others that are their next or previous step along a dimension."""
    n, s, f = table.extent[:, dim], table.near_stride[:, dim], table.far_stride[:, dim]
    fewer = table.extent[:, -1] == 1
    for steps in (n, np.full_like(n, -1)):
        row, other = begins.at(np.where(n > 1, table.near + steps * s, -1))
        fits = fewer[other] & (row != other) & (table.far[other] == (table.far + steps * f)[row])
        row, other = row[fits], other[fits]
        fits = _lacks(table, row, other, dim)
        yield from zip(row[fits].tolist(), other[fits].tolist(), strict=True)


class _Begins:
    """Where the links of each group begin; rows are sorted by group and near offset.

    A bit for each place, some shared, says of most other places at once that nothing begins there.
    """

    __slots__ = ("_borders", "_group", "_keys", "_marks", "_room", "_shift")

    def __init__(self, near: Ints, group: Ints) -> None:
        self._group = group
        self._borders: Ints | None = None
        self._room = int(near.max()) + 1
        if (int(group[-1]) + 1) * self._room >= MAX_OFFSET:
            near, self._borders = places_of(near)
            self._room = len(self._borders)
        self._keys = group * self._room + near
        bits = len(near).bit_length() + 3
        self._shift = np.uint64(64 - bits)
        self._marks = np.zeros(1 << bits, bool)
        self._marks[self._bucket(self._keys)] = True

    def _bucket(self, keys: Ints) -> NDArray[np.uint64]:
        return (keys.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> self._shift

    def at(self, wanted: Ints) -> tuple[Ints, Ints]:
        """Return the rows at whose wanted near offset a link of their group begins, and which.

        A row that wants a negative offset wants none.
        """
        rows, place = np.arange(len(wanted)), wanted
        if self._borders is not None:
            place = np.minimum(np.searchsorted(self._borders, wanted), self._room - 1)
            rows = np.flatnonzero(self._borders[place] == wanted)
            place = place[rows]
        keys = self._group[rows] * self._room + place
        likely = np.flatnonzero(
            (place >= 0) & (place < self._room) & self._marks[self._bucket(keys)]
        )
        rows, keys = rows[likely], keys[likely]
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        found = self._keys[at] == keys
        return rows[found], at[found]


def _lacks(table: LinkTable, row: Ints, other: Ints, dim: int) -> Flags:
    """Mark the rows whose partner has all of their dimensions but ``dim``, and no other."""
    return _alike(_without(table.take(row), dim), _without(table.take(other), table.dims - 1))


def _alike(first: LinkTable, second: LinkTable) -> Flags:
    """Mark the rows that have the same dimensions in both tables."""
    alike = np.ones(len(first), bool)
    for left, right in zip(flat_columns(first), flat_columns(second), strict=True):
        alike &= left == right
    return alike


def _without(table: LinkTable, dim: int) -> LinkTable:
    """Return the table without one column of dimensions."""
    parts = (table.extent, table.near_stride, table.far_stride)
    return LinkTable(table.near, table.far, *[np.delete(part, dim, axis=1) for part in parts])
