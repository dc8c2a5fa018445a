"""Folding: the canonical form of a set of links, as few and as large as merging makes them.

Theory. A set of links with distinct near addresses is a set of pairs (near, far). It can be cut
into links in many ways; folding chooses one of them, from the pairs alone:

1. The pairs are cut into *runs*: maximal chains of step (1, 1). These are unique.
2. Equal blocks are chained (:mod:`reshard.geometry.chains`): those of one shape become one block
   with one more dimension wherever they are evenly spaced. This repeats until nothing chains.
3. Before that, what repeats as a whole is taken off, and put back in the end
   (:mod:`reshard.geometry.peeling`).

A link of many dimensions stands for many runs. Once it has lost the dimensions that all links of
its group share, it is expanded into them when its whole group has at most :data:`FEW_RUNS`, which
the links cut into at most :data:`MOST_PARTS`: the form of such a group depends on its pairs alone,
however crooked the links were cut. In groups of more, where time must not follow the number of
elements, whole links take the place of runs: those that continue each other are joined, equal ones
chained, until nothing changes. That undoes ordinary cuts; but two lists of links that cut into each
other in passing may keep different forms.

*Folding never makes more.* Runs forget how blocks of an irregular order belong together, and
finding the fewest blocks again is as hard as any covering. So where the form of the runs has more
links than came, the links are merged as they came instead. Then two spellings of the same pairs
may keep two forms, each no larger than its spelling; ``same_elements`` knows them for equal.

What may not be merged (another holder, scale, pair of ranks) is another *group*; grouping before
folding is what lets a stack of blocks that alternate between holders fold at all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.chains import (
    chained,
    run_counts,
    run_dims,
    unbelieved_dims,
)
from reshard.geometry.continuing import continued, in_order, runs_joined
from reshard.geometry.ordering import BATCH, Ints, batches, expanded, order_by
from reshard.geometry.peeling import Peel
from reshard.geometry.tables import LinkTable, concatenated, folding_rows

Flags = NDArray[np.bool_]
"""An array of truth values."""
FEW_RUNS = 2048
"""Groups of at most so many runs are folded from their runs;"""
MOST_PARTS = 8 * FEW_RUNS
"""they are counted where the links cut them into at most so many parts."""
SMALL = 64
"""Groups of more links are not asked whether nothing in them can merge; in most, something can."""


def fold_table(table: LinkTable, group: Ints, *, by_runs: bool = False) -> tuple[LinkTable, Ints]:
    """Return the canonical form of links in groups.

    Parameters
    ----------
    table
        Links; near addresses are distinct within a group.
    group
        The group of each row, non-negative.
    by_runs
        Keep the form of the runs where it has more links than came, too: for choices that must
        not depend on how a map is spelled.

    Returns
    -------
    tuple
        The folded links and their groups, sorted by group and near offset.
    """
    if len(table) <= BATCH:
        return _fold_at_once(table.normalised(), group, by_runs)
    done = [
        _fold_at_once(table.take(rows).normalised(), group[rows], by_runs)
        for rows in batches(group)
    ]
    return concatenated([part for part, _ in done]), np.concatenate([of for _, of in done])


def _fold_at_once(
    table: LinkTable,
    group: Ints,
    by_runs: bool,  # noqa: FBT001 - passed on
) -> tuple[LinkTable, Ints]:
    table, group = in_order(table, group)
    settled = _settled(table, group)
    open_rows = np.flatnonzero(~settled)
    if not len(open_rows):
        return table, group
    fold = _folded if by_runs else _never_more
    opened, opened_group = fold(table.take(open_rows), group[open_rows])
    if len(open_rows) == len(table):
        return in_order(opened, opened_group)
    kept = np.flatnonzero(settled)
    table = concatenated([table.take(kept), opened])
    return in_order(table, np.concatenate([group[kept], opened_group]))


def _settled(table: LinkTable, group: Ints) -> Flags:
    """Mark the rows of groups in which plainly nothing can merge; rows are sorted.

    That is so in a group of one link, and in a small one whose links lie one after the other, no
    two with runs of one length and none going on where another ends.
    """
    busy = np.bincount(group) > SMALL
    if busy[group].all():
        return np.zeros(len(group), bool)
    busy[group[_running_on(table)]] = True
    same = group[1:] == group[:-1]
    if same.any():
        stop = table.near_stop()
        touching = same & (table.near[1:] < stop[:-1])
        touching |= same & (table.near[1:] == stop[:-1]) & (table.far[1:] == table.far_stop()[:-1])
        busy[group[1:][touching]] = True
        busy[group[folding_rows(table)]] = True
        length = np.where(run_dims(table), table.extent, 1).prod(axis=1)
        order = order_by([group, length])
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


def _never_more(table: LinkTable, group: Ints) -> tuple[LinkTable, Ints]:
    """Fold; groups of which that makes more links than came are merged as they came instead."""
    folded, of = _folded(table, group)
    count = np.bincount(group)
    more = np.bincount(of, minlength=len(count)) > count
    if not more.any():
        return folded, of
    rows, kept = np.flatnonzero(more[group]), np.flatnonzero(~more[of])
    merged, again = _merged(table.take(rows), group[rows])
    return concatenated([folded.take(kept), merged]), np.concatenate([of[kept], again])


def _folded(table: LinkTable, group: Ints) -> tuple[LinkTable, Ints]:
    """Fold until nothing changes; groups that were folded from their runs are done at once."""
    groups = int(group.max()) + 1
    done: list[tuple[LinkTable, Ints]] = []
    table, group = in_order(table, group)
    while len(table):
        before = np.bincount(group, minlength=groups)
        peel = Peel(groups)
        table = peel.links(table, group)
        table, group, complete, counted = _with_few_runs_expanded(table, group, peel)
        table, group = _merged(table, group)
        table, group = in_order(peel.put_back(table, group), group)
        complete |= np.bincount(group, minlength=groups) == before
        complete |= ~(peel.lost() | _would_open(table, group, counted))
        final = np.flatnonzero(complete[group])
        done.append((table.take(final), group[final]))
        going = np.flatnonzero(~complete[group])
        table, group = table.take(going), group[going]
    return concatenated([part for part, _ in done]), np.concatenate([of for _, of in done])


def _would_open(table: LinkTable, group: Ints, counted: Flags) -> Flags:
    """Mark the groups of which links could be taken apart further than they were."""
    peel = Peel(len(counted))
    peel.links(table, group)
    few = np.bincount(group, run_counts(table), len(counted)) <= MOST_PARTS
    return np.asarray(peel.lost() | (few & ~counted))


def _merged(table: LinkTable, group: Ints) -> tuple[LinkTable, Ints]:
    """Join runs, join blocks and chain them, until that changes nothing."""
    groups = int(group.max(initial=0)) + 1
    done: list[tuple[LinkTable, Ints]] = []
    while len(table):
        table, group = _runs_all_joined(*in_order(table, group))
        before = np.bincount(group, minlength=groups)
        table, group = continued(table, group)
        table, group = chained(table, group)
        changed = (np.bincount(group, minlength=groups) != before)[group]
        still = np.flatnonzero(~changed)
        done.append((table.take(still), group[still]))
        going = np.flatnonzero(changed)
        table, group = table.take(going), group[going]
    return concatenated([part for part, _ in done]), np.concatenate([of for _, of in done])


def _runs_all_joined(table: LinkTable, group: Ints) -> tuple[LinkTable, Ints]:
    """Join runs until none continue each other: joined ones may look alike in new ways."""
    while True:
        before = len(table)
        table, group = runs_joined(table, group)
        if len(table) == before:
            return table, group


def _with_few_runs_expanded(
    table: LinkTable, group: Ints, peel: Peel
) -> tuple[LinkTable, Ints, Flags, Flags]:
    """Expand the groups that have few runs in all into these runs, one repetition of them.

    Also tells which groups these are, and of which groups the runs were counted.
    """
    counted = np.bincount(group, run_counts(table), peel.groups) <= MOST_PARTS
    rows = np.flatnonzero(counted[group])
    if not len(rows):
        return table, group, counted, counted
    runs, again = expanded_runs(table.take(rows))
    runs, of = runs_joined(*in_order(runs, group[rows][again]))
    few = counted & (np.bincount(of, minlength=peel.groups) <= FEW_RUNS)
    kept, opened = np.flatnonzero(~few[group]), np.flatnonzero(few[of])
    runs, of = peel.runs(runs.take(opened), of[opened])
    return concatenated([table.take(kept), runs]), np.concatenate([group[kept], of]), few, counted


def expanded_runs(table: LinkTable) -> tuple[LinkTable, Ints]:
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
