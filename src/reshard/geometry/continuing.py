"""Continuing: links that go on where others end become one.

Theory. Near addresses are distinct within a group, so at most one link of a group begins at an
address, and where a link would go on is looked up, not searched for. What is joined:

* runs whose steps of (1, 1) run on (:func:`runs_joined`);
* links with equal dimensions, one of them longer, that run on along it;
* a link and a block that is its next or previous step along some dimension.

Tables are sorted by group and near offset, before and after.
"""

from __future__ import annotations

from collections.abc import Iterator

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
    run = run_dims(table)
    length = np.where(run, table.extent, 1).prod(axis=1)
    others = LinkTable(
        table.near,
        table.far,
        np.where(run, 1, table.extent),
        np.where(run, 0, table.near_stride),
        np.where(run, 0, table.far_stride),
    )
    one = np.ones_like(length)
    found = _followed(others, group, length, (one, one))
    if found is None:
        return table, group
    first, total, kept = found
    length[first] = total
    step = (length > 1).astype(np.int64)
    grown = LinkTable(
        table.near,
        table.far,
        beside(others.extent, length),
        beside(others.near_stride, step),
        beside(others.far_stride, step),
    )
    return grown.take(kept).normalised(), group[kept]


def _followed(
    others: LinkTable, group: Ints, count: Ints, step: tuple[Ints, Ints]
) -> tuple[Ints, Ints, Ints] | None:
    """Find chains of rows, each beginning where ``count`` steps of the one before it end.

    Rows that follow each other agree in their step and in the dimensions of ``others``; rows
    with a count of 0 follow none. Rows are sorted.

    Returns
    -------
    tuple, optional
        The first row of each chain, the steps of the whole chain, and all rows but those that
        follow another; nothing when there are no chains.
    """
    s, f = step
    near, far = others.near + count * s, others.far + count * f
    if (others.extent == 1).all() and (s == 1).all():
        # Bare runs do not overlap, so what follows one comes next.
        after = np.minimum(np.arange(1, len(group) + 1), len(group) - 1)
        fits = (others.near[after] == near) & (group[after] == group)
    else:
        after = _row_at(others.near, group, near, group)
        fits = after >= 0
    fits &= (count > 0) & (count[after] > 0) & (others.far[after] == far)
    for column in (s, f, *flat_columns(others)):
        fits &= column[after] == column
    rows = np.flatnonzero(fits)
    if not len(rows):
        return None
    kept = np.ones(len(group), bool)
    kept[after[rows]] = False
    return *_chain_totals(rows, after[rows], count), np.flatnonzero(kept)


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
    for dim in range(table.dims):
        if dim < table.dims and (table.extent[:, dim] > 1).any():
            table, group = _joined_along(table, group, dim)
    if ((table.extent > 1) & ~run_dims(table)).any():
        table, group = _absorbed(table, group)
    return table, group


def _joined_along(table: LinkTable, group: Ints, dim: int) -> tuple[LinkTable, Ints]:
    """Join rows that differ only in the extent of one dimension and continue each other there."""
    count = np.where(run_dims(table)[:, dim], 0, table.extent[:, dim])
    count[count == 1] = 0
    step = table.near_stride[:, dim], table.far_stride[:, dim]
    found = _followed(_without(table, dim), group, count, step) if count.any() else None
    if found is None:
        return table, group
    first, total, kept = found
    extent = table.extent.copy(order="K")
    extent[first, dim] = total
    grown = LinkTable(table.near, table.far, extent, table.near_stride, table.far_stride)
    return grown.take(kept).normalised(), group[kept]


def _absorbed(table: LinkTable, group: Ints) -> tuple[LinkTable, Ints]:
    """Add to a link the neighbour that is its next or previous step along some dimension."""
    taken = np.zeros(len(table), bool)
    near, far, extent = table.near.copy(), table.far.copy(), table.extent.copy(order="K")
    partners = np.flatnonzero(table.extent[:, -1] == 1)
    for dim in range(table.dims):
        for row, other in _neighbours(table, group, partners, dim):
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


def _neighbours(
    table: LinkTable, group: Ints, partners: Ints, dim: int
) -> Iterator[tuple[int, int]]:
    """Yield rows and partners that are their next or previous step along a dimension."""
    long = np.flatnonzero(table.extent[:, dim] > 1)
    if not len(partners) or not len(long):
        return
    n, s, f = table.extent[long, dim], table.near_stride[long, dim], table.far_stride[long, dim]
    places = table.near[partners], group[partners]
    for steps in (n, np.full_like(n, -1)):
        at = _row_at(*places, table.near[long] + steps * s, group[long])
        found = np.flatnonzero(at >= 0)
        row, other = long[found], partners[at[found]]
        fits = (row != other) & (table.far[other] == (table.far[long] + steps * f)[found])
        fits &= _lacks(table, row, other, dim)
        yield from zip(row[fits].tolist(), other[fits].tolist(), strict=True)


def _row_at(near: Ints, group: Ints, wanted: Ints, wanted_group: Ints) -> Ints:
    """Return the row at each wanted near offset of a group, or -1; rows are sorted."""
    room = max(int(near.max()), int(wanted.max())) + 1
    if (int(group[-1]) + 1) * room < MAX_OFFSET:
        have = group * room + near
        want = np.where(wanted < 0, -1, wanted_group * room + wanted)
    else:
        place, borders = places_of(np.concatenate([near, wanted]))
        of = np.concatenate([group, wanted_group])
        have, want = np.split(place + of * len(borders), [len(near)])
    at = np.minimum(np.searchsorted(have, want), len(have) - 1)
    return np.where(have[at] == want, at, -1)


def _lacks(table: LinkTable, row: Ints, other: Ints, dim: int) -> Flags:
    """Mark the rows whose partner has all of their dimensions but ``dim``, and no other."""
    alike = np.ones(len(row), bool)
    mine, theirs = _without(table, dim), _without(table, table.dims - 1)
    for left, right in zip(flat_columns(mine), flat_columns(theirs), strict=True):
        alike &= left[row] == right[other]
    return alike


def _without(table: LinkTable, dim: int) -> LinkTable:
    """Return the table without one column of dimensions."""
    parts = (table.extent, table.near_stride, table.far_stride)
    return LinkTable(table.near, table.far, *[np.delete(part, dim, axis=1) for part in parts])
