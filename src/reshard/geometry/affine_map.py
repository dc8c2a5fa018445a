"""The map of one parameter: which pieces every rank's shard is made of.

Theory. ``ParamAffineMap`` is the relation *element of F ↔ element of a shard*. Read from shards
to ``F`` it rebuilds the parameter, read the other way it extracts a shard; both are one loop over
pieces with the copy reversed. It is a relation and not a function because of replication: one
element of ``F`` may live on many ranks, and the map says on which (``locations``) without
choosing one.

A map is a value: frozen, hashable, equal by its pieces as they are listed. ``canonical()`` gives
the spelling that equal relations share. ``validate()`` proves the properties that composition
relies on; a map that is only held, printed or written need not be valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from reshard.errors import InvalidMapError, ReplicaMismatchError, ScaledStateError, UsageError
from reshard.geometry import validation
from reshard.geometry.buffers import Bits, Tensor, flat_bits, like, scaled, strided
from reshard.geometry.document import read_entry, read_params, write_entry, write_params
from reshard.geometry.index_math import as_index, as_indices, numel, row_major_strides
from reshard.geometry.links import Link, from_source, make_link, meet
from reshard.geometry.piece import AffinePiece
from reshard.geometry.pieces import canonical_pieces, piece_of, turned

SCALE_POWER: Mapping[str, int] = MappingProxyType({"fp32": 1, "exp_avg": -1, "exp_avg_sq": -2})
"""The power of a piece's scale by which a shard holds each state of Adam (§2.1)."""


