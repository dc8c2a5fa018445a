"""The rules by which DeepSpeed lays out a flat buffer, in plain integers.

Theory. How a buffer is cut once it is laid out is in :mod:`reshard.layouts.flat`. Here is what
comes before the cut: in which order the shards follow each other, how much padding stands between
and after them, and where a long group of ZeRO-3 is split into several buffers.

Sources: `stage_1_and_2.py` (`_round_robin_reorder`, `__init__`), `stage3.py`
(`_create_fp16_sub_groups`), `bf16_optimizer.py` (`_setup_for_real_optimizer`), DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from reshard.layouts.flat import ceil_div

ALIGNED_NBYTES = 16
"""Where ``parameter_alignment`` lets parameters start."""

TAIL_FACTOR = 2
"""A contiguous buffer is padded to a multiple of this many elements a partition (NCCL's demand)."""


def deal_order(count: int, ranks: int) -> list[int]:
    """Positions of parameters in the order in which they lie when dealt out to ranks in turn.

    Parameters
    ----------
    count
        Number of parameters.
    ranks
        Number of ranks; 1 leaves the order as it is.

    Examples
    --------
    >>> deal_order(5, 2)
    [0, 2, 4, 1, 3]
    """
    return [index for rank in range(ranks) for index in range(rank, count, ranks)]


def alignment_paddings(numels: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Elements of padding after each shard, so that the next one starts at 16 bytes.

    Parameters
    ----------
    numels
        Elements of the shards, in the order of the buffer.
    itemsize
        Bytes an element of the model weights.

    Examples
    --------
    >>> alignment_paddings([5, 8, 3], 2)
    (3, 0, 0)
    """
    step = ALIGNED_NBYTES // gcd(ALIGNED_NBYTES, itemsize)
    paddings = [-numel % step for numel in numels]
    if paddings:
        paddings[-1] = 0
    return tuple(paddings)


def partition_length(end: int, partitions: int) -> int:
    """Elements of a partition of a contiguous buffer whose last shard ends at ``end``.

    Examples
    --------
    >>> partition_length(5, 8)
    2
    """
    step = TAIL_FACTOR * partitions
    return ceil_div(end, step) * TAIL_FACTOR


def tail_padding(end: int, length: int, partition: int) -> int:
    """Elements at the end of a partition that lie behind the last shard.

    Examples
    --------
    >>> [tail_padding(5, 2, partition) for partition in range(4)]
    [0, 0, 1, 2]
    """
    return min(max((partition + 1) * length - end, 0), length)


def split_sub_groups(numels: Sequence[int], partitions: int, size: int) -> list[range]:
    """Where ZeRO-3 splits a group: ranges of positions, one a sub-group.

    A sub-group is closed by the parameter with which a rank's part of it reaches ``size``.

    Parameters
    ----------
    numels
        Elements of the shards.
    partitions
        Number of ranks that share each shard.
    size
        ``sub_group_size``, in elements a rank.

    Examples
    --------
    >>> split_sub_groups([4, 4, 4, 2], 2, 4)
    [range(0, 2), range(2, 4)]
    """
    blocks = [ceil_div(numel, partitions) for numel in numels]
    if size >= sum(blocks):
        return [range(len(blocks))]
    ranges = []
    first = filled = 0
    for index, block in enumerate(blocks):
        filled += block
        if filled >= size or index == len(blocks) - 1:
            ranges.append(range(first, index + 1))
            first, filled = index + 1, 0
    return ranges
