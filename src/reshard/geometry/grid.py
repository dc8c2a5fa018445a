"""The grid: a mixed-radix reading of one address space in which strided blocks are boxes.

Theory. Choose strides ``1 = c_0 | c_1 | … | c_{K-1}``, each dividing the next. Every address has
one digit per stride, ``x_k = (a // c_k) mod (c_{k+1} / c_k)``; the last digit is unbounded. A
block whose strides are among the ``c_k``, each once, and which never carries from one digit into
the next is a *box*, a product of digit intervals; for boxes, intersection, difference and overlap
are comparisons of bounds. A run that carries is cut into head, body (whole blocks of the next
digit, one more dimension) and tail.

A block that has a stride outside the chain, or two dimensions on one digit, is *irregular*. It
can still be read by walking the offending dimension, one step at a time; who has a better way
(:func:`reshard.geometry.links.meet`) asks for the irregular rows instead. :meth:`Grid.of` chooses
the chain that makes walking cheapest. Blocks of several address spaces are read at once, each
space with a chain of its own.

Boxes keep the far side of the link that they were cut from, which is affine in the digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.errors import UnsupportedError
from reshard.geometry.index_math import MAX_OFFSET
from reshard.geometry.ordering import Ints, classes_of, expanded, rows_of, starts_of
from reshard.geometry.tables import LinkTable, concatenated

Flags = NDArray[np.bool_]
"""An array of truth values."""

MOST_BOXES = 1 << 25
"""Walking stops beyond this many boxes; layouts that need more are refused."""


@dataclass(frozen=True, slots=True, eq=False)
class BoxTable:
    """Boxes of one grid as columns."""

    lo: Ints
    hi: Ints
    """Digit intervals, shape ``(boxes, digits)``, innermost digit first, half-open."""
    far: Ints
    """Far offset of the lowest corner, shape ``(boxes,)``."""
    far_stride: Ints
    """Far stride of each digit, shape ``(boxes, digits)``."""
    row: Ints
    """The row of the link table that each box was cut from."""

    def __len__(self) -> int:
        return len(self.far)

    def take(self, index: Ints) -> BoxTable:
        """Return some boxes."""
        return BoxTable(
            rows_of(self.lo, index),
            rows_of(self.hi, index),
            self.far[index],
            rows_of(self.far_stride, index),
            self.row[index],
        )

    def far_at(self, index: Ints, lo: Ints) -> Ints:
        """Return the far offset of given corners inside given boxes."""
        skip = (lo - rows_of(self.lo, index)) * rows_of(self.far_stride, index)
        return np.asarray(self.far[index] + skip.sum(axis=1))

    def volume(self) -> Ints:
        """Number of addresses of each box."""
        return np.asarray((self.hi - self.lo).prod(axis=1))


class Grid:
    """A chain of strides, each dividing the next, the first being 1; one chain for each space.

    Parameters
    ----------
    strides
        Shape ``(spaces, digits)``. Shorter chains are filled up with :data:`MAX_OFFSET`, a digit
        that is always 0.

    Examples
    --------
    >>> from reshard.geometry.links import Link
    >>> table = LinkTable.of([Link(4, 0, ((3, 16, 8), (8, 1, 1)))])
    >>> grid = Grid.of([table])
    >>> grid.strides.tolist()
    [[1, 16]]
    >>> boxes = grid.boxes(table)
    >>> boxes.lo.tolist(), boxes.hi.tolist()
    ([[4, 0]], [[12, 3]])
    """

    __slots__ = ("radices", "strides")

    def __init__(self, strides: Ints) -> None:
        self.strides = strides
        filled = strides[:, 1:] == MAX_OFFSET
        self.radices: Ints = np.where(filled, MAX_OFFSET, strides[:, 1:] // strides[:, :-1])

    @classmethod
    def of(cls, tables: Sequence[LinkTable], spaces: Ints | None = None) -> Grid:
        """Return a grid that suits the links of some tables.

        ``spaces`` are the spaces of the rows of all tables, from 0; all the same when left out.
        """
        space, stride, extent = [], [], []
        at = 0
        for table in tables:
            row, dim = np.nonzero((table.extent > 1) & (table.near_stride > 1))
            space.append(np.zeros_like(row) if spaces is None else spaces[row + at])
            stride.append(table.near_stride[row, dim])
            extent.append(table.extent[row, dim])
            at += len(table)
        count = 1 if spaces is None else int(spaces.max(initial=0)) + 1
        return cls(
            _chains(np.concatenate(space), np.concatenate(stride), np.concatenate(extent), count)
        )

    @property
    def digits(self) -> int:
        """Number of digits."""
        return int(self.strides.shape[1])

    def boxes(self, table: LinkTable, spaces: Ints | None = None) -> BoxTable:
        """Return the boxes of all rows, walking the dimensions that are not digits.

        Repetitions (near stride 0) are left out: a box says where, not how often.

        Raises
        ------
        UnsupportedError
            When walking would make more than :data:`MOST_BOXES` boxes.
        """
        row = np.arange(len(table))
        return self._settled(*self._placed(table, row, _spaces(table, spaces)))

    def walks(self, table: LinkTable, spaces: Ints | None = None) -> NDArray[np.float64]:
        """Return how many boxes each row is walked into, 1 for the regular ones."""
        homeless = self._homeless(table, _spaces(table, spaces))
        return np.asarray(np.where(homeless, table.extent, 1).astype(float).prod(axis=1))

    def regular_boxes(self, table: LinkTable) -> tuple[BoxTable, Ints]:
        """Return the boxes of the regular rows, and the other rows; for a single space."""
        if (
            table.dims == self.digits == 1
            and not ((table.extent > 1) & (table.near_stride != 1)).any()
        ):
            return _bare_boxes(table), np.empty(0, np.int64)
        regular = ~self._homeless(table, _spaces(table, None)).any(axis=1)
        rows = np.flatnonzero(regular)
        placed = self._placed(table.take(rows), rows, np.zeros_like(rows))
        return self._settled(*placed), np.flatnonzero(~regular)

    def links(self, boxes: BoxTable, spaces: Ints | None = None) -> LinkTable:
        """Return boxes as links again, in normal form."""
        strides = rows_of(
            self.strides, np.zeros(len(boxes), np.int64) if spaces is None else spaces
        )
        extent = boxes.hi - boxes.lo
        near = (boxes.lo * strides).sum(axis=1)
        return LinkTable(near, boxes.far, extent, strides, boxes.far_stride).normalised()

    def _digit(self, stride: Ints, space: Ints) -> tuple[Ints, Flags]:
        """Return the digit of each stride, and whether it really is that digit's stride."""
        digit = np.zeros_like(stride)
        exact = np.zeros(stride.shape, bool)
        for k in range(self.digits):
            hit = stride == self.strides[space, k][:, None]
            digit[hit] = k
            exact |= hit
        return digit, exact

    def _homeless(self, table: LinkTable, space: Ints) -> Flags:
        """Mark the dimensions that have no digit of their own in their row."""
        used = (table.extent > 1) & (table.near_stride > 0)
        digit, exact = self._digit(table.near_stride, space)
        homeless, settled = used & ~exact, used & exact
        for later in range(1, table.dims):
            for earlier in range(later):
                both = settled[:, later] & settled[:, earlier]
                homeless[:, later] |= both & (digit[:, later] == digit[:, earlier])
        return homeless

    def _placed(self, table: LinkTable, row: Ints, space: Ints) -> tuple[LinkTable, Ints, Ints]:
        """Return a table whose column ``k`` is digit ``k``, homeless dimensions walked."""
        homeless = self._homeless(table, space)
        while homeless.any():
            again, table, homeless = _walked(table, homeless)
            row, space = row[again], space[again]
        shape = len(table), self.digits
        extent = np.ones(shape, np.int64, order="F")
        far_stride = np.zeros(shape, np.int64, order="F")
        digit, _ = self._digit(table.near_stride, space)
        for dim in range(table.dims):
            at = np.flatnonzero((table.extent[:, dim] > 1) & (table.near_stride[:, dim] > 0))
            extent[at, digit[at, dim]] = table.extent[at, dim]
            far_stride[at, digit[at, dim]] = table.far_stride[at, dim]
        placed = LinkTable(table.near, table.far, extent, rows_of(self.strides, space), far_stride)
        return placed, row, space

    def _settled(self, table: LinkTable, row: Ints, space: Ints) -> BoxTable:
        """Cut what carries, innermost digit first."""
        for digit in range(self.digits - 1):
            radix = self.radices[space, digit]
            start = table.near // self.strides[space, digit] % radix
            carries = start + table.extent[:, digit] > radix
            if carries.any():
                table, again = self._cut(table, digit, start, carries, radix)
                row, space = row[again], space[again]
        lo = table.near[:, None] // rows_of(self.strides, space)
        lo[:, :-1] %= rows_of(self.radices, space)
        return BoxTable(lo, lo + table.extent, table.far, table.far_stride, row)

    def _cut(
        self, table: LinkTable, digit: int, start: Ints, carries: Flags, radices: Ints
    ) -> tuple[LinkTable, Ints]:
        """Return the table with its carrying rows cut, and the row that each is of."""
        at = np.flatnonzero(carries)
        run, radix = table.take(at), radices[at]
        count = run.extent[:, digit]
        head: Ints = (radix - start[at]) % radix
        blocks: Ints = (count - head) // radix
        tail: Ints = count - head - blocks * radix
        stay = np.flatnonzero(~carries)
        parts = [(table.take(stay), stay)]
        none, once = np.zeros_like(head), np.ones_like(head)
        cuts: list[tuple[Ints, Ints, Ints]] = [
            (none, head, once),
            (head, radix, blocks),
            (head + blocks * radix, tail, once),
        ]
        for skip, length, repeat in cuts:
            kept = np.flatnonzero((length > 0) & (repeat > 0))
            part = _part(run.take(kept), digit, skip[kept], length[kept])
            again, part = _repeated(part, digit, repeat[kept])
            parts.append((part, at[kept][again]))
        return concatenated([part for part, _ in parts]), np.concatenate([of for _, of in parts])


