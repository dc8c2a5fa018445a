"""Moves: one strided copy, in elements, in the form that an executor can cut anywhere.

Theory. A move copies the elements ::

    target[target_offset + sum(i_k * target_strides[k])]
        = scale * source[source_offset + sum(i_k * source_strides[k])]     for 0 <= i_k < shape[k]

An executor works on blocks, which are ranges `[lo, hi)` of target elements, so it must cut a move
at any target offset. That is easy when the target offsets ascend as the index runs in row-major
order: then a range of offsets is a range of *ranks* (positions in that order), and a range of ranks
of an N-dimensional box is at most `2N - 1` boxes. :func:`ordered` brings any copy into moves of
that kind:

1. drop axes of extent 1, sort the others by target stride, descending;
2. merge neighbouring axes wherever both sides step as one axis would;
3. where an outer axis steps inside the reach of the inner ones (an interleaved target), unroll it.

Ordering costs a few microseconds a move and happens once a geometry, cutting (:func:`cut`) once a
block and move, in integer arithmetic alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """One strided copy from a holder's shard into a target shard, all in elements.

    Examples
    --------
    Columns 0 and 1 of a 2 x 4 matrix, stored densely:

    >>> Move((2, 2), 0, 0, (2, 1), 0, (4, 1)).target_stop
    6
    """

    shape: Ints
    """Extents; `()` is one element."""
    holder: int
    """Index of the holder in the list of its route."""
    source_offset: int
    source_strides: Ints
    """Where the elements lie in the holder's shard."""
    target_offset: int
    target_strides: Ints
    """Where they go in the target shard; offsets ascend with the row-major order of the index."""
    scale: float = 1.0
    """Factor that turns the stored value into the wanted one."""

    @property
    def numel(self) -> int:
        """Number of elements copied."""
        return prod(self.shape)

    @property
    def target_stop(self) -> int:
        """One past the last target element written."""
        return self.target_offset + _reach(self.shape, self.target_strides) + 1


def _reach(shape: Ints, strides: Ints) -> int:
    """Offset of the last element relative to the first."""
    return sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))


def _axes(move: Move) -> list[tuple[int, int, int]]:
    """`(extent, source stride, target stride)` of the axes that move, widest target step first."""
    axes = zip(move.shape, move.source_strides, move.target_strides, strict=True)
    return sorted((axis for axis in axes if axis[0] != 1), key=lambda axis: (-axis[2], axis[0]))


