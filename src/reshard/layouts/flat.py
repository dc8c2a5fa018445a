"""Flat partitions: how ZeRO cuts a group of shards over data-parallel ranks.

Theory. ZeRO never cuts one parameter. It lays the (tensor-parallel) shards of a group end to end in
one flat buffer and cuts the buffer. So the part of a shard that a partition holds is a *flat range*
of that shard, and three numbers say all there is: where the range starts in the shard, where in the
partition, and how long it is (:class:`FlatFragment`). The geometry turns a flat range into at most
2N-1 pieces.

Two rules are in use.

*Contiguous* (ZeRO-1, ZeRO-2, BF16_Optimizer; :func:`contiguous_partition`). Shards follow each
other, each after the alignment padding of the one before; the buffer is padded to a multiple of the
number of partitions and cut into equal parts, whatever shard a cut falls into.

*Per parameter* (ZeRO-3; :func:`per_parameter_partition`). Every shard of `n` elements is cut by
itself into `W` blocks of `ceil(n / W)`, the last ones short or empty but stored at full length;
partition `r` is the `r`-th blocks of all shards, end to end.

Sources of the rules: `stage_1_and_2.py` and `stage3.py` of DeepSpeed 0.12 to 0.19, checked on real
checkpoints of 0.12.6, 0.14.5, 0.16.9, 0.18.9 and 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FlatFragment:
    """The part of one shard that one partition holds; all numbers in elements."""

    index: int
    """Position of the shard in its group."""
    partition: int
    """Which partition holds it."""
    shard_start: int
    """First element, in row-major order of the shard."""
    partition_start: int
    """Where that element lies in the partition."""
    numel: int
    """Length of the range, at least 1."""


def ceil_div(dividend: int, divisor: int) -> int:
    """`dividend / divisor`, rounded up.

    Examples
    --------
    >>> ceil_div(7, 2)
    4
    """
    return -(-dividend // divisor)


def flat_offsets(numels: Sequence[int], paddings: Sequence[int] = ()) -> tuple[list[int], int]:
    """Offsets of shards laid end to end, and the length of the whole.

    Parameters
    ----------
    numels
        Elements of each shard.
    paddings
        Elements of padding after each shard; empty means none.

    Returns
    -------
    offsets, length
        First element of every shard; end of the last shard with its padding.

    Examples
    --------
    >>> flat_offsets([5, 3], [3, 0])
    ([0, 8], 11)
    """
    offsets = []
    end = 0
    for index, numel in enumerate(numels):
        offsets.append(end)
        end += numel + (paddings[index] if paddings else 0)
    return offsets, end


def contiguous_partition(
    numels: Sequence[int], partition_numel: int, paddings: Sequence[int] = ()
) -> Iterator[FlatFragment]:
    """Fragments of shards laid end to end and cut every `partition_numel` elements.

    Parameters
    ----------
    numels
        Elements of each shard, in the order of the buffer.
    partition_numel
        Length of a partition in elements, tail padding included.
    paddings
        Elements of padding after each shard; empty means none.

    Yields
    ------
    FlatFragment
        In the order of the buffer.

    Examples
    --------
    >>> [(f.index, f.partition, f.shard_start, f.numel) for f in contiguous_partition([5, 3], 4)]
    [(0, 0, 0, 4), (0, 1, 4, 1), (1, 1, 0, 3)]
    """
    offsets, _ = flat_offsets(numels, paddings)
    for index, (offset, numel) in enumerate(zip(offsets, numels, strict=True)):
        start = offset
        while start < offset + numel:
            partition, inside = divmod(start, partition_numel)
            length = min(offset + numel - start, partition_numel - inside)
            yield FlatFragment(index, partition, start - offset, inside, length)
            start += length


def per_parameter_partition(numels: Sequence[int], partitions: int) -> Iterator[FlatFragment]:
    """Fragments of shards that are each cut into equal blocks, one a partition.

    Parameters
    ----------
    numels
        Elements of each shard, in the order of the buffer.
    partitions
        Number of partitions.

    Yields
    ------
    FlatFragment
        By shard, then by partition; empty blocks are left out.

    Examples
    --------
    >>> [
    ...     (f.index, f.partition, f.partition_start, f.numel)
    ...     for f in per_parameter_partition([5, 1], 2)
    ... ]
    [(0, 0, 0, 3), (0, 1, 0, 2), (1, 0, 3, 1)]
    """
    base = 0
    for index, numel in enumerate(numels):
        block = ceil_div(numel, partitions)
        for partition in range(partitions):
            start = partition * block
            length = min(block, numel - start)
            if length > 0:
                yield FlatFragment(index, partition, start, base, length)
        base += block


def per_parameter_length(numels: Sequence[int], partitions: int) -> int:
    """Length in elements of one partition under :func:`per_parameter_partition`.

    Examples
    --------
    >>> per_parameter_length([5, 1], 2)
    4
    """
    return sum(ceil_div(numel, partitions) for numel in numels)
