"""The affine piece: one strided block of elements, seen from both of its homes.

Theory. A piece says that the elements of one block sit at
``source_offset + Σ i_j·source_strides_j`` in the logical tensor ``F`` and at
``dest_offset + Σ i_j·dest_strides_j`` in a holder's shard, for every index ``0 ≤ i_j < shape_j``.
Each side is the argument list of ``torch.as_strided``, so a piece runs in either direction
without interpretation. ``locations`` names all the ranks that hold the same elements (the piece
itself belongs to one of them); ``scale`` is the factor the shard holds them by,
``shard = F · scale``.

A piece is a value: frozen, hashable, checked when it is built. Its fields are kept as given,
because a document must be written back as it was read, except where two spellings cannot differ
in meaning (the order of ``locations``, integer types).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reshard.errors import InvalidMapError
from reshard.geometry.index_math import MAX_OFFSET, as_index, as_indices, numel, span
from reshard.geometry.notation import block_text, ranks_text


@dataclass(frozen=True, slots=True)
class AffinePiece:
    """One strided block of a parameter: where it sits in ``F``, where in a shard, who holds it.

    Raises
    ------
    InvalidMapError
        (``broken="form"``) when a field is malformed; (``broken="P3"``) when the scale has no
        inverse.

    Examples
    --------
    >>> piece = AffinePiece((8, 4), 4, (8, 1), 0, (4, 1), [1])
    >>> print(piece)
    F[4 + 8×8 4×1] → [0 + 8×4 4×1] on 1
    >>> piece.numel
    32
    """

    shape: tuple[int, ...]
    """Extents of the block, in elements; may be empty (0-dimensional) or contain 0."""
    source_offset: int
    source_strides: tuple[int, ...]
    """Place in the logical tensor, in elements."""
    dest_offset: int
    dest_strides: tuple[int, ...]
    """Place in the holder's shard, in elements."""
    locations: tuple[int, ...]
    """Every rank that holds these elements, in any order."""
    scale: float = 1.0
    """Finite non-zero factor, ``shard = F * scale``."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "shape", as_indices(self.shape, "shape"))
        put(self, "source_offset", as_index(self.source_offset, "source_offset"))
        put(self, "source_strides", as_indices(self.source_strides, "source_strides"))
        put(self, "dest_offset", as_index(self.dest_offset, "dest_offset"))
        put(self, "dest_strides", as_indices(self.dest_strides, "dest_strides"))
        put(self, "locations", _as_locations(self.locations))
        put(self, "scale", _as_scale(self.scale))
        _check_side("source", self.shape, self.source_offset, self.source_strides)
        _check_side("dest", self.shape, self.dest_offset, self.dest_strides)

    @property
    def numel(self) -> int:
        """Number of elements, counting one that is named twice twice."""
        return numel(self.shape)

    @property
    def source_stop(self) -> int:
        """One past the largest source offset; ``source_offset`` when the piece is empty."""
        return self.source_offset + (span(self.shape, self.source_strides) + 1 if self.numel else 0)

    @property
    def dest_stop(self) -> int:
        """One past the largest dest offset; ``dest_offset`` when the piece is empty."""
        return self.dest_offset + (span(self.shape, self.dest_strides) + 1 if self.numel else 0)

    def held_by(self, locations: Iterable[int]) -> AffinePiece:
        """Return the same block with other locations.

        >>> print(AffinePiece((4,), 0, (1,), 0, (1,), [0]).held_by([0, 2]))
        F[0 + 4×1] → [0 + 4×1] on 0,2
        """
        return AffinePiece(
            self.shape,
            self.source_offset,
            self.source_strides,
            self.dest_offset,
            self.dest_strides,
            tuple(locations),
            self.scale,
        )

    def __str__(self) -> str:
        source = block_text(self.source_offset, self.shape, self.source_strides)
        dest = block_text(self.dest_offset, self.shape, self.dest_strides)
        times = "" if self.scale == 1.0 else f" ·{self.scale:g}"
        return f"F{source}{times} → {dest} on {ranks_text(self.locations)}"


def trusted_piece(
    shape: tuple[int, ...],
    source_offset: int,
    source_strides: tuple[int, ...],
    dest_offset: int,
    dest_strides: tuple[int, ...],
    locations: tuple[int, ...],
    scale: float,
) -> AffinePiece:
    """Return a piece without checking it: for fields that came out of valid pieces."""
    piece = object.__new__(AffinePiece)
    put = object.__setattr__
    put(piece, "shape", shape)
    put(piece, "source_offset", source_offset)
    put(piece, "source_strides", source_strides)
    put(piece, "dest_offset", dest_offset)
    put(piece, "dest_strides", dest_strides)
    put(piece, "locations", locations)
    put(piece, "scale", scale)
    return piece


def _as_locations(locations: Sequence[int]) -> tuple[int, ...]:
    ranks = tuple(sorted(set(as_indices(locations, "locations"))))
    if not ranks:
        raise InvalidMapError("locations is empty", broken="form", expected="at least one rank")
    return ranks


def _as_scale(scale: object) -> float:
    if isinstance(scale, (str, bytes, bool)):
        raise InvalidMapError("scale is not a number", broken="form", found=repr(scale))
    try:
        factor = float(scale)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise InvalidMapError("scale is not a number", broken="form", found=repr(scale)) from None
    if not math.isfinite(factor) or factor == 0.0:
        raise InvalidMapError(
            "scale has no inverse", broken="P3", expected="a finite non-zero factor", found=factor
        )
    return factor


def _check_side(side: str, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> None:
    if len(strides) != len(shape):
        raise InvalidMapError(
            f"{side}_strides and shape differ in length",
            broken="form",
            expected=len(shape),
            found=len(strides),
        )
    if 0 not in shape and offset + span(shape, strides) >= MAX_OFFSET:
        raise InvalidMapError(
            f"the {side} side ends beyond 2^62",
            broken="form",
            offset=offset + span(shape, strides),
        )
