"""The transfer plan: the strided copies that turn one set of shards into another.

Theory. A segment copies one strided block from the shard of a source rank into the shard of a
target rank. A plan holds the segments of one parameter, each target element in exactly one of
them, and names the target elements that no source holds. It is pure data: it can be compared,
hashed, written as JSON, proved (:meth:`TransferPlan.verify` looks only at the plan), and run in
process by :meth:`TransferPlan.apply`.

Segments are held as columns; the :class:`Segment` objects are made when somebody asks for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from reshard.errors import CompositionError, DocumentError, UsageError, count_text
from reshard.geometry.buffers import Bits, Tensor, flat_bits, like, strided
from reshard.geometry.document import (
    as_list,
    as_mapping,
    as_number,
    as_offset,
    as_offsets,
    as_rank,
    check_version,
    fields,
    refuse,
)
from reshard.geometry.frozen import Frozen
from reshard.geometry.holes import gaps
from reshard.geometry.index_math import MAX_OFFSET, numel, span
from reshard.geometry.movement import refuse_scaled_state, rescaled, same_kind, sized_bits
from reshard.geometry.notation import block_text, ranges_text
from reshard.geometry.ordering import Ints, grouped_sums
from reshard.geometry.refinement import names_once
from reshard.geometry.tables import LinkTable

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


@dataclass(frozen=True, slots=True, eq=False)
class SegmentTable:
    """Segments as columns: ``link`` has the target shard as near space, the source shard as far.

    Rows are in order of target rank and target offset, links in normal form.
    """

    link: LinkTable
    source_rank: Ints
    target_rank: Ints
    scale: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.scale)

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> SegmentTable:
        """Return the table of some segments, in their order."""
        count = len(segments)
        dims = max([len(segment.shape) for segment in segments], default=0)
        pad = [0] * dims

        def column(rows: list[tuple[int, ...]], fill: int) -> Ints:
            filled = [(*row, *[fill] * (len(pad) - len(row))) for row in rows]
            flat = np.fromiter(chain.from_iterable(filled), np.int64)
            return np.asfortranarray(flat.reshape(count, dims))

        link = LinkTable(
            np.array([segment.target_offset for segment in segments], np.int64),
            np.array([segment.source_offset for segment in segments], np.int64),
            column([segment.shape for segment in segments], 1),
            column([segment.target_strides for segment in segments], 0),
            column([segment.source_strides for segment in segments], 0),
        )
        return cls(
            link,
            np.array([segment.source_rank for segment in segments], np.int64),
            np.array([segment.target_rank for segment in segments], np.int64),
            np.array([segment.scale for segment in segments], np.float64),
        )

    def take(self, rows: Ints) -> SegmentTable:
        """Return some rows."""
        return SegmentTable(
            self.link.take(rows), self.source_rank[rows], self.target_rank[rows], self.scale[rows]
        )

    def segments(self) -> Iterator[Segment]:
        """Yield the rows as segments."""
        columns = zip(
            self.link.links(),
            self.source_rank.tolist(),
            self.target_rank.tolist(),
            self.scale.tolist(),
            strict=True,
        )
        for (near, far, dims), source, target, scale in columns:
            shape, to, of = tuple(zip(*dims, strict=True)) or ((), (), ())
            yield Segment(shape, source, far, of, target, near, to, scale)

    def numel_by_target(self) -> dict[int, int]:
        """Number of elements that each target rank receives."""
        return grouped_sums(self.target_rank, self.link.numel())

    def numel_by_source(self) -> dict[int, int]:
        """Number of elements that each source rank gives."""
        return grouped_sums(self.source_rank, self.link.numel())


class TransferPlan(Frozen):
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

    __slots__ = ("_segments", "_source_shapes", "_table", "_target_shapes", "_unfilled")

    _segments: tuple[Segment, ...] | None
    _table: SegmentTable | None
    _source_shapes: dict[int, tuple[int, ...]]
    _target_shapes: dict[int, tuple[int, ...]]
    _unfilled: dict[int, tuple[range, ...]]

    def __init__(
        self,
        source_shapes: Mapping[int, tuple[int, ...]],
        target_shapes: Mapping[int, tuple[int, ...]],
        segments: Sequence[Segment],
        unfilled: Mapping[int, Sequence[range]],
    ) -> None:
        put = object.__setattr__
        put(self, "_segments", tuple(segments))
        put(self, "_table", None)
        put(self, "_source_shapes", dict(source_shapes))
        put(self, "_target_shapes", dict(target_shapes))
        put(self, "_unfilled", {r: tuple(holes) for r, holes in unfilled.items() if holes})

    @classmethod
    def from_table(
        cls,
        source_shapes: Mapping[int, tuple[int, ...]],
        target_shapes: Mapping[int, tuple[int, ...]],
        table: SegmentTable,
        unfilled: Mapping[int, Sequence[range]],
    ) -> TransferPlan:
        """Return the plan of segments that are given as columns."""
        plan = cls(source_shapes, target_shapes, (), unfilled)
        object.__setattr__(plan, "_segments", None)
        object.__setattr__(plan, "_table", table)
        return plan

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, TransferPlan):
            return NotImplemented
        return (
            len(self) == len(other)
            and self._source_shapes == other._source_shapes
            and self._target_shapes == other._target_shapes
            and self._unfilled == other._unfilled
            and self.segments == other.segments
        )

    def __hash__(self) -> int:
        link = self.table.link
        return hash((len(self), int(link.near.sum()), int(link.far.sum())))

    def __len__(self) -> int:
        return len(self.table if self._segments is None else self._segments)

    def __reduce__(self) -> tuple[object, ...]:
        shapes = self._source_shapes, self._target_shapes
        return TransferPlan, (*shapes, self.segments, self._unfilled)

    def __repr__(self) -> str:
        shapes = f"{self._source_shapes!r}, {self._target_shapes!r}"
        return f"TransferPlan({shapes}, {self.segments!r}, {self._unfilled!r})"

    def __str__(self) -> str:
        lines = [f"{count_text(len(self), 'segment')}, {count_text(self.numel, 'element')}"]
        lines += [f"  {segment}" for segment in self.segments]
        for rank, holes in self._unfilled.items():
            lines.append(f"  nothing → {rank}: {ranges_text(holes)}")
        return "\n".join(lines)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The copies, in order of target rank and target offset."""
        segments = self._segments
        if segments is None:
            segments = tuple(self.table.segments())
            object.__setattr__(self, "_segments", segments)
        return segments

    @property
    def table(self) -> SegmentTable:
        """The copies as columns."""
        table = self._table
        if table is None:
            table = SegmentTable.of(self.segments)
            object.__setattr__(self, "_table", table)
        return table

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
        return int(self.table.link.numel().sum())

    def into(self) -> Iterator[tuple[int, tuple[Segment, ...]]]:
        """Yield each target rank that receives something, with its segments."""
        for rank, group in groupby(self.segments, key=lambda segment: segment.target_rank):
            yield rank, tuple(group)

    def verify(self) -> None:
        """Prove the plan from its own data: bounds, each target element once, holes as named.

        Raises
        ------
        CompositionError
            Naming the first segment or element that is wrong.
        """
        if self._table is None:
            for segment in self.segments:
                _check_form(segment)
        _verify(self)

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
        refuse_scaled_state(scale_power, is_scaled=bool((self.table.scale != 1.0).any()))
        needed = np.unique(self.table.source_rank).tolist()
        missing = [rank for rank in needed if rank not in source_shards]
        if missing or not source_shards:
            raise UsageError("a source shard is missing", rank=", ".join(map(str, missing)))
        kind = next(iter(source_shards.values()))
        bits = {}
        for rank in needed:
            same_kind(source_shards[rank], kind, rank)
            size = numel(self._source_shapes[rank])
            bits[rank] = sized_bits(source_shards[rank], size, "a source shard", rank)
        dtype = flat_bits(kind).dtype
        made = {r: np.zeros(numel(shape), dtype) for r, shape in self._target_shapes.items()}
        for segment in self.segments:
            _copy(segment, bits[segment.source_rank], made[segment.target_rank], kind, scale_power)
        return {r: like(kind, array, self._target_shapes[r]) for r, array in made.items()}

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
        check_version(record, "plan", PLAN_VERSION)
        names = ("version", "source_shapes", "target_shapes", "segments", "unfilled")
        _, sources, targets, segments, unfilled = fields(document, "plan", names)
        listed = as_list(segments, "plan.segments")
        return cls(
            _read_shapes(sources, "plan.source_shapes"),
            _read_shapes(targets, "plan.target_shapes"),
            [_read_segment(item, f"plan.segments[{i}]") for i, item in enumerate(listed)],
            _read_holes(unfilled, "plan.unfilled"),
        )


