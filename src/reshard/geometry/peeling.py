"""Peeling: taking off, and putting back, the steps by which a whole group repeats.

Theory. Let a group's runs, in near order, be ``k`` equal stretches of runs, each one step
``(Δnear, Δfar)`` after the one before. Then the group is one stretch with one more dimension, and
only the stretch has to be folded. Among all ways to see a group so, there is a finest: a list of
runs that repeats with periods ``p`` and ``q``, both dividing its length, repeats with their
greatest common divisor too (Fine and Wilf). The finest way does therefore not depend on how the
group was cut into links, and neither does the order in which coarser ones are found: what a coarse
one leaves repeats again, and the two dimensions merge.

Links of a group that share their outermost dimension show a repetition without any run being
looked at (:meth:`Peel.links`), so that no cost follows the rows of a matrix. Where a group was
expanded into its runs, these are compared (:meth:`Peel.runs`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.ordering import Ints, beside, starts_of
from reshard.geometry.tables import LinkTable

Level = tuple[Ints, Ints, Ints]
"""Extent, near and far stride that each group lost at once; an extent of 1 is none."""


class Peel:
    """The dimensions that each of some groups lost, outermost first."""

    __slots__ = ("_levels", "groups")

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self._levels: list[Level] = []

    def links(self, table: LinkTable, group: Ints) -> LinkTable:
        """Take off every outermost dimension that all links of a group share; rows are sorted."""
        while table.dims:
            first = starts_of(group)
            lead = np.repeat(first, np.diff(np.append(first, len(group))))
            peeled = _shared(table, first, lead)
            if not peeled.any():
                break
            rows = first[peeled[first]]
            self._levels.append(self._level(group[rows], *_outermost(table, rows)))
            extent = table.extent.copy(order="K")
            extent[peeled, 0] = 1
            table = LinkTable(
                table.near, table.far, extent, table.near_stride, table.far_stride
            ).normalised()
        return table

    def runs(self, table: LinkTable, group: Ints) -> tuple[LinkTable, Ints]:
        """Take off the repetitions of groups of bare runs; rows are sorted."""
        while True:
            found = list(_repetitions(table, group))
            if not found:
                return table, group
            kept = np.ones(len(group), bool)
            for rows, period, _, _ in found:
                kept[rows[:, period:]] = False
            self._levels.append(
                self._level(
                    np.concatenate([group[rows[:, 0]] for rows, _, _, _ in found]),
                    np.concatenate(
                        [np.full(len(rows), rows.shape[1] // p) for rows, p, _, _ in found]
                    ),
                    np.concatenate([near for _, _, near, _ in found]),
                    np.concatenate([far for _, _, _, far in found]),
                )
            )
            table, group = table.take(np.flatnonzero(kept)), group[kept]

    def lost(self) -> NDArray[np.bool_]:
        """Mark the groups that lost a dimension."""
        marked = np.zeros(self.groups, bool)
        for extent, _, _ in self._levels:
            marked |= extent > 1
        return marked

    def put_back(self, table: LinkTable, group: Ints) -> LinkTable:
        """Return links of the groups with the dimensions that these lost."""
        if not self._levels:
            return table
        extent, near, far = (
            beside(*[level[part][group] for level in self._levels]) for part in range(3)
        )
        return LinkTable(
            table.near,
            table.far,
            beside(extent, table.extent),
            beside(near, table.near_stride),
            beside(far, table.far_stride),
        ).normalised()

    def _level(self, group: Ints, extent: Ints, near: Ints, far: Ints) -> Level:
        level = (
            np.ones(self.groups, np.int64),
            np.zeros(self.groups, np.int64),
            np.zeros(self.groups, np.int64),
        )
        for column, values in zip(level, (extent, near, far), strict=True):
            column[group] = values
        return level


def _outermost(table: LinkTable, rows: Ints) -> tuple[Ints, Ints, Ints]:
    return table.extent[rows, 0], table.near_stride[rows, 0], table.far_stride[rows, 0]


def _shared(table: LinkTable, first: Ints, lead: Ints) -> NDArray[np.bool_]:
    """Mark the rows of groups whose outermost dimension repeats the whole group.

    ``first`` is the first row of each group, ``lead`` that of each row's group. Steps of the
    dimension may touch, but no run may go on from one into the next.
    """
    n, s, f = table.extent[:, 0], table.near_stride[:, 0], table.far_stride[:, 0]
    last = np.append(first[1:], len(table)) - 1
    if not ((n[first] > 1) & (n[first] == n[last]) & (s[first] == s[last])).any():
        return np.zeros(len(table), bool)
    shares = (n > 1) & (n == n[lead]) & (s == s[lead]) & (f == f[lead])
    inside = table.near + ((table.extent - 1) * table.near_stride)[:, 1:].sum(axis=1) + 1
    until = np.repeat(np.maximum.reduceat(inside, first), np.diff(np.append(first, len(table))))
    next_near, next_far = table.near[lead] + s, table.far[lead] + f
    far_inside = table.far + ((table.extent - 1) * table.far_stride)[:, 1:].sum(axis=1) + 1
    runs_on = (inside == next_near) & (far_inside == next_far)
    good = shares & (until <= next_near) & ~runs_on
    whole = np.logical_and.reduceat(good, first)
    return np.asarray(np.repeat(whole, np.diff(np.append(first, len(table)))))


def _repetitions(table: LinkTable, group: Ints) -> Iterator[tuple[Ints, int, Ints, Ints]]:
    """Yield groups of runs that repeat: their rows (one line each), period, and steps."""
    first = starts_of(group)
    size = np.diff(np.append(first, len(group)))
    length = table.extent.prod(axis=1)
    for count in np.unique(size[size > 1]).tolist():
        rows = first[size == count][:, None] + np.arange(count)
        for period in _divisors(count):
            s = table.near[rows[:, period]] - table.near[rows[:, 0]]
            f = table.far[rows[:, period]] - table.far[rows[:, 0]]
            fits = f >= 0
            # Most do not repeat; the last stretch tells that before all are compared.
            for column, step in ((table.near, s), (table.far, f), (length, 0 * s)):
                last, before = column[rows[:, -1]], column[rows[:, -1 - period]]
                fits &= last - before == step
            at = np.flatnonzero(fits)
            for column, step in ((table.near, s), (table.far, f), (length, 0 * s)):
                values = column[rows[at]]
                steady = (values[:, period:] - values[:, :-period] == step[at][:, None]).all(axis=1)
                at = at[steady]
            if len(at):
                yield rows[at], period, s[at], f[at]
                left = np.ones(len(rows), bool)
                left[at] = False
                rows = rows[left]
            if not len(rows):
                break


def _divisors(count: int) -> list[int]:
    """Return the proper divisors of a number, ascending.

    >>> _divisors(12)
    [1, 2, 3, 4, 6]
    """
    return [n for n in range(1, count // 2 + 1) if count % n == 0]
