"""Comparing two checkpoints, whatever their formats and topologies, in bounded memory.

Theory. Two checkpoints are equal when they hold the same logical tensors. So each side gets
identity plans (the target is the row-major logical tensor), both are gathered block by block, and
blocks are compared as integers; only where bits differ are values looked at. Nothing is written, no
full tensor is made, every state of every tensor and every scalar is looked at, and replicas inside
each side are compared on the way. Extras (counters, schedulers, parameter groups) are compared by
value where both sides have the key.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from reshard.execution.audit import Change
from reshard.execution.buffers import Workspace, workspaces
from reshard.execution.crew import Crew, Progress, in_order
from reshard.execution.digests import LEAF_NBYTES
from reshard.execution.filling import Filler, RouteIndexes
from reshard.execution.gather import Gatherer
from reshard.execution.replicas import (
    FIRST,
    ReplicaFinding,
    joined_findings,
    larger,
    raw_bits,
    same_bits,
)
from reshard.execution.sources import Handles, SourceFiles
from reshard.formats.checkpoint import COMPARED_EXTRAS, comparable_extra
from reshard.formats.torch_archive import same_value, short_repr
from reshard.planning import Move, PlannedFill, RouteBook, SourceTable, identity_fill

if TYPE_CHECKING:
    from reshard.execution.buffers import Bytes
    from reshard.formats.checkpoint import Checkpoint, TensorKey
    from reshard.formats.dtypes import DType

SIDES = ("left", "right")


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor state that the two checkpoints do not share."""

    key: TensorKey
    """`(name, state)`."""
    what: str
    """``"only in left"``, ``"only in right"``, ``"shape"``, ``"dtype"`` or ``"values"``."""
    left: str = ""
    right: str = ""
    """The two shapes, dtypes, or values at the first difference, as text."""
    count: int = 0
    numel: int = 0
    """Elements that differ, and elements in all."""
    index: tuple[int, ...] = ()
    """Where the first difference is, as an index of the logical tensor."""
    largest: float = math.nan
    """The largest difference in value; NaN when none can be computed."""


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A scalar or an extra that differs: which, and both values as text."""

    what: str
    left: str
    right: str


@dataclass(frozen=True, slots=True)
class StateTotal:
    """One state over all tensors that both sides have."""

    state: str
    """Name of the state."""
    tensors: int
    differing: int
    """Tensors compared, and how many of them differ."""
    count: int
    """Elements that differ."""
    largest: float
    """The largest difference in value; NaN when there is none."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What comparing two checkpoints found."""

    tensors: int
    """Tensor states that both sides have and whose values were compared."""
    nbytes: int
    """Bytes of them on one side."""
    scalars: int
    extras: int
    """Scalar states and extras that both sides have."""
    states: tuple[StateTotal, ...]
    """Totals by state."""
    differences: tuple[TensorDifference, ...]
    """Tensors that differ, by name and state."""
    values: tuple[ValueDifference, ...]
    """Scalars and extras that differ."""
    replicas: tuple[tuple[str, ReplicaFinding], ...]
    """``"left"`` or ``"right"`` and copies inside that side that differ from each other."""
    casts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Pairs of element types that were compared in the second one, after rounding: how many
    tensors of each."""
    not_held: Mapping[str, int] = field(default_factory=dict)
    """States that one side leaves out by its nature, so that they were not compared: how many
    tensors and scalars the other side has of each."""
    changes: tuple[tuple[str, Change], ...] = ()
    """``"left"`` or ``"right"`` and what in the files of that side is not as its manifest says."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs or changed; replicas that differ among themselves count."""
        return not (self.differences or self.values or self.replicas or self.changes)


