"""The oracle: maps as dense index arrays in plain NumPy, element by element.

Nothing here shares code with ``reshard.geometry``: a piece is expanded by ``numpy.ndindex``-like
arithmetic into the offsets of its elements on both sides, in the order of its index.
"""

from __future__ import annotations

import numpy as np

from reshard.geometry import AffinePiece, ParamAffineMap


def offsets(shape, offset, strides):
    """Offsets of all elements of a block, in row-major order of its index."""
    grid = np.full(tuple(shape), offset, dtype=object)
    for axis, stride in enumerate(strides):
        steps = np.array([i * stride for i in range(shape[axis])], dtype=object)
        grid = grid + steps.reshape([-1 if k == axis else 1 for k in range(len(shape))])
    return [int(x) for x in np.asarray(grid).reshape(-1)]


def elements(piece: AffinePiece):
    """Pairs (source offset, dest offset) of a piece."""
    return list(
        zip(
            offsets(piece.shape, piece.source_offset, piece.source_strides),
            offsets(piece.shape, piece.dest_offset, piece.dest_strides),
            strict=True,
        )
    )


def size(shape):
    """Number of elements of a shape."""
    return int(np.prod(shape, dtype=np.int64))


def relation(one: ParamAffineMap):
    """Set of (rank, dest offset, source offset, locations, scale)."""
    return {
        (rank, d, s, piece.locations, piece.scale)
        for rank, owned in one.pieces_by_rank.items()
        for piece in owned
        for s, d in elements(piece)
    }


def holders(one: ParamAffineMap):
    """Ranks that hold each element of F, by offset."""
    found = {}
    for rank, owned in one.pieces_by_rank.items():
        for piece in owned:
            for s, _ in elements(piece):
                found.setdefault(s, set()).add(rank)
    return found


def broken(one: ParamAffineMap, *, partial=False):
    """The set of properties that a map breaks, by the definitions."""
    found = set()
    total = size(one.logical_shape)
    held = holders(one)
    scales = {}
    for rank, owned in one.pieces_by_rank.items():
        room = size(one.shard_shapes[rank])
        written = []
        for piece in owned:
            pairs = elements(piece)
            if any(s >= total or d >= room for s, d in pairs):
                found.add("bounds")
            dests = [d for _, d in pairs]
            if len(set(dests)) < len(dests):
                found.add("P3")
            written += dests
            for s, _ in pairs:
                scales.setdefault(s, set()).add(piece.scale)
                if held[s] != set(piece.locations):
                    found.add("P5")
        if len(set(written)) < len(written):
            found.add("write-once")
        if not partial and set(range(room)) - set(written):
            found.add("write-once")
    if any(len(kinds) > 1 for kinds in scales.values()):
        found.add("P5")
    if not partial and set(range(total)) - set(held):
        found.add("P1")
    return found


def shard(one: ParamAffineMap, full, rank):
    """The shard of a rank as a flat list, scale 1, None where nothing writes."""
    made = [None] * size(one.shard_shapes[rank])
    for piece in one.pieces_by_rank[rank]:
        for s, d in elements(piece):
            made[d] = full[s]
    return made


def ranges(numbers):
    """Maximal ranges of a set of integers."""
    found = []
    for number in sorted(numbers):
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def copies(plan):
    """List of (target rank, target offset, source rank, source offset, scale) of a plan."""
    return [
        (s.target_rank, t, s.source_rank, o, s.scale)
        for s in plan.segments
        for t, o in zip(
            offsets(s.shape, s.target_offset, s.target_strides),
            offsets(s.shape, s.source_offset, s.source_strides),
            strict=True,
        )
    ]
