"""Resuming: what an interrupted run finished and can be kept.

Theory. A line of a journal is kept when three things hold: the bytes on disk have the digests that
it names; the file around them, when it counts as finished, is whole; and the digests are those of
the sources as they are now. The last is certain as long as no source file was touched since the run
began (size and time of last change); where one was, the sources are read once more, nothing is
written, and digests decide. What is not kept is done again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.execution.blocks import Part, parts_of
from reshard.execution.crew import Crew, in_order
from reshard.execution.journal import Records, SlotRecord
from reshard.execution.output import TaskResult, rest_digest, slot_record
from reshard.execution.positional import read_at
from reshard.execution.stream import Leaves, Produce, stream
from reshard.formats.torch_archive import crc32

if TYPE_CHECKING:
    from reshard.execution.buffers import Workspace
    from reshard.execution.filling import Filler
    from reshard.planning.plan import Plan, PlannedSlot

Slot = tuple[int, int]


def kept_records(
    plan: Plan,
    folder: Path,
    claimed: Records,
    crew: Crew,
    filler_for: Callable[[Workspace], Filler] | None,
) -> Records:
    """The records of a journal that the bytes bear out.

    Parameters
    ----------
    plan
        What the journal is about.
    folder
        Where the files are.
    claimed
        What the journal says.
    crew
        Who reads them.
    filler_for
        Makes a filler for a worker when the sources have to be compared too, else None.

    Returns
    -------
    Records
        Slots whose digests are right, and files of which everything is.
    """
    kept = Records()
    slots = {key: record for key, record in claimed.slots.items() if _exists(plan, *key)}

    def work_for(space: Workspace) -> Callable[[Slot], int]:
        filler = filler_for(space) if filler_for else None

        def work(key: Slot) -> int:
            if _holds(plan, folder, key, slots[key], space, filler):
                kept.slots[key] = slots[key]
            return plan.files[key[0]].slots[key[1]].nbytes

        return work

    total = sum(plan.files[file].slots[slot].nbytes for file, slot in slots)
    crew.run(in_order(sorted(slots)), work_for, total=total, what="verify what was kept")
    buffer = crew.spaces[0].block
    for file, rest in claimed.files.items():
        if file < len(plan.files) and _file_holds(plan, folder, file, rest, kept, buffer):
            kept.files[file] = rest
    return kept


def _exists(plan: Plan, file: int, slot: int) -> bool:
    return file < len(plan.files) and slot < len(plan.files[file].slots)


def _holds(
    plan: Plan,
    folder: Path,
    key: Slot,
    record: SlotRecord,
    space: Workspace,
    filler: Filler | None,
) -> bool:
    file, slot = plan.files[key[0]], plan.files[key[0]].slots[key[1]]
    try:
        handle = os.open(folder / file.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False

    def produce(_: Part, start: int, stop: int, view: memoryview) -> None:
        if read_at(handle, view, slot.offset + start) != stop - start:
            raise EOFError(file.path)

    try:
        if not _result(slot, produce, space).same_bytes(record):
            return False
    except (OSError, EOFError):
        return False
    finally:
        os.close(handle)
    return filler is None or _result(slot, filler.produce, space).same_bytes(record)


def _result(slot: PlannedSlot, produce: Produce, space: Workspace) -> SlotRecord:
    leaves: Leaves = {}
    crc = 0
    for _, data in stream(tuple(parts_of(slot)), produce, space.block, leaves):
        crc = crc32(data, crc)
    return slot_record(slot, TaskResult(crc, leaves))


def _file_holds(
    plan: Plan, folder: Path, file: int, rest: str, kept: Records, buffer: memoryview
) -> bool:
    planned = plan.files[file]
    if any((file, slot) not in kept.slots for slot in range(len(planned.slots))):
        return False
    try:
        handle = os.open(folder / planned.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        whole = os.fstat(handle).st_size == planned.size
        return whole and rest_digest(handle, planned, buffer) == rest
    except OSError:
        return False
    finally:
        os.close(handle)
