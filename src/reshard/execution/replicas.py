"""Replicas: what several holders keep must be the same, bit for bit.

Theory. A route lists, beside the moves that write a shard, the copies that were not chosen
(`checks`). Each is read in the same pass as its block and compared with what is already there, as
integers, so NaN payloads and signed zeros count. While everything agrees that is all. Where a block
differs it is examined in small steps, which finds the number of elements, the first one, and the
largest difference, and then the policy decides:

``refuse``  the whole tensor is examined and :class:`ReplicaMismatchError` tells the result;
``first``   the chosen copy is kept and the finding goes into the report;
``mean``    the elements that differ become the mean of all copies, summed in float64 in the order
            of the route (so the result depends on nothing else), and the finding is reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan, nan
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.errors import ReplicaMismatchError, count_text
from reshard.execution.gather import strided
from reshard.planning.moves import cut

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reshard.formats.checkpoint import TensorKey
    from reshard.formats.dtypes import DType
    from reshard.planning.moves import Move

REFUSE, FIRST, MEAN = "refuse", "first", "mean"


@dataclass(frozen=True, slots=True)
class ReplicaFinding:
    """Copies of one tensor state that differ."""

    key: TensorKey
    """`(name, state)`."""
    count: int
    """Elements at which at least one copy differs from the chosen one."""
    first: int
    """The first of them, as offset in the logical tensor."""
    largest: float
    """The largest difference in value; NaN when no pair of values can be subtracted."""
    holders: tuple[int, ...]
    """The two holders that differ at the first offset."""
    files: tuple[str, ...]
    """Where they are kept."""

    def joined(self, other: ReplicaFinding) -> ReplicaFinding:
        """Both findings as one; the other is about other elements of the same tensor."""
        first = min(self, other, key=lambda finding: finding.first)
        return ReplicaFinding(
            self.key,
            self.count + other.count,
            first.first,
            larger(self.largest, other.largest),
            first.holders,
            first.files,
        )

    def error(self) -> ReplicaMismatchError:
        """The error that says so."""
        return ReplicaMismatchError(
            "holders that should keep the same values differ",
            ranks=self.holders,
            offset=self.first,
            file=" and ".join(self.files),
            parameter=self.key[0],
            state=self.key[1],
            found=f"{count_text(self.count, 'element')} differing, the first at offset "
            f"{self.first}, by at most {self.largest:.6g}",
            next_step="choose a copy with --replicas first, or their mean with --replicas mean",
        )


def larger(left: float, right: float) -> float:
    """The larger of two differences, where NaN means that none is known.

    >>> larger(float("nan"), 1.0)
    1.0
    """
    if isnan(left):
        return right
    return left if isnan(right) else max(left, right)


def joined_findings(findings: Iterable[ReplicaFinding]) -> tuple[ReplicaFinding, ...]:
    """One finding a tensor state, by name and state."""
    joined: dict[TensorKey, ReplicaFinding] = {}
    for finding in findings:
        known = joined.get(finding.key)
        joined[finding.key] = known.joined(finding) if known else finding
    return tuple(joined[key] for key in sorted(joined))


def same_bits(
    move: Move,
    itemsize: int,
    start: int,
    left: memoryview,
    right: memoryview,
    flags: NDArray[np.bool_],
) -> bool:
    """Whether two blocks hold the same bits wherever a move writes.

    Parameters
    ----------
    move
        Says which elements to look at.
    itemsize
        Bytes an element.
    start
        Target element at which both blocks begin.
    left, right
        The blocks.
    flags
        Room for the comparison.
    """
    room = len(flags) if itemsize < 16 else len(flags) // 2
    for low in range(move.target_offset, move.target_stop, room):
        for part in cut(move, low, low + room):
            a, b = (raw_bits(part, itemsize, start, block) for block in (left, right))
            out = flags[: a.size].reshape(a.shape)
            if np.not_equal(a, b, out=out).any():
                return False
    return True


def raw_bits(move: Move, itemsize: int, start: int, block: memoryview) -> NDArray[np.generic]:
    """The elements a move writes, as unsigned integers (two of them for 16 bytes)."""
    strides = tuple(stride * itemsize for stride in move.target_strides)
    shape = move.shape
    if itemsize == 16:
        shape, strides = (*shape, 2), (*strides, 8)
    first = (move.target_offset - start) * itemsize
    return np.ndarray(shape, f"u{min(itemsize, 8)}", block, first, strides)


class Tally:
    """Sums, counts and differences of a few thousand elements of which some differ."""

    def __init__(self, dtype: DType, numel: int, out: memoryview) -> None:
        self._dtype = dtype.numpy()
        self._itemsize = dtype.itemsize
        self._wide = np.complex128 if dtype.is_complex else np.float64
        self._out = out
        self._total = np.ndarray((numel,), self._dtype, out).astype(self._wide)
        self._copies = np.ones(numel)
        self.differs = np.zeros(numel, dtype=np.bool_)
        self.largest = nan
        self._where: list[tuple[Move, int, NDArray[np.bool_]]] = []

    def add(self, move: Move, start: int, twin: memoryview) -> None:
        """Take another copy into account, which lies in ``twin`` where ``move`` puts it."""
        a, b = (raw_bits(move, self._itemsize, start, block) for block in (self._out, twin))
        differs = a != b
        if self._itemsize == 16:
            differs = differs.any(axis=-1)
        ours, theirs = (
            strided(move, self._dtype, start, block).astype(self._wide)
            for block in (self._out, twin)
        )
        for kept, more in ((self._total, theirs), (self._copies, 1)):
            view = self._at(kept, move, start)
            np.add(view, more, out=view)
        marks = self._at(self.differs, move, start)
        np.logical_or(marks, differs, out=marks)
        if differs.any():
            with np.errstate(invalid="ignore"):
                gaps = np.abs(ours - theirs)[differs]
            known = gaps[~np.isnan(gaps)]
            self.largest = larger(self.largest, float(known.max()) if known.size else nan)
            self._where.append((move, start, differs))

    def holder_at(self, element: int) -> int | None:
        """A holder whose copy of that element differs."""
        for move, start, differs in self._where:
            marks = np.zeros_like(self.differs)
            self._at(marks, move, start)[...] = differs
            if marks[element]:
                return move.holder
        return None

    def write_mean(self, out: memoryview) -> None:
        """Overwrite the elements that differ by the mean of all copies."""
        mean = (self._total / self._copies).astype(self._dtype)
        kept = np.ndarray(mean.shape, self._dtype, out)
        kept[self.differs] = mean[self.differs]

    @staticmethod
    def _at(values: NDArray[Any], move: Move, start: int) -> NDArray[Any]:
        item = values.itemsize
        strides = tuple(stride * item for stride in move.target_strides)
        first = (move.target_offset - start) * item
        return np.ndarray(move.shape, values.dtype, values.data, first, strides)
