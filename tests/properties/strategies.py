"""Random valid maps that use everything an affine piece can express.

A shard is made of random strided views of F (steps, transposes, diagonals, repetitions, 0
dimensions, empty views), each written to random strides of the shard, beside or interleaved with
the others. Locations come from the dense oracle; a view whose elements have different holders is
cut until its parts do not, so replicas are cut at other borders on each rank.

A case is a few small numbers and a seed: it is cheap to draw, and shrinks by its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from reshard.geometry import AffinePiece, ParamAffineMap
from tests.conftest import SEARCH
from tests.properties import dense_oracle as dense

View = tuple[tuple[int, ...], int, tuple[int, ...]]
"""Shape, offset and strides."""


def examples(usual: int) -> int:
    """As many examples as usual, or that many times HYPOTHESIS_SEARCH when that is set."""
    return usual * max(SEARCH, 1)


SETTINGS = settings(
    max_examples=examples(60),
    deadline=None,
    derandomize=not SEARCH,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SCALES = (1.0, 1.0, 1.0, 0.5, 0.25, -2.0)


@dataclass(frozen=True)
class Case:
    """A logical tensor and some ranks; maps of it are drawn from the seed."""

    total: int
    ranks: int
    seed: int

    def random(self, name: str = "") -> Random:
        """A source of random numbers for one purpose."""
        return Random(f"{self}{name}")

    def map(self, name: str = "", *, scaled: bool = False) -> ParamAffineMap:
        """One of the maps of this case, by name."""
        return a_map(self.random(name), self.total, self.ranks, scaled=scaled)

    def window(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """A dim, start and length inside a shape of at least one dimension."""
        rnd = self.random("window")
        dim = rnd.randrange(len(shape))
        start = rnd.randrange(shape[dim] + 1)
        return dim, start, rnd.randint(0, shape[dim] - start)


cases: st.SearchStrategy[Case] = st.builds(
    Case, total=st.integers(1, 48), ranks=st.integers(1, 4), seed=st.integers(0, 2**20)
)
"""A few numbers from which everything else follows."""


def shape_of(rnd: Random, total: int) -> tuple[int, ...]:
    """A shape of ``total`` elements with 0 to 4 dimensions."""
    dims: list[int] = []
    while total > 1 and len(dims) < 3:
        divisors = [d for d in range(1, total + 1) if total % d == 0]
        dims.append(rnd.choice(divisors))
        total //= dims[-1]
    if total > 1 or (dims and rnd.random() < 0.2):
        dims.append(total)
    return tuple(dims)


def a_view(rnd: Random, total: int) -> View:
    """A random strided view of ``total`` elements, now and then an empty one."""
    offset = rnd.randrange(total)
    shape: list[int] = []
    strides: list[int] = []
    room = total - 1 - offset
    for _ in range(rnd.randrange(4)):
        stride = rnd.choice([0, 1, 1, 2, 3, 4, 6, 8, rnd.randrange(1, 13)])
        stride = stride if stride or rnd.random() < 0.3 else 1
        most = room // stride if stride else 2
        n = rnd.randint(1, min(6, most) + 1)
        shape.append(n)
        strides.append(stride)
        room -= (n - 1) * stride
    if shape and rnd.random() < 0.1:
        shape[rnd.randrange(len(shape))] = 0
    return tuple(shape), offset, tuple(strides)


def a_box(rnd: Random, shape: Sequence[int]) -> View:
    """A view as layouts make them: a box of the logical shape, stepped, transposed."""
    offset, step = 0, 1
    dims: list[tuple[int, int]] = []
    for extent in reversed(shape):
        lo = rnd.randrange(extent)
        by = rnd.choice([1, 1, 1, 2])
        n = rnd.randint(1, (extent - lo + by - 1) // by)
        dims.append((n, by * step))
        offset += lo * step
        step *= extent
    if rnd.random() < 0.5:
        rnd.shuffle(dims)
    else:
        dims.reverse()
    return tuple(n for n, _ in dims), offset, tuple(s for _, s in dims)


def places_for(
    rnd: Random, shapes: Sequence[tuple[int, ...]]
) -> tuple[list[tuple[int, tuple[int, ...]]], int]:
    """Dest offset and strides for views of given shapes in one shard, and the shard's size."""
    places: list[tuple[int, tuple[int, ...]]] = []
    cursor, index = 0, 0
    while index < len(shapes):
        shape = shapes[index]
        alike = index + 1 < len(shapes) and shapes[index + 1] == shape
        width = 2 if alike and rnd.random() < 0.7 else 1
        order = list(range(len(shape)))
        if rnd.random() < 0.5:
            rnd.shuffle(order)
        else:
            order.reverse()
        strides, step = [0] * len(shape), width
        for axis in order:
            strides[axis] = step
            step *= shape[axis]
        places += [(cursor + k, tuple(strides)) for k in range(width)]
        cursor += width * prod(shape)
        index += width
    return places, cursor


