"""A crew of threads that works through a list of tasks.

Theory. Moving bytes is system calls and C loops, both of which run outside the interpreter lock, so
threads are enough and share handles and buffers of one process. Each worker has one workspace and
takes the next task when it is free. The caller's thread does no work: it waits, reports progress,
and is the one that an interrupt reaches. The first error stops everyone and is raised in the
caller's thread once all workers have put down what they held, so nothing is written after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from reshard.errors import ReshardError
from reshard.execution.buffers import Workspace

Task = TypeVar("Task")
Take = Callable[[int], Task | None]
REPORT_SECONDS = 0.1


def in_order(tasks: Iterable[Task]) -> Take[Task]:
    """Tasks one after the other, whoever asks."""
    left = iter(tasks)
    lock = threading.Lock()

    def take(_: int) -> Task | None:
        with lock:
            return next(left, None)

    return take


class Progress(Protocol):
    """Told how far a piece of work is, from the thread that asked for it."""

    def __call__(self, done_bytes: int, total_bytes: int, what: str, /) -> None:
        """``done_bytes`` of ``total_bytes`` are through with ``what`` (``"convert"``, …)."""
        ...


class Crew:
    """Workers with their workspaces, and what to tell about progress.

    Parameters
    ----------
    spaces
        One workspace a worker.
    progress
        Called about ten times a second, or None.
    """

    def __init__(self, spaces: Sequence[Workspace], progress: Progress | None = None) -> None:
        self.spaces = tuple(spaces)
        self._progress = progress

    def run(
        self,
        take: Take[Task],
        work_for: Callable[[Workspace], Callable[[Task], int]],
        *,
        total: int,
        what: str,
    ) -> None:
        """Do all tasks.

        Parameters
        ----------
        take
            Gives a worker, by number, its next task, or None; several workers ask at a time.
        work_for
            Called once a worker with its workspace; returns the function that does one task and
            returns the bytes it moved.
        total
            Bytes of all tasks, for the progress.
        what
            Name of the work, for the progress.

        Raises
        ------
        BaseException
            The first error of a worker, or the interrupt of the caller.
        """
        makers = [partial(work_for, space) for space in self.spaces]
        self._work(take, makers, total=total, what=what)

    def each(
        self,
        tasks: Iterable[Task],
        work: Callable[[Task], int],
        *,
        threads: int,
        total: int,
        what: str,
    ) -> None:
        """Do tasks that need no buffers, in so many threads; otherwise as :meth:`run`."""
        self._work(in_order(tasks), [lambda: work] * threads, total=total, what=what)

    def _work(
        self,
        take: Take[Task],
        makers: Sequence[Callable[[], Callable[[Task], int]]],
        *,
        total: int,
        what: str,
    ) -> None:
        shift = _Shift(take)
        threads = [
            threading.Thread(target=shift.work, args=(number, maker), daemon=True)
            for number, maker in enumerate(makers)
        ]
        try:
            working = _started(threads)
            while not shift.finished(working):
                self._tell(shift.done, total, what)
        finally:
            shift.stop()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        if shift.error is not None:
            raise shift.error
        self._tell(shift.done, total, what)

    def _tell(self, done: int, total: int, what: str) -> None:
        if self._progress is not None:
            self._progress(done, total, what)


def _started(threads: Sequence[threading.Thread]) -> int:
    """Start threads, as many as the system allows; how many there are changes the speed only."""
    for number, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError as error:
            if number:
                return number
            raise ReshardError(
                "the system starts no thread for the work",
                next_step="raise its limits on tasks and memory (ulimit -u, ulimit -v), or lower "
                "--workers and --max-memory",
            ) from error
    return len(threads)


class _Shift(Generic[Task]):
    """The shared state of one run."""

    def __init__(self, take: Take[Task]) -> None:
        self._take = take
        self._lock = threading.Lock()
        self._news = threading.Condition(threading.Lock())
        self._stopped = False
        self._gone = 0
        self.done = 0
        self.error: BaseException | None = None

    def work(self, number: int, maker: Callable[[], Callable[[Task], int]]) -> None:
        """What one thread does."""
        try:
            work = maker()
            while not self._stopped:
                task = self._take(number)
                if task is None:
                    break
                moved = work(task)
                with self._lock:
                    self.done += moved
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            with self._lock:
                self.error = self.error or error
            self._stopped = True
        finally:
            with self._news:
                self._gone += 1
                self._news.notify()

    def finished(self, workers: int) -> bool:
        """Wait a moment; whether all workers have left."""
        with self._news:
            if self._gone < workers:
                self._news.wait(REPORT_SECONDS)
            return self._gone >= workers

    def stop(self) -> None:
        """Let every worker leave after its present task."""
        self._stopped = True
