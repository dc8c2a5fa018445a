"""Source files: opened once, read by position, watched for change.

Theory. A plan was made from files of certain sizes; bytes read later are only worth something when
the files are still the same. So a file is checked when it is opened (size), while it is read (a
read that ends early names the file) and at the end (it is the same file, with the size and time of
last change of the start). Reads are positional, so any number of threads share one handle; where a
checkpoint has more files than the process may hold open, the surplus is opened anew for each read.

The *fingerprint* of a file is its size and a digest of its first and last 64 KiB. For a torch
archive the end is the zip directory, which holds a CRC-32 of every record, so it depends on all the
content.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from reshard.errors import CheckpointError, MissingFileError, count_text

if TYPE_CHECKING:
    from types import TracebackType

    from reshard.planning import PlannedSource

EDGE_NBYTES = 64 * 1024
SPARE_HANDLES = 64


def _handles_allowed(wanted: int) -> int:
    """How many files may stay open; the soft limit is raised where the hard one allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + SPARE_HANDLES
    if soft < needed:
        ceiling = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))
        soft = ceiling
    return max(soft - SPARE_HANDLES, 1)


class SourceFiles:
    """The source files of a plan, open for reading.

    Parameters
    ----------
    sources
        The files and the sizes they must have.

    Raises
    ------
    MissingFileError
        When a file is gone.
    CheckpointError
        When a size differs, on :meth:`read_into` when a file ends early or cannot be read, and on
        :meth:`check_unchanged` when it was written to meanwhile.
    """

    def __init__(self, sources: Sequence[PlannedSource]) -> None:
        self._sources = tuple(sources)
        self._allowed = _handles_allowed(len(self._sources))
        self._handles: dict[int, int] = {}
        self._lock = threading.Lock()
        found = [self._stat(index) for index in range(len(self._sources))]
        self.stamps = tuple((stat.st_size, stat.st_mtime_ns) for stat in found)
        self._inodes = [(stat.st_dev, stat.st_ino) for stat in found]
        for source, (size, _) in zip(self._sources, self.stamps, strict=True):
            if size != source.nbytes:
                raise CheckpointError(
                    "a source file changed since it was opened",
                    file=source.path,
                    expected=count_text(source.nbytes, "byte"),
                    found=count_text(size, "byte"),
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
            self._handles.clear()

    def read_into(self, source: int, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of a file from ``offset`` on."""
        handle = self._handles.get(source)
        if handle is None:
            handle = self._open(source)
        try:
            done = os.preadv(handle, [buffer], offset)
            while done < len(buffer):
                step = os.preadv(handle, [buffer[done:]], offset + done)
                if step == 0:
                    raise self._ended(source, offset + done)
                done += step
        except OSError as error:
            raise self._unreadable(source, error) from error
        finally:
            if source not in self._handles:
                os.close(handle)

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

    def _open(self, source: int) -> int:
        with self._lock:
            if source in self._handles:
                return self._handles[source]
            try:
                handle = os.open(self._sources[source].path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise self._unreadable(source, error) from error
            if len(self._handles) < self._allowed:
                self._handles[source] = handle
            return handle

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
            next_step="repair or restore the file, then continue with --resume",
        )
