"""The transfer plan: the strided copies that turn one set of shards into another.

Theory. A segment copies one strided block from the shard of a source rank into the shard of a
target rank. A plan holds the segments of one parameter, each target element in exactly one of
them, and names the target elements that no source holds. It is pure data: it can be compared,
hashed, written as JSON, proved (:meth:`TransferPlan.verify` looks only at the plan), and run in
process by :meth:`TransferPlan.apply`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType

import numpy as np

from reshard.errors import CompositionError, DocumentError, ScaledStateError, UsageError
from reshard.geometry.buffers import Bits, Tensor, flat_bits, like, scaled, strided
from reshard.geometry.document import as_integer, as_integers, as_list, as_mapping, fields, refuse
from reshard.geometry.index_math import numel, span
from reshard.geometry.links import Link, make_link
from reshard.geometry.notation import block_text, ranges_text
from reshard.geometry.refinement import overlapping
from reshard.geometry.validation import gaps

PLAN_VERSION = 1
"""The version of the plan document that is written, and the newest that is read."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One strided copy: ``target[block] = source[block] * scale``, offsets in elements."""

    shape: tuple[int, ...]
    source_rank: int
    source_offset: int
    source_strides: tuple[int, ...]
    target_rank: int
    target_offset: int
    target_strides: tuple[int, ...]
    scale: float = 1.0

    @property
    def numel(self) -> int:
        """Number of elements that the segment copies."""
        return numel(self.shape)

    def __str__(self) -> str:
        source = block_text(self.source_offset, self.shape, self.source_strides)
        target = block_text(self.target_offset, self.shape, self.target_strides)
        times = "" if self.scale == 1.0 else f" ·{self.scale:g}"
        return f"{self.source_rank}{source}{times} → {self.target_rank}{target}"


