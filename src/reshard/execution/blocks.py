"""How the work is cut: files into tasks, slots into parts.

Theory. A *part* is a leaf of a fill (at most 4 MiB, see `digests`) or a stretch of zeros between
fills, and never larger than a leaf. A *task* is what one worker does in one go: either a whole
small file, built in memory and written at once, or a run of neighbouring parts of one slot of about
a leaf. The cut depends on the plan alone, so CRC parts and leaf digests come out the same whoever
makes them.

Tasks come in the order in which their files begin in the sources, and by offset within a file, so
sources are read front to back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.execution.digests import LEAF_NBYTES

if TYPE_CHECKING:
    from reshard.planning.plan import Plan, PlannedFile, PlannedFill, PlannedSlot


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes `[start, stop)` of a slot: leaf ``leaf`` of ``fill``, or zeros where that is None."""

    start: int
    stop: int
    fill: PlannedFill | None
    leaf: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Task:
    """Neighbouring parts of one slot; ``slot`` is None for a whole small file."""

    file: int
    slot: int | None
    number: int
    parts: tuple[Part, ...]

    @property
    def start(self) -> int:
        """First byte, counted from the start of the slot."""
        return self.parts[0].start if self.parts else 0

    @property
    def nbytes(self) -> int:
        """Bytes from the first part to the last."""
        return self.parts[-1].stop - self.parts[0].start if self.parts else 0


def parts_of(slot: PlannedSlot) -> Iterator[Part]:
    """Cut a slot into parts, in order, without a hole.

    Parameters
    ----------
    slot
        Its fills come in ascending order and do not overlap.
    """
    at = 0
    for number, fill in enumerate(slot.fills):
        yield from _zeros(at, fill.offset)
        for leaf, first in enumerate(range(0, fill.nbytes, LEAF_NBYTES)):
            stop = min(first + LEAF_NBYTES, fill.nbytes)
            yield Part(fill.offset + first, fill.offset + stop, fill, (number, leaf))
        at = fill.offset + fill.nbytes
    yield from _zeros(at, slot.nbytes)


def _zeros(start: int, stop: int) -> Iterator[Part]:
    for first in range(start, stop, LEAF_NBYTES):
        yield Part(first, min(first + LEAF_NBYTES, stop), None)


def tasks_of(file: int, slot_number: int, slot: PlannedSlot) -> list[Task]:
    """Group the parts of a slot into tasks of about a leaf."""
    tasks: list[Task] = []
    held: list[Part] = []
    size = 0
    for part in parts_of(slot):
        nbytes = part.stop - part.start
        if held and size + nbytes > LEAF_NBYTES:
            tasks.append(Task(file, slot_number, len(tasks), tuple(held)))
            held, size = [], 0
        held.append(part)
        size += nbytes
    if held or not tasks:
        tasks.append(Task(file, slot_number, len(tasks), tuple(held)))
    return tasks


def leaves_of(fill: PlannedFill) -> int:
    """Number of leaves of a fill."""
    return -(-fill.nbytes // LEAF_NBYTES)


def reading_order(plan: Plan) -> list[int]:
    """Indexes of the output files in the order in which their first bytes lie in the sources."""
    files = plan.files
    return sorted(range(len(files)), key=lambda index: (_first_source(files[index]), index))


def _first_source(file: PlannedFile) -> tuple[int, int]:
    for slot in file.slots:
        for fill in slot.fills:
            if fill.route.moves:
                move = fill.route.moves[0]
                place = fill.places[move.holder]
                return place.source, place.offset + move.source_offset * fill.dtype.itemsize
    return -1, 0
