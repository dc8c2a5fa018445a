"""Folding: the canonical form of a set of links, as few and as large as merging makes them.

Theory. A set of links with distinct near addresses is a set of pairs (near, far). It can be cut
into links in many ways; folding chooses one of them, from the pairs alone:

1. The pairs are cut into *runs*: maximal chains of step (1, 1). These are unique.
2. Equal blocks are chained: among the blocks of one shape, the step ``(Δnear, Δfar)`` that occurs
   most often between blocks that are at most 4 apart in near order is chosen (the smallest, where
   several do), and every maximal chain of that step becomes one block with one more dimension.
   This repeats until no step explains a quarter of the blocks of any shape; a step that occurs
   once only counts where its shape is a quarter of all blocks of the group, so that blocks that
   happen to be equal do not pair up. ``Δfar`` is never negative, because strides are not.

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

from reshard.geometry.links import Link
from reshard.geometry.tables import (
    Ints,
    LinkTable,
    classes_of,
    concatenated,
    expanded,
    folding_rows,
    places_of,
    starts_of,
)

FEW_RUNS = 256
"""Groups of at most so many runs are folded from their runs."""
_EXPANDED = 4 * FEW_RUNS
_LAGS = 4


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
        length = np.where(_run_dim(table), table.extent, 1).prod(axis=1)
        order = np.lexsort((length, group))
        of, length = group[order], length[order]
        busy[of[1:][(of[1:] == of[:-1]) & (length[1:] == length[:-1])]] = True
    return ~busy[group]


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
    groups = int(group.max()) + 1
    done: list[tuple[LinkTable, Ints]] = []
    while len(table):
        before = np.bincount(group, minlength=groups)
        table, group = _runs_chained(table, group)
        table, group = _continued(table, group)
        table, group = _blocks_chained(table, group)
        changed = (np.bincount(group, minlength=groups) != before)[group]
        still = np.flatnonzero(~changed)
        done.append((table.take(still), group[still]))
        going = np.flatnonzero(changed)
        table, group = table.take(going), group[going]
    return concatenated([part for part, _ in done]), np.concatenate([of for _, of in done])


# -- runs ----------------------------------------------------------------------------------------


def _run_dim(table: LinkTable) -> NDArray[np.bool_]:
    """Mark the dimension of steps (1, 1) of each row, the innermost one if it has any."""
    return (table.extent > 1) & (table.near_stride == 1) & (table.far_stride == 1)


def _with_few_runs_expanded(table: LinkTable, group: Ints) -> tuple[LinkTable, Ints]:
    """Expand the groups that have few runs in all into these runs."""
    steps = np.where(_run_dim(table), 1, table.extent)
    runs = steps.astype(float).prod(axis=1)
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
    run = _run_dim(table)
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
    run = _run_dim(table)
    length = np.where(run, table.extent, 1).prod(axis=1)
    others = [np.where(run, fill, column) for fill, column in _dim_columns(table)]
    if (others[0] == 1).all():
        # Bare runs do not overlap, so whatever continues one comes next in near order.
        key = [group]
        order, _ = classes_of([group, table.near])
    else:
        key = [group, *_flat_columns(others), table.far - table.near]
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
    extent, near_stride, far_stride = (column[lead] for column in others)
    step = (total > 1).astype(np.int64)
    grown = LinkTable(
        table.near[lead],
        table.far[lead],
        np.column_stack([extent, total]),
        np.column_stack([near_stride, step]),
        np.column_stack([far_stride, step]),
    )
    return grown.normalised(), group[lead]


def _dim_columns(table: LinkTable) -> list[tuple[int, Ints]]:
    return [(1, table.extent), (0, table.near_stride), (0, table.far_stride)]


def _flat_columns(columns: Sequence[Ints]) -> list[Ints]:
    return [column[:, dim] for column in columns for dim in range(column.shape[1])]


# -- links that continue each other ---------------------------------------------------------------


def _continued(table: LinkTable, group: Ints) -> tuple[LinkTable, Ints]:
    """Join links along a dimension that they share, or that one has and its neighbour lacks."""
    for dim in range(table.dims):
        if dim < table.dims and (table.extent[:, dim] > 1).any():
            table, group = _joined_along(table, group, dim)
    if ((table.extent > 1) & ~_run_dim(table)).any():
        table, group = _absorbed(table, group)
    return table, group


def _joined_along(table: LinkTable, group: Ints, dim: int) -> tuple[LinkTable, Ints]:
    """Join rows that differ only in the extent of one dimension and continue each other there."""
    rows = np.flatnonzero((table.extent[:, dim] > 1) & ~_run_dim(table)[:, dim])
    if not len(rows):
        return table, group
    s, f = table.near_stride[rows, dim], table.far_stride[rows, dim]
    block = np.where(s > 0, table.near[rows] // np.maximum(s, 1), 0)
    # Equal for links on one line; products may wrap, the exact comparison below does not rely
    # on them.
    with np.errstate(over="ignore"):
        line = [table.near[rows] - block * s, table.far[rows] - block * f]
    others = [
        np.delete(column, dim, axis=1)[rows]
        for column in (table.extent, table.near_stride, table.far_stride)
    ]
    key = [group[rows], s, f, *_flat_columns(others), *line]
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
    alike = table.extent[at, -1] == 1
    for _, column in _dim_columns(table):
        mine = np.delete(column, dim, axis=1)
        alike &= (mine == column[at][:, :-1]).all(axis=1)
    return alike


# -- equal blocks ---------------------------------------------------------------------------------


def _blocks_chained(table: LinkTable, group: Ints) -> tuple[LinkTable, Ints]:
    """Turn chains of equal blocks, at the step that is commonest among them, into one block."""
    columns = [group, *_flat_columns([column for _, column in _dim_columns(table)])]
    order, label = classes_of(columns)
    size = np.bincount(label)
    several = size[label] > 1
    if not several.any():
        return table, group
    share = size / np.bincount(group)[group[order[starts_of(label)]]]
    order, label = order[several], label[several]
    inner, _ = classes_of([label, table.near[order]])
    order, label = order[inner], label[inner]
    near, far = table.near[order], table.far[order]
    step_near, step_far = _best_steps(near, far, label, share)
    rows, s, f = _chained(near, far, label, step_near[label], step_far[label])
    return _stacked(table, group, order, rows, s, f)


def _chained(
    near: Ints, far: Ints, label: Ints, s: Ints, f: Ints
) -> tuple[tuple[Ints, Ints], Ints, Ints]:
    """Return the chains of step (s, f) within each label: first rows and lengths, all rows."""
    chained = np.flatnonzero(s > 0)
    block = near[chained] // np.maximum(s[chained], 1)
    # Equal for the rows of one line; products may wrap, the exact comparison below does not rely
    # on them.
    line = [near[chained] - block * s[chained], far[chained] - block * f[chained]]
    inner, _ = classes_of([label[chained], *line, near[chained]])
    rows = chained[inner]
    linked = np.zeros(len(rows), bool)
    linked[1:] = (
        (label[rows][1:] == label[rows][:-1])
        & (near[rows][1:] == near[rows][:-1] + s[rows][1:])
        & (far[rows][1:] == far[rows][:-1] + f[rows][1:])
    )
    return (rows, linked), s, f


def _stacked(
    table: LinkTable, group: Ints, order: Ints, chains: tuple[Ints, Ints], s: Ints, f: Ints
) -> tuple[LinkTable, Ints]:
    """Put each chain of rows in the place of its first row, with one more dimension."""
    rows, linked = chains
    first = np.flatnonzero(~linked)
    extent = np.ones(len(table), np.int64)
    step_near, step_far = np.zeros(len(table), np.int64), np.zeros(len(table), np.int64)
    extent[order[rows[first]]] = np.diff(np.append(first, len(rows)))
    step_near[order], step_far[order] = s, f
    kept = np.ones(len(table), bool)
    kept[order[rows[linked]]] = False
    at = np.flatnonzero(kept)
    base = table.take(at)
    grown = LinkTable(
        base.near,
        base.far,
        np.column_stack([extent[at], base.extent]),
        np.column_stack([step_near[at], base.near_stride]),
        np.column_stack([step_far[at], base.far_stride]),
    )
    return grown.normalised(), group[at]


def _best_steps(
    near: Ints, far: Ints, label: Ints, share: NDArray[np.float64]
) -> tuple[Ints, Ints]:
    """Return the step by which the rows of each label are chained, 0 where they are not.

    Rows are sorted by label and near offset; ``share`` is the part of its group that each label
    makes up.
    """
    size = np.bincount(label, minlength=len(share))
    best_near, best_far = np.zeros(len(size), np.int64), np.zeros(len(size), np.int64)
    # A step has to explain a quarter of its blocks; two blocks also have to be a quarter of all.
    needed = np.maximum(-(-(size - 1) // 4), np.where(4 * share >= 1, 1, 2))
    found = []
    for lag in range(1, min(_LAGS, int(size.max()) - 1) + 1):
        s, f = near[lag:] - near[:-lag], far[lag:] - far[:-lag]
        valid = np.flatnonzero((label[lag:] == label[:-lag]) & (f >= 0))
        found.append((label[lag:][valid], s[valid], f[valid]))
    of, s, f = (np.concatenate(column) for column in zip(*found, strict=True))
    often = np.flatnonzero((needed[of] < 2) | _repeated(of, s, f))
    of, s, f = of[often], s[often], f[often]
    if not len(of):
        return best_near, best_far
    order, kind = classes_of([of, s, f])
    first = order[starts_of(kind)]
    count = np.bincount(kind)
    ranked = np.lexsort((f[first], s[first], -count, of[first]))
    lead = ranked[np.flatnonzero(np.diff(of[first][ranked], prepend=-1))]
    best = first[lead]
    enough = count[lead] >= needed[of[best]]
    best = best[enough]
    best_near[of[best]], best_far[of[best]] = s[best], f[best]
    return best_near, best_far


def _repeated(of: Ints, s: Ints, f: Ints) -> NDArray[np.bool_]:
    """Mark all triples that occur more than once, and few others."""
    mixed = of * np.int64(0x1E3779B97F4A7C15) + s * np.int64(0x3F58476D1CE4E5B9) + f
    mixed ^= mixed >> np.int64(29)
    ordered = np.sort(mixed)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(again):
        return np.zeros(len(mixed), bool)
    at = np.minimum(np.searchsorted(again, mixed), len(again) - 1)
    return np.asarray(again[at] == mixed)