class TransferPlan:
    """All copies of one parameter from source shards into target shards.

    Parameters
    ----------
    source_shapes, target_shapes
        Shard shape of every rank on either side.
    segments
        The copies, in order of target rank and target offset.
    unfilled
        For each target rank that has some, the shard elements that no segment writes, as maximal
        ascending ranges of shard offsets.
    """

    __slots__ = ("_hash", "_source_shapes", "_target_shapes", "_unfilled", "segments")

    segments: tuple[Segment, ...]
    _source_shapes: dict[int, tuple[int, ...]]
    _target_shapes: dict[int, tuple[int, ...]]
    _unfilled: dict[int, tuple[range, ...]]
    _hash: int

    def __init__(
        self,
        source_shapes: Mapping[int, tuple[int, ...]],
        target_shapes: Mapping[int, tuple[int, ...]],
        segments: Sequence[Segment],
        unfilled: Mapping[int, Sequence[range]],
    ) -> None:
        put = object.__setattr__
        put(self, "segments", tuple(segments))
        put(self, "_source_shapes", dict(source_shapes))
        put(self, "_target_shapes", dict(target_shapes))
        put(self, "_unfilled", {r: tuple(holes) for r, holes in unfilled.items() if holes})
        put(self, "_hash", hash(self.segments))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"TransferPlan is frozen: cannot set {name}")

    def _value(self) -> tuple[object, ...]:
        return self.segments, self._source_shapes, self._target_shapes, self._unfilled

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, TransferPlan):
            return NotImplemented
        return self._value() == other._value()

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        shapes = self._source_shapes, self._target_shapes
        return TransferPlan, (*shapes, self.segments, self._unfilled)

    def __repr__(self) -> str:
        shapes = f"{self._source_shapes!r}, {self._target_shapes!r}"
        return f"TransferPlan({shapes}, {self.segments!r}, {self._unfilled!r})"

    def __str__(self) -> str:
        lines = [f"{len(self.segments)} segments, {self.numel} elements"]
        lines += [f"  {segment}" for segment in self.segments]
        for rank, holes in self._unfilled.items():
            lines.append(f"  nothing → {rank}: {ranges_text(holes)}")
        return "\n".join(lines)

    @property
    def source_shapes(self) -> Mapping[int, tuple[int, ...]]:
        """Shard shape of every source rank."""
        return MappingProxyType(self._source_shapes)

    @property
    def target_shapes(self) -> Mapping[int, tuple[int, ...]]:
        """Shard shape of every target rank."""
        return MappingProxyType(self._target_shapes)

    @property
    def unfilled(self) -> Mapping[int, tuple[range, ...]]:
        """Shard elements without a source, by target rank; empty when there are none."""
        return MappingProxyType(self._unfilled)

    @property
    def numel(self) -> int:
        """Number of elements that the plan copies."""
        return sum(segment.numel for segment in self.segments)

    @property
    def is_scaled(self) -> bool:
        """Whether some segment has a scale other than 1."""
        return any(segment.scale != 1.0 for segment in self.segments)

    def into(self) -> Iterator[tuple[int, tuple[Segment, ...]]]:
        """Yield each target rank that receives something, with its segments."""
        for rank, group in groupby(self.segments, key=lambda segment: segment.target_rank):
            yield rank, tuple(group)

    # -- proof -------------------------------------------------------------------------------

    def verify(self) -> None:
        """Prove the plan from its own data: bounds, each target element once, holes as named.

        Raises
        ------
        CompositionError
            Naming the first segment or element that is wrong.
        """
        by_target: dict[int, list[Segment]] = {rank: [] for rank in self._target_shapes}
        for segment in self.segments:
            self._check_bounds(segment)
            by_target[segment.target_rank].append(segment)
        for rank, segments in by_target.items():
            links = [_target_link(segment) for segment in segments]
            if overlapping(links):
                raise CompositionError("a target element is written twice", rank=rank)
            named = sum(map(len, self._unfilled.get(rank, ())))
            size = numel(self._target_shapes[rank])
            if sum(segment.numel for segment in segments) + named != size:
                raise CompositionError("target elements are not accounted for", rank=rank)
            if named and gaps(links, size) != list(self._unfilled[rank]):
                raise CompositionError("holes are not where the plan says", rank=rank)

    def _check_bounds(self, segment: Segment) -> None:
        sides = (
            ("source", self._source_shapes, segment.source_rank, segment.source_offset,
             segment.source_strides),
            ("target", self._target_shapes, segment.target_rank, segment.target_offset,
             segment.target_strides),
        )
        for side, shapes, rank, offset, strides in sides:
            if rank not in shapes:
                raise CompositionError(f"a segment names an unknown {side} rank", rank=rank)
            if 0 in segment.shape or offset + span(segment.shape, strides) >= numel(shapes[rank]):
                raise CompositionError(f"a segment leaves its {side} shard: {segment}", rank=rank)

    # -- execution ---------------------------------------------------------------------------

    def apply(self, source_shards: Mapping[int, Tensor], scale_power: int = 1) -> dict[int, Tensor]:
        """Run the plan in this process and return the target shards.

        Parameters
        ----------
        source_shards
            Shard of every source rank that the plan reads, NumPy or torch, all of one dtype.
        scale_power
            The power of the scales to apply; see :data:`SCALE_POWER`.

        Returns
        -------
        dict
            A new shard for every target rank; unfilled elements are 0.

        Raises
        ------
        UsageError
            When a shard is missing or has the wrong number of elements.
        ScaledStateError
            When a scaled segment would have to scale an optimizer state.
        """
        if scale_power not in (0, 1) and self.is_scaled:
            raise ScaledStateError("a scaled optimizer state cannot be moved alone")
        needed = sorted({segment.source_rank for segment in self.segments})
        missing = [rank for rank in needed if rank not in source_shards]
        if missing or not source_shards:
            raise UsageError("a source shard is missing", rank=", ".join(map(str, missing)))
        kind = next(iter(source_shards.values()))
        bits = {rank: self._source_bits(rank, source_shards[rank], kind) for rank in needed}
        dtype = flat_bits(kind).dtype
        made = {r: np.zeros(numel(shape), dtype) for r, shape in self._target_shapes.items()}
        for segment in self.segments:
            target = made[segment.target_rank]
            _copy(segment, bits[segment.source_rank], target, kind, scale_power)
        return {r: like(kind, array, self._target_shapes[r]) for r, array in made.items()}

    def _source_bits(self, rank: int, shard: Tensor, kind: Tensor) -> Bits:
        bits = flat_bits(shard)
        size = numel(self._source_shapes[rank])
        if bits.size != size:
            raise UsageError(
                "a source shard has another number of elements",
                rank=rank,
                expected=size,
                found=bits.size,
            )
        if str(shard.dtype) != str(kind.dtype):
            raise UsageError(
                "source shards differ in dtype", rank=rank, expected=kind.dtype, found=shard.dtype
            )
        return bits

    # -- documents ---------------------------------------------------------------------------

    def to_dict(self) -> dict[str, object]:
        """Return the plan as plain scalars, lists and dictionaries."""
        return {
            "version": PLAN_VERSION,
            "source_shapes": {rank: list(shape) for rank, shape in self._source_shapes.items()},
            "target_shapes": {rank: list(shape) for rank, shape in self._target_shapes.items()},
            "segments": [_write_segment(segment) for segment in self.segments],
            "unfilled": {
                rank: [[hole.start, hole.stop] for hole in holes]
                for rank, holes in self._unfilled.items()
            },
        }

    @classmethod
    def from_dict(cls, document: object) -> TransferPlan:
        """Return the plan that :meth:`to_dict` wrote.

        Raises
        ------
        DocumentError
            With the path of the first malformed value, or for an unknown version.
        """
        record = as_mapping(document, "plan")
        if record.get("version") != PLAN_VERSION:
            refuse("plan.version", "unknown version", str(PLAN_VERSION), record.get("version"))
        names = ("version", "source_shapes", "target_shapes", "segments", "unfilled")
        _, sources, targets, segments, unfilled = fields(document, "plan", names)
        listed = as_list(segments, "plan.segments")
        return cls(
            _read_shapes(sources, "plan.source_shapes"),
            _read_shapes(targets, "plan.target_shapes"),
            [_read_segment(item, f"plan.segments[{i}]") for i, item in enumerate(listed)],
            _read_holes(unfilled, "plan.unfilled"),
        )


