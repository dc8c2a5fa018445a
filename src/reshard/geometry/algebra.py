"""The algebra of pieces under its names.

Theory. A piece is a relation between ``F`` and a shard, a plan one between two sets of shards.
Relations compose (:func:`~reshard.geometry.compose`, :func:`~reshard.geometry.nest`,
:func:`follow`), have inverses (:func:`invert`), can be restricted to a part of a space
(:func:`restrict`), meet (:func:`intersect`), and have one canonical spelling (:func:`coalesce`
for one block, :func:`canonicalise` for a map). Where an operation has nothing to return, as two
pieces that do not meet, it returns nothing rather than raising.
"""

from __future__ import annotations

import numpy as np

from reshard.errors import CompositionError, UsageError
from reshard.geometry.affine_map import ParamAffineMap, folded_map
from reshard.geometry.assembling import closed, folded_segments, layers_of
from reshard.geometry.index_math import numel, row_major_strides
from reshard.geometry.layers import table_layers
from reshard.geometry.links import Link, from_dest, from_source, make_link, meet
from reshard.geometry.matching import matched
from reshard.geometry.piece import AffinePiece, trusted_piece
from reshard.geometry.piece_table import PieceTable
from reshard.geometry.plan import TransferPlan
from reshard.geometry.segments import SegmentTable
from reshard.geometry.tables import LinkTable


def coalesce(piece: AffinePiece) -> AffinePiece:
    """Return a non-empty piece in canonical spelling: no unit dimensions, merged, sorted.

    >>> print(coalesce(AffinePiece((2, 1, 4), 8, (4, 9, 1), 0, (4, 9, 1), [0])))
    F[8 + 8×1] → [0 + 8×1] on 0
    """
    if not piece.numel:
        return piece
    return _piece_of(from_dest(piece), piece)


def canonicalise(one: ParamAffineMap) -> ParamAffineMap:
    """Return the canonical form of a map; the same as :meth:`ParamAffineMap.canonical`."""
    return one.canonical()


def intersect(one: AffinePiece, other: AffinePiece) -> tuple[AffinePiece, ...]:
    """Return the parts of ``one`` whose elements of ``F`` are in ``other`` too, maybe none.

    >>> rows = AffinePiece((2, 4), 0, (4, 1), 0, (4, 1), [0])
    >>> columns = AffinePiece((4, 2), 2, (4, 1), 0, (2, 1), [1])
    >>> [str(part) for part in intersect(rows, columns)]
    ['F[2 + 2×4 2×1] → [2 + 2×4 2×1] on 0']
    """
    if not one.numel or not other.numel:
        return ()
    # Only where the other piece is matters, not how often it names an element there.
    table, _, depth = table_layers(LinkTable.of([from_source(other)]), np.zeros(1, np.int64))
    link = from_source(one)
    parts = [
        make_link(part.first, part.near, [(n, f, s) for n, s, f, _ in part.dims])
        for place in table.take(np.flatnonzero(depth == 0)).links()
        for part in meet(link, place)
    ]
    return tuple([_piece_of(part, one) for part in sorted(parts)])


def _piece_of(link: Link, piece: AffinePiece) -> AffinePiece:
    """Return the piece of a link from the shard to ``F``, held like ``piece``."""
    shape, dests, sources = tuple(zip(*link.dims, strict=True)) or ((), (), ())
    return trusted_piece(shape, link.far, sources, link.near, dests, piece.locations, piece.scale)


def restrict(one: ParamAffineMap, dim: int, start: int, length: int) -> ParamAffineMap:
    """Return a map that knows only a range of ``F``, whose shape and offsets stay.

    :meth:`ParamAffineMap.narrow` gives the same relation with ``F`` cut down to the range.

    Raises
    ------
    UsageError
        When the range is not inside the dimension.
    """
    shape = one.logical_shape
    if not 0 <= dim < len(shape) or not 0 <= start <= start + length <= shape[dim]:
        raise UsageError(
            "no such range", dim=dim, expected=f"inside {shape}", found=(start, length)
        )
    strides = row_major_strides(shape)
    small = (*shape[:dim], length, *shape[dim + 1 :])
    at = start * strides[dim]
    windows = [make_link(at, at, zip(small, strides, strides, strict=True))] if numel(small) else []
    table = one.table
    found = matched(table.link, LinkTable.of(windows))
    part = table.take(found.first)
    kept = PieceTable(part.rank, part.index, found.link, part.scale, part.place, part.holders)
    return folded_map(shape, one.shard_shapes, kept)


