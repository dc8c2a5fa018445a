"""Which folder the user meant: the one with `latest`, a tag folder, or a file inside one.

Theory. Trainers save tag folders (`global_step1000/`) under a save folder, beside a pointer file
that names the newest (`latest`, `latest_universal`). Users pass any of the three. All are accepted,
the same way for every format; what was resolved is said. A pointer that names a folder that is not
there is refused, with the complete folders listed: taking "the newest" silently would be a guess.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import CheckpointError, MissingFileError, UsageError

POINTERS = ("latest", "latest_universal")
"""Pointer files, in the order in which they are looked for."""

WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json")
"""Ends of the names of files of weights."""

DCP_INDEXES = (".metadata", ".metadata.tmp")
"""Ends of the names of files that make a folder a distributed checkpoint of PyTorch: the index, of
all ranks or of one, and the index before the save was finished."""

POINTER_LIMIT = 4096
"""A pointer file holds one folder name; more bytes than this are not a pointer."""

_WANTED = f"one of {', '.join(POINTERS)}, *_states.pt or *.safetensors files, or a .metadata"
_ELSEWHERE = "check the path; if it is right, the save did not finish or was not copied"
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class TagFolder:
    """A resolved checkpoint folder."""

    path: Path
    """The tag folder, absolute."""
    tag: str
    """Its name."""
    pointer: str | None = None
    """The pointer file that named it, None when the user did."""
    also: tuple[Path, ...] = ()
    """Further folders that hold ranks of the same checkpoint, absolute."""
    named: str | None = None
    """Name of the file that the user named in it, None when they named a folder."""

    def listing(self) -> dict[str, list[Path]]:
        """Every file of the folder and of the `also` folders, by name."""
        found: dict[str, list[Path]] = {}
        for folder in (self.path, *self.also):
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                if Path(entry.path).is_file():
                    found.setdefault(entry.name, []).append(folder / entry.name)
        return found


def holds_checkpoint(folder: Path) -> bool:
    """Whether a folder directly holds checkpoint files (`.pt` files, `zero/`, or a DCP index)."""
    names = [entry.name for entry in os.scandir(folder)]
    return "zero" in names or any(name.endswith(("_states.pt", *DCP_INDEXES)) for name in names)


def holds_weights(folder: Path) -> bool:
    """Whether a folder directly holds files of weights for serving (safetensors)."""
    return any(path.name.endswith(WEIGHT_SUFFIXES) for path in folder.iterdir())


def resolve_folder(path: str | os.PathLike[str], also: Sequence[str] = ()) -> TagFolder:
    """Find the tag folder that `path` means.

    Parameters
    ----------
    path
        A save folder with a pointer file, a pointer file, a tag folder, or a file in one. Weights
        that lie beside a pointer file are taken when a file of them is named, else the checkpoint.
    also
        Further folders with ranks of the same checkpoint; each may be given like `path`.

    Raises
    ------
    MissingFileError
        When nothing is there, or the pointer names a folder that is not there.
    CheckpointError
        When the folder holds no checkpoint, or the pointer is empty or no text.
    """
    given = Path(path).absolute()
    if not given.exists():
        raise MissingFileError("no such file or folder", file=given, next_step="check the path")
    folder, named = (given, None) if given.is_dir() else (given.parent, given.name)
    pointer = None
    if named in POINTERS or not _holds_any(folder, named):
        folder, pointer = _follow_pointer(folder, named)
        named = None
    others = tuple(_resolve_other(other, folder) for other in also)
    return TagFolder(folder, folder.name, pointer, others, named)


def _holds_any(folder: Path, named: str | None) -> bool:
    """Whether the files of a checkpoint or of weights are here, not where a pointer leads."""
    if holds_checkpoint(folder) or (named is not None and named.endswith(WEIGHT_SUFFIXES)):
        return True
    return holds_weights(folder) and not any((folder / name).is_file() for name in POINTERS)


def _resolve_other(path: str, first: Path) -> Path:
    folder = Path(path).absolute()
    if not folder.is_dir():
        raise UsageError("--also names no folder", file=folder, next_step="check the path")
    inner = folder / first.name
    return inner if not holds_checkpoint(folder) and inner.is_dir() else folder


def _follow_pointer(folder: Path, named: str | None) -> tuple[Path, str]:
    """The tag folder that a pointer file names: the one the user named, else the first there is."""
    for name in (named,) if named in POINTERS else POINTERS:
        if (folder / name).is_file():
            tag = _read_pointer(folder / name)
            if not (folder / tag).is_dir():
                raise MissingFileError(
                    f"the pointer file names a folder that is not there: {tag!r}",
                    file=folder / name,
                    found=_said_tags(_tags(folder)),
                    next_step="name the tag folder itself",
                )
            return folder / tag, name
    raise _nothing_here(folder)


def _nothing_here(folder: Path) -> CheckpointError:
    """The error for a folder without a checkpoint; it says where in it there are some."""
    saves, tags = _save_folders(folder), _tags(folder)
    if saves:
        listed = ", ".join(f"{name} ({pointer}: {tag})" for name, pointer, tag in saves)
        found, such = f"folders with a pointer file: {listed}", saves[0][0]
    else:
        found, such = _said_tags(tags), tags[-1] if tags else ""
    return CheckpointError(
        "no checkpoint here: neither checkpoint files nor a pointer file",
        file=folder,
        expected=_WANTED,
        found=found if such else _entries(folder),
        next_step=f"name one of them, such as {folder / such}" if such else _ELSEWHERE,
    )


def unknown_folder(folder: TagFolder) -> CheckpointError:
    """Return the error for a folder that is there and holds nothing that a format recognises."""
    others = [tag for tag in _tags(folder.path.parent) if tag != folder.tag]
    named = f"{folder.pointer} names a folder without a checkpoint" if folder.pointer else ""
    beside = f"name another tag folder ({', '.join(others)})" if others else _ELSEWHERE
    return CheckpointError(
        named or "no checkpoint here: the folder is of no format that is known",
        file=folder.path,
        expected=_WANTED,
        found=_entries(folder.path),
        next_step=beside,
    )


def _entries(folder: Path) -> str:
    """What lies in a folder, in a few words."""
    names = sorted(entry.name for entry in os.scandir(folder))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more if names else "an empty folder"


def _save_folders(folder: Path) -> list[tuple[str, str, str]]:
    """Folders one level below that have a pointer file: `(name, pointer, what it says)`."""
    found = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        pointers = [name for name in POINTERS if (Path(entry.path) / name).is_file()]
        if pointers and Path(entry.path).is_dir():
            said = pointer_bytes(Path(entry.path) / pointers[0])[:POINTER_LIMIT]
            found.append((entry.name, pointers[0], said.decode("utf-8", "replace").strip()))
    return found


def pointer_bytes(path: Path) -> bytes:
    """Return what a pointer file holds, of which more than a folder name is never read.

    Only regular files are read: a pipe would be waited for, and a device has no end. What is
    neither a file nor readable holds nothing.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return b""
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return b""
        return os.read(handle, POINTER_LIMIT + 1)
    except OSError:
        return b""
    finally:
        os.close(handle)


