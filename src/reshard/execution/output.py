"""Output files: laid out, filled in place, summed.

Theory. A small file (it fits a block) is built in memory, literals, tensor bytes and checksums
together, and written with one call: a model has thousands of them, and what they cost is calls. A
larger one is created at its full size with its literals, then its slots are filled by whichever
workers are free; the last one to finish a slot joins the CRCs of its tasks and patches the sum in,
and the last one to finish a file digests what lies outside its slots and closes it.

Either way the file ends up byte for byte the same, and the journal hears of it only afterwards.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from reshard.errors import OutputError
from reshard.execution.blocks import Task, leaves_of, parts_of, tasks_of
from reshard.execution.digests import digest_of
from reshard.execution.durable import reserve, start_writing
from reshard.execution.journal import Journal, Records, SlotRecord
from reshard.execution.positional import read_at, write_all
from reshard.execution.replicas import ReplicaFinding, joined_findings
from reshard.execution.stream import Leaves, stream
from reshard.formats.torch_archive import crc32, crc32_combine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.execution.buffers import Workspace
    from reshard.execution.filling import Filler
    from reshard.planning.plan import Plan, PlannedFile, PlannedSlot

NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
RESERVED_NBYTES = 64 * 1024
"""Files of fewer bytes are written faster without a reservation."""
CREATE = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def output_error(error: OSError, file: object) -> OutputError:
    """What to tell when the system refuses to write."""
    full = error.errno in NO_ROOM
    return OutputError(
        "there is no room left for the output" if full else "the output cannot be written",
        file=file,
        found=error.strerror or str(error),
        next_step=f"{'make room' if full else 'repair that'}, then continue with --resume",
    )


def gaps_of(size: int, slots: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Byte ranges of a file outside some ranges.

    Parameters
    ----------
    size
        Bytes of the file.
    slots
        `(offset, nbytes)`, ascending.

    Examples
    --------
    >>> list(gaps_of(10, [(2, 3), (5, 4)]))
    [(0, 2), (9, 10)]
    """
    at = 0
    for offset, nbytes in slots:
        if offset > at:
            yield at, offset
        at = offset + nbytes
    if at < size:
        yield at, size


