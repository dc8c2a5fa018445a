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

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.errors import ReplicaMismatchError, UnsupportedError
from reshard.execution.gather import Gatherer, MoveIndex, strided
from reshard.execution.rounding import round_into
from reshard.planning.moves import cut

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reshard.execution.buffers import Workspace
    from reshard.formats.checkpoint import TensorKey
    from reshard.formats.dtypes import DType
    from reshard.planning.moves import Move
    from reshard.planning.plan import PlannedFill, Route

REFUSE, FIRST, MEAN = "refuse", "first", "mean"


@dataclass(frozen=True, slots=True)
class ReplicaFinding:
    """Copies of one tensor state that differ.

    Parameters
    ----------
    key
        `(name, state)`.
    count
        Elements at which at least one copy differs from the chosen one.
    first
        The first of them, as offset in the logical tensor.
    largest
        The largest difference in value; NaN when no pair of values can be subtracted.
    holders
        The two holders that differ at the first offset.
    files
        Where they are kept.
    """

    key: TensorKey
    count: int
    first: int
    largest: float
    holders: tuple[int, ...]
    files: tuple[str, ...]

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
            found=f"{self.count} elements that differ, the first at offset {self.first}, "
            f"by at most {self.largest:.6g}",
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


class ReplicaLedger:
    """Findings of all workers, one a tensor state."""

    def __init__(self) -> None:
        self._findings: dict[TensorKey, ReplicaFinding] = {}
        self._lock = threading.Lock()

    def add(self, finding: ReplicaFinding) -> None:
        """Note a finding; those of one tensor are joined."""
        with self._lock:
            known = self._findings.get(finding.key)
            self._findings[finding.key] = known.joined(finding) if known else finding

    def findings(self) -> tuple[ReplicaFinding, ...]:
        """All findings, by name and state."""
        with self._lock:
            return tuple(self._findings[key] for key in sorted(self._findings))


