"""The staging folder: where output grows, and how it becomes the result.

Theory. Output for `parent/name` grows in `parent/.name.reshard`, on the same file system, so that
it can be published by a rename. The folder holds ::

    lock        held (flock) by the process at work; the kernel frees it when that process dies
    journal     what is finished
    data/       the output folder to be
    replaced/   the output that was there before, for the moment between two renames

A staging folder whose lock is free belongs to a run that is dead. It is continued when the caller
asks for that, discarded when the caller allows to overwrite or when nothing in it is finished, and
otherwise refused: hours of work are not thrown away by a command that was merely repeated. A folder
of that name that has no journal of ours is never touched.

Publication is: sync everything in `data/`, mark the journal, rename `data/` to its final name
(after the old result was renamed to `replaced/`, or both at once where the system can exchange two
names), sync the parent, write the pointer file under another name, rename it, sync, remove the
staging folder. Killed at any point, the final name is absent, the old result, or the complete new
one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.errors import OutputError
from reshard.execution.durable import sync_folder
from reshard.execution.journal import JournalContent, read_journal

if TYPE_CHECKING:
    from types import TracebackType

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_LOCK = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def staging_path(destination: Path) -> Path:
    """Where the output for a destination grows.

    >>> staging_path(Path("/runs/step3_universal")).name
    '.step3_universal.reshard'
    """
    return destination.parent / f".{destination.name}.reshard"


class Staging:
    """The staging folder of one destination, locked.

    Parameters
    ----------
    destination
        The final folder.
    fsync
        Whether to make things durable.

    Raises
    ------
    OutputError
        When another process is at work on the same destination, or the folder cannot be made.
    """

    def __init__(self, destination: Path, *, fsync: bool) -> None:
        self.destination = destination
        self.folder = staging_path(destination)
        self.data = self.folder / "data"
        self.journal_path = self.folder / "journal"
        self._fsync = fsync
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._locked()
        except OutputError:
            raise
        except OSError as error:
            raise _no_place(error, destination) from error

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._lock)

    def _locked(self) -> int:
        """The handle of the lock file; whoever holds it owns the folder."""
        lock = self.folder / "lock"
        while True:
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir()
            try:
                if not stat.S_ISDIR(self.folder.lstat().st_mode):
                    raise _strange(self.folder, "a link" if self.folder.is_symlink() else "a file")
                handle = os.open(lock, _LOCK, 0o644)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(handle), lock.stat()):
                    return handle
            except BlockingIOError:
                os.close(handle)
                raise OutputError(
                    "another process is writing this output",
                    file=self.destination,
                    next_step="wait for it to end, or stop it and continue with --resume",
                ) from None
            except FileNotFoundError:
                pass
            os.close(handle)

    def found(self) -> JournalContent | None:
        """What an earlier run left, or None; a folder that is not ours is refused."""
        journal = read_journal(self.journal_path)
        strangers = {entry.name for entry in self.folder.iterdir()} - {
            "lock",
            "journal",
            "journal.new",
        }
        if journal is None and strangers:
            raise OutputError(
                "a folder of the name reshard works in holds something else",
                file=self.folder,
                found=", ".join(sorted(strangers)),
                next_step="move it away",
            )
        return journal

    def discard(self) -> None:
        """Remove what an earlier run left, except an old result that it had moved aside."""
        aside = self.folder / "replaced"
        if aside.exists() and not self.destination.exists():
            aside.rename(self.destination)
        for entry in sorted(self.folder.iterdir(), key=lambda path: path.name == "journal"):
            if entry.name == "lock":
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def remove(self) -> None:
        """Remove the folder; the lock file goes last, and then the folder is another run's."""
        self.discard()
        (self.folder / "lock").unlink()
        with contextlib.suppress(OSError):  # where that other run has made its lock already
            self.folder.rmdir()

    def publish(
        self, pointer: tuple[str, str] | None, *, overwrite: bool, stage: Callable[[str], None]
    ) -> None:
        """Give the output its final name, then write the pointer file.

        Parameters
        ----------
        pointer
            `(file name, text)` of a file beside the output, or None.
        overwrite
            Whether an existing result may be replaced.
        stage
            Told the name of each step that has just been done.
        """
        self._rename(overwrite=overwrite, stage=stage)
        stage("renamed")
        self.finish(pointer, stage=stage)

    def finish(self, pointer: tuple[str, str] | None, *, stage: Callable[[str], None]) -> None:
        """What is left of :meth:`publish` once the output has its final name."""
        self._sync(self.destination.parent)
        stage("renamed-durably")
        if pointer is not None:
            self._point(*pointer)
        stage("pointed")
        self.remove()
        self._sync(self.destination.parent)

    def _sync(self, folder: Path) -> None:
        if self._fsync:
            sync_folder(folder)

    def _rename(self, *, overwrite: bool, stage: Callable[[str], None]) -> None:
        """Give the data its final name; an old result ends in the staging folder."""
        if overwrite and self.destination.exists():
            if _exchange(self.data, self.destination):
                return
            self.destination.rename(self.folder / "replaced")
            stage("replaced")
        try:
            self.data.rename(self.destination)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise exists_error(self.destination) from error
            raise

    def _point(self, name: str, text: str) -> None:
        fresh = self.folder / "pointer"
        with fresh.open("w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            if self._fsync:
                os.fsync(file.fileno())
        fresh.rename(self.destination.parent / name)
        self._sync(self.destination.parent)


def _no_place(error: OSError, destination: Path) -> OutputError:
    """What to tell when not even the staging folder can be made."""
    above = next((path for path in destination.parents if path.exists()), destination)
    beneath_a_file = not above.is_dir()
    return OutputError(
        "the output would lie beneath something that is not a folder"
        if beneath_a_file
        else "the output cannot be written",
        file=destination,
        found=above if beneath_a_file else error.strerror or str(error),
        next_step="choose another folder",
    )


def _strange(folder: Path, found: str) -> OutputError:
    """What to tell when the name of the staging folder is that of something else."""
    return OutputError(
        "the name of the folder reshard works in is taken by something else",
        file=folder,
        found=found,
        next_step="move it away",
    )


def exists_error(destination: Path) -> OutputError:
    """What to tell when the destination is taken."""
    return OutputError(
        "the output exists already",
        file=destination,
        next_step="choose another name, or replace it with --overwrite",
    )


def _exchange(left: Path, right: Path) -> bool:
    """Exchange two names in one step; whether the system could."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    done = call(
        _AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), ctypes.c_uint(_RENAME_EXCHANGE)
    )
    return int(done) == 0
