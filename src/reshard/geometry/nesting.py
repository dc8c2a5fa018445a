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

from reshard.errors import InvalidMapError, UsageError
from reshard.geometry.affine_map import ParamAffineMap
from reshard.geometry.index_math import numel
from reshard.geometry.links import Link, from_dest, from_source, make_link, meet
from reshard.geometry.piece import AffinePiece
from reshard.geometry.pieces import canonical_pieces, piece_of, turned
from reshard.geometry.refinement import Arrangement, overlapping


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
    listed = [
        (rank, piece) for rank, owned in pieces_by_rank.items() for piece in owned if piece.numel
    ]
    links = [from_source(piece) for _, piece in listed]
    arrangement = Arrangement(links, [rank for rank, _ in listed])
    pieces: dict[int, list[AffinePiece]] = {rank: [] for rank in shard_shapes}
    for index, (rank, piece) in enumerate(listed):
        for part in arrangement.parts(index):
            pieces[rank].append(piece_of(turned(part.link), part.owners, piece.scale))
    folded = {rank: canonical_pieces(owned) for rank, owned in pieces.items()}
    return ParamAffineMap(logical_shape, shard_shapes, folded)


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
    pieces: dict[int, list[AffinePiece]] = {}
    for rank, cut in inner.items():
        _check_nested(outer, rank, cut, shapes)
        shapes.update(cut.shard_shapes)
        below = [
            (holder, piece, from_source(piece)) for holder, piece in cut.pieces() if piece.numel
        ]
        for holder in cut.ranks:
            pieces[holder] = []
        for piece in outer.pieces_by_rank[rank]:
            if piece.numel:
                for holder, held, link in below:
                    pieces[holder] += _through(piece, held, link)
    if _holds_once(outer):
        folded = {holder: canonical_pieces(owned) for holder, owned in pieces.items()}
        return ParamAffineMap(outer.logical_shape, shapes, folded)
    return locate(outer.logical_shape, shapes, pieces)


def _holds_once(outer: ParamAffineMap) -> bool:
    """Tell whether each element is in one place only, so that inner locations stay exact."""
    for owned in outer.pieces_by_rank.values():
        filled = [piece for piece in owned if piece.numel]
        if any(len(piece.locations) > 1 for piece in filled):
            return False
        if overlapping([from_source(piece) for piece in filled]):
            return False
    return True


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


def _through(piece: AffinePiece, held: AffinePiece, link: Link) -> list[AffinePiece]:
    """Return the elements of ``held`` that come from ``piece``, as pieces of ``F``."""
    found = []
    for part in meet(from_dest(piece), link):
        made = make_link(part.second, part.first, [(n, g, f) for n, _, f, g in part.dims])
        found.append(piece_of(made, held.locations, piece.scale * held.scale))
    return found


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
    return tuple(
        [
            piece_of(
                make_link(part.second, part.first, [(n, g, f) for n, _, f, g in part.dims]),
                piece.locations,
                piece.scale,
            )
            for part in sorted(meet(from_dest(piece), window))
        ]
    )
