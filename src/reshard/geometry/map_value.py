"""The value of a map: its shapes and pieces, however they are held.

Theory. A map is a value: frozen, hashable, equal by its pieces as they are listed. Those that
were written down hold their pieces as objects, those that were computed hold them as columns
(:class:`~reshard.geometry.piece_table.PieceTable`); either is made from the other when somebody
asks for it. What can be done with a map is in :mod:`reshard.geometry.affine_map`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from reshard.errors import InvalidMapError, count_text
from reshard.geometry.frozen import Frozen
from reshard.geometry.index_math import MAX_OFFSET, as_index, as_indices, numel
from reshard.geometry.piece import AffinePiece
from reshard.geometry.piece_table import PieceTable

MANY_PIECES = 1024
"""Maps of more pieces are put into columns at once, so that no later question pays for it."""

_Map = TypeVar("_Map", bound="MapValue")


class MapValue(Frozen):
    """Shapes and pieces of one parameter; see :class:`~reshard.geometry.ParamAffineMap`."""

    __slots__ = ("_hash", "_pieces", "_proved", "_shapes", "_table", "logical_shape")

    logical_shape: tuple[int, ...]
    _shapes: dict[int, tuple[int, ...]]
    _pieces: dict[int, tuple[AffinePiece, ...]] | None
    _table: PieceTable | None
    _hash: int | None
    _proved: frozenset[bool]
    """Which proofs have been made, by whether holes were accepted: each is made once."""

    def __init__(
        self,
        logical_shape: Sequence[int],
        shard_shapes: Mapping[int, Sequence[int]],
        pieces_by_rank: Mapping[int, Sequence[AffinePiece]],
    ) -> None:
        full, shapes = _checked_shapes(logical_shape, shard_shapes)
        object.__setattr__(self, "logical_shape", full)
        object.__setattr__(self, "_shapes", shapes)
        object.__setattr__(self, "_hash", None)
        object.__setattr__(self, "_proved", frozenset())
        stray = sorted(rank for rank in pieces_by_rank if rank not in self._shapes)
        if stray:
            raise InvalidMapError("pieces of a rank without a shard", broken="form", ranks=stray)
        pieces = {rank: tuple(pieces_by_rank.get(rank, ())) for rank in self._shapes}
        many = sum(map(len, pieces.values())) > MANY_PIECES
        object.__setattr__(self, "_pieces", pieces)
        object.__setattr__(self, "_table", PieceTable.of(pieces) if many else None)

    @classmethod
    def from_table(
        cls: type[_Map],
        logical_shape: Sequence[int],
        shard_shapes: Mapping[int, Sequence[int]],
        table: PieceTable,
    ) -> _Map:
        """Return the map of pieces that are given as columns, which are trusted as they are."""
        made = cls(logical_shape, shard_shapes, {})
        object.__setattr__(made, "_pieces", None)
        object.__setattr__(made, "_table", table)
        return made

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, MapValue):
            return NotImplemented
        return (
            hash(self) == hash(other)
            and self.logical_shape == other.logical_shape
            and self._shapes == other._shapes
            and self._owned() == other._owned()
        )

    def __hash__(self) -> int:
        value = self._hash
        if value is None:
            table = self.table
            # Cheap and the same however the map is held: shapes, and sums over the pieces.
            sums = (int(column.sum()) for column in (table.link.near, table.link.far))
            value = hash((self.logical_shape, *self._shapes.items(), len(table), *sums))
            object.__setattr__(self, "_hash", value)
        return value

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.logical_shape, self._shapes, self._owned())

    def __repr__(self) -> str:
        return f"ParamAffineMap({self.logical_shape!r}, {self._shapes!r}, {self._owned()!r})"

    def __str__(self) -> str:
        shape = "×".join(map(str, self.logical_shape)) or "scalar"
        lines = [f"{shape} over {count_text(len(self._shapes), 'rank')}"]
        for rank, pieces in self._owned().items():
            shard = "×".join(map(str, self._shapes[rank])) or "scalar"
            text = "; ".join(map(str, pieces)) or "nothing"
            lines.append(f"  {rank} ({shard}): {text}")
        return "\n".join(lines)

    def _owned(self) -> dict[int, tuple[AffinePiece, ...]]:
        """Return the pieces of each rank, made from the table on the first call."""
        pieces = self._pieces
        if pieces is None:
            made = self.table.pieces()
            pieces = {rank: tuple(made.get(rank, ())) for rank in self._shapes}
            object.__setattr__(self, "_pieces", pieces)
        return pieces

    @property
    def table(self) -> PieceTable:
        """The non-empty pieces as columns."""
        table = self._table
        if table is None:
            table = PieceTable.of(self._owned())
            object.__setattr__(self, "_table", table)
        return table

    @property
    def shard_shapes(self) -> Mapping[int, tuple[int, ...]]:
        """Shape of each rank's shard, ranks ascending."""
        return MappingProxyType(self._shapes)

    @property
    def pieces_by_rank(self) -> Mapping[int, tuple[AffinePiece, ...]]:
        """Pieces of each rank, ranks ascending; a rank without pieces has ``()``."""
        return MappingProxyType(self._owned())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold a shard, ascending."""
        return tuple(self._shapes)

    @property
    def numel(self) -> int:
        """Number of elements of ``F``."""
        return numel(self.logical_shape)

    @property
    def is_scaled(self) -> bool:
        """Whether some non-empty piece has a scale other than 1."""
        return bool((self.table.scale != 1.0).any())

    def pieces(self) -> Iterator[tuple[int, AffinePiece]]:
        """Yield every rank and piece, ranks ascending."""
        for rank, owned in self._owned().items():
            for piece in owned:
                yield rank, piece


def _checked_shapes(
    logical_shape: Sequence[int], shard_shapes: Mapping[int, Sequence[int]]
) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
    full = as_indices(logical_shape, "logical_shape")
    shapes = {
        as_index(rank, "rank"): as_indices(shape, "shard_shape")
        for rank, shape in shard_shapes.items()
    }
    largest = max([numel(full), *[numel(shape) for shape in shapes.values()]])
    if largest > MAX_OFFSET:
        raise InvalidMapError(
            "a tensor is too large", broken="form", expected="up to 2^62", found=largest
        )
    return full, {rank: shapes[rank] for rank in sorted(shapes)}
