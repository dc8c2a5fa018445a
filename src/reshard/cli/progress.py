"""Progress of a long run: bytes done, rate, time left, on standard error.

Theory. A run has phases (``convert``, ``sync``, ``compare``, …), each with its own bytes. A job
that runs for an hour has two kinds of readers. A person at a terminal wants a bar. A log file
wants a plain line now and then, whole in itself, that ``tail`` and ``grep`` can use. Both get the
same numbers, computed here once: the bytes done of all bytes, the mean rate since the start of
the phase (bytes that a resumed run found done do not count as speed), and the time left at that
rate. A phase that ends before its first line was due leaves no line, and ``--quiet`` leaves none
at all.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from reshard.cli.screen import wants_rich
from reshard.cli.units import format_bytes, format_rate, format_seconds

SECONDS_BETWEEN_LINES = 5.0

Report = Callable[[int, int, str], None]
"""Takes bytes done, bytes in all, and the name of the phase."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How far a run is."""

    done: int
    total: int
    """Bytes."""
    fresh: int
    """Of these, done since the start."""
    seconds: float
    """Since the start."""

    @property
    def seconds_left(self) -> float | None:
        """Time left at the mean rate, None when there is no rate yet."""
        if self.fresh <= 0 or self.seconds <= 0:
            return None
        return (self.total - self.done) * self.seconds / self.fresh

    def __str__(self) -> str:
        share = 100 * self.done // self.total if self.total else 100
        size = f"{format_bytes(self.done)} of {format_bytes(self.total)}"
        left = self.seconds_left
        if left is None:
            return f"{size} ({share} %)"
        rate = format_rate(self.fresh, self.seconds)
        return f"{size} ({share} %), {rate}, {format_seconds(left)} left"


class Phases:
    """Turns what is reported into a :class:`Pace` for the present phase."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.name = ""
        self.start = 0.0
        self._first = 0

    def note(self, done: int, total: int, phase: str) -> tuple[Pace, bool]:
        """Return how far the phase is, and whether it has only begun."""
        begun = phase != self.name
        if begun:
            self.name, self.start, self._first = phase, self.clock(), done
        return Pace(done, total, done - self._first, self.clock() - self.start), begun


class LineMeter:
    """Writes a plain line every few seconds.

    Parameters
    ----------
    stream
        Where to.
    clock
        Gives seconds.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._phases = Phases(clock)
        self._due = 0.0
        self._wrote = False

    def __call__(self, done: int, total: int, phase: str, /) -> None:
        """Take note of bytes done, and write a line when one is due."""
        pace, begun = self._phases.note(done, total, phase)
        if begun:
            self._due, self._wrote = self._phases.start + SECONDS_BETWEEN_LINES, False
        now = self._phases.start + pace.seconds
        last = done >= total and self._wrote
        if now < self._due and not last:
            return
        self._stream.write(f"{phase}: {pace}\n")
        self._stream.flush()
        self._due = now + SECONDS_BETWEEN_LINES
        self._wrote = not last


@contextmanager
def meter(*, quiet: bool = False, stream: TextIO | None = None) -> Iterator[Report | None]:
    """Give a callback that shows progress the way its stream calls for, None when quiet."""
    where = stream or sys.stderr
    if quiet:
        yield None
    elif wants_rich(where):
        with _bar(where) as report:
            yield report
    else:
        yield LineMeter(where)


@contextmanager
def _bar(stream: TextIO) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[pace]}", markup=False),
    )
    phases = Phases(time.monotonic)
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task: TaskID | None = None

        def report(done: int, total: int, phase: str, /) -> None:
            nonlocal task
            pace, begun = phases.note(done, total, phase)
            if begun or task is None:
                task = bar.add_task(phase, pace="")
            bar.update(task, completed=done, total=total, pace=str(pace))

        yield report