def _bare_boxes(table: LinkTable) -> BoxTable:
    """Return runs, which are boxes of one digit as they stand."""
    lo = table.near[:, None]
    return BoxTable(lo, lo + table.extent, table.far, table.far_stride, np.arange(len(table)))


def _spaces(table: LinkTable, spaces: Ints | None) -> Ints:
    return np.zeros(len(table), np.int64) if spaces is None else spaces


def _chains(space: Ints, stride: Ints, extent: Ints, count: int) -> Ints:
    """Choose a chain for each space from the strides of its dimensions.

    The weight of a stride is the number of steps that walking it would cost; the heaviest is
    taken, whatever neither divides it nor is divided by it is dropped, and so on.
    """
    order, label = classes_of([space, stride])
    first = order[starts_of(label)]
    weight = np.bincount(label, extent[order].astype(float))
    space, stride = space[first], stride[first]
    order = np.lexsort((-stride, -weight, space))
    space, stride = space[order], stride[order]
    chosen = [np.ones(count, np.int64)]
    while len(space):
        lead = np.flatnonzero(np.diff(space, prepend=-1))
        taken = np.full(count, MAX_OFFSET)
        taken[space[lead]] = stride[lead]
        chosen.append(taken)
        other = taken[space]
        fits = (stride != other) & ((stride % other == 0) | (other % stride == 0))
        space, stride = space[fits], stride[fits]
    return np.sort(np.column_stack(chosen), axis=1)


