"""Other cuts of the same pieces: along any dimension, in steps, and in pinwheels."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from reshard.geometry import AffinePiece, ParamAffineMap


def part(piece: AffinePiece, axis: int, start: int, count: int, step: int = 1) -> AffinePiece:
    """``count`` steps of one axis of a piece, ``step`` apart."""

    def put(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:axis], value, *values[axis + 1 :])

    to, of = piece.dest_strides[axis], piece.source_strides[axis]
    return replace(
        piece,
        shape=put(piece.shape, count),
        source_offset=piece.source_offset + start * of,
        dest_offset=piece.dest_offset + start * to,
        source_strides=put(piece.source_strides, of * step),
        dest_strides=put(piece.dest_strides, to * step),
    )


def in_two(rnd: Random, piece: AffinePiece) -> list[AffinePiece]:
    """A straight cut."""
    axis = rnd.choice([k for k, n in enumerate(piece.shape) if n > 1])
    at = rnd.randrange(1, piece.shape[axis])
    return [part(piece, axis, 0, at), part(piece, axis, at, piece.shape[axis] - at)]


def in_steps(rnd: Random, piece: AffinePiece) -> list[AffinePiece]:
    """Every second or third step of an axis."""
    axis = rnd.choice([k for k, n in enumerate(piece.shape) if n > 1])
    n, by = piece.shape[axis], rnd.choice([2, 3])
    return [part(piece, axis, k, (n - k + by - 1) // by, by) for k in range(min(by, n))]


def in_a_pinwheel(rnd: Random, piece: AffinePiece) -> list[AffinePiece]:
    """Four blocks around a fifth, which no straight cut takes apart."""
    long = [k for k, n in enumerate(piece.shape) if n > 2]
    if len(long) < 2:
        return in_two(rnd, piece)
    (a, high), (b, wide) = ((k, piece.shape[k]) for k in rnd.sample(long, 2))
    top, left = (sorted(rnd.sample(range(1, n), 2)) for n in (high, wide))

    def box(a0: int, a1: int, b0: int, b1: int) -> AffinePiece:
        return part(part(piece, a, a0, a1 - a0), b, b0, b1 - b0)

    return [
        box(0, top[0], 0, left[1]),
        box(top[0], high, 0, left[0]),
        box(top[1], high, left[0], wide),
        box(0, top[1], left[1], wide),
        box(top[0], top[1], left[0], left[1]),
    ]


def recut(rnd: Random, piece: AffinePiece, depth: int, *, straight: bool) -> list[AffinePiece]:
    """A piece cut again and again."""
    if not depth or max(piece.shape, default=1) < 2:
        return [piece]
    ways = [in_two, in_two] if straight else [in_two, in_steps, in_a_pinwheel]
    parts = rnd.choice(ways)(rnd, piece)
    return [one for each in parts for one in recut(rnd, each, depth - 1, straight=straight)]


def recut_map(rnd: Random, one: ParamAffineMap, depth: int, *, straight: bool) -> ParamAffineMap:
    """A map whose pieces are cut and listed in any order."""
    pieces = {}
    for rank, owned in one.pieces_by_rank.items():
        parts = [q for piece in owned for q in recut(rnd, piece, depth, straight=straight)]
        pieces[rank] = rnd.sample(parts, len(parts))
    return ParamAffineMap(one.logical_shape, one.shard_shapes, pieces)


def bands(rnd: Random, rows: int) -> ParamAffineMap:
    """Bands of the columns of a matrix side by side in one shard, as fused weights have them."""
    count, width = rnd.choice([1, 2, 3]), rnd.choice([8, 24])
    places = rnd.sample(range(2 * count), count)
    across = 2 * count * width
    pieces = [
        AffinePiece((rows, width), width * at, (across, 1), width * k, (count * width, 1), (0,))
        for k, at in enumerate(places)
    ]
    return ParamAffineMap((rows, across), {0: (rows, count * width)}, {0: pieces})
