"""What a run may spend when its caller does not say."""

from __future__ import annotations

import os

from reshard.execution import Progress

DEFAULT_MAX_MEMORY_BYTES = 256 * 1024**2
"""Hard cap on the buffers of all workers of a run together."""

MOST_WORKERS = 16
"""Copies under way at a time by default at most; a disk gains nothing from more."""

__all__ = ["DEFAULT_MAX_MEMORY_BYTES", "MOST_WORKERS", "Progress", "default_workers"]


def default_workers() -> int:
    """Return one worker a CPU that this process may use, up to :data:`MOST_WORKERS`."""
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cpus = os.cpu_count() or 1
    return min(cpus, MOST_WORKERS)
