"""From an exception to one line and an exit code, in one place.

Theory. A run ends in one of four ways: done (0), a comparison found differences (1), bad usage or
bad input (2), interrupted (130, as shells have it). The last three say why in exactly one line on
standard error that begins with ``error:``, and there is never a traceback, for a traceback hides
the one thing the reader can act on. Where reshard itself is at fault the line says so and how to
report it; ``RESHARD_DEBUG=1`` then adds the traceback.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

from reshard import __version__
from reshard.cli.text import visible
from reshard.errors import InternalError, ReshardError

DONE = 0
DIFFERENT = 1
REFUSED = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


class InterruptedRunError(Exception):
    """The user stopped a run that can be continued; the text says how."""


_REMEDIES = {
    errno.ENOSPC: "free space or choose another disk, then run it again",
    errno.EDQUOT: "the disk quota is used up: free space or choose another disk",
    errno.EACCES: "check the permissions of the file and its folders",
    errno.EPERM: "check the permissions of the file and its folders",
    errno.EROFS: "choose a folder on a disk that can be written",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path: a part of it is a file, not a folder",
    errno.EMFILE: "raise the limit of open files (ulimit -n) or lower --workers",
    errno.EIO: "the disk or network reports a fault: check it, or copy the file from elsewhere",
    errno.ENAMETOOLONG: "choose a shorter output path",
}


def refuse(error: BaseException) -> int:
    """Say on standard error what ended the run, and return the exit code for it."""
    if isinstance(error, BrokenPipeError):
        return _leave_pipe()
    say_error(describe(error))
    if os.environ.get("RESHARD_DEBUG") == "1":
        traceback.print_exception(error)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt | InterruptedRunError) else REFUSED


def say_error(message: str) -> None:
    """Write one ``error:`` line."""
    sys.stderr.write(f"error: {visible(message)}\n")


def describe(error: BaseException) -> str:
    """Return in one line what an exception means to the person who started the run.

    Examples
    --------
    >>> describe(MemoryError())
    'out of memory; next: lower --max-memory or --workers'
    >>> describe(PermissionError(13, "Permission denied", "out"))
    'permission denied: out; next: check the permissions of the file and its folders'
    """
    if isinstance(error, InternalError):
        return _internal(error)
    if isinstance(error, ReshardError):
        return str(error)
    if isinstance(error, KeyboardInterrupt | InterruptedRunError):
        return f"interrupted; next: {error}" if str(error) else "interrupted"
    if isinstance(error, MemoryError):
        return "out of memory; next: lower --max-memory or --workers"
    if isinstance(error, OSError) and error.errno is not None:
        return _operating_system(error)
    return _internal(error)


def _operating_system(error: OSError) -> str:
    reason = (error.strerror or os.strerror(error.errno or 0)).strip()
    paths = [
        os.fsdecode(p) for p in (error.filename, error.filename2) if isinstance(p, str | bytes)
    ]
    said = ": ".join([reason[:1].lower() + reason[1:], *paths])
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{said}; next: {remedy}" if remedy else said


def _internal(error: BaseException) -> str:
    said = str(error) if isinstance(error, InternalError) else f"{type(error).__name__}: {error}"
    version = f"reshard {__version__}, Python {sys.version.split()[0]}"
    return (
        f"internal: {said} ({version}{_place(error.__traceback__)}); next: this is a fault of "
        "reshard, please report it with what the same command prints under RESHARD_DEBUG=1"
    )


def _place(trace: TracebackType | None) -> str:
    if trace is None:
        return ""
    last = traceback.extract_tb(trace)[-1]
    return f", {Path(last.filename).name}:{last.lineno}"


def _leave_pipe() -> int:
    # Whoever read our output has gone; a flush at exit would fail again, and say so.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE
