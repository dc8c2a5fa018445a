"""Cases: a few small numbers and a seed, from which random maps and their damage follow.

A case is cheap to draw and shrinks by its numbers. The maps are those of
:mod:`tests.properties.strategies`; here are the other ways to spell them, and to break them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from reshard.geometry import AffinePiece, ParamAffineMap
from tests.properties import index_arrays as dense
from tests.properties.strategies import a_map, halves

SETTINGS = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


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
