"""Tables: many links as columns of one array each, for work that Python objects are too slow for.

Theory. A :class:`LinkTable` holds what a list of :class:`~reshard.geometry.links.Link` would, one
row a link, padded to a common number of dimensions with extents of 1. All columns are signed
64-bit integers. Offsets stay below 2^62 (:data:`~reshard.geometry.index_math.MAX_OFFSET`), so a
sum of two of them does not overflow; where a product might, the comment says why it does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.index_math import MAX_OFFSET
from reshard.geometry.links import Link
from reshard.geometry.ordering import Ints, beside, classes_of, expanded, rows_of


@dataclass(frozen=True, slots=True, eq=False)
class LinkTable:
    """Links as columns."""

    near: Ints
    far: Ints
    """Offsets, shape ``(rows,)``."""
    extent: Ints
    near_stride: Ints
    far_stride: Ints
    """Dimensions, shape ``(rows, dims)``, by columns; unused ones have extent 1."""

    def __len__(self) -> int:
        return len(self.near)

    @property
    def nbytes(self) -> int:
        """Bytes of the columns."""
        parts = (self.near, self.far, self.extent, self.near_stride, self.far_stride)
        return sum(part.nbytes for part in parts)

    @property
    def dims(self) -> int:
        """Number of dimension columns."""
        return int(self.extent.shape[1])

    @classmethod
    def of(cls, links: Sequence[Link]) -> LinkTable:
        """Return the table of some links.

        >>> LinkTable.of([Link(0, 5, ((4, 1, 2),)), Link(9, 0, ())]).extent.tolist()
        [[4], [1]]
        """
        rows = len(links)
        dims = max([len(link.dims) for link in links], default=0)
        pad = [(), *[((1, 0, 0),) * k for k in range(1, dims + 1)]]
        flat = chain.from_iterable(
            chain.from_iterable(link.dims + pad[dims - len(link.dims)]) for link in links
        )
        table = np.fromiter(flat, np.int64, rows * dims * 3).reshape(rows, dims, 3)
        return cls(
            np.fromiter([link.near for link in links], np.int64, rows),
            np.fromiter([link.far for link in links], np.int64, rows),
            np.asfortranarray(table[:, :, 0]),
            np.asfortranarray(table[:, :, 1]),
            np.asfortranarray(table[:, :, 2]),
        )

    def links(self) -> list[Link]:
        """Return the rows as links; they must be in normal form (:meth:`normalised`)."""
        dims = np.stack([self.extent, self.near_stride, self.far_stride], axis=2).tolist()
        return [
            Link(near, far, tuple([tuple(dim) for dim in row if dim[0] != 1]))
            for near, far, row in zip(self.near.tolist(), self.far.tolist(), dims, strict=True)
        ]

    def take(self, index: NDArray[np.int64] | NDArray[np.bool_] | slice) -> LinkTable:
        """Return some rows."""
        return LinkTable(
            self.near[index],
            self.far[index],
            rows_of(self.extent, index),
            rows_of(self.near_stride, index),
            rows_of(self.far_stride, index),
        )

    def replaced(self, rows: Ints, by: LinkTable) -> LinkTable:
        """Return the table with some rows replaced, which are given in normal form or not."""
        dims = max(self.dims, by.dims)
        old, new = self.padded(dims), by.normalised().padded(dims)
        near, far = old.near.copy(), old.far.copy()
        near[rows], far[rows] = new.near, new.far
        extent, near_stride, far_stride = (
            np.array(part, order="F") for part in (old.extent, old.near_stride, old.far_stride)
        )
        extent[rows], near_stride[rows] = new.extent, new.near_stride
        far_stride[rows] = new.far_stride
        return LinkTable(near, far, extent, near_stride, far_stride)

    def turned(self) -> LinkTable:
        """Exchange near and far."""
        return LinkTable(self.far, self.near, self.extent, self.far_stride, self.near_stride)

    def numel(self) -> Ints:
        """Number of elements of each row."""
        return np.asarray(self.extent.prod(axis=1))

    def repeats(self) -> bool:
        """Tell whether some row names a near address many times, by a near stride of 0."""
        return bool(((self.extent > 1) & (self.near_stride == 0)).any())

    def near_stop(self) -> Ints:
        """One past the largest near offset of each row."""
        return np.asarray(self.near + ((self.extent - 1) * self.near_stride).sum(axis=1) + 1)

    def far_stop(self) -> Ints:
        """One past the largest far offset of each row."""
        return np.asarray(self.far + ((self.extent - 1) * self.far_stride).sum(axis=1) + 1)

    def padded(self, dims: int) -> LinkTable:
        """Return the table with more dimension columns."""
        more = dims - self.dims
        if not more:
            return self
        ones = np.ones((len(self), more), np.int64)
        zeros = np.zeros((len(self), more), np.int64)
        return LinkTable(
            self.near,
            self.far,
            beside(self.extent, ones),
            beside(self.near_stride, zeros),
            beside(self.far_stride, zeros),
        )

    def normalised(self) -> LinkTable:
        """Return the rows in normal form.

        Dimensions are sorted by near stride, largest first, merged where they run on in both
        spaces, and those of extent 1 stand last with strides of 0.
        """
        unit = self.extent == 1
        extent = np.array(self.extent, order="F")
        near_stride, far_stride = (
            np.asfortranarray(np.where(unit, 0, each))
            for each in (self.near_stride, self.far_stride)
        )
        _sort_dims(extent, near_stride, far_stride)
        if _coalesce(extent, near_stride, far_stride):
            _sort_dims(extent, near_stride, far_stride)
        return LinkTable(self.near, self.far, extent, near_stride, far_stride).trimmed()

    def trimmed(self) -> LinkTable:
        """Return rows in normal form without the columns that none of them uses."""
        used = int((self.extent != 1).any(axis=0).sum())
        if used == self.dims:
            return self
        parts = (self.extent, self.near_stride, self.far_stride)
        return LinkTable(self.near, self.far, *[part[:, :used] for part in parts])


def _sort_dims(extent: Ints, near_stride: Ints, far_stride: Ints) -> None:
    """Sort the dimensions of each row in place by strides, largest first, those of extent 1 last.

    These have strides of 0, but so may others. Neighbours that stand wrong are exchanged until
    none do: dimensions are few, and nearly always in order.
    """
    dims = extent.shape[1]
    columns = [part[:, dim] for dim in range(dims) for part in (extent, near_stride, far_stride)]
    for last in range(dims - 1, 0, -1):
        moved = False
        for dim in range(last):
            (n, s, f), (m, t, g) = (
                columns[3 * dim : 3 * dim + 3],
                columns[3 * dim + 3 : 3 * dim + 6],
            )
            rows = np.flatnonzero((s < t) | ((s == t) & ((f < g) | ((n == 1) & (m != 1)))))
            if len(rows):
                moved = True
                for left, right in ((n, m), (s, t), (f, g)):
                    left[rows], right[rows] = right[rows], left[rows]
        if not moved:
            break


def _coalesce(extent: Ints, near_stride: Ints, far_stride: Ints) -> bool:
    """Merge neighbouring dimensions in place, innermost first; tell whether any were.

    The product extent·stride overflows for no dimension that could merge: it then equals the
    next stride, which is at most 2^62.
    """
    merged = False
    for outer in range(extent.shape[1] - 2, -1, -1):
        inner = outer + 1
        count = extent[:, inner]
        runs_on = (
            (near_stride[:, outer] == count * near_stride[:, inner])
            & (far_stride[:, outer] == count * far_stride[:, inner])
            & (count > 1)
            & (extent[:, outer] > 1)
        )
        if runs_on.any():
            merged = True
            extent[runs_on, outer] *= count[runs_on]
            for stride in (near_stride, far_stride):
                stride[runs_on, outer] = stride[runs_on, inner]
                stride[runs_on, inner] = 0
            extent[runs_on, inner] = 1
    return merged


def concatenated(tables: Iterable[LinkTable]) -> LinkTable:
    """Return the rows of several tables in one."""
    listed = list(tables)
    dims = max([table.dims for table in listed], default=0)
    padded = [table.padded(dims) for table in listed]
    if len(padded) == 1:
        return padded[0]
    return LinkTable(
        np.concatenate([table.near for table in padded]),
        np.concatenate([table.far for table in padded]),
        np.concatenate([table.extent.T for table in padded], axis=1).T,
        np.concatenate([table.near_stride.T for table in padded], axis=1).T,
        np.concatenate([table.far_stride.T for table in padded], axis=1).T,
    )


def clusters(table: LinkTable, spaces: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Group links whose spans touch, directly or through others, within each space.

    Returns
    -------
    cluster
        The group of each row, from 0.
    crowded
        Whether each row shares its group, or folds on itself.

    Examples
    --------
    >>> table = LinkTable.of([Link(0, 0, ((3, 4, 1),)), Link(20, 0, ()), Link(1, 0, ((3, 4, 1),))])
    >>> clusters(table, np.zeros(3, np.int64))[0].tolist()
    [0, 1, 0]
    """
    order, _ = classes_of([spaces, table.near])
    near, stop, space = table.near[order], table.near_stop()[order], spaces[order]
    new = np.ones(len(order), bool)
    new[1:] = space[1:] != space[:-1]
    if ((near[1:] < stop[:-1]) & ~new[1:]).any():
        begin, end = _on_one_line(near, stop, space)
        new[1:] |= begin[1:] >= np.maximum.accumulate(end)[:-1]
    else:
        new[:] = True
    cluster = np.empty(len(order), np.int64)
    cluster[order] = np.cumsum(new) - 1
    crowded = np.bincount(cluster)[cluster] > 1
    crowded[folding_rows(table)] = True
    return cluster, crowded