def distribute(one: ParamAffineMap) -> TransferPlan:
    """Return a map as a plan: from ``F``, the flat shard of a rank 0, to the shards.

    >>> half = [AffinePiece((2,), 2 * r, (1,), 0, (1,), [r]) for r in (0, 1)]
    >>> print(distribute(ParamAffineMap((4,), {0: (2,), 1: (2,)}, {r: [half[r]] for r in (0, 1)})))
    2 segments, 4 elements
      0[0 + 2×1] → 0[0 + 2×1]
      0[2 + 2×1] → 1[0 + 2×1]
    """
    table = one.canonical().table
    turned = table.link.turned().normalised()
    segments = SegmentTable(turned, np.zeros_like(table.rank), table.rank, table.scale)
    return closed({0: (one.numel,)}, one.shard_shapes, folded_segments(segments))


def invert(plan: TransferPlan | ParamAffineMap) -> TransferPlan:
    """Return the plan that moves data back, from the target shards into the source shards.

    A source element that went to several targets comes back from the lowest of them; one that
    went nowhere is unfilled. Scales become their reciprocals. A map stands for the plan from
    ``F`` to its shards (:func:`distribute`), so that its inverse gathers ``F``, and
    ``follow(target, invert(source))`` is ``compose(target, source)``.

    >>> from reshard.geometry import Segment
    >>> there = TransferPlan({0: (4,)}, {7: (2,)}, [Segment((2,), 0, 1, (2,), 7, 0, (1,))], {})
    >>> print(invert(there))
    1 segment, 2 elements
      7[0 + 2×1] → 0[1 + 2×2]
      nothing → 0: [0, 1), [2, 3)
    """
    if isinstance(plan, ParamAffineMap):
        return _gather(plan)
    table = plan.table
    back = table.link.turned().normalised()
    parts, rows, depth = table_layers(back, table.source_rank)
    kept = np.flatnonzero(depth == 0)
    rows = rows[kept]
    turned = SegmentTable(
        parts.take(kept), table.target_rank[rows], table.source_rank[rows], 1.0 / table.scale[rows]
    )
    return closed(plan.target_shapes, plan.source_shapes, folded_segments(turned))


def _gather(one: ParamAffineMap) -> TransferPlan:
    """Return the plan from shards to ``F``; of several places it reads what ``compose`` does."""
    held = layers_of(one)[0]
    lowest = np.array([ranks[0] for ranks in held.holders], np.int64)
    read = held.take(np.flatnonzero(lowest[held.place] == held.rank))
    segments = SegmentTable(read.link, read.rank, np.zeros_like(read.rank), 1.0 / read.scale)
    return closed(one.shard_shapes, {0: (one.numel,)}, folded_segments(segments))


def _plan_of(one: TransferPlan | ParamAffineMap) -> TransferPlan:
    return distribute(one) if isinstance(one, ParamAffineMap) else one


def follow(
    second: TransferPlan | ParamAffineMap, first: TransferPlan | ParamAffineMap
) -> TransferPlan:
    """Return the plan that does ``first`` and then ``second`` in one step.

    A map stands for the plan from ``F`` to its shards (:func:`distribute`). Elements that
    ``second`` reads where ``first`` wrote nothing are unfilled.

    Raises
    ------
    CompositionError
        When ``second`` does not read from the shards that ``first`` fills.
    """
    second, first = _plan_of(second), _plan_of(first)
    if dict(second.source_shapes) != dict(first.target_shapes):
        raise CompositionError(
            "the second plan does not start where the first one ends",
            expected=dict(first.target_shapes),
            found=dict(second.source_shapes),
        )
    late, early = second.table, first.table
    # Seen from the shards in between: near them, far the last and the first ones.
    found = matched(
        late.link.turned().normalised(),
        early.link.normalised(),
        late.source_rank,
        early.target_rank,
    )
    both = SegmentTable(
        found.link,
        early.source_rank[found.second],
        late.target_rank[found.first],
        late.scale[found.first] * early.scale[found.second],
    )
    return closed(first.source_shapes, second.target_shapes, folded_segments(both))
