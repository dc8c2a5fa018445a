"""From "which bytes hold which elements" to stored tensors: the composition every reader ends in.

Theory. A reader knows two maps. The *outer* map takes the logical tensor to shards (of tensor
ranks, stages, experts). For each shard it knows *stretches*: flat ranges of the shard and the byte
ranges that hold them. `nest` composes them to one map from the logical tensor to holders, and the
holders' regions are the stretches' bytes. Most tensors of a model share a handful of geometries, so
compositions are kept by geometry and made once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from reshard.errors import CheckpointError, InvalidMapError, UnsupportedError, count_text
from reshard.formats.checkpoint import Region
from reshard.formats.torch_archive import TensorRecord
from reshard.geometry import AffinePiece, ParamAffineMap, locate, nest
from reshard.geometry.holes import holes_of
from reshard.layouts.builders import row_major_strides


@dataclass(frozen=True, slots=True)
class Stretch:
    """A flat range of a shard, and the bytes that hold it."""

    region: Region
    """The bytes."""
    start: int
    """First element, in row-major order of the shard."""
    numel: int
    """Length in elements."""


@dataclass(frozen=True, slots=True)
class Located:
    """A composed map and the region of each of its holders."""

    map: ParamAffineMap
    regions: Mapping[int, Region]


_Geometry = tuple[ParamAffineMap, tuple[tuple[int, tuple[tuple[int, int], ...]], ...]]


@dataclass(frozen=True, slots=True)
class Assembler:
    """Composes outer maps with stretches, each geometry once."""

    made: dict[_Geometry, ParamAffineMap] = field(default_factory=dict)
    """Geometry -> composed map."""

    def locate(
        self, name: str, outer: ParamAffineMap, shards: Mapping[int, Sequence[Stretch]]
    ) -> Located:
        """Compose one tensor.

        Parameters
        ----------
        name
            The parameter, for messages.
        outer
            From the logical tensor to shards.
        shards
            Outer rank -> its stretches; holders are numbered in this order.

        Raises
        ------
        InvalidMapError
            When the stretches do not hold every element.
        """
        geometry: list[tuple[int, tuple[tuple[int, int], ...]]] = []
        regions: dict[int, Region] = {}
        for rank, stretches in shards.items():
            geometry.append((rank, tuple((part.start, part.numel) for part in stretches)))
            for part in stretches:
                regions[len(regions)] = part.region
        key = (outer, tuple(geometry))
        composed = self.made.get(key)
        if composed is None:
            composed = _compose(outer, geometry)
            # The map may leave elements of shards out (padding), but none of the tensor.
            composed.validate(name, partial=True)
            _refuse_holes(name, composed)
            self.made[key] = composed
        return Located(composed, regions)


def _refuse_holes(name: str, composed: ParamAffineMap) -> None:
    holes = holes_of(composed.table.link, composed.numel)
    if holes:
        raise InvalidMapError(
            "an element of the parameter is in none of the files",
            broken="P1",
            offset=holes.start,
            parameter=name,
            expected=count_text(composed.numel, "element"),
            found=composed.numel - holes.numel,
        )


def _compose(
    outer: ParamAffineMap, geometry: Sequence[tuple[int, tuple[tuple[int, int], ...]]]
) -> ParamAffineMap:
    inner = {}
    holder = 0
    for rank, ranges in geometry:
        whole = prod(outer.shard_shapes[rank])
        pieces = {}
        for start, numel in ranges:
            pieces[holder] = (
                [AffinePiece((numel,), start, (1,), 0, (1,), (holder,))] if numel else []
            )
            holder += 1
        shapes = {index: (numel,) for index, (_, numel) in zip(pieces, ranges, strict=True)}
        inner[rank] = locate((whole,), shapes, pieces)
    return nest(outer, inner)


def stored_order(
    record: TensorRecord, name: str, file: str, holder: int = 0
) -> ParamAffineMap | None:
    """The map from a tensor to its dense storage when it is not stored in row-major order.

    Parameters
    ----------
    record
        The tensor.
    name, file
        For messages.
    holder
        The one rank of the map.

    Returns
    -------
    ParamAffineMap or None
        None for the usual, row-major order; else the map (of a transposed weight).

    Raises
    ------
    UnsupportedError
        When the storage has gaps or overlaps (an expanded or sliced view).
    """
    if record.strides == row_major_strides(record.shape) or prod(record.shape) <= 1:
        return None
    step = 1
    axes = [axis for axis in zip(record.strides, record.shape, strict=True) if axis[1] != 1]
    if len(axes) <= 1 and all(stride == 1 for stride, _ in axes):
        return None
    for stride, extent in sorted(axes):
        if stride != step:
            raise UnsupportedError(
                "a tensor is a view with gaps or overlaps in its storage",
                file=file,
                parameter=name,
                expected="a dense tensor",
                found=f"shape {record.shape}, strides {record.strides}",
            )
        step *= extent
    numel = prod(record.shape)
    strides = row_major_strides(record.shape)
    piece = AffinePiece(record.shape, 0, strides, 0, record.strides, (holder,))
    return ParamAffineMap(record.shape, {holder: (numel,)}, {holder: (piece,)})


def row_major_order(shape: tuple[int, ...], holder: int) -> ParamAffineMap:
    """The map from a tensor to its storage in row-major order."""
    strides = row_major_strides(shape)
    piece = AffinePiece(shape, 0, strides, 0, strides, (holder,))
    return ParamAffineMap(shape, {holder: (prod(shape),)}, {holder: (piece,)})


def record_region(record: TensorRecord, file: str) -> Region:
    """The bytes of a dense tensor, which are its elements as they are."""
    require_plain(record, file)
    nbytes = prod(record.shape) * record.dtype.itemsize
    if record.offset + nbytes > record.storage.offset + record.storage.nbytes:
        raise CheckpointError(
            "a tensor reaches over the end of its storage",
            file=file,
            expected=f"{count_text(nbytes, 'byte')} from {record.offset}",
            found=f"a storage that ends at {record.storage.offset + record.storage.nbytes}",
        )
    return Region(file, record.offset, nbytes)


def require_plain(record: TensorRecord, file: str) -> None:
    """Refuse a lazy view (negated, conjugated): its elements are not the bytes of its storage."""
    metadata = record.metadata
    if metadata and (not isinstance(metadata, Mapping) or any(metadata.values())):
        raise UnsupportedError(
            "a tensor is a lazy view of its storage (negated or conjugated)",
            file=file,
            expected="a plain tensor",
            found=f"shape {record.shape}, {metadata!r}",
            next_step="save it resolved (resolve_neg, resolve_conj)",
        )


def require_flat(record: TensorRecord, file: str, what: str) -> None:
    """Refuse a one-dimensional tensor whose elements do not lie side by side in its storage."""
    if record.shape[0] > 1 and record.strides != (1,):
        raise UnsupportedError(
            f"{what} is a view with gaps or overlaps in its storage",
            file=file,
            expected="stride 1",
            found=f"stride {record.strides[0]}",
        )
    record_region(record, file)