def _part(run: LinkTable, digit: int, skip: Ints, length: Ints) -> LinkTable:
    """Return the part of runs along one digit that starts after ``skip`` steps."""
    extent = run.extent.copy(order="K")
    extent[:, digit] = length
    near = run.near + skip * run.near_stride[:, digit]
    far = run.far + skip * run.far_stride[:, digit]
    return LinkTable(near, far, extent, run.near_stride, run.far_stride)


def _repeated(table: LinkTable, digit: int, repeat: Ints) -> tuple[Ints, LinkTable]:
    """Give runs that fill ``repeat`` whole blocks of the next digit that digit too."""
    above = digit + 1
    jump = table.far_stride[:, digit] * table.extent[:, digit]
    many = repeat > 1
    free = many & (table.extent[:, above] == 1)
    extent, far_stride = table.extent.copy(order="K"), table.far_stride.copy(order="K")
    extent[free, above] = repeat[free]
    far_stride[free, above] = jump[free]
    table = LinkTable(table.near, table.far, extent, table.near_stride, far_stride)
    times = np.where(many & ~free, repeat, 1)
    again = np.repeat(np.arange(len(times)), times)
    if len(again) == len(times):
        return again, table
    steps = expanded(np.zeros_like(times), times)
    walked = table.take(again)
    near = walked.near + steps * walked.near_stride[:, above]
    far = walked.far + steps * jump[again]
    return again, LinkTable(near, far, walked.extent, walked.near_stride, walked.far_stride)


def _walked(table: LinkTable, homeless: Flags) -> tuple[Ints, LinkTable, Flags]:
    """Walk the first homeless dimension of each row that has one; tells whose each row is."""
    dim = homeless.argmax(axis=1)
    lines = np.arange(len(table))
    times = np.where(homeless[lines, dim], table.extent[lines, dim], 1)
    boxes = float(times.astype(float).sum())
    if boxes > MOST_BOXES:
        raise UnsupportedError(
            "the strides of these pieces have too little in common",
            expected=f"at most {MOST_BOXES} boxes",
            found=f"{boxes:.3g}",
        )
    again = np.repeat(lines, times)
    steps = expanded(np.zeros_like(times), times)
    walked = table.take(again)
    at, mine, stepping = dim[again], np.arange(len(again)), times[again] > 1
    near = walked.near + np.where(stepping, steps * walked.near_stride[mine, at], 0)
    far = walked.far + np.where(stepping, steps * walked.far_stride[mine, at], 0)
    walked.extent[stepping, at[stepping]] = 1
    left = rows_of(homeless, again)
    left[mine, at] = False
    return again, LinkTable(near, far, walked.extent, walked.near_stride, walked.far_stride), left