def _check_form(segment: Segment) -> None:
    """Refuse a segment that no pieces could have given, before it becomes columns."""
    shape, strides = segment.shape, (segment.source_strides, segment.target_strides)
    numbers = (*shape, *strides[0], *strides[1], segment.source_offset, segment.target_offset)
    sound = all(type(n) is int and 0 <= n <= MAX_OFFSET for n in numbers)
    sound = sound and all(
        len(shape) == len(one) and span(shape, one) < MAX_OFFSET for one in strides
    )
    if not sound or not math.isfinite(segment.scale) or not segment.scale:
        raise CompositionError(f"a malformed segment: {segment}", rank=segment.target_rank)


def _verify(plan: TransferPlan) -> None:
    table = plan.table
    sides = (
        ("source", plan.source_shapes, table.source_rank, table.link.far_stop()),
        ("target", plan.target_shapes, table.target_rank, table.link.near_stop()),
    )
    if (table.link.extent < 1).any():
        raise CompositionError("a segment copies nothing")
    for side, shapes, ranks, stop in sides:
        for rank in np.unique(ranks).tolist():
            if rank not in shapes:
                raise CompositionError(f"a segment names an unknown {side} rank", rank=rank)
            beyond = np.flatnonzero((ranks == rank) & (stop > numel(shapes[rank])))
            if len(beyond):
                segment = plan.segments[int(beyond[0])]
                raise CompositionError(f"a segment leaves its {side} shard: {segment}", rank=rank)
    link = table.link.normalised()
    if not names_once(link, table.target_rank):
        raise CompositionError("a target element is written twice")
    _verify_holes(plan)


