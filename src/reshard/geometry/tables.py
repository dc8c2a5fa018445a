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

from reshard.geometry.links import Link
from reshard.geometry.ordering import Ints, classes_of, expanded


@dataclass(frozen=True, slots=True, eq=False)
class LinkTable:
    """Links as columns.

    Parameters
    ----------
    near, far
        Offsets, shape ``(rows,)``.
    extent, near_stride, far_stride
        Dimensions, shape ``(rows, dims)``; unused ones have extent 1.
    """

    near: Ints
    far: Ints
    extent: Ints
    near_stride: Ints
    far_stride: Ints

    def __len__(self) -> int:
        return len(self.near)

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
            np.ascontiguousarray(table[:, :, 0]),
            np.ascontiguousarray(table[:, :, 1]),
            np.ascontiguousarray(table[:, :, 2]),
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
            self.extent[index],
            self.near_stride[index],
            self.far_stride[index],
        )

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
            np.concatenate([self.extent, ones], axis=1),
            np.concatenate([self.near_stride, zeros], axis=1),
            np.concatenate([self.far_stride, zeros], axis=1),
        )

    def normalised(self) -> LinkTable:
        """Return the rows in normal form.

        Dimensions are sorted by near stride, largest first, merged where they run on in both
        spaces, and those of extent 1 stand last with strides of 0.
        """
        unit = self.extent == 1
        extent = self.extent
        near_stride = np.where(unit, 0, self.near_stride)
        far_stride = np.where(unit, 0, self.far_stride)
        if self.dims > 1:
            order = np.lexsort((-far_stride, -near_stride, unit), axis=1)
            extent = np.take_along_axis(extent, order, axis=1)
            near_stride = np.take_along_axis(near_stride, order, axis=1)
            far_stride = np.take_along_axis(far_stride, order, axis=1)
            if _coalesce(extent, near_stride, far_stride):
                order = np.argsort(extent == 1, axis=1, kind="stable")
                extent = np.take_along_axis(extent, order, axis=1)
                near_stride = np.take_along_axis(near_stride, order, axis=1)
                far_stride = np.take_along_axis(far_stride, order, axis=1)
        used = int((extent != 1).any(axis=0).sum())
        return LinkTable(
            self.near, self.far, extent[:, :used], near_stride[:, :used], far_stride[:, :used]
        )


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
            (count > 1)
            & (near_stride[:, outer] == count * near_stride[:, inner])
            & (far_stride[:, outer] == count * far_stride[:, inner])
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
        np.concatenate([table.extent for table in padded]),
        np.concatenate([table.near_stride for table in padded]),
        np.concatenate([table.far_stride for table in padded]),
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
        # The furthest stop so far, within each space: compared as places in one sorted list.
        fence = classes_of([np.concatenate([space, space]), np.concatenate([near, stop])])
        place = np.empty(2 * len(order), np.int64)
        place[fence[0]] = fence[1]
        reached = np.maximum.accumulate(place[len(order) :])
        new[1:] |= place[: len(order)][1:] >= reached[:-1]
    else:
        new[:] = True
    cluster = np.empty(len(order), np.int64)
    cluster[order] = np.cumsum(new) - 1
    crowded = np.bincount(cluster)[cluster] > 1
    crowded[folding_rows(table)] = True
    return cluster, crowded


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
