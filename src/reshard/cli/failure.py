"""From an exception to one line and an exit code, in one place.

Theory. A run ends in one of four ways: done (0), a comparison found differences (1), bad usage or
bad input (2), interrupted (130, as shells have it). The last three say why in exactly one line on
standard error that begins with ``error:``, and there is never a traceback, for a traceback hides
the one thing the reader can act on. Where reshard itself is at fault the line says so and how to
report it; ``RESHARD_DEBUG=1`` then adds the traceback.

With ``--json`` standard output holds one document, whatever happens. That of an error is
``reshard.error/1``: `error` {`kind`, `message` (the line), `exit_code`, and where they are known
`what`, `file`, `rank`, `parameter`, `state`, `dim`, `expected`, `found`, `next_step`; `shards`
{parameter: {rank: shape}} where layouts are not known}.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from json import dumps
from pathlib import Path
from types import TracebackType

from reshard import __version__
from reshard.cli.text import visible
from reshard.errors import InternalError, ReshardError, UnknownLayoutError

DONE = 0
DIFFERENT = 1
REFUSED = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


_PACKAGE = Path(__file__).parents[1]
"""Where reshard lies."""

_PLACES = ("what", "file", "rank", "parameter", "state", "dim", "expected", "found", "next_step")
"""Attributes of every error that say more than the line."""


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


def refuse(error: BaseException, *, json: bool = False) -> int:
    """Say on standard error what ended the run, and return the exit code for it.

    Parameters
    ----------
    error
        What ended it.
    json
        Whether standard output is to hold a document that says so too.
    """
    if isinstance(error, BrokenPipeError):
        return _leave_pipe()
    interrupted = isinstance(error, KeyboardInterrupt | InterruptedRunError)
    code = INTERRUPTED if interrupted else REFUSED
    message = describe(error)
    if json:
        write_error(type(error).__name__, message, code, error)
    say_error(message)
    if os.environ.get("RESHARD_DEBUG") == "1":
        traceback.print_exception(error)
    return code


def write_error(kind: str, message: str, code: int, error: BaseException | None = None) -> None:
    """Write the ``reshard.error/1`` document to standard output."""
    document: dict[str, object] = {"kind": kind, "message": message, "exit_code": code}
    if isinstance(error, ReshardError):
        places = ((place, getattr(error, place)) for place in _PLACES)
        document |= {place: _plain(value) for place, value in places if value is not None}
    if isinstance(error, UnknownLayoutError):
        document["shards"] = {
            name: {str(rank): list(shape) for rank, shape in shapes.items()}
            for name, shapes in error.shards.items()
        }
    _put_out(dumps({"schema": "reshard.error/1", "error": document}, indent=2) + "\n")


def _plain(value: object) -> object:
    return value if isinstance(value, str | int) else str(value)


def say_error(message: str) -> None:
    """Write one ``error:`` line, after all that was said before."""
    _put_out("")
    sys.stderr.write(f"error: {visible(message)}\n")


def _put_out(text: str) -> None:
    """Write to standard output and empty its buffer, or give it up where it takes no more.

    It may be what failed (a full disk, a reader that has gone); the line on standard error is
    then all there is, and must come.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        _give_up_output()


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
    frames = traceback.extract_tb(trace)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE)]
    last = (ours or frames)[-1]  # what a generated or foreign function says leads nowhere
    return f", {Path(last.filename).name}:{last.lineno}"


def _leave_pipe() -> int:
    _give_up_output()
    return BROKEN_PIPE


def _give_up_output() -> None:
    # What is still in the buffer would fail again at exit, and Python would say so.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
