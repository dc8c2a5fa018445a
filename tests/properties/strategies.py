"""Random valid maps that use everything an affine piece can express.

A shard is made of random strided views of F (steps, transposes, diagonals, repetitions, 0
dimensions, empty views), each written to random strides of the shard, beside or interleaved with
the others. Locations come from the dense oracle; a view whose elements have different holders is
cut until its parts do not.
"""

from __future__ import annotations

from math import prod
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from reshard.geometry import AffinePiece, ParamAffineMap

from . import dense_oracle as dense

SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
randoms = st.randoms(use_true_random=False)
SCALES = (1.0, 1.0, 1.0, 0.5, 0.25, -2.0)


def shape_of(rnd: Random, total: int) -> tuple[int, ...]:
    """A shape of ``total`` elements with 0 to 4 dimensions."""
    dims = []
    while total > 1 and len(dims) < 3:
        divisors = [d for d in range(1, total + 1) if total % d == 0]
        dims.append(rnd.choice(divisors))
        total //= dims[-1]
    if total > 1 or (dims and rnd.random() < 0.2):
        dims.append(total)
    return tuple(dims)


def a_view(rnd: Random, total: int):
    """A random strided view of ``total`` elements: shape, offset, strides."""
    offset = rnd.randrange(total)
    shape, strides = [], []
    room = total - 1 - offset
    for _ in range(rnd.randrange(4)):
        stride = rnd.choice([0, 1, 1, 2, 3, 4, 6, 8, rnd.randrange(1, 13)])
        stride = stride if stride or rnd.random() < 0.3 else 1
        most = room // stride if stride else 2
        n = rnd.randint(1, min(6, most) + 1)
        shape.append(n)
        strides.append(stride)
        room -= (n - 1) * stride
    return tuple(shape), offset, tuple(strides)


def a_place(rnd: Random, shapes):
    """Dest offset and strides for views of given shapes in one shard, and the shard's size."""
    places, cursor, index = [], 0, 0
    while index < len(shapes):
        shape = shapes[index]
        alike = index + 1 < len(shapes) and shapes[index + 1] == shape
        width = 2 if alike and rnd.random() < 0.7 else 1
        order = list(range(len(shape)))
        rnd.shuffle(order)
        strides, step = [0] * len(shape), width
        for axis in order:
            strides[axis] = step
            step *= shape[axis]
        for k in range(width):
            places.append((cursor + k, tuple(strides)))
        cursor += width * prod(shape)
        index += width
    return places, cursor


def homogeneous(piece: AffinePiece, held):
    """Cut a piece until all elements of each part have the same holders."""
    kinds = {frozenset(held[s]) for s, _ in dense.elements(piece)}
    if len(kinds) <= 1:
        return [piece.held_by(sorted(kinds.pop()) if kinds else piece.locations)]
    axis = max(range(len(piece.shape)), key=lambda k: piece.shape[k])
    return [
        part for half in halves(piece, axis, piece.shape[axis] // 2)
        for part in homogeneous(half, held)
    ]


def halves(piece: AffinePiece, axis: int, at: int):
    """Cut a piece in two along an axis."""
    parts = []
    for start, n in ((0, at), (at, piece.shape[axis] - at)):
        parts.append(
            AffinePiece(
                (*piece.shape[:axis], n, *piece.shape[axis + 1 :]),
                piece.source_offset + start * piece.source_strides[axis],
                piece.source_strides,
                piece.dest_offset + start * piece.dest_strides[axis],
                piece.dest_strides,
                piece.locations,
                piece.scale,
            )
        )
    return parts


def recut(rnd: Random, one: ParamAffineMap, cuts: int = 6) -> ParamAffineMap:
    """The same relation, cut and ordered in another way."""
    pieces = {}
    for rank, owned in one.pieces_by_rank.items():
        listed = list(owned)
        for _ in range(rnd.randrange(cuts)):
            index = rnd.randrange(len(listed)) if listed else 0
            wide = [k for k, n in enumerate(listed[index].shape) if n > 1] if listed else []
            if wide:
                piece = listed.pop(index)
                axis = rnd.choice(wide)
                listed += halves(piece, axis, rnd.randrange(1, piece.shape[axis]))
        rnd.shuffle(listed)
        pieces[rank] = listed
    return ParamAffineMap(one.logical_shape, one.shard_shapes, pieces)


def regular_views(rnd: Random, shape):
    """Views as layouts make them: boxes of the logical shape, stepped, transposed."""
    offset, dims, step = 0, [], 1
    for extent in reversed(shape):
        lo = rnd.randrange(extent)
        by = rnd.choice([1, 1, 1, 2])
        n = rnd.randint(1, (extent - lo + by - 1) // by)
        dims.append((n, by * step))
        offset += lo * step
        step *= extent
    rnd.shuffle(dims)
    return tuple(n for n, _ in dims), offset, tuple(s for _, s in dims)


def a_map(rnd: Random, total: int, ranks: int, *, scaled=False, regular=None) -> ParamAffineMap:
    """A valid map of ``total`` elements over ``ranks`` ranks, the last of which fills the holes."""
    regular = rnd.random() < 0.5 if regular is None else regular
    logical = shape_of(rnd, total)
    views = {}
    for rank in range(ranks):
        count = rnd.randrange(4)
        if rank and views[rank - 1] and rnd.random() < 0.3:
            views[rank] = list(views[rank - 1])
            continue
        views[rank] = [
            regular_views(rnd, logical) if regular else a_view(rnd, total) for _ in range(count)
        ]
        views[rank] += views[rank][-1:] * (rnd.random() < 0.1)
    covered = {s for owned in views.values() for view in owned for s in dense.offsets(*view)}
    for hole in dense.ranges(set(range(total)) - covered):
        views[ranks - 1].append(((len(hole),), hole.start, (1,)))
    factor = scales_of(rnd, views, total) if scaled else [1.0] * total
    pieces, shapes = {}, {}
    for rank, owned in views.items():
        places, room = a_place(rnd, [shape for shape, _, _ in owned])
        pieces[rank] = [
            AffinePiece(shape, offset, strides, at, to, [rank], factor[offset])
            for (shape, offset, strides), (at, to) in zip(owned, places, strict=True)
        ]
        shapes[rank] = shape_of(rnd, room) if room else (0,)
    held = dense.holders(ParamAffineMap(logical, shapes, pieces))
    exact = {
        rank: [part for piece in owned for part in homogeneous(piece, held)]
        for rank, owned in pieces.items()
    }
    return ParamAffineMap(logical, shapes, exact)


def scales_of(rnd: Random, views, total):
    """One scale for each element, the same within a view and within all views it touches."""
    group = list(range(total))
    for owned in views.values():
        for view in owned:
            touched = {group[s] for s in dense.offsets(*view)}
            group = [min(touched) if g in touched else g for g in group]
    chosen = {g: rnd.choice(SCALES) for g in sorted(set(group))}
    return [chosen[g] for g in group]