def _merge(axes: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merge an axis into its outer neighbour where both sides step as one axis would.

    >>> _merge([(2, 4, 4), (4, 1, 1)])
    [(8, 1, 1)]
    """
    merged: list[tuple[int, int, int]] = []
    for extent, source, target in axes:
        if merged:
            outer, outer_source, outer_target = merged[-1]
            if outer_source == extent * source and outer_target == extent * target:
                merged[-1] = (outer * extent, source, target)
                continue
        merged.append((extent, source, target))
    return merged


def ordered(move: Move) -> Iterator[Move]:
    """Rewrite a copy as moves whose target offsets ascend in row-major order.

    Parameters
    ----------
    move
        Any strided copy; its axes may come in any order.

    Yields
    ------
    Move
        Usually one; several where the target interleaves.

    Examples
    --------
    >>> [m.shape for m in ordered(Move((4, 1, 2), 0, 0, (2, 9, 1), 0, (2, 9, 1)))]
    [(8,)]
    """
    if 0 in move.shape:
        return
    axes = _merge(_axes(move))
    yield from _unrolled(move, axes, move.source_offset, move.target_offset)


def _unrolled(
    move: Move, axes: list[tuple[int, int, int]], source_offset: int, target_offset: int
) -> Iterator[Move]:
    shape = tuple(extent for extent, _, _ in axes)
    sources = tuple(source for _, source, _ in axes)
    targets = tuple(target for _, _, target in axes)
    inner = [_reach(shape[k + 1 :], targets[k + 1 :]) for k in range(len(axes))]
    bad = next((k for k, reach in enumerate(inner) if targets[k] <= reach), None)
    if bad is None:
        yield Move(shape, move.holder, source_offset, sources, target_offset, targets, move.scale)
        return
    rest = axes[:bad] + axes[bad + 1 :]
    for step in range(shape[bad]):
        yield from _unrolled(
            move, rest, source_offset + step * sources[bad], target_offset + step * targets[bad]
        )


def _rank_at(move: Move, offset: int) -> int:
    """How many elements of an ordered move have a target offset below ``offset``."""
    left = offset - move.target_offset
    rank, size = 0, move.numel
    if left <= 0:
        return 0
    for axis, (extent, stride) in enumerate(zip(move.shape, move.target_strides, strict=True)):
        size //= extent
        index = min(left // stride, extent - 1)
        left -= index * stride
        rank += index * size
        inner = _reach(move.shape[axis + 1 :], move.target_strides[axis + 1 :])
        if left > inner:
            return rank + size
    return rank + (left > 0)


def _boxes(shape: Ints, start: int, stop: int) -> Iterator[tuple[Ints, Ints]]:
    """Cover the row-major ranks `[start, stop)` of a box by `(first index, extents)` boxes.

    >>> list(_boxes((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if not shape:
        yield (), ()
        return
    size = prod(shape[1:])
    first, last = start // size, (stop - 1) // size
    if first == last:
        for index, extents in _boxes(shape[1:], start - first * size, stop - first * size):
            yield (first, *index), (1, *extents)
        return
    head, tail = start - first * size, stop - last * size
    full_first = first + (head > 0)
    full_stop = last + (tail == size)
    if head:
        for index, extents in _boxes(shape[1:], head, size):
            yield (first, *index), (1, *extents)
    if full_stop > full_first:
        yield (full_first, *(0,) * (len(shape) - 1)), (full_stop - full_first, *shape[1:])
    if full_stop == last:
        for index, extents in _boxes(shape[1:], 0, tail):
            yield (last, *index), (1, *extents)


def cut(move: Move, start: int, stop: int) -> Iterator[Move]:
    """The part of an ordered move that writes target elements `[start, stop)`.

    Parameters
    ----------
    move
        A move made by :func:`ordered`.
    start, stop
        Range of target offsets, in elements.

    Yields
    ------
    Move
        At most `2N - 1` ordered moves in ascending target order.

    Examples
    --------
    >>> columns = Move((2, 2), 0, 0, (2, 1), 0, (4, 1))
    >>> [(m.shape, m.source_offset, m.target_offset) for m in cut(columns, 1, 5)]
    [((), 1, 1), ((), 2, 4)]
    """
    if move.target_strides == (1,):
        low = max(start - move.target_offset, 0)
        high = min(stop - move.target_offset, move.shape[0])
    else:
        low, high = _rank_at(move, start), _rank_at(move, stop)
    if low >= high:
        return
    if high - low == move.numel:
        yield move
        return
    if len(move.shape) == 1:
        yield _line(move, low, high)
        return
    for index, extents in _boxes(move.shape, low, high):
        yield _part(move, index, extents)


def _line(move: Move, low: int, high: int) -> Move:
    (source,), (target,) = move.source_strides, move.target_strides
    return Move(
        (high - low,) if high - low > 1 else (),
        move.holder,
        move.source_offset + low * source,
        (source,) if high - low > 1 else (),
        move.target_offset + low * target,
        (target,) if high - low > 1 else (),
        move.scale,
    )


def _part(move: Move, index: Ints, extents: Ints) -> Move:
    steps = zip(index, move.source_strides, move.target_strides, strict=True)
    source_offset, target_offset = move.source_offset, move.target_offset
    for place, source, target in steps:
        source_offset += place * source
        target_offset += place * target
    kept = [k for k, extent in enumerate(extents) if extent != 1]
    return Move(
        tuple(extents[k] for k in kept),
        move.holder,
        source_offset,
        tuple(move.source_strides[k] for k in kept),
        target_offset,
        tuple(move.target_strides[k] for k in kept),
        move.scale,
    )
