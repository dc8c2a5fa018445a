"""Flat partitions against their definition: lay shards end to end in an index array, and cut it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard.layouts.flat import (
    FlatFragment,
    contiguous_partition,
    flat_offsets,
    per_parameter_length,
    per_parameter_partition,
)

NUMELS = st.lists(st.integers(0, 40), max_size=8)
PADDING = -1


def marked(numels: list[int], paddings: list[int]) -> np.ndarray:
    """A buffer of `shard * 1000 + element`, with -1 in the padding."""
    parts = []
    for index, numel in enumerate(numels):
        parts.append(index * 1000 + np.arange(numel))
        parts.append(np.full(paddings[index], PADDING))
    return np.concatenate([*parts, np.empty(0, dtype=int)]).astype(int)


def assert_fragments_are(partitions: list[np.ndarray], fragments: list[FlatFragment]) -> None:
    """Every fragment says what its partition holds there, and all elements are in one."""
    left = [partition.copy() for partition in partitions]
    for part in fragments:
        where = slice(part.partition_start, part.partition_start + part.numel)
        expected = part.index * 1000 + part.shard_start + np.arange(part.numel)
        assert (left[part.partition][where] == expected).all()
        left[part.partition][where] = PADDING
    assert all((partition == PADDING).all() for partition in left)


@given(NUMELS, st.integers(1, 6), st.data())
def test_contiguous_partition_is_the_cut_buffer(
    numels: list[int], count: int, data: st.DataObject
) -> None:
    paddings = data.draw(st.lists(st.integers(0, 4), min_size=len(numels), max_size=len(numels)))
    buffer = marked(numels, paddings)
    length = -(-len(buffer) // count) + data.draw(st.integers(0, 3)) or 1
    padded = np.concatenate([buffer, np.full(length * count - len(buffer), PADDING)])
    fragments = list(contiguous_partition(numels, length, paddings))
    assert_fragments_are(np.split(padded, count), fragments)


@given(NUMELS, st.integers(1, 6))
def test_per_parameter_partition_cuts_each_shard(numels: list[int], count: int) -> None:
    partitions: list[list[np.ndarray]] = [[] for _ in range(count)]
    for index, numel in enumerate(numels):
        block = -(-numel // count)
        whole = np.full(block * count, PADDING)
        whole[:numel] = index * 1000 + np.arange(numel)
        for rank in range(count):
            partitions[rank].append(whole[rank * block : (rank + 1) * block])
    joined = [np.concatenate([*blocks, np.empty(0, dtype=int)]) for blocks in partitions]
    assert_fragments_are(joined, list(per_parameter_partition(numels, count)))
    assert {len(partition) for partition in joined} == {per_parameter_length(numels, count)}


@given(NUMELS)
def test_offsets_are_the_running_sum(numels: list[int]) -> None:
    offsets, end = flat_offsets(numels)
    assert offsets == [sum(numels[:index]) for index in range(len(numels))]
    assert end == sum(numels)
