"""Checks of the destination, all of them before any bulk work.

Theory. Output may not exist yet (unless it may be replaced), may not touch its own input, must have
names that stay inside its folder and that the file system can hold, and must have room. Each check
raises an :class:`~reshard.errors.OutputError` that says what to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.errors import OutputError, count_text
from reshard.execution.staging import exists_error, staging_path
from reshard.formats.manifest import MANIFEST_NAME

if TYPE_CHECKING:
    from reshard.planning.plan import Plan

LONGEST_NAME = 255
"""Bytes that one part of a path may have on the usual file systems."""

NOT_NAMES = frozenset(("", ".", ".."))
"""What a path that stays in its folder has no part of; an absolute one begins with an empty one."""

BLOCK_NBYTES = 4096
FOLDER_NBYTES = 4096


def resolved(destination: str | os.PathLike[str]) -> Path:
    """The destination as an absolute path without symbolic links in its parents."""
    path = Path(destination)
    try:
        return path.parent.resolve() / path.name if path.name not in ("", "..") else path.resolve()
    except RuntimeError as error:  # as pathlib, before 3.13, tells links that lead in a circle
        raise OutputError(
            "the output would lie beneath links that lead in a circle",
            file=path,
            next_step="choose another folder",
        ) from error


def check_free(destination: Path, *, overwrite: bool) -> None:
    """Refuse a destination that is taken; an empty folder is not.

    With `overwrite` a folder may go only when reshard (its manifest says so) or DeepSpeed's
    converter (a `zero` folder and nothing foreign) wrote it: a mistyped name must not cost
    somebody their work.
    """
    over = len(os.fsencode(staging_path(destination).name)) - LONGEST_NAME
    if over > 0:
        nbytes = len(os.fsencode(destination.name))
        raise OutputError(
            "the name of the output is too long for the folder reshard works in",
            file=destination,
            expected=f"at most {nbytes - over} bytes",
            found=nbytes,
            next_step="choose a shorter name",
        )
    if not destination.exists() and not destination.is_symlink():
        return
    if destination.is_symlink() or not destination.is_dir():
        raise OutputError(
            "the output is taken by something that is not a folder",
            file=destination,
            next_step="choose another name",
        )
    if destination.is_mount():
        raise OutputError(
            "the output is a mount point, and a finished folder cannot take its name",
            file=destination,
            next_step="choose a folder inside it",
        )
    if not overwrite and any(destination.iterdir()):
        raise exists_error(destination)
    if overwrite and not _may_be_replaced(destination):
        raise OutputError(
            "the output is a folder that no checkpoint converter wrote",
            file=destination,
            expected=f"a {MANIFEST_NAME} in it",
            next_step="choose another name, or move it away",
        )


def _may_be_replaced(folder: Path) -> bool:
    names = {entry.name for entry in folder.iterdir()}
    if not names or MANIFEST_NAME in names:
        return True
    return "zero" in names and all(
        name == "zero" or name.endswith("_model_states.pt") for name in names
    )


def check_apart(plan: Plan, destination: Path) -> None:
    """Refuse a destination that is, contains or lies in a folder of the input."""
    folders = {Path(source.path).parent.resolve() for source in plan.sources}
    for folder in sorted(folders):
        if folder == destination or folder in destination.parents or destination in folder.parents:
            raise OutputError(
                "the output would touch its own input",
                file=destination,
                found=f"input files in {folder}",
                next_step="choose a folder beside it",
            )


def check_pointer(plan: Plan, destination: Path) -> None:
    """Refuse a destination beside which the name of the pointer file is a folder's."""
    pointer = destination.parent / plan.pointer[0] if plan.pointer else None
    if pointer is not None and pointer.is_dir() and not pointer.is_symlink():
        raise OutputError(
            "the name of the pointer file is taken by a folder",
            file=pointer,
            next_step="move it away, or choose an output in another folder",
        )


def check_names(plan: Plan) -> None:
    """Refuse names that leave the output folder, collide, or are too long."""
    seen: set[str] = {MANIFEST_NAME}
    for file in plan.files:
        _check_path(file.path)
        if file.path in seen:
            raise OutputError("two output files have the same name", file=file.path)
        seen.add(file.path)
    both = seen.intersection(folders_of(plan))
    if both:
        raise OutputError("a name is both an output file and a folder", file=min(both))
    if plan.pointer is not None:
        _check_path(plan.pointer[0], parts=1)


def check_case(plan: Plan, folder: Path) -> None:
    """Refuse names that the file system of a folder with a file `lock` in it takes for one."""
    if not (folder / "LOCK").exists():
        return
    seen: dict[str, str] = {}
    for name in (*folders_of(plan), *(file.path for file in plan.files)):
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            raise OutputError(
                "two names of the output are one on this file system, which ignores case",
                file=folder,
                found=f"{other} and {name}",
                next_step="choose a folder on another file system",
            )


def _check_path(text: str, parts: int | None = None) -> None:
    names = text.split("/")
    inside = "\0" not in text and not NOT_NAMES.intersection(names)
    if not inside or (parts is not None and len(names) != parts):
        raise OutputError("an output file would leave its folder", file=repr(text))
    longest = max(map(len, os.fsencode(text).split(b"/")))
    if longest > LONGEST_NAME:
        raise OutputError(
            "a file name is too long for the file system",
            file=text,
            expected=f"at most {LONGEST_NAME} bytes",
            found=longest,
        )


def disk_needed(plan: Plan) -> int:
    """Bytes of disk that the output takes: whole blocks of files, and folders."""
    files = sum(-(-file.size // BLOCK_NBYTES) * BLOCK_NBYTES for file in plan.files)
    return files + FOLDER_NBYTES * len(folders_of(plan))


def check_room(plan: Plan, parent: Path, present: int) -> None:
    """Refuse when the file system of ``parent`` has no room for what is not ``present`` yet."""
    found = os.statvfs(parent)
    free = found.f_bavail * found.f_frsize
    needed = disk_needed(plan) - present
    if needed > free:
        raise OutputError(
            "there is no room for the output",
            file=parent,
            expected=f"{count_text(needed, 'byte')} free",
            found=f"{count_text(free, 'byte')} free",
            next_step="make room, or choose a folder on another disk",
        )


def folders_of(plan: Plan) -> list[str]:
    """Folders inside the output, parents first."""
    folders: set[str] = set()
    for file in plan.files:
        folder = file.path.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    return sorted(folders, key=lambda folder: (folder.count("/"), folder))


def allocated(paths: Iterable[Path]) -> int:
    """Bytes of disk that files have already."""
    total = 0
    for path in paths:
        try:
            total += path.lstat().st_blocks * 512
        except OSError:
            continue
    return total