def _on_one_line(near: Ints, stop: Ints, space: Ints) -> tuple[Ints, Ints]:
    """Return begins and ends, in order of spaces, as places of one line with a space after another.

    Where the spaces do not fit into 62 bits one after the other, places are counted.
    """
    room = int(stop.max()) + 1
    if (int(space[-1]) + 1) * room < MAX_OFFSET:
        return near + space * room, stop + space * room
    order, label = classes_of([np.concatenate([space, space]), np.concatenate([near, stop])])
    place = np.empty(len(order), np.int64)
    place[order] = label
    begin, end = np.split(place, 2)
    return begin, end


def apart(table: LinkTable, spaces: Ints) -> bool:
    """Tell whether links are disjoint for a simple reason: within a space their spans are.

    No link may fold on itself either. False means that it takes more to know.
    """
    return not clusters(table, spaces)[1].any()


def outermost_expanded(table: LinkTable, steps: Ints) -> tuple[Ints, LinkTable]:
    """Return one row for each of the first ``steps`` steps of the outermost dimension of rows.

    Rows with 1 step keep that dimension. Tells whose each row is.
    """
    again = np.repeat(np.arange(len(table)), steps)
    step = expanded(np.zeros_like(steps), steps)
    rows = table.take(again)
    near, far = rows.near + step * rows.near_stride[:, 0], rows.far + step * rows.far_stride[:, 0]
    extent = rows.extent
    extent[steps[again] > 1, 0] = 1
    return again, LinkTable(near, far, extent, rows.near_stride, rows.far_stride).normalised()


def folding_rows(table: LinkTable) -> Ints:
    """Return the rows with a dimension that steps by less than the ones inside it reach."""
    reach = np.ones(len(table), np.int64)
    folds = np.zeros(len(table), bool)
    for dim in range(table.dims - 1, -1, -1):
        count, step = table.extent[:, dim], table.near_stride[:, dim]
        folds |= (count > 1) & (step < reach)
        reach += (count - 1) * step
    return np.flatnonzero(folds)
