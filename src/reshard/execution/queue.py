"""Handing out tasks so that workers keep to different files.

Theory. A file system lets one writer at a time into a file, so two workers on one file take turns.
Each worker therefore takes a file for itself and works through it in order; only when no file is
left does it help with the one that has the most tasks left. A single huge file is so filled by
everybody, and a thousand files by one worker each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from reshard.execution.blocks import Task


class FileQueue:
    """The tasks of many files; the caller makes sure that one thread at a time asks.

    Parameters
    ----------
    files
        Files in the order in which they are to be begun.
    begin
        Prepares a file and returns its tasks.

    Examples
    --------
    >>> queue = FileQueue([0, 1], lambda file: [Task(file, 0, k, ()) for k in range(3)])
    >>> [(t.file, t.number) for t in map(queue.take, (0, 1, 0, 1, 0, 0)) if t]
    [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    """

    def __init__(self, files: Iterable[int], begin: Callable[[int], Sequence[Task]]) -> None:
        self._files = iter(files)
        self._begin = begin
        self._own: dict[int, deque[Task]] = {}

    def take(self, worker: int) -> Task | None:
        """The next task for a worker, None when there is none left."""
        own = self._own.setdefault(worker, deque())
        while not own:
            file = next(self._files, None)
            if file is None:
                own = max(self._own.values(), key=len)
                break
            own.extend(self._begin(file))
        return own.popleft() if own else None
