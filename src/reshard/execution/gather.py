"""Gathering: the bytes of one block of a target shard, out of the source files.

Theory. A block is a range `[start, stop)` of elements of a target shard. :class:`MoveIndex` finds
the moves that write into it, :func:`~reshard.planning.moves.cut` cuts them to it, and what is left
are strided boxes, each of them read in the cheapest of three ways:

* *contiguous on both sides*: one positional read, from the file straight into the block;
* *dense in the source* (on average a gap costs less to read than another system call): the covering
  span is read into scratch, in pieces that fit, and scattered from there by one strided copy;
* *sparse in the source*: one index of the widest axis at a time, each again in the cheapest way.

A column split is of the second kind with no gap at all, so each of its source bytes is read once.
Nothing here makes a Python object per element, and no buffer grows with the tensor.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Protocol

import numpy as np

from reshard.planning.moves import cut

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reshard.formats.dtypes import DType
    from reshard.planning.moves import Move
    from reshard.planning.plan import Place

CHEAP_GAP_NBYTES = 8192
"""Bytes that cost about as much to read as one more system call."""

RAW = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""Types to copy elements as, by their size: copying does not look at the bits."""

Axis = tuple[int, int, int]
"""`(extent, source stride, target stride)`, strides in bytes."""


class Reader(Protocol):
    """What a gatherer reads from."""

    def read_into(self, source: int, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of file ``source`` from ``offset`` on."""
        ...


class MoveIndex:
    """The moves of a route, found by target offset.

    Parameters
    ----------
    moves
        Ordered moves, ascending by target offset; their extents may interleave.
    """

    def __init__(self, moves: Sequence[Move]) -> None:
        self.moves = tuple(moves)
        self._starts = [move.target_offset for move in self.moves]
        self._stops = list(accumulate((move.target_stop for move in self.moves), max))

    def within(self, start: int, stop: int) -> Iterator[Move]:
        """The parts of all moves that write target elements `[start, stop)`."""
        first = bisect_right(self._stops, start)
        last = bisect_left(self._starts, stop)
        for move in self.moves[first:last]:
            yield from cut(move, start, stop)


class Gatherer:
    """Fills blocks from source files.

    Parameters
    ----------
    reader
        The source files.
    scratch
        Room for source spans; whatever its size, every box can be read.
    """

    def __init__(self, reader: Reader, scratch: memoryview) -> None:
        self._reader = reader
        self._scratch = scratch

    def with_scratch(self, scratch: memoryview) -> Gatherer:
        """A gatherer of the same files with other room."""
        return Gatherer(self._reader, scratch)

    def gather(
        self,
        moves: Iterator[Move],
        places: Sequence[Place],
        dtype: DType,
        start: int,
        out: memoryview,
    ) -> None:
        """Carry out moves into a block.

        Parameters
        ----------
        moves
            Moves cut to the block.
        places
            Where the shard of each holder starts.
        dtype
            Element type.
        start
            Target element at which the block begins.
        out
            The block.
        """
        for move in moves:
            self.read(move, places[move.holder], dtype, start, out)

    def read(self, move: Move, place: Place, dtype: DType, start: int, out: memoryview) -> None:
        """Carry out one move into a block (see :meth:`gather`)."""
        self._copy(move, place, dtype.itemsize, start, out)
        if move.scale != 1.0:
            _multiply(strided(move, dtype.numpy(), start, out), move.scale)

    def _copy(self, move: Move, place: Place, itemsize: int, start: int, out: memoryview) -> None:
        at = place.offset + move.source_offset * itemsize
        to = (move.target_offset - start) * itemsize
        if not move.shape:
            self._reader.read_into(place.source, at, out[to : to + itemsize])
        elif move.source_strides == (1,) == move.target_strides:
            stop = to + move.shape[0] * itemsize
            self._reader.read_into(place.source, at, out[to:stop])
        else:
            axes = [
                (extent, source * itemsize, target * itemsize)
                for extent, source, target in zip(
                    move.shape, move.source_strides, move.target_strides, strict=True
                )
            ]
            _Box(self._reader, self._scratch, place.source, itemsize, out).read(axes, at, to)


def strided(
    move: Move, dtype: np.dtype[np.generic], start: int, block: memoryview
) -> NDArray[np.generic]:
    """The elements of a block that a move writes, as a view.

    Parameters
    ----------
    move
        A move cut to the block.
    dtype
        Element type.
    start
        Target element at which the block begins.
    block
        The block.
    """
    strides = tuple(stride * dtype.itemsize for stride in move.target_strides)
    first = (move.target_offset - start) * dtype.itemsize
    return np.ndarray(move.shape, dtype, block, first, strides)


def _multiply(values: NDArray[np.generic], scale: float) -> None:
    """Multiply in place, in double or single precision as torch does, rounding once."""
    wide = np.float64 if values.dtype == np.float64 else np.float32
    np.multiply(values, wide(scale), out=values, dtype=wide, casting="unsafe")


class _Box:
    """Reads the strided boxes of one move."""

    __slots__ = ("_itemsize", "_out", "_reader", "_scratch", "_source")

    def __init__(
        self, reader: Reader, scratch: memoryview, source: int, itemsize: int, out: memoryview
    ) -> None:
        self._reader = reader
        self._scratch = scratch
        self._source = source
        self._itemsize = itemsize
        self._out = out

    def read(self, axes: list[Axis], at: int, to: int) -> None:
        """Read a box whose first element is byte ``at`` of the file and ``to`` of the block."""
        item = self._itemsize
        if not axes or axes == [(axes[0][0], item, item)]:
            nbytes = axes[0][0] * item if axes else item
            self._reader.read_into(self._source, at, self._out[to : to + nbytes])
            return
        span = _span(axes, item)
        dense = span <= CHEAP_GAP_NBYTES * _runs(axes, item)
        if dense and span <= len(self._scratch):
            self._scatter(axes, at, to, span)
            return
        wide = max(range(len(axes)), key=lambda k: axes[k][1])
        self._split(axes, wide, at, to, dense=dense)

    def _scatter(self, axes: list[Axis], at: int, to: int, span: int) -> None:
        self._reader.read_into(self._source, at, self._scratch[:span])
        shape, sources, targets = zip(*axes, strict=True)
        raw = RAW[self._itemsize]
        read = np.ndarray(shape, raw, self._scratch, 0, sources)
        np.copyto(np.ndarray(shape, raw, self._out, to, targets), read)

    def _split(self, axes: list[Axis], wide: int, at: int, to: int, *, dense: bool) -> None:
        extent, source, target = axes[wide]
        rest = axes[:wide] + axes[wide + 1 :]
        room = len(self._scratch) - _span(rest, self._itemsize)
        chunk = room // source + 1 if dense and room > 0 else 1
        for first in range(0, extent, chunk):
            count = min(chunk, extent - first)
            cut_axis = [] if count == 1 else [(count, source, target)]
            part = [*axes[:wide], *cut_axis, *axes[wide + 1 :]]
            self.read(part, at + first * source, to + first * target)


def _span(axes: list[Axis], itemsize: int) -> int:
    """Bytes from the first to the last source byte of a box."""
    return sum((extent - 1) * source for extent, source, _ in axes) + itemsize


def _runs(axes: list[Axis], itemsize: int) -> int:
    """Number of source runs that are contiguous."""
    return prod(extent for extent, source, _ in axes if source != itemsize)
