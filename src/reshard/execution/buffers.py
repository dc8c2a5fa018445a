"""Every buffer of an execution, under one hard cap.

Theory. The cap is divided evenly between the workers, and a worker never allocates anything that
grows with the size of a tensor: all it has is one :class:`Workspace`, taken from the pool before
the first byte moves. So the peak is known beforehand and does not depend on the input. ::

    share = cap / workers
    block      2/8 share, at most 2 MiB    target bytes on their way
    twin       2/8 share, at most 2 MiB    the same bytes from another holder or another checkpoint
    scratch    the rest,  at most 8 MiB    source spans that a strided copy is taken out of
    flags      1/8 share, at most 1 MiB    one byte an element compared
    analysis   1/8 share, at most 1 MiB    float64 values, only where something differs

Sizes change how many steps a tensor takes, never the bytes that come out. A block is small enough
to stay in the processor's caches between reading, checksum, digest and writing, and large enough
that workers seldom wait for each other: every one of these four gives up the interpreter and has to
get it back.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.errors import InternalError, UsageError, count_text

KIB = 1 << 10
MIB = 1 << 20
DEFAULT_MAX_MEMORY = 256 * MIB
SMALLEST_SHARE = 64 * KIB
LARGEST_BLOCK = 2 * MIB
LARGEST_SCRATCH = 8 * MIB
ANALYSIS_NBYTES = 128
"""Bytes of temporary arrays per element that is examined because it differs."""

Bytes = NDArray[np.uint8]


class BufferPool:
    """Hands out byte buffers and refuses to pass the cap.

    Parameters
    ----------
    cap
        Bytes that all buffers together may have.

    Examples
    --------
    >>> pool = BufferPool(100)
    >>> len(pool.take(60)), pool.taken
    (60, 60)
    """

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.taken = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Bytes:
        """A new buffer of ``nbytes`` bytes; pages are touched only when they are used."""
        self._count(nbytes)
        return np.empty(nbytes, dtype=np.uint8)

    def reserve(self, nbytes: int) -> None:
        """Count bytes that are allocated and freed as they are needed."""
        self._count(nbytes)

    def _count(self, nbytes: int) -> None:
        with self._lock:
            if self.taken + nbytes > self.cap:
                raise InternalError(
                    "a buffer would pass the memory cap",
                    expected=f"at most {count_text(self.cap, 'byte')}",
                    found=self.taken + nbytes,
                )
            self.taken += nbytes


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes in bytes of the buffers of one worker, and how many workers there are."""

    workers: int
    block: int
    scratch: int
    flags: int
    analysis: int

    @property
    def total(self) -> int:
        """Bytes of all buffers of all workers."""
        return self.workers * (2 * self.block + self.scratch + self.flags + self.analysis)


def sizes_for(max_memory: int, workers: int) -> Sizes:
    """Divide a cap between workers.

    Parameters
    ----------
    max_memory
        Cap over all buffers of all workers, in bytes.
    workers
        Threads wanted; fewer are used where the cap is too small for all of them.

    Returns
    -------
    Sizes
        Whose `total` is at most ``max_memory``.

    Raises
    ------
    UsageError
        Where the cap is too small for one worker, or no worker was asked for.

    Examples
    --------
    >>> sizes_for(1 << 20, 64).workers
    16
    """
    if workers < 1:
        raise UsageError("there must be at least one worker", found=workers)
    if max_memory < SMALLEST_SHARE:
        raise UsageError(
            "the memory cap is too small",
            expected=f"at least {SMALLEST_SHARE} bytes",
            found=max_memory,
            next_step="raise --max-memory",
        )
    workers = min(workers, max_memory // SMALLEST_SHARE)
    share = max_memory // workers
    unit = share // 8 // 64 * 64
    block = min(2 * unit, LARGEST_BLOCK)
    side = min(unit, LARGEST_BLOCK // 2)
    scratch = min((share - 2 * block - 2 * side) // 64 * 64, LARGEST_SCRATCH)
    return Sizes(workers, block, scratch, side, side)


class Workspace:
    """The buffers of one worker.

    Parameters
    ----------
    pool
        Where they are taken from.
    sizes
        How large they are.
    """

    def __init__(self, pool: BufferPool, sizes: Sizes) -> None:
        self.block = pool.take(sizes.block).data
        self.twin = pool.take(sizes.block).data
        self.scratch = pool.take(sizes.scratch).data
        self.flags = pool.take(sizes.flags).view(np.bool_)
        self.analysis_numel = max(sizes.analysis // ANALYSIS_NBYTES, 1)
        pool.reserve(sizes.analysis)


def workspaces(max_memory: int, workers: int) -> list[Workspace]:
    """One workspace a worker, all of them under the cap together.

    Parameters
    ----------
    max_memory
        Cap in bytes.
    workers
        Threads wanted.
    """
    sizes = sizes_for(max_memory, workers)
    pool = BufferPool(max_memory)
    return [Workspace(pool, sizes) for _ in range(sizes.workers)]
