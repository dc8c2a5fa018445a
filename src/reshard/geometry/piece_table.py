"""Piece tables: all non-empty pieces of a map as columns.

Theory. Proofs and compositions look at every piece of a map at once. The columns are those of a
:class:`~reshard.geometry.tables.LinkTable` whose near space is ``F`` and whose far space is the
shard of the piece's rank, in normal form, with the rank, the scale and the locations beside them.
Sets of locations are few and repeat, so a row names its set by number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.ordering import Ints, grouped_sums
from reshard.geometry.piece import AffinePiece, trusted_piece
from reshard.geometry.tables import LinkTable

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class PieceTable:
    """The non-empty pieces of a map."""

    rank: Ints
    """The rank that each piece belongs to."""
    index: Ints
    """Its place in that rank's list of pieces."""
    link: LinkTable
    """Where it is: near ``F``, far the shard."""
    scale: Floats
    """Its factor."""
    place: Ints
    """Its set of locations, as an index into ``holders``."""
    holders: tuple[tuple[int, ...], ...]
    """The distinct sets of locations, each ascending."""

    def __len__(self) -> int:
        return len(self.rank)

    @classmethod
    def of(cls, pieces_by_rank: Mapping[int, Sequence[AffinePiece]]) -> PieceTable:
        """Return the table of the pieces of a map."""
        listed = [
            (rank, index, piece)
            for rank, owned in pieces_by_rank.items()
            for index, piece in enumerate(owned)
            if 0 not in piece.shape
        ]
        count = len(listed)
        pieces = [piece for _, _, piece in listed]
        place, holders = _numbered([piece.locations for piece in pieces])
        return cls(
            np.fromiter([rank for rank, _, _ in listed], np.int64, count),
            np.fromiter([index for _, index, _ in listed], np.int64, count),
            _link_table(pieces).normalised(),
            np.fromiter([piece.scale for piece in pieces], np.float64, count),
            np.fromiter(place, np.int64, count),
            holders,
        )

    def take(self, rows: Ints) -> PieceTable:
        """Return some rows."""
        return PieceTable(
            self.rank[rows],
            self.index[rows],
            self.link.take(rows),
            self.scale[rows],
            self.place[rows],
            self.holders,
        )

    def turned(self) -> PieceTable:
        """Exchange ``F`` and the shards."""
        return PieceTable(
            self.rank, self.index, self.link.turned(), self.scale, self.place, self.holders
        )

    def pieces(self) -> dict[int, list[AffinePiece]]:
        """Return the rows as pieces, by rank, dimensions in order of the dest strides."""
        found: dict[int, list[AffinePiece]] = {}
        columns = zip(
            self.rank.tolist(),
            self.link.turned().normalised().links(),
            self.place.tolist(),
            self.scale.tolist(),
            strict=True,
        )
        for rank, (dest, source, dims), place, scale in columns:
            shape, dests, sources = tuple(zip(*dims, strict=True)) or ((), (), ())
            piece = trusted_piece(shape, source, sources, dest, dests, self.holders[place], scale)
            found.setdefault(rank, []).append(piece)
        return found

    def numel_by_rank(self) -> dict[int, int]:
        """Number of elements that the pieces of each rank write."""
        return grouped_sums(self.rank, self.link.numel())


def _numbered(
    listed: Sequence[tuple[int, ...]],
) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    """Number sets of locations, and return the distinct ones.

    Builders give one tuple to many pieces; comparing it with itself each time would cost as many
    ranks as it names.
    """
    sets: dict[tuple[int, ...], int] = {}
    seen: dict[int, int] = {}
    for ranks in listed:
        if id(ranks) not in seen:
            seen[id(ranks)] = sets.setdefault(ranks, len(sets))
    return [seen[id(ranks)] for ranks in listed], tuple(sets)


def _link_table(pieces: Sequence[AffinePiece]) -> LinkTable:
    count = len(pieces)
    near = np.fromiter([piece.source_offset for piece in pieces], np.int64, count)
    far = np.fromiter([piece.dest_offset for piece in pieces], np.int64, count)
    sizes = np.fromiter([len(piece.shape) for piece in pieces], np.int64, count)
    dims = int(sizes.max(initial=0))
    # A cell of the padded columns is in use when its number is below the piece's dimensions.
    used = np.arange(dims) < sizes[:, None]
    columns = []
    for fill, values in (
        (1, [piece.shape for piece in pieces]),
        (0, [piece.source_strides for piece in pieces]),
        (0, [piece.dest_strides for piece in pieces]),
    ):
        column = np.full((count, dims), fill, np.int64)
        column[used] = np.fromiter(chain.from_iterable(values), np.int64)
        columns.append(np.asfortranarray(column))
    return LinkTable(near, far, *columns)