class ParamAffineMap:
    """The pieces of one parameter, by the rank whose shard they fill.

    Parameters
    ----------
    logical_shape
        Shape of the logical tensor ``F``, in elements.
    shard_shapes
        Shape of each rank's shard. A shard may have any number of dimensions.
    pieces_by_rank
        The pieces of each rank; a rank that is left out has none.

    Raises
    ------
    InvalidMapError
        (``broken="form"``) when a shape is malformed, or pieces are given for a rank without a
        shard.

    Examples
    --------
    Two ranks hold the columns of a 2×4 matrix:

    >>> half = [AffinePiece((2, 2), 2 * r, (4, 1), 0, (2, 1), [r]) for r in (0, 1)]
    >>> split = ParamAffineMap((2, 4), {0: (2, 2), 1: (2, 2)}, {0: [half[0]], 1: [half[1]]})
    >>> print(split)
    2×4 over 2 ranks
      0 (2×2): F[0 + 2×4 2×1] → [0 + 2×2 2×1] on 0
      1 (2×2): F[2 + 2×4 2×1] → [0 + 2×2 2×1] on 1
    >>> split.validate()
    >>> split.extract(np.arange(8).reshape(2, 4), 1).tolist()
    [[2, 3], [6, 7]]
    """

    __slots__ = ("_hash", "_pieces", "_shapes", "logical_shape")

    logical_shape: tuple[int, ...]
    _shapes: dict[int, tuple[int, ...]]
    _pieces: dict[int, tuple[AffinePiece, ...]]
    _hash: int

    def __init__(
        self,
        logical_shape: Sequence[int],
        shard_shapes: Mapping[int, Sequence[int]],
        pieces_by_rank: Mapping[int, Sequence[AffinePiece]],
    ) -> None:
        put = object.__setattr__
        shapes = {
            as_index(rank, "rank"): as_indices(shape, "shard_shape")
            for rank, shape in shard_shapes.items()
        }
        stray = sorted(rank for rank in pieces_by_rank if rank not in shapes)
        if stray:
            raise InvalidMapError("pieces of a rank without a shard", broken="form", ranks=stray)
        ranks = sorted(shapes)
        put(self, "logical_shape", as_indices(logical_shape, "logical_shape"))
        put(self, "_shapes", {rank: shapes[rank] for rank in ranks})
        put(self, "_pieces", {rank: tuple(pieces_by_rank.get(rank, ())) for rank in ranks})
        put(self, "_hash", hash((self.logical_shape, *self._shapes.items(), *self._pieces.items())))

    # -- the value ---------------------------------------------------------------------------

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"ParamAffineMap is frozen: cannot set {name}")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ParamAffineMap):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.logical_shape == other.logical_shape
            and self._shapes == other._shapes
            and self._pieces == other._pieces
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return ParamAffineMap, (self.logical_shape, self._shapes, self._pieces)

    def __repr__(self) -> str:
        return f"ParamAffineMap({self.logical_shape!r}, {self._shapes!r}, {self._pieces!r})"

    def __str__(self) -> str:
        shape = "×".join(map(str, self.logical_shape)) or "scalar"
        lines = [f"{shape} over {len(self._shapes)} ranks"]
        for rank, pieces in self._pieces.items():
            shard = "×".join(map(str, self._shapes[rank])) or "scalar"
            text = "; ".join(map(str, pieces)) or "nothing"
            lines.append(f"  {rank} ({shard}): {text}")
        return "\n".join(lines)

    @property
    def shard_shapes(self) -> Mapping[int, tuple[int, ...]]:
        """Shape of each rank's shard, ranks ascending."""
        return MappingProxyType(self._shapes)

    @property
    def pieces_by_rank(self) -> Mapping[int, tuple[AffinePiece, ...]]:
        """Pieces of each rank, ranks ascending; a rank without pieces has ``()``."""
        return MappingProxyType(self._pieces)

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
        """Whether some piece has a scale other than 1."""
        return any(piece.scale != 1.0 for _, piece in self.pieces())

    def pieces(self) -> Iterator[tuple[int, AffinePiece]]:
        """Yield every rank and piece, ranks ascending."""
        for rank, owned in self._pieces.items():
            for piece in owned:
                yield rank, piece

    # -- properties --------------------------------------------------------------------------

    def validate(self, parameter: str | None = None, *, partial: bool = False) -> None:
        """Prove that the map is usable: bounds, write-once, P1, P3 and P5, exactly.

        Parameters
        ----------
        parameter
            Its name, for the message.
        partial
            Accept shards with elements that no piece writes, and ``F`` with elements that no
            rank holds: what :meth:`narrow` or missing ranks leave of a valid map.

        Raises
        ------
        InvalidMapError
            Its attributes say which property is broken, by which ranks, piece and offset.
        """
        validation.check_bounds(self.numel, self._shapes, self._pieces, parameter)
        validation.check_written_once(self._shapes, self._pieces, parameter, partial=partial)
        validation.check_holders(self.numel, self._pieces, parameter, partial=partial)

    def uncovered_offsets(self) -> list[range]:
        """Return the elements of ``F`` that no rank holds, as maximal ranges, ascending.

        >>> piece = AffinePiece((2, 2), 0, (4, 1), 0, (2, 1), [0])
        >>> ParamAffineMap((2, 4), {0: (2, 2)}, {0: [piece]}).uncovered_offsets()
        [range(2, 4), range(6, 8)]
        """
        links = [from_source(piece) for _, piece in self.pieces() if piece.numel]
        return validation.holes(links, self.numel)

    def holders(self, offset: int) -> tuple[int, ...]:
        """Return the ranks whose shards hold one element of ``F``, ascending.

        Raises
        ------
        UsageError
            When ``F`` has no such element.
        """
        if not 0 <= offset < self.numel:
            raise UsageError("no such element", expected=f"0 … {self.numel - 1}", found=offset)
        point = Link(offset, 0, ())
        found = {
            rank
            for rank, piece in self.pieces()
            if piece.numel and piece.source_offset <= offset < piece.source_stop
            if meet(from_source(piece), point)
        }
        return tuple(sorted(found))

    def canonical(self) -> ParamAffineMap:
        """Return the same relation in its canonical form: maximally merged and folded.

        Empty pieces are dropped, others merged within each rank, set of locations and scale.
        """
        pieces = {rank: canonical_pieces(owned) for rank, owned in self._pieces.items()}
        return ParamAffineMap(self.logical_shape, self._shapes, pieces)

    # -- restriction -------------------------------------------------------------------------

    def narrow(self, dim: int, start: int, length: int) -> ParamAffineMap:
        """Return the map of ``F.narrow(dim, start, length)`` over the same shards.

        Elements of the shards that lie outside the range are no longer written by any piece, so
        the result validates as ``partial``.

        Raises
        ------
        UsageError
            When the range is not inside the dimension.
        """
        shape = self.logical_shape
        if not 0 <= dim < len(shape) or not 0 <= start <= start + length <= shape[dim]:
            raise UsageError(
                "no such range", dim=dim, expected=f"inside {shape}", found=(start, length)
            )
        small = (*shape[:dim], length, *shape[dim + 1 :])
        window = make_link(
            start * row_major_strides(shape)[dim],
            0,
            zip(small, row_major_strides(shape), row_major_strides(small), strict=True),
        )
        pieces: dict[int, list[AffinePiece]] = {rank: [] for rank in self._shapes}
        if 0 not in small:
            for rank, piece in self.pieces():
                if piece.numel:
                    pieces[rank] += _windowed(piece, window)
        return ParamAffineMap(small, self._shapes, pieces)

    # -- movement ----------------------------------------------------------------------------

    def extract(self, full: Tensor, rank: int, scale_power: int = 1) -> Tensor:
        """Return one rank's shard, cut out of the full tensor.

        Parameters
        ----------
        full
            The logical tensor, NumPy or torch, any dtype; only its number of elements matters.
        rank
            Whose shard.
        scale_power
            The shard holds ``F * scale ** scale_power``; see :data:`SCALE_POWER`.

        Raises
        ------
        UsageError
            When the tensor has another number of elements, or the rank has no shard.
        ScaledStateError
            When a scaled piece would have to scale an optimizer state.
        """
        self._refuse_scaled_state(scale_power)
        if rank not in self._shapes:
            raise UsageError("no such rank", rank=rank, expected=list(self.ranks))
        bits = self._flat(full, self.numel, "the full tensor", None)
        shard = np.zeros(numel(self._shapes[rank]), bits.dtype)
        for piece in self._pieces[rank]:
            source = strided(bits, piece.source_offset, piece.shape, piece.source_strides)
            dest = strided(shard, piece.dest_offset, piece.shape, piece.dest_strides)
            dest[...] = _rescaled(full, source, piece, scale_power, divide=False)
        return like(full, shard, self._shapes[rank])

    def rebuild(self, shards: Mapping[int, Tensor], scale_power: int = 1) -> Tensor:
        """Return the full tensor, put together from shards.

        Ranks may be missing when the others hold all of ``F``. Wherever several shards hold the
        same element, their bits are compared.

        Parameters
        ----------
        shards
            Shard of each rank, NumPy or torch, all of one dtype.
        scale_power
            The shards hold ``F * scale ** scale_power``; see :data:`SCALE_POWER`.

        Raises
        ------
        ReplicaMismatchError
            (P2) when two shards hold an element by different bits.
        InvalidMapError
            (``broken="P1"``) when an element is in none of the given shards.
        UsageError
            When a shard has the wrong number of elements, or dtypes differ.
        ScaledStateError
            When a scaled piece would have to scale an optimizer state.
        """
        self._refuse_scaled_state(scale_power)
        first, bits = self._shard_bits(shards)
        self._refuse_holes(bits)
        full = np.zeros(self.numel, bits[next(iter(bits))].dtype)
        for rank, piece, dest in self._views(bits):
            strided(full, piece.source_offset, piece.shape, piece.source_strides)[...] = dest
        self._compare(full, bits)
        if not self.is_scaled:
            return like(first, full, self.logical_shape)
        unscaled = full.copy()
        for _, piece, dest in self._views(bits):
            target = strided(unscaled, piece.source_offset, piece.shape, piece.source_strides)
            target[...] = _rescaled(first, dest, piece, scale_power, divide=True)
        return like(first, unscaled, self.logical_shape)

    def _refuse_scaled_state(self, scale_power: int) -> None:
        if scale_power not in (0, 1) and self.is_scaled:
            raise ScaledStateError(
                "a scaled optimizer state cannot be moved alone: Adam's lr and eps live in the"
                " scaled coordinate too",
                found=f"scale ** {scale_power}",
                next_step="convert the parameter only, or start its optimizer state anew",
            )

    def _flat(self, tensor: Tensor, size: int, name: str, rank: int | None) -> Bits:
        bits = flat_bits(tensor)
        if bits.size != size:
            raise UsageError(
                f"{name} has another number of elements", rank=rank, expected=size, found=bits.size
            )
        return bits

    def _shard_bits(self, shards: Mapping[int, Tensor]) -> tuple[Tensor, dict[int, Bits]]:
        unknown = sorted(set(shards) - set(self._shapes))
        if unknown or not shards:
            raise UsageError(
                "shards do not fit the map", expected=list(self.ranks), found=list(shards)
            )
        first = next(iter(shards.values()))
        bits = {}
        for rank in sorted(shards):
            if str(shards[rank].dtype) != str(first.dtype):
                raise UsageError(
                    "shards differ in dtype", rank=rank, expected=first.dtype, found=shards[rank].dtype
                )
            bits[rank] = self._flat(shards[rank], numel(self._shapes[rank]), "the shard", rank)
        return first, bits

    def _refuse_holes(self, bits: Mapping[int, Bits]) -> None:
        links = [from_source(p) for rank, p in self.pieces() if rank in bits and p.numel]
        holes = validation.holes(links, self.numel)
        if holes:
            raise InvalidMapError(
                "an element of F is in none of the shards",
                broken="P1",
                offset=holes[0].start,
                ranks=sorted(set(self._shapes) - set(bits)),
                expected=self.numel,
                found=self.numel - sum(map(len, holes)),
                next_step="give the shards of the ranks named here too",
            )

    def _views(self, bits: Mapping[int, Bits]) -> Iterator[tuple[int, AffinePiece, Bits]]:
        for rank, piece in self.pieces():
            if rank in bits and piece.numel:
                view = strided(bits[rank], piece.dest_offset, piece.shape, piece.dest_strides)
                yield rank, piece, view

    def _compare(self, full: Bits, bits: Mapping[int, Bits]) -> None:
        """Compare every shard with what was written last, which finds any two that differ."""
        held = sum(piece.numel for _, piece, _ in self._views(bits))
        if held == self.numel:
            return
        for rank, piece, dest in self._views(bits):
            written = strided(full, piece.source_offset, piece.shape, piece.source_strides)
            differs = np.atleast_1d(written != dest)
            if differs.any():
                where = np.argwhere(differs)[0].tolist()[: len(piece.shape)]
                offset = piece.source_offset + sum(
                    i * s for i, s in zip(where, piece.source_strides, strict=True)
                )
                raise ReplicaMismatchError(
                    "ranks hold different bits for the same element of F",
                    ranks=[r for r in self.holders(offset) if r in bits],
                    offset=offset,
                    found=f"offset {offset}, {int(differs.sum())} elements of rank {rank}",
                )

    # -- documents ---------------------------------------------------------------------------

    def to_dict(self) -> dict[str, object]:
        """Return the map as the plain scalars and lists of §6.2."""
        return write_entry((self.logical_shape, self._shapes, self._pieces))

    @classmethod
    def from_dict(cls, entry: object, path: str = "map") -> ParamAffineMap:
        """Return the map that :meth:`to_dict` (or DeepSpeed) wrote.

        Raises
        ------
        DocumentError
            With the path of the first malformed value.
        """
        return cls(*read_entry(entry, path))


