"""Chains: equal blocks at even distance become one block with one more dimension.

Theory. Among the blocks of one shape in a group, the differences ``(Δnear, Δfar)`` between blocks
that are at most 4 apart in near order are counted. In a group of more than :data:`MANY` blocks
that would drown in chance; there, only places that *recur* are looked at, from which the way to the
next block is the same: this way is counted, and the difference between the two places. The
commonest difference is the *step* by which blocks are chained: for a given step, the maximal
chains ``x, x + step, x + 2·step, …`` are unique, whatever the order in which the blocks came. A
step counts only when

* it explains a quarter of the blocks, and ``Δfar`` is not negative, because strides are not;
* where it occurs once, there is a reason to believe in it: the blocks have a quarter of all runs
  of the group, or something else in the group steps by it too. Without that, blocks that happen
  to be equal would pair up across a whole shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.ordering import (
    Ints,
    beside,
    classes_of,
    groups_of,
    mixed,
    order_by,
    starts_of,
)
from reshard.geometry.tables import LinkTable

Flags = NDArray[np.bool_]
"""An array of truth values."""
MANY = 1024
"""In groups of more blocks than this, only what recurs is looked at."""
_LAGS = 4
_ENOUGH = 4
"""A quarter: one in so many."""


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """Steps: the group or label that each belongs to, and the two differences."""

    of: Ints
    near: Ints
    far: Ints

    def take(self, index: Ints) -> _Steps:
        return _Steps(self.of[index], self.near[index], self.far[index])

    @property
    def columns(self) -> list[Ints]:
        return [self.of, self.near, self.far]


@dataclass(frozen=True, slots=True, eq=False)
class _Labels:
    """Blocks of one shape in one group: which group, how many."""

    group: Ints
    size: Ints
    alone: Flags
    """Whether they have less than a quarter of the runs of their group."""


def _appended(parts: Sequence[_Steps]) -> _Steps:
    columns = zip(*[part.columns for part in parts], strict=True)
    return _Steps(*(np.concatenate(column) for column in columns))


def run_dims(table: LinkTable) -> Flags:
    """Mark the dimension of steps (1, 1) of each row, the innermost one if it has any."""
    one = (table.near_stride == 1) & (table.far_stride == 1)
    return np.asarray(one & (table.extent > 1))


def run_counts(table: LinkTable) -> NDArray[np.float64]:
    """Return the number of runs of each row."""
    counts: NDArray[np.float64] = np.where(run_dims(table), 1, table.extent).astype(float)
    return np.asarray(counts.prod(axis=1))


def flat_columns(table: LinkTable) -> list[Ints]:
    """Return the columns of all dimensions."""
    parts = (table.extent, table.near_stride, table.far_stride)
    return [part[:, dim] for part in parts for dim in range(table.dims)]


def unbelieved_dims(table: LinkTable, group: Ints) -> Flags:
    """Mark dimensions of two steps that chaining would not have made."""
    pairs: Flags = np.asarray((table.extent == 2) & ~run_dims(table))
    if not pairs.any():
        return pairs
    runs = run_counts(table)
    share = runs / np.bincount(group, runs)[group]
    rows, dims = np.nonzero(pairs & (_ENOUGH * share < 1)[:, None])
    mine = _Steps(group[rows], table.near_stride[rows, dims], table.far_stride[rows, dims])
    believed = _repeated(mine, _dim_steps(table, group))
    marked = np.zeros_like(pairs)
    marked[rows[~believed], dims[~believed]] = True
    return marked


def chained(table: LinkTable, group: Ints) -> tuple[LinkTable, Ints]:
    """Chain equal blocks, those of each shape by their commonest step."""
    order, label = _equal_blocks(table, group)
    if not len(order):
        return table, group
    size = np.bincount(label)
    runs = run_counts(table)
    lead = order[starts_of(label)]
    share = size * runs[lead] / np.bincount(group, runs)[group[lead]]
    labels = _Labels(group[lead], size, _ENOUGH * share < 1)
    inner = order_by([label, table.near[order]])
    order, label = order[inner], label[inner]
    near, far = table.near[order], table.far[order]
    others = _dim_steps(table, group)
    found = _candidates(_Steps(label, near, far), labels, np.bincount(group), others)
    if not len(found.of):
        return table, group
    steps = _best_steps(found, labels, others)
    rows, linked = _chains(near, far, label, steps.near[label], steps.far[label])
    if not linked.any():
        return table, group
    return _stacked(table, group, order, (rows, linked), (steps.near[label], steps.far[label]))


def _equal_blocks(table: LinkTable, group: Ints) -> tuple[Ints, Ints]:
    """Return the rows that have others of their shape in their group, and what shape, from 0."""
    columns = [group, *flat_columns(table)]
    bucket = mixed(columns) & ((1 << len(group).bit_length()) - 1)
    rows = np.flatnonzero((np.bincount(bucket) > 1)[bucket])
    order, label = groups_of([column[rows] for column in columns])
    several = np.flatnonzero((np.bincount(label) > 1)[label])
    label = label[several]
    return rows[order[several]], np.cumsum(np.diff(label, prepend=label[:1]) > 0)


def _candidates(blocks: _Steps, labels: _Labels, crowd: Ints, others: _Steps) -> _Steps:
    """Return the differences that may be steps; blocks are sorted by label and near.

    ``crowd`` is the number of blocks of each group.
    """
    group = labels.group
    many = (crowd[group] > MANY)[blocks.of]
    few = blocks.take(np.flatnonzero(~many)) if many.any() else blocks
    few = _appended([_differences(few), _periods(few)])
    if not many.any():
        return few
    rest = blocks.take(np.flatnonzero(many))
    recurring = _recurring(rest)
    evidence = _appended([_Steps(group[recurring.of], recurring.near, recurring.far), others])
    having = np.zeros(len(crowd), bool)
    having[evidence.of] = True
    near = _differences(rest.take(np.flatnonzero(having[group[rest.of]])))
    recurring, near = _frequent(recurring, near, labels)
    told = _among(_Steps(group[near.of], near.near, near.far), evidence)
    return _appended([few, recurring, near.take(np.flatnonzero(told))])


def _frequent(recurring: _Steps, near: _Steps, labels: _Labels) -> tuple[_Steps, _Steps]:
    """Leave out the steps that are too rare to count, in groups where nobody asks for evidence.

    There all labels have a large share of the runs, and so many blocks that one step explains no
    quarter of them.
    """
    asking = np.zeros(int(labels.group.max()) + 1, bool)
    asking[labels.group[labels.alone | (labels.size <= _ENOUGH + 1)]] = True
    both = _appended([recurring, near])
    kept = asking[labels.group[both.of]] | _plausible(both, labels.size)
    of_recurring, of_near = np.split(kept, [len(recurring.of)])
    return recurring.take(np.flatnonzero(of_recurring)), near.take(np.flatnonzero(of_near))


def _plausible(found: _Steps, size: Ints) -> Flags:
    """Mark all steps that explain a quarter of the blocks of their label, and few others.

    Occurrences are counted in buckets that unequal steps may share.
    """
    bucket = mixed(found.columns) & ((1 << len(found.of).bit_length()) - 1)
    return np.asarray(_ENOUGH * np.bincount(bucket)[bucket] >= size[found.of] - 1)


def _differences(blocks: _Steps) -> _Steps:
    """Return the differences between blocks of one label; they are sorted by label and near."""
    if not len(blocks.of):
        return blocks
    label, near, far = blocks.columns
    found = []
    for lag in range(1, min(_LAGS, int(np.bincount(label).max()) - 1) + 1):
        f = far[lag:] - far[:-lag]
        valid = np.flatnonzero((label[lag:] == label[:-lag]) & (f >= 0))
        found.append(_Steps(label[lag:][valid], near[lag:][valid] - near[:-lag][valid], f[valid]))
    return _appended([blocks.take(np.arange(0)), *found])


def _periods(blocks: _Steps) -> _Steps:
    """Return the differences between places further apart than :func:`_differences` looks.

    Rows of many blocks step by whole rows, which recur however irregular a row is.
    """
    first, then, _ = _recurrences(blocks)
    apart = np.flatnonzero(then - first > _LAGS)
    first, then = first[apart], then[apart]
    label, near, far = blocks.columns
    found = _Steps(label[first], near[then] - near[first], far[then] - far[first])
    return found.take(np.flatnonzero(found.far >= 0))


def _recurring(blocks: _Steps) -> _Steps:
    """Return the differences between places from which the next block is equally far, and that way.

    From both places to the next ones the difference is the same, so each is returned twice.
    """
    first, then, step = _recurrences(blocks)
    label, near, far = blocks.columns
    found = _Steps(label[first], near[then] - near[first], far[then] - far[first])
    every = _appended([found, found, step])
    return every.take(np.flatnonzero(every.far >= 0))


def _recurrences(blocks: _Steps) -> tuple[Ints, Ints, _Steps]:
    """Return places and the next ones from which the next block is equally far, and that way."""
    label, near, far = blocks.columns
    same = np.flatnonzero(label[1:] == label[:-1])
    token = _Steps(label[same], near[same + 1] - near[same], far[same + 1] - far[same])
    bits = len(same).bit_length()
    # Equal tokens stand side by side, in order; unequal ones may, too, and are sorted out.
    order = np.sort((mixed(token.columns) << bits) | np.arange(len(same))) & ((1 << bits) - 1)
    first, then = order[:-1], order[1:]
    again = np.ones(len(first), bool)
    for column in token.columns:
        again &= column[first] == column[then]
    step = token.take(np.concatenate([first[again], then[again]]))
    return same[first[again]], same[then[again]], step


def _dim_steps(table: LinkTable, group: Ints) -> _Steps:
    """Return the steps of all dimensions, as often as they are evidence: once or twice."""
    found = [_Steps(group[:0], group[:0], group[:0])]
    stepping = (table.extent > 1) & ~run_dims(table)
    for dim in range(table.dims):
        steps = _Steps(group, table.near_stride[:, dim], table.far_stride[:, dim])
        found.append(steps.take(np.flatnonzero(stepping[:, dim])))
        found.append(steps.take(np.flatnonzero(stepping[:, dim] & (table.extent[:, dim] > 2))))
    return _appended(found)


def _best_steps(found: _Steps, labels: _Labels, others: _Steps) -> _Steps:
    """Return the step by which each label is chained, 0 where it is not.

    ``others`` are the steps that other dimensions of the groups make.
    """
    size, alone = labels.size, labels.alone
    best = _Steps(size, np.zeros_like(size), np.zeros_like(size))
    every = _appended([_Steps(labels.group[found.of], found.near, found.far), others])
    kept = np.flatnonzero(_plausible(found, size))
    lonely = alone[found.of[kept]]
    lonely[lonely] = ~_repeated(every.take(kept[lonely]), every)
    kept = kept[~lonely]
    found, grouped = found.take(kept), every.take(kept)
    order, kind = classes_of(found.columns)
    if not len(order):
        return best
    first = order[starts_of(kind)]
    count, step, of = np.bincount(kind), found.take(first), found.of[first]
    believed = (count > 1) | ~alone[of]
    once = np.flatnonzero(~believed)
    believed[once] = _repeated(grouped.take(first[once]), every)
    fits = np.flatnonzero(believed & (_ENOUGH * count >= size[of] - 1))
    ranked = fits[np.lexsort((step.far[fits], step.near[fits], -count[fits], of[fits]))]
    lead = ranked[np.flatnonzero(np.diff(of[ranked], prepend=-1))]
    best.near[of[lead]], best.far[of[lead]] = step.near[lead], step.far[lead]
    return best


def _repeated(asked: _Steps, every: _Steps) -> Flags:
    """Mark the steps that occur more than once among all of their group."""
    numbers, ordered = _compared(asked, every)
    return _in(numbers, ordered[1:][ordered[1:] == ordered[:-1]])


def _among(asked: _Steps, every: _Steps) -> Flags:
    """Mark the steps that occur among all of their group."""
    return _in(*_compared(asked, every))


def _compared(asked: _Steps, every: _Steps) -> tuple[Ints, Ints]:
    """Return steps as numbers, and in order those of all that may be the same."""
    numbers = mixed(asked.columns)
    if not len(numbers):
        return numbers, numbers
    many = mixed(every.columns)
    buckets = (4 << len(numbers).bit_length()) - 1
    wanted = np.zeros(buckets + 1, bool)
    wanted[numbers & buckets] = True
    return numbers, np.sort(many[wanted[many & buckets]])


def _in(numbers: Ints, ordered: Ints) -> Flags:
    # Bisection among few distinct numbers stays in the cache.
    distinct = ordered[np.diff(ordered, prepend=-1) > 0]
    if not len(distinct):
        return np.zeros(len(numbers), bool)
    at = np.minimum(np.searchsorted(distinct, numbers), len(distinct) - 1)
    return np.asarray(distinct[at] == numbers)


def _chains(near: Ints, far: Ints, label: Ints, s: Ints, f: Ints) -> tuple[Ints, Flags]:
    """Return the rows that have a step, chain by chain, and whether each continues its chain."""
    chosen = np.flatnonzero(s > 0)
    block = near[chosen] // np.maximum(s[chosen], 1)
    # Equal for the rows of one line; products may wrap, the exact comparison below does not rely
    # on them.
    line = [near[chosen] - block * s[chosen], far[chosen] - block * f[chosen]]
    order, _ = classes_of([label[chosen], *line, near[chosen]])
    rows = chosen[order]
    linked = np.zeros(len(rows), bool)
    linked[1:] = (
        (label[rows][1:] == label[rows][:-1])
        & (near[rows][1:] == near[rows][:-1] + s[rows][1:])
        & (far[rows][1:] == far[rows][:-1] + f[rows][1:])
    )
    return rows, linked


def _stacked(
    table: LinkTable, group: Ints, order: Ints, chains: tuple[Ints, Flags], step: tuple[Ints, Ints]
) -> tuple[LinkTable, Ints]:
    """Put each chain of rows in the place of its first row, with one more dimension."""
    rows, linked = chains
    first = np.flatnonzero(~linked)
    extent = np.ones(len(table), np.int64)
    step_near, step_far = np.zeros(len(table), np.int64), np.zeros(len(table), np.int64)
    extent[order[rows[first]]] = np.diff(np.append(first, len(rows)))
    step_near[order], step_far[order] = step
    kept = np.ones(len(table), bool)
    kept[order[rows[linked]]] = False
    at = np.flatnonzero(extent > 1)
    base = table.take(at)
    grown = LinkTable(
        base.near,
        base.far,
        beside(extent[at], base.extent),
        beside(step_near[at], base.near_stride),
        beside(step_far[at], base.far_stride),
    )
    left = np.flatnonzero(kept)
    return table.replaced(at, grown).take(left).trimmed(), group[left]
