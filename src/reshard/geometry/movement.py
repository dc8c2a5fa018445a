"""Movement: extracting shards from a full tensor and rebuilding it, piece by piece.

Theory. ``extract`` writes ``source view → dest view`` for every piece of a rank, ``rebuild``
writes ``dest view → source view`` for every piece of all ranks: the same loop with the copy
reversed. Rebuilding writes every replica and then compares each with what stands there at the
end, bit for bit (P2): two that differ cannot both agree with it, whatever their borders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from reshard.errors import InvalidMapError, ReplicaMismatchError, ScaledStateError, UsageError
from reshard.geometry.buffers import Bits, Tensor, flat_bits, like, scaled, strided
from reshard.geometry.holes import holes_of
from reshard.geometry.index_math import numel

if TYPE_CHECKING:
    from reshard.geometry.affine_map import ParamAffineMap
    from reshard.geometry.piece import AffinePiece


def extract(one: ParamAffineMap, full: Tensor, rank: int, scale_power: int) -> Tensor:
    """Return one rank's shard; see :meth:`ParamAffineMap.extract`."""
    refuse_scaled_state(scale_power, is_scaled=one.is_scaled)
    if rank not in one.shard_shapes:
        raise UsageError("no such rank", rank=rank, expected=list(one.ranks))
    shape = one.shard_shapes[rank]
    bits = sized_bits(full, one.numel, "the full tensor", None)
    shard = np.zeros(numel(shape), bits.dtype)
    for piece in one.pieces_by_rank[rank]:
        source = strided(bits, piece.source_offset, piece.shape, piece.source_strides)
        dest = strided(shard, piece.dest_offset, piece.shape, piece.dest_strides)
        dest[...] = rescaled(full, source, piece.scale, scale_power, divide=False)
    return like(full, shard, shape)


def rebuild(one: ParamAffineMap, shards: Mapping[int, Tensor], scale_power: int) -> Tensor:
    """Return the full tensor; see :meth:`ParamAffineMap.rebuild`."""
    refuse_scaled_state(scale_power, is_scaled=one.is_scaled)
    kind, bits = _shard_bits(one, shards)
    _refuse_holes(one, bits)
    full = np.zeros(one.numel, flat_bits(kind).dtype)
    for _, piece, dest in _views(one, bits):
        strided(full, piece.source_offset, piece.shape, piece.source_strides)[...] = dest
    _compare(one, full, bits)
    if not one.is_scaled:
        return like(kind, full, one.logical_shape)
    unscaled = full.copy()
    for _, piece, dest in _views(one, bits):
        target = strided(unscaled, piece.source_offset, piece.shape, piece.source_strides)
        target[...] = rescaled(kind, dest, piece.scale, scale_power, divide=True)
    return like(kind, unscaled, one.logical_shape)


def refuse_scaled_state(scale_power: int, *, is_scaled: bool) -> None:
    """Refuse to move an optimizer state through a scale.

    Raises
    ------
    ScaledStateError
        When something is scaled and ``scale_power`` is not that of the parameter.
    """
    if is_scaled and scale_power not in (0, 1):
        raise ScaledStateError(
            "a scaled optimizer state cannot be moved alone: Adam's lr and eps live in the"
            " scaled coordinate too",
            found=f"scale ** {scale_power}",
            next_step="convert the parameter only, or start its optimizer state anew",
        )


def sized_bits(tensor: Tensor, size: int, name: str, rank: int | None) -> Bits:
    """Return the bits of a tensor that must have ``size`` elements.

    Raises
    ------
    UsageError
        When it has another number.
    """
    bits = flat_bits(tensor)
    if bits.size != size:
        raise UsageError(
            f"{name} has another number of elements", rank=rank, expected=size, found=bits.size
        )
    return bits


def rescaled(kind: Tensor, block: Bits, scale: float, scale_power: int, *, divide: bool) -> Bits:
    """Return a block of bits times (or divided by) ``scale ** scale_power``, as ``kind`` does."""
    if scale == 1.0 or scale_power == 0 or not block.size:
        return block
    packed = np.ascontiguousarray(block).reshape(-1)
    values = like(kind, packed, (packed.size,))
    return flat_bits(scaled(values, scale**scale_power, divide=divide)).reshape(block.shape)


def same_kind(tensor: Tensor, kind: Tensor, rank: int) -> None:
    """Refuse tensors of different dtypes.

    Raises
    ------
    UsageError
        When the dtypes differ.
    """
    if str(tensor.dtype) != str(kind.dtype):
        raise UsageError(
            "shards differ in dtype", rank=rank, expected=kind.dtype, found=tensor.dtype
        )


def _shard_bits(
    one: ParamAffineMap, shards: Mapping[int, Tensor]
) -> tuple[Tensor, dict[int, Bits]]:
    if not shards or set(shards) - set(one.ranks):
        raise UsageError("shards do not fit the map", expected=list(one.ranks), found=list(shards))
    kind = next(iter(shards.values()))
    bits = {}
    for rank in sorted(shards):
        same_kind(shards[rank], kind, rank)
        bits[rank] = sized_bits(shards[rank], numel(one.shard_shapes[rank]), "the shard", rank)
    return kind, bits


def _refuse_holes(one: ParamAffineMap, bits: Mapping[int, Bits]) -> None:
    table = one.table
    given = np.flatnonzero(np.isin(table.rank, list(bits)))
    holes = holes_of(table.link.take(given), one.numel)
    if holes:
        raise InvalidMapError(
            "an element of F is in none of the shards",
            broken="P1",
            offset=holes.start,
            ranks=sorted(set(one.ranks) - set(bits)),
            expected=one.numel,
            found=one.numel - holes.numel,
            next_step="give the shards of the ranks named here too",
        )


def _views(
    one: ParamAffineMap, bits: Mapping[int, Bits]
) -> Iterator[tuple[int, AffinePiece, Bits]]:
    for rank, piece in one.pieces():
        if rank in bits and piece.numel:
            view = strided(bits[rank], piece.dest_offset, piece.shape, piece.dest_strides)
            yield rank, piece, view


def _compare(one: ParamAffineMap, full: Bits, bits: Mapping[int, Bits]) -> None:
    if sum(piece.numel for _, piece, _ in _views(one, bits)) == one.numel:
        return
    for rank, piece, dest in _views(one, bits):
        written = strided(full, piece.source_offset, piece.shape, piece.source_strides)
        differs = np.atleast_1d(written != dest)
        if differs.any():
            where = np.argwhere(differs)[0].tolist()[: len(piece.shape)]
            offset = piece.source_offset + sum(
                i * s for i, s in zip(where, piece.source_strides, strict=True)
            )
            raise ReplicaMismatchError(
                "ranks hold different bits for the same element of F",
                ranks=[holder for holder in one.holders(offset) if holder in bits],
                offset=offset,
                found=f"offset {offset}, {int(differs.sum())} elements of rank {rank}",
            )