class RouteIndexes:
    """The move indexes of every route met so far, shared by all workers."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Route, MoveIndex, MoveIndex]] = {}

    def of(self, route: Route) -> tuple[MoveIndex, MoveIndex]:
        """The indexes of the moves and of the checks of a route."""
        known = self._known.get(id(route))
        if known is None:
            known = (route, MoveIndex(route.moves), MoveIndex(route.checks))
            self._known[id(route)] = known
        return known[1], known[2]


def logical_offset(route: Route, element: int) -> int:
    """Offset in the logical tensor of an element of the target shard."""
    for origin in route.origins:
        for part in cut(origin, element, element + 1):
            return part.source_offset
    return element


class Filler:
    """Fills blocks of fills and compares their replicas; one a worker.

    Parameters
    ----------
    gatherer
        Reads the moves.
    space
        The worker's buffers.
    indexes
        Shared move indexes.
    policy
        ``"refuse"``, ``"first"`` or ``"mean"``.
    ledger
        Where findings go.
    names
        Names of the source files, for messages.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        space: Workspace,
        indexes: RouteIndexes,
        policy: str,
        ledger: ReplicaLedger,
        names: Sequence[str],
    ) -> None:
        self._gatherer = gatherer
        self._twin = space.twin
        self._flags = space.flags
        self._step = space.analysis_numel
        self._indexes = indexes
        self._policy = policy
        self._ledger = ledger
        self._names = names
        # While a fill is rounded, one half of the scratch holds its elements as they are stored.
        half = len(space.scratch) // 2
        self._raw = space.scratch[: min(half, len(space.twin))]
        self._halved = gatherer.with_scratch(space.scratch[half:])

    def fill(self, fill: PlannedFill, start: int, stop: int, out: memoryview) -> None:
        """Write elements `[start, stop)` of a fill to ``out`` and compare the replicas."""
        if fill.stored is not None:
            self._fill_rounded(fill, fill.stored, start, stop, out)
            return
        moves, checks = self._indexes.of(fill.route)
        self._gatherer.gather(moves.within(start, stop), fill.places, fill.dtype, start, out)
        if checks.moves and not self._agrees(fill, checks, start, stop, out):
            if self._policy == REFUSE:
                raise self._surveyed(fill).error()
            self._ledger.add(self._examined(fill, start, stop, out))

    def _fill_rounded(
        self, fill: PlannedFill, stored: DType, start: int, stop: int, out: memoryview
    ) -> None:
        """Fill step by step as stored, replicas compared, and round each step to its place."""
        exact = replace(fill, dtype=stored, stored=None)
        item, step = fill.dtype.itemsize, len(self._raw) // stored.itemsize
        whole, self._gatherer = self._gatherer, self._halved
        try:
            for low in range(start, stop, step):
                high = min(low + step, stop)
                raw = self._raw[: (high - low) * stored.itemsize]
                self.fill(exact, low, high, raw)
                place = out[(low - start) * item : (high - start) * item]
                round_into(raw, stored, place, fill.dtype)
        finally:
            self._gatherer = whole

    def _agrees(
        self, fill: PlannedFill, checks: MoveIndex, start: int, stop: int, out: memoryview
    ) -> bool:
        for move in checks.within(start, stop):
            self._gatherer.read(move, fill.places[move.holder], fill.dtype, start, self._twin)
            if not same_bits(move, fill.dtype.itemsize, start, out, self._twin, self._flags):
                return False
        return True

    def _surveyed(self, fill: PlannedFill) -> ReplicaFinding:
        """The finding about a whole fill, read once more."""
        moves, _ = self._indexes.of(fill.route)
        out = memoryview(bytearray(self._step * fill.dtype.itemsize))
        found: ReplicaFinding | None = None
        for start in range(0, fill.route.numel, self._step):
            stop = min(start + self._step, fill.route.numel)
            self._gatherer.gather(moves.within(start, stop), fill.places, fill.dtype, start, out)
            step = self._examined(fill, start, stop, out)
            if step.count:
                found = found.joined(step) if found else step
        if found is None:
            raise ReplicaMismatchError(
                "a source file changed while it was read",
                parameter=fill.key[0],
                state=fill.key[1],
                next_step="wait until the job that writes it has ended, then start again",
            )
        return found

    def _examined(
        self, fill: PlannedFill, start: int, stop: int, out: memoryview
    ) -> ReplicaFinding:
        found: ReplicaFinding | None = None
        item = fill.dtype.itemsize
        for low in range(start, stop, self._step):
            high = min(low + self._step, stop)
            step = self._examined_step(fill, low, high, out[(low - start) * item :])
            if step is not None:
                found = found.joined(step) if found else step
        return found or ReplicaFinding(fill.key, 0, start, nan, (), ())

    def _examined_step(
        self, fill: PlannedFill, start: int, stop: int, out: memoryview
    ) -> ReplicaFinding | None:
        tally = _Tally(fill.dtype, stop - start, out)
        _, checks = self._indexes.of(fill.route)
        for move in checks.within(start, stop):
            self._gatherer.read(move, fill.places[move.holder], fill.dtype, start, self._twin)
            tally.add(move, start, self._twin)
        if not tally.differs.any():
            return None
        if self._policy == MEAN:
            if not (fill.dtype.is_floating or fill.dtype.is_complex):
                raise UnsupportedError(
                    f"copies of {fill.dtype} values differ and have no mean",
                    parameter=fill.key[0],
                    state=fill.key[1],
                    next_step="use --replicas first",
                )
            tally.write_mean(out)
        return self._finding(fill, tally, start)

    def _finding(self, fill: PlannedFill, tally: _Tally, start: int) -> ReplicaFinding:
        first = int(np.argmax(tally.differs))
        moves, _ = self._indexes.of(fill.route)
        chosen = next(iter(moves.within(start + first, start + first + 1)))
        holders = (chosen.holder, *(h for h in (tally.holder_at(first),) if h is not None))
        return ReplicaFinding(
            fill.key,
            int(np.count_nonzero(tally.differs)),
            logical_offset(fill.route, start + first),
            tally.largest,
            tuple(fill.route.holders[holder] for holder in holders),
            tuple(self._names[fill.places[holder].source] for holder in holders),
        )


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


class _Tally:
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
