"""The transfer plan: the strided copies that turn one set of shards into another.

Theory. A segment copies one strided block from the shard of a source rank into the shard of a
target rank. A plan holds the segments of one parameter, each target element in exactly one of
them, and names the target elements that no source holds. It is pure data: it can be compared,
hashed, written as JSON, proved (:meth:`TransferPlan.verify` looks only at the plan), and run in
process by :meth:`TransferPlan.apply`.

Segments are held as columns; the :class:`Segment` objects are made when somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

import numpy as np

from reshard.errors import UsageError, count_text
from reshard.geometry.buffers import Bits, Tensor, flat_bits, like, strided
from reshard.geometry.document import as_list, as_mapping, check_version, fields
from reshard.geometry.frozen import Frozen
from reshard.geometry.holes import Holes, holes_text, listed
from reshard.geometry.index_math import numel
from reshard.geometry.map_value import MANY_PIECES
from reshard.geometry.movement import refuse_scaled_state, rescaled, same_kind, sized_bits
from reshard.geometry.plan_document import (
    PLAN_VERSION,
    read_holes,
    read_segment,
    read_shapes,
    write_segment,
)
from reshard.geometry.plan_proof import Subject, check_form, prove
from reshard.geometry.segments import Segment, Segments, SegmentTable


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

    __slots__ = ("_holes", "_segments", "_source_shapes", "_table", "_target_shapes", "_unfilled")

    _segments: tuple[Segment, ...] | None
    _table: SegmentTable | None
    _source_shapes: dict[int, tuple[int, ...]]
    _target_shapes: dict[int, tuple[int, ...]]
    _unfilled: dict[int, tuple[range, ...]] | None
    _holes: dict[int, Collection[range]]

    def __init__(
        self,
        source_shapes: Mapping[int, tuple[int, ...]],
        target_shapes: Mapping[int, tuple[int, ...]],
        segments: Sequence[Segment],
        unfilled: Mapping[int, Collection[range]],
    ) -> None:
        put = object.__setattr__
        put(self, "_segments", tuple(segments))
        put(self, "_table", None)
        put(self, "_source_shapes", dict(source_shapes))
        put(self, "_target_shapes", dict(target_shapes))
        put(self, "_holes", {r: _kept(holes) for r, holes in unfilled.items() if holes})
        put(self, "_unfilled", None)

    @classmethod
    def from_table(
        cls,
        source_shapes: Mapping[int, tuple[int, ...]],
        target_shapes: Mapping[int, tuple[int, ...]],
        table: SegmentTable,
        unfilled: Mapping[int, Collection[range]],
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
            and self.unfilled == other.unfilled
            and self.segments == other.segments
        )

    def __hash__(self) -> int:
        link = self.table.link
        return hash((len(self), int(link.near.sum()), int(link.far.sum())))

    def __len__(self) -> int:
        return len(self.table if self._segments is None else self._segments)

    def __reduce__(self) -> tuple[object, ...]:
        shapes = self._source_shapes, self._target_shapes
        return TransferPlan, (*shapes, tuple(self.segments), dict(self.unfilled))

    def __repr__(self) -> str:
        shapes = f"{self._source_shapes!r}, {self._target_shapes!r}"
        return f"TransferPlan({shapes}, {self.segments!r}, {dict(self.unfilled)!r})"

    def __str__(self) -> str:
        lines = [f"{count_text(len(self), 'segment')}, {count_text(self.numel, 'element')}"]
        lines += [f"  {segment}" for segment in self.segments]
        for rank, holes in self._holes.items():
            lines.append(f"  nothing → {rank}: {holes_text(holes)}")
        return "\n".join(lines)

    @property
    def segments(self) -> Sequence[Segment]:
        """The copies, in order of target rank and target offset; of many, each made when asked."""
        segments = self._segments
        if segments is None:
            if len(self.table) > MANY_PIECES:
                return Segments(self.table)
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
        """Shard elements without a source, by target rank; empty when there are none.

        Raises
        ------
        UnsupportedError
            When there are too many ranges to list; :attr:`holes` tells how many.
        """
        unfilled = self._unfilled
        if unfilled is None:
            unfilled = {rank: tuple(listed(holes)) for rank, holes in self._holes.items()}
            object.__setattr__(self, "_unfilled", unfilled)
        return MappingProxyType(unfilled)

    @property
    def holes(self) -> Mapping[int, Collection[range]]:
        """The same, without a list of them: there may be far too many."""
        return MappingProxyType(self._holes)

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
                check_form(segment)
        prove(Subject(self.source_shapes, self.target_shapes, self.table, self.unfilled))

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
            "segments": [write_segment(segment) for segment in self.segments],
            "unfilled": {
                rank: [[hole.start, hole.stop] for hole in holes]
                for rank, holes in self.unfilled.items()
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
            read_shapes(sources, "plan.source_shapes"),
            read_shapes(targets, "plan.target_shapes"),
            [read_segment(item, f"plan.segments[{i}]") for i, item in enumerate(listed)],
            read_holes(unfilled, "plan.unfilled"),
        )


def _kept(holes: Collection[range]) -> Collection[range]:
    return holes if isinstance(holes, Holes) else tuple(holes)


def _copy(segment: Segment, source: Bits, target: Bits, kind: Tensor, scale_power: int) -> None:
    block = strided(source, segment.source_offset, segment.shape, segment.source_strides)
    place = strided(target, segment.target_offset, segment.shape, segment.target_strides)
    place[...] = rescaled(kind, block, segment.scale, scale_power, divide=False)
