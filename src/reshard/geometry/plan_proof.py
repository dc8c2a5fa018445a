"""Proving a plan from itself: bounds, each target element written once, holes as named.

Theory. Nothing is known of the maps that a plan came from. Segments that stay inside their shards
and share no target element write as many elements as they have; where these and the holes that
the plan names are as many as the shard has elements, and the holes are where nothing is written,
every element is accounted for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from reshard.errors import CompositionError
from reshard.geometry.disjointness import names_once
from reshard.geometry.holes import gaps
from reshard.geometry.index_math import MAX_OFFSET, numel, span
from reshard.geometry.segments import Segment, SegmentTable

Shapes = Mapping[int, tuple[int, ...]]
"""Shard shape of every rank."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A plan under proof: the shard shapes of both sides, its segments, and its holes."""

    source_shapes: Shapes
    target_shapes: Shapes
    table: SegmentTable
    unfilled: Mapping[int, tuple[range, ...]]


def check_form(segment: Segment) -> None:
    """Refuse a segment that no pieces could have given, before it becomes columns."""
    shape, strides = segment.shape, (segment.source_strides, segment.target_strides)
    numbers = (*shape, *strides[0], *strides[1], segment.source_offset, segment.target_offset)
    sound = all(type(n) is int and 0 <= n <= MAX_OFFSET for n in numbers)
    sound = sound and all(
        len(shape) == len(one) and span(shape, one) < MAX_OFFSET for one in strides
    )
    if not sound or not math.isfinite(segment.scale) or not segment.scale:
        raise CompositionError(f"a malformed segment: {segment}", rank=segment.target_rank)


def prove(subject: Subject) -> None:
    """Prove all of a plan.

    Raises
    ------
    CompositionError
        Naming the first segment or element that is wrong.
    """
    table = subject.table
    sides = (
        ("source", subject.source_shapes, table.source_rank, table.link.far_stop()),
        ("target", subject.target_shapes, table.target_rank, table.link.near_stop()),
    )
    if (table.link.extent < 1).any():
        raise CompositionError("a segment copies nothing")
    for side, shapes, ranks, stop in sides:
        for rank in np.unique(ranks).tolist():
            if rank not in shapes:
                raise CompositionError(f"a segment names an unknown {side} rank", rank=rank)
            beyond = np.flatnonzero((ranks == rank) & (stop > numel(shapes[rank])))
            if len(beyond):
                (segment,) = table.take(beyond[:1]).segments()
                raise CompositionError(f"a segment leaves its {side} shard: {segment}", rank=rank)
    link = table.link.normalised()
    if not names_once(link, table.target_rank):
        raise CompositionError("a target element is written twice")
    _check_holes(subject)


def _check_holes(subject: Subject) -> None:
    """Refuse a plan whose holes are not exactly where it says."""
    table = subject.table
    written = table.numel_by_target()
    stray = sorted(set(subject.unfilled) - set(subject.target_shapes))
    if stray:
        raise CompositionError("holes of an unknown target rank", rank=stray[0])
    for rank, shape in subject.target_shapes.items():
        size, named = numel(shape), subject.unfilled.get(rank, ())
        if written.get(rank, 0) + sum(map(len, named)) != size:
            raise CompositionError("target elements are not accounted for", rank=rank)
        if named:
            mine = table.link.take(np.flatnonzero(table.target_rank == rank))
            if gaps(mine.normalised(), size) != list(named):
                raise CompositionError("holes are not where the plan says", rank=rank)
