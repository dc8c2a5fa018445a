"""What compose refuses by itself, what it keeps in memory, and how many pieces folding leaves."""

from __future__ import annotations

import random

import numpy as np
import pytest

from reshard.errors import InvalidMapError
from reshard.geometry import AffinePiece, ParamAffineMap, compose, cut_flat_range, nest
from reshard.geometry.composition import KEPT
from reshard.geometry.kept import LEAST
from reshard.layouts.builders import block_gather_map, contiguous_split_map, replicated_map


def rows(first: int, rank: int) -> AffinePiece:
    return AffinePiece((4, 8), 8 * first, (8, 1), 0, (8, 1), (rank,))


LIE = ParamAffineMap((8, 8), {0: (4, 8), 1: (4, 8)}, {r: [rows(0, r)] for r in (0, 1)})
"""Both ranks hold the upper half, each says that it alone does; nobody holds the lower one."""


def test_a_gap_and_an_overlap_that_cancel_are_refused() -> None:
    whole = replicated_map((8, 8), 1)
    for target, source, side in ((whole, LIE, "source"), (LIE, whole, "target")):
        with pytest.raises(InvalidMapError, match=rf"the {side} map is not valid.*P5") as caught:
            compose(target, source, partial=True)
        assert caught.value.broken == "P5"


def test_a_map_is_proved_once() -> None:
    whole = replicated_map((8, 8), 2)
    assert not whole._proved
    compose(replicated_map((8, 8), 1), whole)
    assert whole._proved == {True}
    compose(whole, replicated_map((8, 8), 1))
    assert whole._proved == {True, False}


def test_a_target_that_has_not_all_is_refused_unless_a_part_is_meant() -> None:
    """Its shard is full, of elements that it holds twice; the others are nowhere."""
    half = [AffinePiece((4,), 0, (1,), at, (1,), (0,)) for at in (0, 4)]
    twice = ParamAffineMap((8,), {0: (8,)}, {0: half})
    whole = replicated_map((8,), 1)
    with pytest.raises(InvalidMapError, match=r"the target map is not valid.*P1"):
        compose(twice, whole)
    assert compose(twice, whole, partial=True).numel == 8


def test_what_is_kept_is_bounded_in_bytes_and_can_be_forgotten() -> None:
    KEPT.clear()
    rng = np.random.default_rng(0)
    for _ in range(30):
        lengths = rng.integers(1, 9, 2000).tolist()
        scattered = contiguous_split_map((sum(lengths),), lengths, 0)
        compose(replicated_map((sum(lengths),), 1), scattered)
        assert KEPT.nbytes <= 16 << 20
    assert KEPT.nbytes > 10 * LEAST
    KEPT.clear()
    assert KEPT.nbytes == 0


# ----------------------------------------------------------------------- folding


def shuffled(shape: tuple[int, int], block: int, tp: int, dp: int) -> ParamAffineMap:
    """Columns in shuffled blocks over tensor ranks, each shard flat over data ranks."""
    ids = {rank: list(range(rank, shape[1] // block, tp)) for rank in range(tp)}
    for rank, listed in ids.items():
        random.Random(rank).shuffle(listed)
    outer = block_gather_map(shape, ids, block, 1)
    inner = {}
    for rank in range(tp):
        size = int(np.prod(outer.shard_shapes[rank]))
        bounds = [size * part // dp + 7 * (0 < part < dp) for part in range(dp + 1)]
        holders = {rank * dp + part: (bounds[part], bounds[part + 1]) for part in range(dp)}
        inner[rank] = ParamAffineMap(
            (size,),
            {holder: (stop - start,) for holder, (start, stop) in holders.items()},
            {
                holder: [AffinePiece((stop - start,), start, (1,), 0, (1,), (holder,))]
                for holder, (start, stop) in holders.items()
            },
        )
    return nest(outer, inner)


@pytest.mark.parametrize("height", [64, 256, 4096])
def test_fragments_of_shuffled_blocks_do_not_grow_with_the_rows(height: int) -> None:
    found = shuffled((height, 1792), 16, 8, 8)
    assert len(found.table) <= 64 * (2 * 14 + 4)
    found.validate()


@pytest.mark.parametrize("height", [8, 32, 128, 512])
def test_a_flat_range_of_gathered_columns_folds_to_its_blocks(height: int) -> None:
    one = block_gather_map((height, 40), {0: [3, 0, 4, 2, 1]}, 8, 1)
    parts = [p for q in one.pieces_by_rank[0] for p in cut_flat_range(q, 3, one.numel - 3)]
    folded = ParamAffineMap((height, 40), {0: (one.numel - 6,)}, {0: parts}).canonical()
    assert len(folded.table) <= len(parts) == 7