def filled_ranges(planned: PlannedFile) -> list[tuple[int, int]]:
    """Ranges `(offset, nbytes)` of a file that are tensor elements; those that touch are one.

    A slot may hold zeros between its fills, which belong to no tensor: they count as the rest of
    the file, so that digests of the tensors and of the rest cover every byte.
    """
    ranges: list[tuple[int, int]] = []
    for slot in planned.slots:
        at = -1
        for fill in slot.fills:
            start = slot.offset + fill.offset
            if start == at:
                ranges[-1] = ranges[-1][0], ranges[-1][1] + fill.nbytes
            else:
                ranges.append((start, fill.nbytes))
            at = start + fill.nbytes
    return ranges


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What passed through: CRC-32, digest of each leaf, and replicas that differ."""

    crc: int
    leaves: Leaves
    findings: Sequence[ReplicaFinding] = ()


@dataclass(frozen=True, slots=True)
class _OpenSlot:
    """A slot that is being filled: what its tasks have found so far."""

    tasks: list[Task]
    crcs: dict[int, int] = field(default_factory=dict)
    leaves: Leaves = field(default_factory=dict)
    findings: list[ReplicaFinding] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _OpenFile:
    """A large file that is being filled."""

    handle: int
    slots: dict[int, _OpenSlot]
    records: dict[int, SlotRecord]


class Output:
    """The files under way; shared by all workers.

    Parameters
    ----------
    plan
        What is to be written.
    folder
        Where, as an existing folder that is not the final one.
    journal
        Hears of what is finished.
    kept
        What an earlier run finished; it is not touched.
    small
        Files of at most so many bytes are built in memory.
    fsync
        Whether the system is told to begin writing to the disk what is finished.
    """

    def __init__(
        self, plan: Plan, folder: str, journal: Journal, kept: Records, *, small: int, fsync: bool
    ) -> None:
        self.plan = plan
        self.records = kept
        self.fsync = fsync
        self._folder = folder
        self._journal = journal
        self._small = small
        self._open: dict[int, _OpenFile] = {}
        self._lock = threading.Lock()

    def path(self, file: int) -> str:
        """Where a file is built."""
        return f"{self._folder}/{self.plan.files[file].path}"

    def begin(self, file: int) -> list[Task]:
        """Lay out a file; returns the tasks that are left to do in it."""
        if file in self.records.files:
            return []
        planned = self.plan.files[file]
        if planned.size <= self._small or not planned.slots:
            return [Task(file, None, 0, ())]
        slots = {
            number: _OpenSlot(tasks_of(file, number, slot))
            for number, slot in enumerate(planned.slots)
            if (file, number) not in self.records.slots
        }
        self._lay_out(file, slots)
        if not slots:
            self._close(file)
        return [task for slot in slots.values() for task in slot.tasks]

    def _kept(self, file: int) -> dict[int, SlotRecord]:
        return {
            number: self.records.slots[file, number]
            for number in range(len(self.plan.files[file].slots))
            if (file, number) in self.records.slots
        }

    def _lay_out(self, file: int, slots: dict[int, _OpenSlot]) -> None:
        """Create a large file at its full size, with its literals; what was kept stays."""
        planned, kept = self.plan.files[file], self._kept(file)
        try:
            handle = os.open(self.path(file), CREATE | (0 if kept else os.O_TRUNC), 0o644)
            with self._lock:
                self._open[file] = _OpenFile(handle, slots, kept)
            reserve(handle, planned.size)
            for offset, data in planned.literals:
                write_all(handle, data, offset)
            for number, record in kept.items():
                _patch(handle, planned.slots[number], record)
        except OSError as error:
            raise output_error(error, planned.path) from error

    def write_plain(self, file: int, buffer: memoryview) -> None:
        """Write a file without slots."""
        self._lay_out(file, {})
        self._close(file, buffer)

    def handle(self, file: int) -> int:
        """The handle of a large file under way."""
        return self._open[file].handle

    def task_done(self, task: Task, found: TaskResult, buffer: memoryview) -> None:
        """Take the results of a task; the last one of a slot or file finishes it."""
        number = task.slot or 0
        with self._lock:
            opened = self._open[task.file]
            slot = opened.slots[number]
            slot.crcs[task.number] = found.crc
            slot.leaves.update(found.leaves)
            slot.findings.extend(found.findings)
            if len(slot.crcs) < len(slot.tasks):
                return
        planned = self.plan.files[task.file].slots[number]
        result = TaskResult(_joined(slot), slot.leaves, slot.findings)
        record = slot_record(planned, result)
        _patch(opened.handle, planned, record)
        self._journal.finished(task.file, {number: record}, None)
        with self._lock:
            opened.records[number] = record
            last = len(opened.records) == len(self.plan.files[task.file].slots)
        if last:
            self._close(task.file, buffer)

    def _close(self, file: int, buffer: memoryview | None = None) -> None:
        with self._lock:
            opened = self._open.pop(file)
        rest = rest_digest(
            opened.handle, self.plan.files[file], buffer or memoryview(bytearray(1 << 16))
        )
        os.close(opened.handle)
        self.file_done(file, {}, rest, opened.records)

    def file_done(
        self,
        file: int,
        fresh: dict[int, SlotRecord],
        rest: str,
        known: dict[int, SlotRecord] | None = None,
    ) -> None:
        """Note a finished file, with the slots that the journal has not heard of yet."""
        self._journal.finished(file, fresh, rest)
        with self._lock:
            for number, record in {**fresh, **(known or {})}.items():
                self.records.slots[file, number] = record
            self.records.files[file] = rest

    def abandon(self) -> None:
        """Close whatever is open, after an error."""
        with self._lock:
            for opened in self._open.values():
                os.close(opened.handle)
            self._open.clear()


def _joined(slot: _OpenSlot) -> int:
    crc = 0
    for task in slot.tasks:
        crc = crc32_combine(crc, slot.crcs[task.number], task.nbytes)
    return crc


def _patch(handle: int, slot: PlannedSlot, record: SlotRecord) -> None:
    """Write the checksum of a finished slot wherever its file wants it."""
    for offset in slot.crc_offsets:
        write_all(handle, record.crc.to_bytes(4, "little"), offset)


def slot_record(slot: PlannedSlot, result: TaskResult) -> SlotRecord:
    """The record of a slot from the results of all its tasks together."""
    digests = tuple(
        digest_of(result.leaves[number, leaf] for leaf in range(leaves_of(fill)))
        for number, fill in enumerate(slot.fills)
    )
    return SlotRecord(result.crc, digests, joined_findings(result.findings))


def rest_digest(handle: int, planned: PlannedFile, buffer: memoryview) -> str:
    """Digest of the bytes of a file outside its tensors, read back from it."""
    state = xxhash.xxh3_128()
    for start, stop in gaps_of(planned.size, filled_ranges(planned)):
        for at in range(start, stop, len(buffer)):
            view = buffer[: min(len(buffer), stop - at)]
            if read_at(handle, view, at) != len(view):
                raise OutputError("an output file is cut short", file=planned.path)
            state.update(view)
    return state.hexdigest()


class Builder:
    """One worker's part of the output.

    Parameters
    ----------
    output
        The files.
    filler
        Makes tensor bytes.
    space
        The worker's buffers.
    """

    def __init__(self, output: Output, filler: Filler, space: Workspace) -> None:
        self._output = output
        self._filler = filler
        self._block = space.block
        self._spare = space.scratch

    def do(self, task: Task) -> int:
        """Carry out a task; returns the tensor bytes it wrote."""
        path = self._output.plan.files[task.file].path
        try:
            return self._small(task.file) if task.slot is None else self._large(task)
        except OSError as error:
            if isinstance(error, OutputError) or error.errno is None:
                raise
            raise output_error(error, path) from error

    def _large(self, task: Task) -> int:
        slot = self._output.plan.files[task.file].slots[task.slot or 0]
        handle = self._output.handle(task.file)
        leaves: Leaves = {}
        crc = 0
        # Blocks end where a block of the file ends, so the page cache can use large pages.
        first = len(self._block) - (slot.offset + task.start) % len(self._block)
        for offset, data in stream(
            task.parts, self._filler.produce, self._block, leaves, first=first
        ):
            crc = crc32(data, crc)
            write_all(handle, data, slot.offset + offset)
        if self._output.fsync and task.nbytes:
            start_writing(handle, slot.offset + task.start, task.nbytes)
        found = TaskResult(crc, leaves, self._filler.taken())
        self._output.task_done(task, found, self._spare)
        return task.nbytes

    def _small(self, file: int) -> int:
        planned = self._output.plan.files[file]
        if planned.size > len(self._block):
            self._output.write_plain(file, self._spare)
            return 0
        image = self._block[: planned.size]
        np.frombuffer(image, dtype=np.uint8)[:] = 0
        for offset, data in planned.literals:
            image[offset : offset + len(data)] = data
        records = {number: self._slot(slot, image) for number, slot in enumerate(planned.slots)}
        state = xxhash.xxh3_128()
        for start, stop in gaps_of(planned.size, filled_ranges(planned)):
            state.update(image[start:stop])
        handle = os.open(self._output.path(file), CREATE | os.O_TRUNC, 0o644)
        try:
            if planned.size >= RESERVED_NBYTES:
                reserve(handle, planned.size)
            write_all(handle, image, 0)
            if self._output.fsync:
                start_writing(handle, 0, planned.size)
        finally:
            os.close(handle)
        self._output.file_done(file, records, state.hexdigest())
        return sum(slot.nbytes for slot in planned.slots)

    def _slot(self, slot: PlannedSlot, image: memoryview) -> SlotRecord:
        leaves: Leaves = {}
        data = image[slot.offset : slot.offset + slot.nbytes]
        for _ in stream(tuple(parts_of(slot)), self._filler.produce, data, leaves):
            pass
        record = slot_record(slot, TaskResult(crc32(data), leaves, self._filler.taken()))
        for offset in slot.crc_offsets:
            image[offset : offset + 4] = record.crc.to_bytes(4, "little")
        return record
