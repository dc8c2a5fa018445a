"""Source files: opened once, read by position, watched for change.

Theory. A plan was made from the headers of certain files; bytes read later are only worth something
when the files are still the same. So a file is checked when it is opened (it is the one whose
header was read, of that size and time of last change), while it is read (a read that ends early
names the file) and at the end (it is still the same). Reads are positional, so any number of
threads share one handle; where a checkpoint has more files than the process may hold open, the
surplus is opened anew for each read.

The *fingerprint* of a file is its size and a digest of its first and last 64 KiB. For a torch
archive the end is the zip directory, which holds a CRC-32 of every record, so it depends on all the
content.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from reshard.errors import CheckpointError, MissingFileError, count_text
from reshard.execution.positional import read_at
from reshard.formats.stamps import stamp_of

if TYPE_CHECKING:
    from types import TracebackType

    from reshard.planning import PlannedSource

EDGE_NBYTES = 64 * 1024
SPARE_HANDLES = 64
"""Files that whoever reads may have open beside those that are kept open."""

PASSING_HANDLES = 16
"""Of these, files that are opened for one read at a time."""


class Handles:
    """How many source files may stay open: one budget for all that are read at a time.

    Parameters
    ----------
    wanted
        Number of source files. The soft limit of the process is raised where the hard one allows
        it.
    """

    def __init__(self, wanted: int) -> None:
        self._left = _handles_allowed(wanted)
        self._lock = threading.Lock()
        self.passing = threading.BoundedSemaphore(PASSING_HANDLES)
        """Held while a file is open that does not stay open."""

    def take(self) -> bool:
        """Whether one more file may stay open; it is counted then."""
        with self._lock:
            spared = self._left > 0
            self._left -= spared
            return spared

    def give_back(self, count: int) -> None:
        """Count files that were closed."""
        with self._lock:
            self._left += count


def _handles_allowed(wanted: int) -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = _open_files() + SPARE_HANDLES
    if soft < taken + wanted:
        soft = taken + wanted if hard == resource.RLIM_INFINITY else min(hard, taken + wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(soft - taken, 0)


def _open_files() -> int:
    """How many files the process has open already; none where the system does not tell."""
    try:
        return sum(1 for _ in Path("/dev/fd").iterdir())
    except OSError:
        return 0


class SourceFiles:
    """The source files of a plan, open for reading.

    Parameters
    ----------
    sources
        The files and the sizes they must have.
    handles
        The budget of open files, where others read at the same time; by default one of its own.

    Raises
    ------
    MissingFileError
        When a file is gone.
    CheckpointError
        When a size differs, on :meth:`read_into` when a file ends early or cannot be read, and on
        :meth:`check_unchanged` when it was written to meanwhile.
    """

    def __init__(self, sources: Sequence[PlannedSource], handles: Handles | None = None) -> None:
        self._sources = tuple(sources)
        self._budget = handles or Handles(len(self._sources))
        self._handles: dict[int, int] = {}
        self._lock = threading.Lock()
        found = [self._stat(index) for index in range(len(self._sources))]
        self.stamps = tuple((stat.st_size, stat.st_mtime_ns) for stat in found)
        self._inodes = [(stat.st_dev, stat.st_ino) for stat in found]
        for source, stat in zip(self._sources, found, strict=True):
            if stat.st_size != source.nbytes or source.stamp not in ((), stamp_of(stat)):
                written = "the same number, written since its header was read"
                same = stat.st_size == source.nbytes
                raise CheckpointError(
                    "a source file changed since it was opened",
                    file=source.path,
                    expected=count_text(source.nbytes, "byte"),
                    found=written if same else count_text(stat.st_size, "byte"),
                    next_step="wait until the job that writes it has ended, then start again",
                )

    def __enter__(self) -> SourceFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every handle."""
        with self._lock:
            for handle in self._handles.values():
                os.close(handle)
            self._budget.give_back(len(self._handles))
            self._handles.clear()

    def read_into(self, source: int, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of a file from ``offset`` on."""
        try:
            handle = self._kept(source)
            if handle is not None:
                done = read_at(handle, buffer, offset)
            else:
                with self._budget.passing:
                    handle = self._opened(source)
                    try:
                        done = read_at(handle, buffer, offset)
                    finally:
                        os.close(handle)
        except OSError as error:
            raise self._unreadable(source, error) from error
        if done < len(buffer):
            raise self._ended(source, offset + done)

    def fingerprints(self) -> list[tuple[str, int, str]]:
        """`(name, bytes, digest of both ends)` of every file."""
        return [
            (source.name, source.nbytes, self._edges(index))
            for index, source in enumerate(self._sources)
        ]

    def check_unchanged(self) -> None:
        """Refuse when a file is another one, or was changed, since the start."""
        for index, source in enumerate(self._sources):
            stat = self._stat(index)
            replaced = (stat.st_dev, stat.st_ino) != self._inodes[index]
            if replaced or (stat.st_size, stat.st_mtime_ns) != self.stamps[index]:
                raise CheckpointError(
                    f"a source file was {'replaced' if replaced else 'written to'} while it was "
                    "read",
                    file=source.path,
                    next_step="wait until the job that writes it has ended, then start again",
                )

    def _kept(self, source: int) -> int | None:
        """The handle of a file that stays open; None where the budget is spent."""
        handle = self._handles.get(source)
        if handle is not None:
            return handle
        with self._lock:
            if source not in self._handles and self._budget.take():
                try:
                    self._handles[source] = self._opened(source)
                except OSError:
                    self._budget.give_back(1)
                    raise
            return self._handles.get(source)

    def _opened(self, source: int) -> int:
        return os.open(self._sources[source].path, os.O_RDONLY | os.O_CLOEXEC)

    def _stat(self, index: int) -> os.stat_result:
        path = self._sources[index].path
        try:
            return Path(path).stat()
        except FileNotFoundError as error:
            raise MissingFileError("a source file is gone", file=path) from error
        except OSError as error:
            raise self._unreadable(index, error) from error

    def _edges(self, index: int) -> str:
        nbytes = self._sources[index].nbytes
        head = bytearray(min(EDGE_NBYTES, nbytes))
        tail = bytearray(min(EDGE_NBYTES, nbytes - len(head)))
        self.read_into(index, 0, memoryview(head))
        self.read_into(index, nbytes - len(tail), memoryview(tail))
        return xxhash.xxh3_128_hexdigest(head + tail)

    def _ended(self, source: int, offset: int) -> CheckpointError:
        planned = self._sources[source]
        return CheckpointError(
            "a source file became shorter while it was read",
            file=planned.path,
            expected=count_text(planned.nbytes, "byte"),
            found=f"its end at or before byte {offset}",
            next_step="restore the file, then continue with --resume",
        )

    def _unreadable(self, source: int, error: OSError) -> CheckpointError:
        return CheckpointError(
            "a source file cannot be read",
            file=self._sources[source].path,
            found=error.strerror or str(error),
            next_step="raise the limit of open files (ulimit -n), then continue with --resume"
            if error.errno in (errno.EMFILE, errno.ENFILE)
            else "repair or restore the file, then continue with --resume",
        )
