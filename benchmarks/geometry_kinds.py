"""Pairs of maps of every kind that a planner meets, with as many pieces a side as one asks for.

Theory. What costs depends on what a layout looks like: whether pieces lie one after the other or
interleave, whether the copies fold, how many copies a piece is cut into. Every kind here is held
by :data:`RANKS` ranks, whose shards are flat: each has its pieces one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from reshard.geometry import AffinePiece, LinkTable, ParamAffineMap, PieceTable, nest

RANKS = 8
Ints = NDArray[np.int64]
Pair = tuple[ParamAffineMap, ParamAffineMap]
"""Target and source."""


def placed(offset: Ints, extent: Ints, strides: Ints, rank: Ints) -> ParamAffineMap:
    """Blocks of a tensor, each laid row-major behind those that its rank already has."""
    size = extent.prod(axis=1)
    order = np.argsort(rank, kind="stable")
    sizes = np.bincount(rank, size, RANKS).astype(np.int64)
    dest = np.empty(len(rank), np.int64)
    dest[order] = np.cumsum(size[order]) - size[order]
    dest -= (np.cumsum(sizes) - sizes)[rank]
    inner = np.cumprod(extent[:, :0:-1], axis=1)[:, ::-1]
    steps = np.concatenate([inner, np.ones((len(rank), 1), np.int64)], axis=1)
    table = PieceTable(
        rank.astype(np.int64),
        np.arange(len(rank)),
        LinkTable(offset, dest, extent, strides, steps).normalised(),
        np.ones(len(rank)),
        rank.astype(np.int64),
        tuple((r,) for r in range(RANKS)),
    )
    shapes = {r: (int(sizes[r]),) for r in range(RANKS)}
    return ParamAffineMap.from_table((int(size.sum()),), shapes, table)


def runs(start: Ints, length: Ints, rank: Ints) -> ParamAffineMap:
    """Runs of a vector."""
    return placed(start, length[:, None], np.ones((len(start), 1), np.int64), rank)


def cuts(total: int, count: int, seed: int) -> Ints:
    """Borders of ``count`` parts of random sizes."""
    random = np.random.default_rng(seed)
    places = np.unique(random.integers(1, total, count + count // 4 + 8))
    inner = np.sort(random.choice(places, count - 1, replace=False))
    return np.concatenate([[0], inner, [total]])


def random_ranks(count: int, seed: int) -> Ints:
    """A rank for each piece."""
    return np.random.default_rng(seed).integers(0, RANKS, count)


def in_turn(count: int) -> Ints:
    """Ranks dealt out one after the other."""
    return np.arange(count) % RANKS


def contiguous(count: int) -> Ints:
    """Ranks that each take the next pieces."""
    return np.arange(count) * RANKS // count


def scattered(count: int) -> Pair:
    """Runs of random sizes dealt out at random: nothing folds."""

    def one(seed: int) -> ParamAffineMap:
        borders = cuts(64 * count, count, seed)
        return runs(borders[:-1], np.diff(borders), random_ranks(count, seed))

    return one(1), one(2)


def cyclic_blocks(count: int) -> Pair:
    """Equal blocks dealt out in turn, to contiguous ones: all folds."""
    start, length = np.arange(count) * 64, np.full(count, 64)
    return runs(start, length, contiguous(count)), runs(start, length, in_turn(count))


def blocks(rows: Ints, columns: Ints, rank: Ints) -> ParamAffineMap:
    """Blocks of a matrix between borders of rows and of columns."""
    width, across = int(columns[-1]), len(columns) - 1
    extent = np.stack(
        [np.repeat(np.diff(rows), across), np.tile(np.diff(columns), len(rows) - 1)], axis=1
    )
    offset = np.repeat(rows[:-1], across) * width + np.tile(columns[:-1], len(rows) - 1)
    return placed(offset, extent, np.tile([width, 1], (len(offset), 1)), rank)


def even_grids(count: int) -> Pair:
    """Square blocks to blocks twice as high and half as wide, both dealt out at random."""
    side = isqrt(count) // 2 * 2

    def one(down: int, across: int, seed: int) -> ParamAffineMap:
        edges = [np.arange(n + 1) * (2 * side // n) for n in (down, across)]
        return blocks(*edges, random_ranks(down * across, seed))

    return one(side // 2, side * 2, 1), one(side, side, 2)


def uneven_grids(count: int) -> Pair:
    """Blocks of random sizes to other such blocks: four copies a block."""
    side = isqrt(count)

    def one(seed: int) -> ParamAffineMap:
        edges = [cuts(40 * side, side, seed + axis) for axis in (0, 9)]
        return blocks(*edges, random_ranks(side * side, seed))

    return one(1), one(2)


def cyclic_grids(count: int) -> Pair:
    """A grid of blocks dealt out in turn, to the same in bands of rows."""
    side = isqrt(count)
    edges = np.arange(side + 1) * 40
    return blocks(edges, edges, contiguous(side**2)), blocks(edges, edges, in_turn(side**2))


def interleaved(count: int) -> Pair:
    """Sixteen steps interleaved in every 1024 elements, to runs: 16 copies a piece, all fold."""
    number = np.arange(count)
    offset = number // 16 * 1024 + number % 16
    stepped = placed(offset, np.full((count, 1), 64), np.full((count, 1), 16), in_turn(count))
    return runs(number * 64, np.full(count, 64), contiguous(count)), stepped


def heads(count: int) -> Pair:
    """Columns of 128 for each head, dealt out in turn, to contiguous ones."""
    rows, columns = np.array([0, 64]), np.arange(count + 1) * 128
    return blocks(rows, columns, contiguous(count)), blocks(rows, columns, in_turn(count))


def fragments(count: int) -> Pair:
    """Flat ranges of the shards of a column split, to those of another split."""

    def one(tp: int, seed: int) -> ParamAffineMap:
        height, width = count // 4, 4096
        cut = width // tp
        parts = {
            r: [AffinePiece((height, cut), cut * r, (width, 1), 0, (cut, 1), (r,))]
            for r in range(tp)
        }
        outer = ParamAffineMap((height, width), dict.fromkeys(parts, (height, cut)), parts)
        # Every range is seen to make up to three pieces.
        each, inner = count // (2 * tp), {}
        for r in range(tp):
            borders = cuts(height * cut, each, seed + r)
            sizes = np.diff(borders)
            rank = np.arange(each) % (RANKS // tp) + r * (RANKS // tp)
            inner[r] = _dealt(borders[:-1], sizes, rank, height * cut)
        return nest(outer, inner)

    return one(2, 1), one(4, 20)


def _dealt(start: Ints, length: Ints, rank: Ints, total: int) -> ParamAffineMap:
    """Runs of one shard over the ranks that share it."""
    whole = runs(start, length, rank)
    held = {r: whole.shard_shapes[r] for r in sorted(set(rank.tolist()))}
    return ParamAffineMap.from_table((total,), held, whole.table)


KINDS: dict[str, Callable[[int], Pair]] = {
    "scattered runs": scattered,
    "cyclic blocks → contiguous": cyclic_blocks,
    "even grids of blocks": even_grids,
    "uneven grids of blocks": uneven_grids,
    "cyclic grid → bands": cyclic_grids,
    "interleaved steps → runs": interleaved,
    "cyclic heads of columns": heads,
    "flat ranges of column splits": fragments,
}
"""All kinds, by name."""
