"""Filling: the elements of a fill, gathered, rounded where that was asked for, replicas compared.

Theory. A block of a fill is made in one pass over its sources: the chosen copies are gathered into
the block, the other copies are gathered beside it and compared (`replicas`), and where the target
wants another floating-point type the block is rounded (`rounding`). Whoever writes, verifies or
compares asks a :class:`Filler`, one a worker, and never sees where bytes come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from typing import TYPE_CHECKING

import numpy as np

from reshard.errors import ReplicaMismatchError, UnsupportedError
from reshard.execution.gather import Gatherer, MoveIndex
from reshard.execution.replicas import MEAN, REFUSE, ReplicaFinding, Tally, same_bits
from reshard.execution.rounding import round_into
from reshard.planning.moves import cut

if TYPE_CHECKING:
    from reshard.execution.blocks import Part
    from reshard.execution.buffers import Workspace
    from reshard.formats.dtypes import DType
    from reshard.planning.plan import PlannedFill, Route


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
    names
        Names of the source files, for messages.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        space: Workspace,
        indexes: RouteIndexes,
        policy: str,
        names: Sequence[str],
    ) -> None:
        self._gatherer = gatherer
        self._twin = space.twin
        self._flags = space.flags
        self._step = space.analysis_numel
        self._indexes = indexes
        self._policy = policy
        self._names = names
        self._findings: list[ReplicaFinding] = []
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
                raise self.surveyed(fill).error()
            self._findings.append(self._examined(fill, start, stop, out))

    def produce(self, part: Part, start: int, stop: int, view: memoryview) -> None:
        """Make bytes `[start, stop)` of a slot, which lie in a part (see `stream`)."""
        if part.fill is None:
            np.frombuffer(view, dtype=np.uint8)[:] = 0
            return
        fill, item = part.fill, part.fill.dtype.itemsize
        first = (start - fill.offset) // item
        self.fill(fill, first, first + (stop - start) // item, view)

    def taken(self) -> list[ReplicaFinding]:
        """What was found since this was last asked."""
        found, self._findings = self._findings, []
        return found

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

    def surveyed(self, fill: PlannedFill) -> ReplicaFinding:
        """The finding about a whole fill whose copies differ, read once more.

        Raises
        ------
        ReplicaMismatchError
            When they are equal now.
        """
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
        tally = Tally(fill.dtype, stop - start, out)
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

    def _finding(self, fill: PlannedFill, tally: Tally, start: int) -> ReplicaFinding:
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