def _windowed(piece: AffinePiece, window: Link) -> list[AffinePiece]:
    """Return the parts of a piece inside a window of ``F``, seen from the window."""
    found = []
    for part in meet(from_source(piece), window):
        dims = [(n, f, g) for n, _, f, g in part.dims]
        link = make_link(part.first, part.second, dims)
        found.append(piece_of(link, piece.locations, piece.scale))
    return found


def _rescaled(
    kind: Tensor, block: Bits, piece: AffinePiece, scale_power: int, *, divide: bool
) -> Bits:
    if piece.scale == 1.0 or scale_power == 0 or not block.size:
        return block
    packed = np.ascontiguousarray(block).reshape(-1)
    values = like(kind, packed, (packed.size,))
    return flat_bits(scaled(values, piece.scale**scale_power, divide=divide)).reshape(piece.shape)


def maps_to_document(maps: Mapping[str, ParamAffineMap]) -> dict[str, object]:
    """Return the whole document of §6.2, ``{"version": 1, "params": {pattern: map}}``."""
    return write_params({p: (m.logical_shape, m._shapes, m._pieces) for p, m in maps.items()})


def maps_from_document(document: object, *, validate: bool = False) -> dict[str, ParamAffineMap]:
    """Return the maps of a whole document, by pattern.

    Parameters
    ----------
    document
        What JSON or a checkpoint gave.
    validate
        Also refuse maps that break P1, P3 or P5.

    Raises
    ------
    DocumentError
        When the document is malformed or of an unknown version.
    InvalidMapError
        When ``validate`` is set and a map is not valid.
    """
    maps = {pattern: ParamAffineMap(*entry) for pattern, entry in read_params(document).items()}
    if validate:
        for pattern, one in maps.items():
            one.validate(pattern)
    return maps
