"""A short probe of the disks, for an estimate of time.

Theory. A conversion reads source files and writes to the destination's file system, so a second of
doing just that, with the plan's own files, says more than any table of hardware. The probe copies
blocks from places spread over the source files into a file without a name, which vanishes when it
is closed; with ``fsync`` it waits for the disk, as the conversion will. A cache that holds the
source makes the probe as optimistic as it will make the conversion.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.errors import ReshardError
from reshard.execution.positional import write_all
from reshard.execution.sources import SourceFiles

if TYPE_CHECKING:
    from reshard.planning.plan import Plan

BLOCK_NBYTES = 1 << 20
LONGEST_SECONDS = 1.0


def measured_rate(
    plan: Plan, folder: str | os.PathLike[str], *, fsync: bool, nbytes: int = 64 << 20
) -> float | None:
    """Bytes per second at which source files can be copied into a folder.

    Parameters
    ----------
    plan
        Whose source files are read.
    folder
        Where the output will be; the nearest existing parent is used.
    fsync
        Whether the conversion will wait for the disk.
    nbytes
        How much is copied at most; less when that takes over a second.

    Returns
    -------
    float or None
        None when there is nothing to read or the folder cannot be written.

    Raises
    ------
    CheckpointError
        When a source file is gone, cannot be read, or changed.
    """
    home = Path(folder).absolute()
    while not home.is_dir():
        home = home.parent
    try:
        with SourceFiles(plan.sources) as files, _nameless_file(home) as handle:
            start = time.perf_counter()
            done = _copied(files, handle, _places(plan, nbytes))
            if fsync:
                os.fsync(handle)
            seconds = time.perf_counter() - start
    except OSError as error:
        if isinstance(error, ReshardError):
            raise
        return None
    return done / seconds if done else None


@contextmanager
def _nameless_file(folder: Path) -> Iterator[int]:
    """A file in a folder that vanishes when it is closed."""
    handle = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)


def _copied(files: SourceFiles, handle: int, places: Iterator[tuple[int, int, int]]) -> int:
    """Copy blocks one after the other, for a second at most; returns the bytes."""
    buffer = memoryview(bytearray(BLOCK_NBYTES))
    end = time.perf_counter() + LONGEST_SECONDS
    done = 0
    for source, offset, size in places:
        files.read_into(source, offset, buffer[:size])
        write_all(handle, buffer[:size], done)
        done += size
        if time.perf_counter() > end:
            break
    return done


def _places(plan: Plan, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Blocks `(source, offset, size)` spread evenly over the source files."""
    total = sum(source.nbytes for source in plan.sources)
    stride = max(total // max(nbytes // BLOCK_NBYTES, 1), BLOCK_NBYTES)
    for index, source in enumerate(plan.sources):
        for offset in range(0, source.nbytes, stride):
            yield index, offset, min(BLOCK_NBYTES, source.nbytes - offset)
