"""Auditing: digests of bytes that are on disk, compared with what was written down.

Theory. A manifest covers every byte of its output once, so reading them all once, in blocks, in
parallel, finds every later change: a bad disk, a truncated copy, a file that was edited or added.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from reshard.execution.buffers import Workspace, workspaces
from reshard.execution.crew import Crew, Progress, in_order
from reshard.execution.digests import LEAF_NBYTES, digest_of
from reshard.execution.manifest import read_manifest
from reshard.execution.output import gaps_of
from reshard.execution.positional import read_at
from reshard.formats.manifest import MANIFEST_NAME, ManifestFile, ManifestPart, malformed

_WORDS = {
    "missing": "a file that is missing",
    "size": "another size",
    "other bytes": "other bytes outside the tensors",
    "extra file": "a file that was added",
    "cannot be read": "a file that cannot be read",
}


@dataclass(frozen=True, slots=True)
class Change:
    """Something in an output that is no longer what its manifest says."""

    file: str
    """Path relative to the output folder."""
    what: str
    """``"missing"``, ``"size"``, ``"tensor"``, ``"other bytes"`` (outside the tensors), ``"extra
    file"``, ``"cannot be read"``."""
    name: str = ""
    state: str = ""
    """The tensor concerned, for ``"tensor"``."""

    @property
    def said(self) -> str:
        """The change in words.

        >>> Change("a.pt", "tensor", "w", "fp32").said, Change("a.pt", "missing").said
        ('other bytes of fp32 of w', 'a file that is missing')
        """
        if self.name:
            return f"other bytes of {self.state} of {self.name}"
        return _WORDS[self.what]


def check_manifest(
    folder: str | os.PathLike[str],
    *,
    workers: int,
    max_memory: int,
    progress: Progress | None = None,
) -> tuple[Change, ...]:
    """Find what changed in an output since it was written.

    Parameters
    ----------
    folder
        The output folder, with its manifest.
    workers
        Threads.
    max_memory
        Cap over all buffers, in bytes.
    progress
        Told how far it is.

    Returns
    -------
    tuple of Change
        Empty when every byte is as it was.

    Raises
    ------
    MissingFileError
        When there is no manifest.
    ArchiveError
        When the manifest is malformed.
    """
    return changes_in(Path(folder), Crew(workspaces(max_memory, workers), progress))


def changes_in(root: Path, crew: Crew) -> tuple[Change, ...]:
    """As :func:`check_manifest`, with a crew that is there already."""
    manifest = read_manifest(root)
    known = {file.path: file.nbytes for file in manifest.files}
    parts: dict[str, list[ManifestPart]] = {}
    for part in manifest.parts:
        if part.file not in known:
            raise malformed(root / MANIFEST_NAME, "a tensor in a file that is listed", part.file)
        if part.offset + part.nbytes > known[part.file]:
            raise malformed(root / MANIFEST_NAME, "a tensor inside its file", part.name)
        parts.setdefault(part.file, []).append(part)
    changes: list[Change] = list(_extra_files(root, known))

    def work_for(space: Workspace) -> Callable[[ManifestFile], int]:
        buffer = space.block

        def work(file: ManifestFile) -> int:
            changes.extend(_changes(root, file, parts.get(file.path, ()), buffer))
            return file.nbytes

        return work

    total = sum(file.nbytes for file in manifest.files)
    crew.run(in_order(manifest.files), work_for, total=total, what="check")
    return tuple(sorted(changes, key=lambda change: (change.file, change.name, change.state)))


def _extra_files(root: Path, known: Container[str]) -> Iterable[Change]:
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        is_folder = path.is_dir() and not path.is_symlink()
        if not is_folder and name not in known and name != MANIFEST_NAME:
            yield Change(name, "extra file")


def _changes(
    root: Path, file: ManifestFile, parts: Iterable[ManifestPart], buffer: memoryview
) -> list[Change]:
    try:  # a pipe in the place of the file would make a plain open wait for a writer
        handle = os.open(root / file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return [Change(file.path, "missing")]
    except OSError:
        return [Change(file.path, "cannot be read")]
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            return [Change(file.path, "cannot be read")]
        if found.st_size != file.nbytes:
            return [Change(file.path, "size")]
        changes = [
            Change(file.path, "tensor", part.name, part.state)
            for part in parts
            if _range_digest(handle, part.offset, part.nbytes, buffer) != part.digest
        ]
        if _rest_of(handle, file, buffer) != file.rest:
            changes.append(Change(file.path, "other bytes"))
        return changes
    except OSError:
        return [Change(file.path, "cannot be read")]
    finally:
        os.close(handle)


def _range_digest(handle: int, offset: int, nbytes: int, buffer: memoryview) -> str:
    """Digest of a range of a file, in the leaves of `digests`."""
    leaves: list[bytes] = []
    for first in range(0, nbytes, LEAF_NBYTES):
        state = xxhash.xxh3_128()
        _update(state, handle, offset + first, min(LEAF_NBYTES, nbytes - first), buffer)
        leaves.append(state.digest())
    return digest_of(leaves)


def _rest_of(handle: int, file: ManifestFile, buffer: memoryview) -> str:
    state = xxhash.xxh3_128()
    for start, stop in gaps_of(file.nbytes, file.slots):
        _update(state, handle, start, stop - start, buffer)
    return state.hexdigest()


def _update(
    state: xxhash.xxh3_128, handle: int, offset: int, nbytes: int, buffer: memoryview
) -> None:
    for at in range(0, nbytes, len(buffer)):
        view = buffer[: min(len(buffer), nbytes - at)]
        if read_at(handle, view, offset + at) != len(view):
            raise OSError("the file is cut short")
        state.update(view)