def a_map(rnd: Random, total: int, ranks: int, *, scaled: bool = False) -> ParamAffineMap:
    """A valid map of ``total`` elements over ``ranks`` ranks, the last of which fills the holes."""
    logical = shape_of(rnd, total)
    views = views_of(rnd, logical, total, ranks)
    factor = scales_of(rnd, views, total) if scaled else [1.0] * total
    pieces: dict[int, list[AffinePiece]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for rank, owned in views.items():
        places, room = places_for(rnd, [shape for shape, _, _ in owned])
        pieces[rank] = [
            AffinePiece(shape, offset, strides, at, to, (rank,), factor[offset])
            for (shape, offset, strides), (at, to) in zip(owned, places, strict=True)
        ]
        shapes[rank] = shape_of(rnd, room) if room else (0,)
    held = dense.holders(ParamAffineMap(logical, shapes, pieces))
    exact = {
        rank: [part for piece in owned for part in homogeneous(piece, held)]
        for rank, owned in pieces.items()
    }
    return ParamAffineMap(logical, shapes, exact)


def views_of(
    rnd: Random, logical: tuple[int, ...], total: int, ranks: int
) -> dict[int, list[View]]:
    """The views of each rank, replicated now and then, together covering everything."""
    regular = rnd.random() < 0.5
    views: dict[int, list[View]] = {}
    for rank in range(ranks):
        if rank and views[rank - 1] and rnd.random() < 0.3:
            views[rank] = list(views[rank - 1])
            continue
        views[rank] = [
            a_box(rnd, logical) if regular else a_view(rnd, total) for _ in range(rnd.randrange(4))
        ]
        if rnd.random() < 0.1:
            views[rank] += views[rank][-1:]
    covered = {s for owned in views.values() for view in owned for s in dense.offsets(*view)}
    for hole in dense.ranges(set(range(total)) - covered):
        views[ranks - 1].append(((len(hole),), hole.start, (1,)))
    return views


def scales_of(rnd: Random, views: Mapping[int, Sequence[View]], total: int) -> list[float]:
    """One scale for each element, the same within a view and within all views it touches."""
    group = list(range(total))
    for owned in views.values():
        for view in owned:
            touched = {group[s] for s in dense.offsets(*view)}
            group = [min(touched) if g in touched else g for g in group]
    chosen = {g: rnd.choice(SCALES) for g in sorted(set(group))}
    return [chosen[g] for g in group]


def homogeneous(piece: AffinePiece, held: Mapping[int, set[int]]) -> list[AffinePiece]:
    """Cut a piece until all elements of each part have the same holders."""
    kinds = {frozenset(held[s]) for s, _ in dense.elements(piece)}
    if len(kinds) <= 1:
        return [piece.held_by(sorted(kinds.pop()) if kinds else piece.locations)]
    axis = max(range(len(piece.shape)), key=lambda k: piece.shape[k])
    return [
        part
        for half in halves(piece, axis, piece.shape[axis] // 2)
        for part in homogeneous(half, held)
    ]


def halves(piece: AffinePiece, axis: int, at: int) -> list[AffinePiece]:
    """Cut a piece in two along an axis."""
    return [
        replace(
            piece,
            shape=(*piece.shape[:axis], n, *piece.shape[axis + 1 :]),
            source_offset=piece.source_offset + start * piece.source_strides[axis],
            dest_offset=piece.dest_offset + start * piece.dest_strides[axis],
        )
        for start, n in ((0, at), (at, piece.shape[axis] - at))
    ]


# ------------------------------------------------------------------ other spellings of a map


Rewrite = Callable[[Random, AffinePiece], list[AffinePiece]]


def reordered(rnd: Random, one: ParamAffineMap) -> ParamAffineMap:
    """The same pieces of the same ranks, listed in another order."""
    pieces = {rank: rnd.sample(owned, len(owned)) for rank, owned in one.pieces_by_rank.items()}
    ranks = rnd.sample(one.ranks, len(one.ranks))
    return ParamAffineMap(
        one.logical_shape, {r: one.shard_shapes[r] for r in ranks}, {r: pieces[r] for r in ranks}
    )


def respelled(rnd: Random, one: ParamAffineMap) -> ParamAffineMap:
    """The same relation: pieces cut, turned, with extra unit dims and empty pieces, reordered."""
    return reordered(rnd, rewritten(rnd, one, _respelled))


def exploded(rnd: Random, one: ParamAffineMap) -> ParamAffineMap:
    """The same relation, one 0-dimensional piece for each element, in any order."""
    return reordered(rnd, rewritten(rnd, one, _points))


def rewritten(rnd: Random, one: ParamAffineMap, rewrite: Rewrite) -> ParamAffineMap:
    """A map with each piece replaced by others."""
    pieces = {
        rank: [part for piece in owned for part in rewrite(rnd, piece)]
        for rank, owned in one.pieces_by_rank.items()
    }
    return ParamAffineMap(one.logical_shape, one.shard_shapes, pieces)


def _respelled(rnd: Random, piece: AffinePiece) -> list[AffinePiece]:
    wide = [axis for axis, n in enumerate(piece.shape) if n > 1]
    if wide and rnd.random() < 0.5:
        axis = rnd.choice(wide)
        cut = halves(piece, axis, rnd.randrange(piece.shape[axis]))
        return [part for half in cut for part in _respelled(rnd, half)]
    dims = list(zip(piece.shape, piece.source_strides, piece.dest_strides, strict=True))
    if rnd.random() < 0.3:
        dims.append((1, rnd.randrange(99), rnd.randrange(99)))
    rnd.shuffle(dims)
    return [
        replace(
            piece,
            shape=tuple(n for n, _, _ in dims),
            source_strides=tuple(s for _, s, _ in dims),
            dest_strides=tuple(d for _, _, d in dims),
        )
    ]


def _points(_: Random, piece: AffinePiece) -> list[AffinePiece]:
    return [
        AffinePiece((), s, (), d, (), piece.locations, piece.scale)
        for s, d in dense.elements(piece)
    ]


# ------------------------------------------------------------------ broken maps


def damaged(rnd: Random, one: ParamAffineMap) -> ParamAffineMap:
    """A map with one thing changed; it may still be valid."""
    pieces = {rank: list(owned) for rank, owned in one.pieces_by_rank.items()}
    shapes = dict(one.shard_shapes)
    rank = rnd.choice(one.ranks)
    if not pieces[rank] or rnd.random() < 0.1:
        shapes[rank] = (*shapes[rank], rnd.choice([0, 1, 2]))
        return ParamAffineMap(one.logical_shape, shapes, pieces)
    index = rnd.randrange(len(pieces[rank]))
    piece = pieces[rank].pop(index)
    if rnd.random() < 0.1:
        pieces[rnd.choice(one.ranks)].append(piece)
    pieces[rank][index:index] = _damages(rnd, piece, one.ranks)
    return ParamAffineMap(one.logical_shape, shapes, pieces)


def _damages(rnd: Random, piece: AffinePiece, ranks: Sequence[int]) -> list[AffinePiece]:
    by = rnd.choice([-7, -2, -1, -1, 1, 1, 2, 7])
    held = rnd.sample(ranks, rnd.randint(1, len(ranks)))
    choices = [
        [],
        [piece, piece],
        [replace(piece, source_offset=max(0, piece.source_offset + by))],
        [replace(piece, dest_offset=max(0, piece.dest_offset + by))],
        [piece.held_by(held)],
        [replace(piece, scale=piece.scale * 2)],
    ]
    if piece.shape:
        axis, step = rnd.randrange(len(piece.shape)), rnd.choice([-1, 1])
        choices += [
            [replace(piece, shape=_put(piece.shape, axis, step))],
            [replace(piece, source_strides=_put(piece.source_strides, axis, step))],
            [replace(piece, dest_strides=_put(piece.dest_strides, axis, step))],
        ]
    return rnd.choice(choices)


def _put(values: tuple[int, ...], axis: int, by: int) -> tuple[int, ...]:
    return (*values[:axis], max(0, values[axis] + by), *values[axis + 1 :])
