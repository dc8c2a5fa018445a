"""Nesting: maps inside maps, and exact locations for pieces that only know their owner.

Theory. A tensor-parallel shard is itself cut again: flattened into a group, the group into ranges
over data-parallel ranks. ``nest(outer, inner)`` joins ``F → shard`` with ``shard → holders``, so
that the whole chain is one map ``F → holders``. A flat range of an N-dimensional piece is at most
2N−1 pieces, so the number of pieces stays small.

Replicas of the outer map can be cut at different borders by their inner maps. The pieces then
overlap without being equal, and what P5 asks, one set of holders for a whole piece, has to be
made: :func:`locate` cuts overlapping pieces to their common refinement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from reshard.errors import InvalidMapError, UsageError
from reshard.geometry.affine_map import ParamAffineMap, folded_map
from reshard.geometry.disjointness import names_once
from reshard.geometry.index_math import numel
from reshard.geometry.links import from_dest, make_link, meet
from reshard.geometry.matching import matched
from reshard.geometry.ordering import Ints
from reshard.geometry.piece import AffinePiece, trusted_piece
from reshard.geometry.piece_table import PieceTable
from reshard.geometry.refinement import Arrangement, Groups
from reshard.geometry.tables import LinkTable, concatenated


def locate(
    logical_shape: Sequence[int],
    shard_shapes: Mapping[int, Sequence[int]],
    pieces_by_rank: Mapping[int, Sequence[AffinePiece]],
) -> ParamAffineMap:
    """Return the canonical map of pieces whose ``locations`` are not trusted.

    Parameters
    ----------
    logical_shape, shard_shapes, pieces_by_rank
        As for :class:`ParamAffineMap`; only the rank that lists a piece counts as its holder.

    Examples
    --------
    Two ranks hold all of a vector, one of them in two parts:

    >>> whole = AffinePiece((6,), 0, (1,), 0, (1,), [0])
    >>> parts = [AffinePiece((4,), 0, (1,), 0, (1,), [1]), AffinePiece((2,), 4, (1,), 4, (1,), [1])]
    >>> found = locate((6,), {0: (6,), 1: (6,)}, {0: [whole], 1: parts})
    >>> print(found.pieces_by_rank[1][0])
    F[0 + 6×1] → [0 + 6×1] on 0,1
    """
    return _located(logical_shape, shard_shapes, PieceTable.of(pieces_by_rank))


def _located(
    logical_shape: Sequence[int], shard_shapes: Mapping[int, Sequence[int]], table: PieceTable
) -> ParamAffineMap:
    parts, rows, owners = Arrangement(table.link, table.rank).parts()
    place, holders = _interned(owners)
    cut = table.take(rows)
    exact = PieceTable(cut.rank, cut.index, parts.turned(), cut.scale, place, holders)
    return folded_map(logical_shape, shard_shapes, exact)


def _interned(owners: Groups) -> tuple[Ints, tuple[tuple[int, ...], ...]]:
    """Return the number of each list among the distinct ones, and these."""
    sets: dict[tuple[int, ...], int] = {}
    items, start = owners.items.tolist(), owners.start.tolist()
    place = [sets.setdefault(tuple(items[a:b]), len(sets)) for a, b in pairwise(start)]
    return np.array(place, np.int64), tuple(sets)


def nest(outer: ParamAffineMap, inner: Mapping[int, ParamAffineMap]) -> ParamAffineMap:
    """Return the map ``F → holders`` that goes through the shards of ``outer``.

    Parameters
    ----------
    outer
        A valid map ``F → shard``.
    inner
        For ranks of ``outer``, the map of that rank's shard over its own holders. The holders of
        all inner maps are the ranks of the result, so they must be distinct. Ranks of ``outer``
        may be left out, and an inner map need not cover its shard; whether the result covers
        ``F`` is for :meth:`ParamAffineMap.validate` to say. Scales multiply.

    Raises
    ------
    UsageError
        When ``inner`` names an unknown rank, or a holder occurs twice.
    InvalidMapError
        When an inner map describes another number of elements than the shard has.

    Examples
    --------
    Rank 0 holds the left half of a 4×4 matrix; two ranks share its 8 elements as flat ranges:

    >>> half = AffinePiece((4, 2), 0, (4, 1), 0, (2, 1), [0])
    >>> outer = ParamAffineMap((4, 4), {0: (4, 2)}, {0: [half]})
    >>> cut = {r: [AffinePiece((n,), a, (1,), 0, (1,), [r])] for r, a, n in ((0, 0, 5), (1, 5, 3))}
    >>> print(nest(outer, {0: ParamAffineMap((8,), {0: (5,), 1: (3,)}, cut)}))
    4×4 over 2 ranks
      0 (5): F[0 + 2×4 2×1] → [0 + 2×2 2×1] on 0; F[8] → [4] on 0
      1 (3): F[9] → [0] on 1; F[12 + 2×1] → [1 + 2×1] on 1
    """
    shapes: dict[int, tuple[int, ...]] = {}
    for rank, cut in inner.items():
        _check_nested(outer, rank, cut, shapes)
        shapes.update(cut.shard_shapes)
    table = _joined(outer, inner)
    if _holds_once(outer):
        turned = PieceTable(
            table.rank, table.index, table.link.turned(), table.scale, table.place, table.holders
        )
        return folded_map(outer.logical_shape, shapes, turned)
    return _located(outer.logical_shape, shapes, table)


def _joined(outer: ParamAffineMap, inner: Mapping[int, ParamAffineMap]) -> PieceTable:
    """Return the pieces ``F → holder`` that go through a shard, located as the inner maps say."""
    below = _stacked({rank: cut.table for rank, cut in inner.items()})
    key = np.repeat(list(inner), [len(cut.table) for cut in inner.values()]).astype(np.int64)
    above = outer.table
    # Seen from the shard: near the shard, far the holder and F.
    found = matched(below.link, above.link.turned().normalised(), key, above.rank)
    held = below.take(found.first)
    link = found.link.turned().normalised()
    scale = held.scale * above.scale[found.second]
    return PieceTable(held.rank, held.index, link, scale, held.place, held.holders)


def _stacked(tables: Mapping[int, PieceTable]) -> PieceTable:
    """Return the rows of several tables in one, their sets of locations renumbered."""
    listed = list(tables.values())
    shift = np.cumsum([0, *[len(table.holders) for table in listed]])
    empty = np.empty(0, np.int64)
    return PieceTable(
        np.concatenate([empty, *[table.rank for table in listed]]),
        np.concatenate([empty, *[table.index for table in listed]]),
        concatenated([LinkTable.of([]), *[table.link for table in listed]]),
        np.concatenate([np.empty(0), *[table.scale for table in listed]]),
        np.concatenate(
            [empty, *[t.place + first for t, first in zip(listed, shift[:-1], strict=True)]]
        ),
        tuple([ranks for table in listed for ranks in table.holders]),
    )


def _holds_once(outer: ParamAffineMap) -> bool:
    """Tell whether each element is in one place only, so that inner locations stay exact."""
    table = outer.table
    if any(len(ranks) > 1 for ranks in table.holders):
        return False
    return names_once(table.link, table.rank)


def _check_nested(
    outer: ParamAffineMap, rank: int, cut: ParamAffineMap, taken: Mapping[int, object]
) -> None:
    if rank not in outer.shard_shapes:
        raise UsageError("no such outer rank", rank=rank, expected=list(outer.ranks))
    size = numel(outer.shard_shapes[rank])
    if cut.numel != size:
        raise InvalidMapError(
            "the inner map has another number of elements than the outer shard",
            broken="form",
            ranks=(rank,),
            expected=size,
            found=cut.numel,
        )
    twice = sorted(set(cut.ranks) & set(taken))
    if twice:
        raise UsageError("a holder occurs in the inner maps of two ranks", rank=twice[0])


def cut_flat_range(piece: AffinePiece, lo: int, hi: int) -> tuple[AffinePiece, ...]:
    """Return the part of a piece whose dest offsets are in ``[lo, hi)``, seen from ``lo``.

    This is what a flat range of a shard, a ZeRO fragment, holds of a piece: at most 2N−1 pieces
    for one of N dimensions.

    >>> block = AffinePiece((4, 2), 0, (8, 1), 0, (2, 1), [0])
    >>> [str(part) for part in cut_flat_range(block, 3, 8)]
    ['F[9] → [0] on 0', 'F[16 + 2×8 2×1] → [1 + 2×2 2×1] on 0']
    """
    if not piece.numel or hi <= lo:
        return ()
    window = make_link(lo, 0, [(hi - lo, 1, 1)])
    found = []
    for part in sorted(meet(from_dest(piece), window)):
        shape, sources, dests = tuple(
            zip(*[(n, f, g) for n, _, f, g in part.dims], strict=True)
        ) or ((), (), ())
        found.append(
            trusted_piece(
                shape, part.first, sources, part.second, dests, piece.locations, piece.scale
            )
        )
    return tuple(found)
