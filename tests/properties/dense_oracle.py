"""The oracle: maps as dense index arrays in plain NumPy, element by element.

Nothing here shares code with ``reshard.geometry``: a piece is expanded into the offsets of its
elements on both sides, in the order of its index, and every law is asked of those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TypeVar

import numpy as np

from reshard.geometry import AffinePiece, ParamAffineMap, TransferPlan

Element = tuple[int, int, int, tuple[int, ...], float]
"""Rank, dest offset, source offset, locations, scale."""

Copy = tuple[int, int, int, int, float]
"""Target rank, target offset, source rank, source offset, scale."""

Item = TypeVar("Item")


def offsets(shape: Sequence[int], offset: int, strides: Sequence[int]) -> list[int]:
    """Offsets of all elements of a block, in row-major order of its index."""
    grid = np.full(tuple(shape), offset, np.int64)
    for axis, (extent, stride) in enumerate(zip(shape, strides, strict=True)):
        steps = np.arange(extent, dtype=np.int64) * stride
        grid = grid + steps.reshape([-1 if k == axis else 1 for k in range(len(shape))])
    return [int(x) for x in grid.reshape(-1)]


def elements(piece: AffinePiece) -> list[tuple[int, int]]:
    """Pairs (source offset, dest offset) of a piece."""
    sources = offsets(piece.shape, piece.source_offset, piece.source_strides)
    dests = offsets(piece.shape, piece.dest_offset, piece.dest_strides)
    return list(zip(sources, dests, strict=True))


def size(shape: Sequence[int]) -> int:
    """Number of elements of a shape."""
    return prod(shape)


def relation(one: ParamAffineMap) -> set[Element]:
    """All that a map says, one tuple for each element of each shard."""
    return {
        (rank, d, s, piece.locations, piece.scale)
        for rank, piece in one.pieces()
        for s, d in elements(piece)
    }


def holders(one: ParamAffineMap) -> dict[int, set[int]]:
    """Ranks that hold each element of F, by offset."""
    found: dict[int, set[int]] = {}
    for rank, piece in one.pieces():
        for s, _ in elements(piece):
            found.setdefault(s, set()).add(rank)
    return found


def places(one: ParamAffineMap) -> dict[tuple[int, int], tuple[int, float]]:
    """What is in each element of each shard: its offset in F and its scale."""
    return {(rank, d): (s, scale) for rank, d, s, _, scale in relation(one)}


def broken(one: ParamAffineMap, *, partial: bool = False) -> set[str]:
    """The set of properties that a map breaks, by the definitions."""
    found: set[str] = set()
    total = size(one.logical_shape)
    held = holders(one)
    scales: dict[int, set[float]] = {}
    for rank, owned in one.pieces_by_rank.items():
        room = size(one.shard_shapes[rank])
        written: list[int] = []
        for piece in owned:
            pairs = elements(piece)
            dests = [d for _, d in pairs]
            written += dests
            if any(s >= total or d >= room for s, d in pairs):
                found.add("bounds")
            if repeats(dests):
                found.add("P3")
            for s, _ in pairs:
                scales.setdefault(s, set()).add(piece.scale)
                if held[s] != set(piece.locations):
                    found.add("P5")
        if repeats(written) or (not partial and set(range(room)) - set(written)):
            found.add("write-once")
    if any(len(kinds) > 1 for kinds in scales.values()):
        found.add("P5")
    if not partial and set(range(total)) - set(held):
        found.add("P1")
    return found


def repeats(items: Iterable[Item]) -> bool:
    """Whether an item occurs twice."""
    listed = list(items)
    return len(set(listed)) < len(listed)


def ranges(numbers: Iterable[int]) -> list[range]:
    """Maximal ranges of a set of integers."""
    found: list[range] = []
    for number in sorted(numbers):
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def copies(plan: TransferPlan) -> list[Copy]:
    """Every copy of one element that a plan makes."""
    return [
        (s.target_rank, t, s.source_rank, o, s.scale)
        for s in plan.segments
        for t, o in zip(
            offsets(s.shape, s.target_offset, s.target_strides),
            offsets(s.shape, s.source_offset, s.source_strides),
            strict=True,
        )
    ]


def same_copies(one: TransferPlan, other: TransferPlan) -> bool:
    """Whether two plans copy the same elements to the same places, however they are cut."""
    shapes = (dict(one.source_shapes), dict(one.target_shapes))
    return (
        shapes == (dict(other.source_shapes), dict(other.target_shapes))
        and set(copies(one)) == set(copies(other))
        and dict(one.unfilled) == dict(other.unfilled)
    )


def plan_is_sound(plan: TransferPlan) -> bool:
    """Whether a plan writes each target element once or names it, inside both sets of shards."""
    made = copies(plan)
    room = {r: size(shape) for r, shape in plan.target_shapes.items()}
    held = {r: size(shape) for r, shape in plan.source_shapes.items()}
    inside = all(0 <= t < room.get(tr, 0) and 0 <= o < held.get(sr, 0) for tr, t, sr, o, _ in made)
    named = [(r, t) for r, holes in plan.unfilled.items() for hole in holes for t in hole]
    said = [(tr, t) for tr, t, *_ in made] + named
    wanted = sorted((r, t) for r, n in room.items() for t in range(n))
    return inside and sorted(said) == wanted