def _read_pointer(path: Path) -> str:
    raw = pointer_bytes(path)
    try:
        tag = raw.decode("utf-8").strip() if len(raw) <= POINTER_LIMIT else ""
    except UnicodeDecodeError:
        tag = ""
    if not tag or tag in (".", "..") or "\0" in tag or Path(tag).name != tag:
        raise CheckpointError(
            "the pointer file does not hold one folder name",
            file=path,
            found=repr(raw[:40]),
            next_step="name the tag folder itself",
        )
    return tag


def _said_tags(tags: Sequence[str]) -> str:
    return "folders with checkpoint files: " + ", ".join(tags) if tags else "none"


def _tags(folder: Path) -> list[str]:
    return [
        entry.name
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name)
        if Path(entry.path).is_dir()
        and not entry.name.startswith(".")
        and holds_checkpoint(Path(entry.path))
    ]


def holds_sets(folder: TagFolder) -> bool:
    """Whether there is a set among the files of a folder."""
    return any(name.endswith(WEIGHT_SUFFIXES) for name in folder.listing())


def names_set(folder: TagFolder) -> bool:
    """Whether the user named a file of a set."""
    return folder.named is not None and folder.named.endswith(WEIGHT_SUFFIXES)


def holds_index(folder: TagFolder) -> bool:
    """Whether there is an index of DCP among the files of a folder."""
    return any(name.endswith(DCP_INDEXES) for name in folder.listing())
