"""Handing out tasks so that workers keep to different files.

Theory. A file system lets one writer at a time into a file, so two workers on one file take turns.
Each worker therefore takes a file for itself and works through it in order; only when no file is
left does it help with the one that has the most tasks left. A single huge file is so filled by
everybody, and a thousand files by one worker each.

Beginning a file (creating it, reserving its room) waits for the file system, so workers begin files
side by side. Whoever finds nothing to do while another is still beginning one waits for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from reshard.execution.blocks import Task


class FileQueue:
    """The tasks of many files; any number of threads may ask.

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
        self._beginning = 0
        self._news = threading.Condition()

    def take(self, worker: int) -> Task | None:
        """The next task for a worker, None when there is none left."""
        while True:
            with self._news:
                own = self._own.setdefault(worker, deque())
                file = next(self._files, None) if not own else None
                if file is None:
                    left = own or max(self._own.values(), key=len)
                    if left or not self._beginning:
                        return left.popleft() if left else None
                    self._news.wait()
                    continue
                self._beginning += 1
            self._extend(own, file)

    def _extend(self, own: deque[Task], file: int) -> None:
        """Begin a file, and tell those who wait that its tasks are there (or will never be)."""
        tasks: Sequence[Task] = ()
        try:
            tasks = self._begin(file)
        finally:
            with self._news:
                own.extend(tasks)
                self._beginning -= 1
                self._news.notify_all()
