"""Pieces and links: going from one to the other, and the canonical form of a list of pieces.

Theory. Composition and refinement produce links; maps are made of pieces. A piece made from links
lists its dimensions outermost first in the order of its dest strides, drops unit dimensions and
merges those that run on in both spaces: that is the canonical spelling of one block. Canonical
lists are folded (:mod:`reshard.geometry.folding`) within each set of locations and each scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from reshard.geometry.folding import fold
from reshard.geometry.links import Link, from_dest, make_link
from reshard.geometry.piece import AffinePiece


def piece_of(link: Link, locations: Iterable[int], scale: float) -> AffinePiece:
    """Return the piece of a link whose near space is the shard and whose far space is ``F``."""
    shape, dest, source = zip(*link.dims, strict=True) if link.dims else ((), (), ())
    return AffinePiece(shape, link.far, source, link.near, dest, tuple(locations), scale)


def turned(link: Link) -> Link:
    """Exchange the near and far space of a link."""
    return make_link(link.far, link.near, [(n, f, s) for n, s, f in link.dims])


def canonical_pieces(pieces: Sequence[AffinePiece]) -> tuple[AffinePiece, ...]:
    """Return the canonical form of the pieces of one rank, in order of their dest offsets.

    >>> halves = [AffinePiece((2, 4), 8 * i, (4, 1), 8 * i, (4, 1), [0]) for i in (1, 0)]
    >>> [str(piece) for piece in canonical_pieces(halves)]
    ['F[0 + 16×1] → [0 + 16×1] on 0']
    """
    groups: dict[tuple[tuple[int, ...], float], list[Link]] = {}
    for piece in pieces:
        if piece.numel:
            groups.setdefault((piece.locations, piece.scale), []).append(from_dest(piece))
    found = [
        (link.near, piece_of(link, locations, scale))
        for (locations, scale), links in groups.items()
        for link in fold(links)
    ]
    found.sort(key=lambda item: item[0])
    return tuple([piece for _, piece in found])