def _target_link(segment: Segment) -> Link:
    return make_link(
        segment.target_offset,
        segment.source_offset,
        zip(segment.shape, segment.target_strides, segment.source_strides, strict=True),
    )


def _copy(segment: Segment, source: Bits, target: Bits, kind: Tensor, scale_power: int) -> None:
    block = strided(source, segment.source_offset, segment.shape, segment.source_strides)
    place = strided(target, segment.target_offset, segment.shape, segment.target_strides)
    if segment.scale != 1.0 and scale_power:
        packed = np.ascontiguousarray(block).reshape(-1)
        factor = segment.scale**scale_power
        product = scaled(like(kind, packed, (packed.size,)), factor, divide=False)
        block = flat_bits(product).reshape(segment.shape)
    place[...] = block


def _write_segment(segment: Segment) -> dict[str, object]:
    written: dict[str, object] = {
        "shape": list(segment.shape),
        "source": [segment.source_rank, segment.source_offset, list(segment.source_strides)],
        "target": [segment.target_rank, segment.target_offset, list(segment.target_strides)],
    }
    if segment.scale != 1.0:
        written["scale"] = segment.scale
    return written


def _read_segment(value: object, path: str) -> Segment:
    shape, source, target, scale = fields(value, path, ("shape", "source", "target"), ("scale",))
    extents = as_integers(shape, f"{path}.shape")
    source_rank, source_offset, source_strides = _read_end(source, f"{path}.source", extents)
    target_rank, target_offset, target_strides = _read_end(target, f"{path}.target", extents)
    factor = 1.0 if scale is None else scale
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        refuse(f"{path}.scale", "not a number", "a finite non-zero number", scale)
    return Segment(
        extents,
        source_rank,
        source_offset,
        source_strides,
        target_rank,
        target_offset,
        target_strides,
        float(factor),
    )


def _read_end(
    value: object, path: str, shape: tuple[int, ...]
) -> tuple[int, int, tuple[int, ...]]:
    triple = as_list(value, path)
    if len(triple) != 3:
        refuse(path, "not a triple", "[rank, offset, strides]", value)
    strides = as_integers(triple[2], f"{path}[2]")
    if len(strides) != len(shape):
        raise DocumentError(f"{path}[2]: strides and shape differ in length")
    return as_integer(triple[0], f"{path}[0]"), as_integer(triple[1], f"{path}[1]"), strides


def _read_shapes(value: object, path: str) -> dict[int, tuple[int, ...]]:
    return {
        _read_rank(key, path): as_integers(shape, f"{path}.{key}")
        for key, shape in as_mapping(value, path).items()
    }


def _read_rank(key: object, path: str) -> int:
    if isinstance(key, str) and key.isascii() and key.isdigit():
        return int(key)
    return as_integer(key, path)


def _read_holes(value: object, path: str) -> dict[int, list[range]]:
    holes = {}
    for key, listed in as_mapping(value, path).items():
        here = f"{path}.{key}"
        pairs = [as_integers(pair, here) for pair in as_list(listed, here)]
        if any(len(pair) != 2 or pair[0] >= pair[1] for pair in pairs):
            refuse(here, "not a range", "[start, stop]", listed)
        holes[_read_rank(key, path)] = [range(*pair) for pair in pairs]
    return holes
