"""What interrupted runs left beside a checkpoint.

Theory. A run grows its output in `.NAME.reshard` and holds a lock in it while it lives; the kernel
frees the lock of a dead one. So a folder of that form whose lock is free belongs to a run that was
stopped. Nothing is changed here: the lock is only tried, shared, and given back at once.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from reshard.formats.checkpoint import Problem

_ENDING = ".reshard"


def leftovers(folders: Sequence[Path]) -> Iterator[Problem]:
    """Yield a problem for each work folder of a run that lies in one of some folders."""
    seen: set[Path] = set()
    for folder in folders:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            path = Path(entry.path)
            if path not in seen and entry.is_dir(follow_symlinks=False) and _is_work(path):
                seen.add(path)
                yield _told(path)


def _is_work(path: Path) -> bool:
    name = path.name
    return name.startswith(".") and name.endswith(_ENDING) and (path / "lock").is_file()


def _told(path: Path) -> Problem:
    output = path.parent / path.name[1 : -len(_ENDING)]
    if _is_held(path / "lock"):
        return Problem(f"a run is writing {output.name} now", str(path))
    if (path / "replaced").is_dir() and not output.exists():
        return Problem(
            f"a run was stopped between two renames: the old {output.name} is in `replaced`",
            str(path),
            next_step="repeat that command with --resume, which finishes it",
        )
    return Problem(
        f"a run that was writing {output.name} was stopped",
        str(path),
        next_step="finish it with the same command and --resume, or remove this folder",
    )


def _is_held(lock: Path) -> bool:
    try:
        handle = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
