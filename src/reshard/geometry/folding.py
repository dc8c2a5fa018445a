"""Folding: the canonical form of a set of links, as few and as large as merging makes them.

Theory. A set of links with distinct near addresses is a set of pairs (near, far). It can be cut
into links in many ways; folding chooses one of them, from the pairs alone:

1. The pairs are cut into *runs*: maximal chains of step (1, 1). These are unique.
2. Equal blocks are chained (:mod:`reshard.geometry.chains`): those of one shape become one block
   with one more dimension wherever they are evenly spaced. This repeats until nothing chains.

A link of many dimensions stands for many runs. It is expanded into them only when all links of
its group together have few (:data:`FEW_RUNS`). Otherwise links that continue each other along a
dimension are joined, and whole links take the place of runs in step 2. So the form is the same
for equal sets of few runs, however they were cut, and for larger ones whose links do not cut into
each other in passing.

What may not be merged (another holder, scale, pair of ranks) is another *group*; grouping before
folding is what lets a stack of blocks that alternate between holders fold at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.chains import (
    chained,
    flat_columns,
    run_counts,
    run_dims,
    split_dims,
    unbelieved_dims,
)
from reshard.geometry.links import Link
from reshard.geometry.tables import (
    Ints,
    LinkTable,
    classes_of,
    concatenated,
    expanded,
    folding_rows,
    places_of,
)

FEW_RUNS = 256
"""Groups of at most so many runs are folded from their runs."""
_EXPANDED = 4 * FEW_RUNS


def fold(links: Sequence[Link]) -> list[Link]:
    """Return the canonical form of one group of links, in near order.

    >>> fold([Link(0, 0, ((4, 1, 1),)), Link(16, 8, ((4, 1, 1),)), Link(4, 4, ((4, 1, 1),))])
    [Link(near=0, far=0, dims=((8, 1, 1),)), Link(near=16, far=8, dims=((4, 1, 1),))]
    >>> fold([Link(0, 0, ((4, 1, 1),)), Link(16, 4, ((4, 1, 1),)), Link(32, 8, ((4, 1, 1),))])
    [Link(near=0, far=0, dims=((3, 16, 4), (4, 1, 1)))]
    """
    if len(links) < 2:
        return list(links)
    table, _ = fold_table(LinkTable.of(links), np.zeros(len(links), np.int64))
    return table.links()


def fold_table(table: LinkTable, group: Ints) -> tuple[LinkTable, Ints]:
    """Return the canonical form of links in groups.

    Parameters
    ----------
    table
        Links; near addresses are distinct within a group.
    group
        The group of each row, non-negative.

    Returns
    -------
    tuple
        The folded links and their groups, sorted by group and near offset.
    """
    table = table.normalised()
    order = np.lexsort((table.near, group))
    table, group = table.take(order), group[order]
    settled = _settled(table, group)
    open_rows = np.flatnonzero(~settled)
    if not len(open_rows):
        return table, group
    opened, opened_group = _folded(table.take(open_rows), group[open_rows])
    kept = np.flatnonzero(settled)
    table = concatenated([table.take(kept), opened])
    group = np.concatenate([group[kept], opened_group])
    order = np.lexsort((table.near, group))
    return table.take(order), group[order]


def _settled(table: LinkTable, group: Ints) -> NDArray[np.bool_]:
    """Mark the rows of groups in which plainly nothing can merge; rows are sorted.

    That is so in a group of one link, and in one whose links lie one after the other, no two with
    runs of one length and none going on where another ends.
    """
    busy = np.zeros(int(group.max(initial=0)) + 1, bool)
    busy[group[_running_on(table)]] = True
    same = group[1:] == group[:-1]
    if same.any():
        stop = table.near_stop()
        touching = same & (table.near[1:] < stop[:-1])
        touching |= same & (table.near[1:] == stop[:-1]) & (table.far[1:] == table.far_stop()[:-1])
        busy[group[1:][touching]] = True
        busy[group[folding_rows(table)]] = True
        length = np.where(run_dims(table), table.extent, 1).prod(axis=1)
        order = np.lexsort((length, group))
        of, length = group[order], length[order]
        busy[of[1:][(of[1:] == of[:-1]) & (length[1:] == length[:-1])]] = True
        busy[group[unbelieved_dims(table, group).any(axis=1)]] = True
    return np.asarray(~busy[group])


def _running_on(table: LinkTable) -> Ints:
    """Return the rows in which a step of some dimension goes on, by (1, 1), where the last ended.

    That happens to repetitions, ``a a b b`` of neighbours ``a b``: their runs cross their blocks.
    """
    runs_on = np.zeros(len(table), bool)
    near, far = np.zeros_like(table.near), np.zeros_like(table.far)
    for dim in range(table.dims - 1, -1, -1):
        s, f, n = table.near_stride[:, dim], table.far_stride[:, dim], table.extent[:, dim]
        runs_on |= (n > 1) & (s - near == 1) & (f - far == 1) & ((s != 1) | (f != 1))
        near, far = near + (n - 1) * s, far + (n - 1) * f
    return np.flatnonzero(runs_on)


def _folded(table: LinkTable, group: Ints) -> tuple[LinkTable, Ints]:
    table, group = _with_few_runs_expanded(table, group)
    doubtful = unbelieved_dims(table, group)
    if doubtful.any():
        whose, table = split_dims(table, doubtful)
        group = group[whose]
    groups = int(group.max()) + 1
    done: list[tuple[LinkTable, Ints]] = []
    while len(table):
        before = np.bincount(group, minlength=groups)
        table, group = _runs_chained(table, group)
        table, group = _continued(table, group)
        table, group = chained(table, group)
        changed = (np.bincount(group, minlength=groups) != before)[group]
        still = np.flatnonzero(~changed)
        done.append((table.take(still), group[still]))
        going = np.flatnonzero(changed)
        table, group = table.take(going), group[going]
    return concatenated([part for part, _ in done]), np.concatenate([of for _, of in done])


# -- runs ----------------------------------------------------------------------------------------


def _with_few_runs_expanded(table: LinkTable, group: Ints) -> tuple[LinkTable, Ints]:
    """Expand the groups that have few runs in all into these runs."""
    runs = run_counts(table)
    in_group = np.bincount(group, runs)[group]
    several = np.bincount(group, runs > 1)[group] > 0
    small = several & (in_group <= _EXPANDED)
    if not small.any():
        return table, group
    rows = np.flatnonzero(small)
    expanded_table, again = _expanded_runs(table.take(rows))
    parts, part_group = _runs_chained(expanded_table, group[rows][again])
    few = np.bincount(part_group, minlength=int(group.max()) + 1) <= FEW_RUNS
    kept = np.flatnonzero(~small | ~few[group])
    taken = np.flatnonzero(few[part_group])
    return (
        concatenated([table.take(kept), parts.take(taken)]),
        np.concatenate([group[kept], part_group[taken]]),
    )


def _expanded_runs(table: LinkTable) -> tuple[LinkTable, Ints]:
    """Return every run of every row as a row, and the row that each is of."""
    run = run_dims(table)
    length = np.where(run, table.extent, 1).prod(axis=1)
    near, far, again = table.near, table.far, np.arange(len(table))
    for dim in range(table.dims):
        count = np.where(run[:, dim], 1, table.extent[:, dim])[again]
        step = expanded(np.zeros_like(count), count)
        again = np.repeat(again, count)
        near = np.repeat(near, count) + step * table.near_stride[again, dim]
        far = np.repeat(far, count) + step * table.far_stride[again, dim]
    extent = length[again][:, None]
    step = (extent > 1).astype(np.int64)
    return LinkTable(near, far, extent, step, step), again


def _runs_chained(table: LinkTable, group: Ints) -> tuple[LinkTable, Ints]:
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
    if (others.extent == 1).all():
        # Bare runs do not overlap, so whatever continues one comes next in near order.
        key = [group]
        order, _ = classes_of([group, table.near])
    else:
        key = [group, *flat_columns(others), table.far - table.near]
        order, _ = classes_of([*key, table.near])
    near, far, size = table.near[order], table.far[order], length[order]
    joined = np.zeros(len(order), bool)
    joined[1:] = (near[1:] == near[:-1] + size[:-1]) & (far[1:] == far[:-1] + size[:-1])
    for column in key:
        joined[1:] &= column[order][1:] == column[order][:-1]
    if not joined.any():
        return table, group
    first = np.flatnonzero(~joined)
    lead = order[first]
    total = np.add.reduceat(size, first)
    step = (total > 1).astype(np.int64)
    base = others.take(lead)
    grown = LinkTable(
        base.near,
        base.far,
        np.column_stack([base.extent, total]),
        np.column_stack([base.near_stride, step]),
        np.column_stack([base.far_stride, step]),
    )
    return grown.normalised(), group[lead]


# -- links that continue each other ---------------------------------------------------------------


def _continued(table: LinkTable, group: Ints) -> tuple[LinkTable, Ints]:
    """Join links along a dimension that they share, or that one has and its neighbour lacks."""
    for dim in range(table.dims):
        if dim < table.dims and (table.extent[:, dim] > 1).any():
            table, group = _joined_along(table, group, dim)
    if ((table.extent > 1) & ~run_dims(table)).any():
        table, group = _absorbed(table, group)
    return table, group


def _joined_along(table: LinkTable, group: Ints, dim: int) -> tuple[LinkTable, Ints]:
    """Join rows that differ only in the extent of one dimension and continue each other there."""
    rows = np.flatnonzero((table.extent[:, dim] > 1) & ~run_dims(table)[:, dim])
    if not len(rows):
        return table, group
    s, f = table.near_stride[rows, dim], table.far_stride[rows, dim]
    block = np.where(s > 0, table.near[rows] // np.maximum(s, 1), 0)
    # Equal for links on one line; products may wrap, the exact comparison below does not rely
    # on them.
    line = [table.near[rows] - block * s, table.far[rows] - block * f]
    key = [group[rows], s, f, *flat_columns(_without(table, dim).take(rows)), *line]
    order, _ = classes_of([*key, table.near[rows]])
    same = np.ones(max(len(order) - 1, 0), bool)
    for column in key:
        same &= column[order][1:] == column[order][:-1]
    count = table.extent[rows, dim][order]
    near, far = table.near[rows][order], table.far[rows][order]
    joined = np.zeros(len(order), bool)
    joined[1:] = (
        same
        & (near[1:] == near[:-1] + (count * s[order])[:-1])
        & (far[1:] == far[:-1] + (count * f[order])[:-1])
    )
    if not joined.any():
        return table, group
    first = np.flatnonzero(~joined)
    lead = rows[order[first]]
    extent = table.extent.copy()
    extent[lead, dim] = np.add.reduceat(count, first)
    gone = np.zeros(len(table), bool)
    gone[rows[order[joined]]] = True
    kept = np.flatnonzero(~gone)
    grown = LinkTable(table.near, table.far, extent, table.near_stride, table.far_stride)
    return grown.take(kept).normalised(), group[kept]


def _absorbed(table: LinkTable, group: Ints) -> tuple[LinkTable, Ints]:
    """Add to a link the neighbour that is its next or previous step along some dimension."""
    order = np.lexsort((table.near, group))
    table, group = table.take(order), group[order]
    taken = np.zeros(len(table), bool)
    near, far, extent = table.near.copy(), table.far.copy(), table.extent.copy()
    for dim in range(table.dims):
        long = table.extent[:, dim] > 1
        s, f = table.near_stride[:, dim], table.far_stride[:, dim]
        for steps in (table.extent[:, dim], np.full(len(table), -1)):
            at = _row_at(table.near, group, near + steps * s)
            fits = long & (at >= 0) & (at != np.arange(len(table)))
            fits &= table.far[at] == far + steps * f
            fits &= _lacks(table, at, dim)
            for row in np.flatnonzero(fits).tolist():
                other = int(at[row])
                if taken[row] or taken[other]:
                    continue
                taken[row] = taken[other] = True
                extent[row, dim] += 1
                near[row], far[row] = min(near[row], near[other]), min(far[row], far[other])
                extent[other] = 0
    kept = np.flatnonzero((extent != 0).all(axis=1))
    if len(kept) == len(table):
        return table, group
    grown = LinkTable(near, far, extent, table.near_stride, table.far_stride)
    return grown.take(kept).normalised(), group[kept]


def _row_at(near: Ints, group: Ints, wanted: Ints) -> Ints:
    """Return the row of the same group at each wanted near offset, or -1; rows are sorted."""
    place, borders = places_of(np.concatenate([near, wanted]))
    have, want = np.split(place + np.concatenate([group, group]) * len(borders), 2)
    at = np.minimum(np.searchsorted(have, want), len(have) - 1)
    return np.where(have[at] == want, at, -1)


def _lacks(table: LinkTable, at: Ints, dim: int) -> NDArray[np.bool_]:
    """Mark the rows whose partner ``at`` has all of their dimensions but ``dim``, and no other."""
    mine, other = _without(table, dim), _without(table, table.dims - 1).take(at)
    alike = table.extent[at, -1] == 1
    for left, right in zip(flat_columns(mine), flat_columns(other), strict=True):
        alike &= left == right
    return np.asarray(alike)


def _without(table: LinkTable, dim: int) -> LinkTable:
    """Return the table without one column of dimensions."""
    parts = (table.extent, table.near_stride, table.far_stride)
    return LinkTable(table.near, table.far, *[np.delete(part, dim, axis=1) for part in parts])