def _verify_holes(plan: TransferPlan) -> None:
    table = plan.table
    written = table.numel_by_target()
    stray = sorted(set(plan.unfilled) - set(plan.target_shapes))
    if stray:
        raise CompositionError("holes of an unknown target rank", rank=stray[0])
    for rank, shape in plan.target_shapes.items():
        size, named = numel(shape), plan.unfilled.get(rank, ())
        if written.get(rank, 0) + sum(map(len, named)) != size:
            raise CompositionError("target elements are not accounted for", rank=rank)
        if named:
            mine = table.link.take(np.flatnonzero(table.target_rank == rank))
            if gaps(mine.normalised(), size) != list(named):
                raise CompositionError("holes are not where the plan says", rank=rank)


def _copy(segment: Segment, source: Bits, target: Bits, kind: Tensor, scale_power: int) -> None:
    block = strided(source, segment.source_offset, segment.shape, segment.source_strides)
    place = strided(target, segment.target_offset, segment.shape, segment.target_strides)
    place[...] = rescaled(kind, block, segment.scale, scale_power, divide=False)


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
    extents = as_offsets(shape, f"{path}.shape")
    source_rank, source_offset, source_strides = _read_end(source, f"{path}.source", extents)
    target_rank, target_offset, target_strides = _read_end(target, f"{path}.target", extents)
    factor = as_number(scale, f"{path}.scale")
    if not math.isfinite(factor) or not factor:
        refuse(f"{path}.scale", "a scale without an inverse", "a finite non-zero number", scale)
    return Segment(
        extents,
        source_rank,
        source_offset,
        source_strides,
        target_rank,
        target_offset,
        target_strides,
        factor,
    )


def _read_end(value: object, path: str, shape: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
    triple = as_list(value, path)
    if len(triple) != 3:
        refuse(path, "not a triple", "[rank, offset, strides]", value)
    strides = as_offsets(triple[2], f"{path}[2]")
    if len(strides) != len(shape):
        raise DocumentError(f"{path}[2]: strides and shape differ in length")
    return as_offset(triple[0], f"{path}[0]"), as_offset(triple[1], f"{path}[1]"), strides


def _read_shapes(value: object, path: str) -> dict[int, tuple[int, ...]]:
    return {
        as_rank(key, path): as_offsets(shape, f"{path}.{key}")
        for key, shape in as_mapping(value, path).items()
    }


def _read_holes(value: object, path: str) -> dict[int, list[range]]:
    holes = {}
    for key, listed in as_mapping(value, path).items():
        here = f"{path}.{key}"
        pairs = [as_offsets(pair, here) for pair in as_list(listed, here)]
        if any(len(pair) != 2 or pair[0] >= pair[1] for pair in pairs):
            refuse(here, "not a range", "[start, stop]", listed)
        holes[as_rank(key, path)] = [range(*pair) for pair in pairs]
    return holes