def compare(
    left: Checkpoint,
    right: Checkpoint,
    *,
    workers: int,
    max_memory: int,
    dtypes: Mapping[TensorKey, DType] | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare two checkpoints, bit for bit.

    Parameters
    ----------
    left, right
        The checkpoints, of any formats and topologies.
    dtypes
        Tensors that are rounded to an element type before they are compared. Two others of
        different types differ.
    workers
        Threads.
    max_memory
        Hard cap over all buffers of all workers, in bytes.
    progress
        Told how far it is.

    Returns
    -------
    Comparison
        Empty of differences when both hold the same.

    Raises
    ------
    CheckpointError
        A file is gone, cannot be read, changed, or does not hold all elements.
    """
    dtypes = dtypes or {}
    keys = [key for key in left.tensors if key in right.tensors]
    unlike = list(_unlike(left, right, dtypes))
    odd = {difference.key for difference in unlike}
    shared = [key for key in keys if key not in odd]
    crew = Crew(workspaces(max_memory, workers), progress)
    pair = _Pair(left, right, shared, dtypes)
    with pair.sides[0].files, pair.sides[1].files:
        pair.run(crew)
    return Comparison(
        tensors=len(shared),
        nbytes=sum(left.tensors[key].nbytes for key in shared),
        scalars=len(left.scalars.keys() & right.scalars.keys()),
        extras=len(_shared_extras(left, right)),
        states=tuple(pair.totals()),
        differences=tuple(sorted((*unlike, *pair.differences()), key=lambda found: found.key)),
        values=tuple(_values(left, right)),
        replicas=tuple(
            (name, finding)
            for name, side in zip(SIDES, pair.sides, strict=True)
            for finding in joined_findings(side.findings)
        ),
        casts=Counter(_cast(left, right, key) for key in shared if key in dtypes),
    )


def _cast(left: Checkpoint, right: Checkpoint, key: TensorKey) -> tuple[str, str]:
    return str(left.tensors[key].dtype), str(right.tensors[key].dtype)


def _unlike(
    left: Checkpoint, right: Checkpoint, dtypes: Mapping[TensorKey, DType]
) -> Iterator[TensorDifference]:
    """Tensors that cannot be compared element by element."""
    for key in sorted(left.tensors.keys() | right.tensors.keys()):
        ours, theirs = left.tensors.get(key), right.tensors.get(key)
        if theirs is None:
            yield TensorDifference(key, "only in left")
        elif ours is None:
            yield TensorDifference(key, "only in right")
        elif ours.shape != theirs.shape:
            yield TensorDifference(key, "shape", str(ours.shape), str(theirs.shape))
        elif ours.dtype != theirs.dtype and key not in dtypes:
            yield TensorDifference(key, "dtype", str(ours.dtype), str(theirs.dtype))


def _values(left: Checkpoint, right: Checkpoint) -> Iterator[ValueDifference]:
    for key in sorted(left.scalars.keys() | right.scalars.keys()):
        ours, theirs = left.scalars.get(key), right.scalars.get(key)
        if ours is None or theirs is None or not _same_number(ours.value, theirs.value):
            texts = ("missing" if side is None else repr(side.value) for side in (ours, theirs))
            yield ValueDifference(f"{key[1]} of {key[0]}", *texts)
    for name in _shared_extras(left, right):
        mine, other = (comparable_extra(name, side.extras[name].value) for side in (left, right))
        if not same_value(mine, other):
            yield ValueDifference(name, short_repr(mine), short_repr(other))


def _same_number(left: float, right: float) -> bool:
    """Whether two scalars have the same value; a file may keep 3 as 3.0."""
    return left == right or (left != left and right != right)  # noqa: PLR0124 - NaN is NaN


def _shared_extras(left: Checkpoint, right: Checkpoint) -> list[str]:
    """Extras that both sides have and that no topology changes."""
    return [name for name in COMPARED_EXTRAS if name in left.extras and name in right.extras]


@dataclass(frozen=True, slots=True)
class _Side:
    """One checkpoint: its files, and a fill for every tensor compared."""

    fills: dict[TensorKey, PlannedFill]
    files: SourceFiles
    names: list[str]
    findings: list[ReplicaFinding]


def _sides(
    checkpoints: Sequence[Checkpoint], keys: list[TensorKey], dtypes: Mapping[TensorKey, DType]
) -> tuple[_Side, ...]:
    tables = [SourceTable(checkpoint) for checkpoint in checkpoints]
    fills = [_fills(*side, keys, dtypes) for side in zip(checkpoints, tables, strict=True)]
    files = [table.files() for table in tables]
    handles = Handles(sum(map(len, files)))
    return tuple(
        _Side(made, SourceFiles(sources, handles), [source.name for source in sources], [])
        for made, sources in zip(fills, files, strict=True)
    )


def _fills(
    checkpoint: Checkpoint,
    table: SourceTable,
    keys: list[TensorKey],
    dtypes: Mapping[TensorKey, DType],
) -> dict[TensorKey, PlannedFill]:
    book = RouteBook()
    return {
        key: identity_fill(checkpoint.tensors[key], table, book, dtypes.get(key)) for key in keys
    }


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Elements `[start, stop)` of one tensor."""

    key: TensorKey
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Found:
    """What is known of the differences in one tensor."""

    count: int
    first: int
    left: str
    right: str
    largest: float

    def joined(self, other: _Found) -> _Found:
        """Both together; the other is about other elements of the same tensor."""
        first = min(self, other, key=lambda found: found.first)
        largest = larger(self.largest, other.largest)
        return _Found(self.count + other.count, first.first, first.left, first.right, largest)


class _Pair:
    """Two sides under comparison, and what was found so far."""

    def __init__(
        self,
        left: Checkpoint,
        right: Checkpoint,
        keys: list[TensorKey],
        dtypes: Mapping[TensorKey, DType],
    ) -> None:
        self.keys = keys
        self.rounded = frozenset(dtypes)
        self.sides = _sides((left, right), keys, dtypes)
        self._indexes = RouteIndexes()
        self._found: dict[TensorKey, _Found] = {}
        self._lock = threading.Lock()

    def run(self, crew: Crew) -> None:
        """Compare all tensors."""
        total = sum(fill.nbytes for fill in self.sides[0].fills.values())
        crew.run(in_order(self._stretches()), self._work_for, total=total, what="compare")
        for side in self.sides:
            side.files.check_unchanged()

    def _stretches(self) -> Iterator[_Stretch]:
        for key in self.keys:
            fill = self.sides[0].fills[key]
            step = LEAF_NBYTES // fill.dtype.itemsize
            for start in range(0, fill.route.numel, step):
                yield _Stretch(key, start, min(start + step, fill.route.numel))

    def _work_for(self, space: Workspace) -> Callable[[_Stretch], int]:
        fillers = [
            Filler(Gatherer(side.files, space.scratch), space, self._indexes, FIRST, side.names)
            for side in self.sides
        ]
        return _Comparer(self, fillers, space).do

    def note(self, key: TensorKey, found: _Found) -> None:
        """Add what one stretch showed."""
        with self._lock:
            known = self._found.get(key)
            self._found[key] = known.joined(found) if known else found

    def differences(self) -> Iterator[TensorDifference]:
        """Every tensor whose values differ."""
        for key, found in self._found.items():
            fill = self.sides[0].fills[key]
            index = tuple(int(place) for place in np.unravel_index(found.first, fill.shape))
            yield TensorDifference(
                key,
                "values",
                found.left,
                found.right,
                found.count,
                fill.route.numel,
                index,
                found.largest,
            )

    def totals(self) -> Iterator[StateTotal]:
        """Totals by state, in order of first appearance."""
        for state in dict.fromkeys(state for _, state in self.keys):
            keys = [key for key in self.keys if key[1] == state]
            found = [self._found[key] for key in keys if key in self._found]
            largest = math.nan
            for one in found:
                largest = larger(largest, one.largest)
            count = sum(one.count for one in found)
            yield StateTotal(state, len(keys), len(found), count, largest)


class _Comparer:
    """One worker of a comparison."""

    def __init__(self, pair: _Pair, fillers: list[Filler], space: Workspace) -> None:
        self._pair = pair
        self._fillers = fillers
        half = len(space.block) // 2 // 64 * 64
        self._blocks = (space.block[:half], space.block[half : 2 * half])
        self._flags = space.flags
        self._step = space.analysis_numel

    def do(self, stretch: _Stretch) -> int:
        """Compare one stretch; returns its bytes."""
        fills = [side.fills[stretch.key] for side in self._pair.sides]
        item = fills[0].dtype.itemsize
        room = len(self._blocks[0]) // item
        for start in range(stretch.start, stretch.stop, room):
            stop = min(start + room, stretch.stop)
            for filler, fill, block in zip(self._fillers, fills, self._blocks, strict=True):
                filler.fill(fill, start, stop, block)
            run = Move((stop - start,), 0, 0, (1,), start, (1,))
            if not same_bits(run, item, start, *self._blocks, self._flags):
                self._examine(fills[0], start, stop)
        for filler, side in zip(self._fillers, self._pair.sides, strict=True):
            side.findings.extend(filler.taken())
        return (stretch.stop - stretch.start) * item

    def _examine(self, fill: PlannedFill, start: int, stop: int) -> None:
        for low in range(start, stop, self._step):
            high = min(low + self._step, stop)
            run = Move((high - low,), 0, 0, (1,), low, (1,))
            a, b = (raw_bits(run, fill.dtype.itemsize, start, block) for block in self._blocks)
            differs = a != b
            if differs.ndim > 1:
                differs = differs.any(axis=-1)
            if fill.key in self._pair.rounded:
                differs &= ~self._both_nan(fill, (low - start) * fill.dtype.itemsize, len(differs))
            if differs.any():
                self._note(fill, low, (low - start) * fill.dtype.itemsize, differs)

    def _both_nan(self, fill: PlannedFill, offset: int, numel: int) -> Bytes:
        """Where both sides are NaN: rounding keeps that, and not its payload."""
        with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
            left, right = (
                np.isnan(np.ndarray((numel,), fill.dtype.numpy(), block, offset))
                for block in self._blocks
            )
        both: Bytes = left & right
        return both

    def _note(self, fill: PlannedFill, low: int, offset: int, differs: Bytes) -> None:
        values = [
            np.ndarray(differs.shape, fill.dtype.numpy(), block, offset)[differs]
            for block in self._blocks
        ]
        wide = np.complex128 if fill.dtype.is_complex else np.float64
        with np.errstate(invalid="ignore"):
            gaps = np.abs(values[0].astype(wide) - values[1].astype(wide))
        known = gaps[~np.isnan(gaps)]
        self._pair.note(
            fill.key,
            _Found(
                len(gaps),
                low + int(np.argmax(differs)),
                str(values[0][0]),
                str(values[1][0]),
                float(known.max()) if known.size else math.nan,
            ),
        )
