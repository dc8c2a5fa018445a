"""Auditing: digests of bytes that are on disk, compared with what was written down.

Theory. Two things need it: continuing an interrupted run, which trusts a journal line only when the
bytes have its digests, and checking an output against its manifest long after. Both read every byte
once, in blocks, in parallel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from reshard.errors import ArchiveError
from reshard.execution.blocks import Part, parts_of
from reshard.execution.buffers import Workspace, workspaces
from reshard.execution.crew import Crew, Progress, in_order
from reshard.execution.digests import LEAF_NBYTES, digest_of
from reshard.execution.journal import Records
from reshard.execution.manifest import MANIFEST_NAME, ManifestFile, ManifestPart, read_manifest
from reshard.execution.output import gaps_of, rest_digest, slot_record
from reshard.execution.stream import Leaves, stream
from reshard.formats.torch_archive import crc32

if TYPE_CHECKING:
    from reshard.planning.plan import Plan


def verified(plan: Plan, folder: Path, claimed: Records, crew: Crew) -> Records:
    """The records of a journal that the bytes bear out.

    Parameters
    ----------
    plan
        What the journal is about.
    folder
        Where the files are.
    claimed
        What the journal says.
    crew
        Who reads them.

    Returns
    -------
    Records
        Slots whose digests are right, and files of which everything is.
    """
    borne_out = Records()
    slots = {key: record for key, record in claimed.slots.items() if _exists(plan, *key)}

    def slot_work(space: Workspace) -> Callable[[tuple[int, int]], int]:
        def work(key: tuple[int, int]) -> int:
            if _slot_holds(plan, folder, key, claimed, space.block):
                borne_out.slots[key] = slots[key]
            return plan.files[key[0]].slots[key[1]].nbytes

        return work

    total = sum(plan.files[file].slots[slot].nbytes for file, slot in slots)
    crew.run(in_order(sorted(slots)), slot_work, total=total, what="verify what was kept")
    buffer = crew.spaces[0].block
    for file, rest in claimed.files.items():
        if file < len(plan.files) and _file_holds(plan, folder, file, rest, borne_out, buffer):
            borne_out.files[file] = rest
    return borne_out


def _exists(plan: Plan, file: int, slot: int) -> bool:
    return file < len(plan.files) and slot < len(plan.files[file].slots)


def _slot_holds(
    plan: Plan, folder: Path, key: tuple[int, int], claimed: Records, buffer: memoryview
) -> bool:
    file, slot = plan.files[key[0]], plan.files[key[0]].slots[key[1]]
    leaves: Leaves = {}
    crc = 0
    try:
        handle = os.open(folder / file.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False

    def produce(part: Part, start: int, stop: int, view: memoryview) -> None:
        if os.preadv(handle, [view], slot.offset + start) != stop - start:
            raise EOFError(part)

    try:
        for _, data in stream(tuple(parts_of(slot)), produce, buffer, leaves):
            crc = crc32(data, crc)
    except (OSError, EOFError):
        return False
    finally:
        os.close(handle)
    return slot_record(slot, crc, leaves) == claimed.slots[key]


def _file_holds(
    plan: Plan, folder: Path, file: int, rest: str, borne_out: Records, buffer: memoryview
) -> bool:
    planned = plan.files[file]
    if any((file, slot) not in borne_out.slots for slot in range(len(planned.slots))):
        return False
    try:
        handle = os.open(folder / planned.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        whole = os.fstat(handle).st_size == planned.size
        return whole and rest_digest(handle, planned, buffer) == rest
    except OSError:
        return False
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class Change:
    """Something in an output that is no longer what its manifest says.

    Parameters
    ----------
    file
        Path relative to the output folder.
    what
        ``"missing"``, ``"size"``, ``"tensor"``, ``"other bytes"``, ``"extra file"``,
        ``"cannot be read"``.
    name, state
        The tensor concerned, for ``"tensor"``.
    """

    file: str
    what: str
    name: str = ""
    state: str = ""


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
    root = Path(folder)
    manifest = read_manifest(root)
    known = {file.path for file in manifest.files}
    parts: dict[str, list[ManifestPart]] = {}
    for part in manifest.parts:
        if part.file not in known:
            raise ArchiveError(
                "the manifest is malformed", file=root / MANIFEST_NAME, found=part.file
            )
        parts.setdefault(part.file, []).append(part)
    changes: list[Change] = list(_extra_files(root, known))

    def work_for(space: Workspace) -> Callable[[ManifestFile], int]:
        buffer = space.block

        def work(file: ManifestFile) -> int:
            changes.extend(_changes(root, file, parts.get(file.path, ()), buffer))
            return file.nbytes

        return work

    crew = Crew(workspaces(max_memory, workers), progress)
    total = sum(file.nbytes for file in manifest.files)
    crew.run(in_order(manifest.files), work_for, total=total, what="check")
    return tuple(sorted(changes, key=lambda change: (change.file, change.name, change.state)))


def _extra_files(root: Path, known: set[str]) -> Iterable[Change]:
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if not path.is_dir() and name not in known and name != MANIFEST_NAME:
            yield Change(name, "extra file")


def _changes(
    root: Path, file: ManifestFile, parts: Iterable[ManifestPart], buffer: memoryview
) -> list[Change]:
    try:
        handle = os.open(root / file.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return [Change(file.path, "missing")]
    try:
        if os.fstat(handle).st_size != file.nbytes:
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
        if os.preadv(handle, [view], offset + at) != len(view):
            raise OSError("the file is cut short")
        state.update(view)
