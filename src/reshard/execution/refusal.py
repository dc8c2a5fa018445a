"""Which refusal is told when holders differ in many places.

Theory. Workers meet mismatches in whatever order they run, but the same input must be refused in
the same words every time. So a mismatch stops nobody at once: it is noted with its place in the
order of work (file, slot, task), and from then on only tasks that come before the earliest one
noted are still carried out. When they are through, the earliest of all is known. Tasks are given
out in about that order, so hardly anything is left to do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from reshard.errors import ReplicaMismatchError
from reshard.execution.blocks import Task

Place = tuple[int, int, int]
"""Position of the file in the order of work, slot, number of the task."""


class FirstMismatch:
    """The mismatch that comes first in the order of work, whoever meets one first.

    Parameters
    ----------
    order
        Indexes of the files in the order of work.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._position = {file: position for position, file in enumerate(order)}
        self._lock = threading.Lock()
        self._earliest: tuple[Place, ReplicaMismatchError] | None = None

    def begin(self, begin: Callable[[int], list[Task]]) -> Callable[[int], list[Task]]:
        """Begin files as before, but none that comes after a mismatch."""
        return lambda file: begin(file) if self._matters((self._position[file], 0, 0)) else []

    def guard(self, work: Callable[[Task], int]) -> Callable[[Task], int]:
        """Carry out tasks as before, but none that comes after a mismatch, and note mismatches."""

        def guarded(task: Task) -> int:
            place = (self._position[task.file], task.slot or 0, task.number)
            if not self._matters(place):
                return 0
            try:
                return work(task)
            except ReplicaMismatchError as error:
                self._note(place, error)
                return 0

        return guarded

    def tell(self) -> None:
        """Raise the earliest mismatch, if there was one."""
        if self._earliest is not None:
            raise self._earliest[1]

    def _matters(self, place: Place) -> bool:
        return self._earliest is None or place < self._earliest[0]

    def _note(self, place: Place, error: ReplicaMismatchError) -> None:
        with self._lock:
            if self._matters(place):
                self._earliest = place, error
