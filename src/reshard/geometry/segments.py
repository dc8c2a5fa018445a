"""Segments: the strided copies that a plan is made of, one by one and as columns.

Theory. A segment copies one strided block from the shard of a source rank into the shard of a
target rank. Plans that were computed have very many and hold them as columns
(:class:`SegmentTable`): links (:class:`~reshard.geometry.tables.LinkTable`) from the target shard,
their near space, to the source shard, with the ranks and the scale beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import eq
from typing import overload

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.index_math import numel
from reshard.geometry.notation import block_text
from reshard.geometry.ordering import Ints, grouped_sums
from reshard.geometry.tables import LinkTable

_BATCH = 4096
"""Segments that are made at a time where one after the other is asked for."""


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


class Segments(Sequence[Segment]):
    """The rows of a table as segments, each made when it is asked for."""

    __slots__ = ("_table",)

    def __init__(self, table: SegmentTable) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, index: int) -> Segment: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Segment]: ...

    def __getitem__(self, index: int | slice) -> Segment | Sequence[Segment]:
        rows = np.arange(len(self))[index]
        if isinstance(index, slice):
            return tuple(self._table.take(rows).segments())
        return next(self._table.take(np.atleast_1d(rows)).segments())

    def __iter__(self) -> Iterator[Segment]:
        for at in range(0, len(self), _BATCH):
            rows = np.arange(at, min(at + _BATCH, len(self)))
            yield from self._table.take(rows).segments()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Segments | tuple):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    def __hash__(self) -> int:
        return hash((len(self), int(self._table.link.near.sum()), int(self._table.link.far.sum())))

    def __repr__(self) -> str:
        return repr(tuple(self))
