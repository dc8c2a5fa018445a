"""Which files of a folder make a set, by the names that transformers gives them.

Theory. ``STEM.safetensors`` is a set of one file; ``STEM-00001-of-00003.safetensors`` … are one of
three, and ``STEM.safetensors.index.json`` says which tensor is in which. What an index says is
checked against the files in both directions: an index that is older than the files beside it names
tensors or files that are not there, or does not name some that are. Two sets that hold the same
state are two versions of one model, and choosing between them is not ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import ArchiveError, CheckpointError, MissingFileError, count_text
from reshard.formats.folders import WEIGHT_SUFFIXES, TagFolder, names_set
from reshard.formats.parsing import Cursor, shown
from reshard.formats.safetensors.header import LARGEST

SUFFIX, INDEX_SUFFIX = WEIGHT_SUFFIXES
LARGEST_INDEX = 1 << 28
"""Bytes of an index file; the largest models have a few megabytes."""

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.safetensors")


@dataclass(frozen=True, slots=True)
class Index:
    """An index file: tensor -> name of its file, and what it says that all tensors take.

    That is a number of bytes, None when it says nothing, or a text with what else it says.
    """

    path: Path
    weight_map: Mapping[str, str]
    total_size: int | str | None


@dataclass(frozen=True, slots=True)
class FileSet:
    """The files of one set, ascending by name, and its index if it has one."""

    stem: str
    paths: tuple[Path, ...]
    index: Index | None = None


def shard_name(stem: str, number: int, count: int) -> str:
    """Name of one file of a set; `number` counts from 0.

    >>> shard_name("model", 0, 1), shard_name("model", 1, 3)
    ('model.safetensors', 'model-00002-of-00003.safetensors')
    """
    return f"{stem}{SUFFIX}" if count == 1 else f"{stem}-{number + 1:05d}-of-{count:05d}{SUFFIX}"


def file_sets(folder: TagFolder) -> list[FileSet]:
    """Find the sets of a folder; only the one that the user named, when they named a file.

    Raises
    ------
    MissingFileError
        An index names a file that is not there, or a file of a numbered row is missing.
    CheckpointError
        A file is in two folders, or beside an index that does not name it.
    ArchiveError
        An index is no sound JSON.
    """
    paths = _by_name(folder)
    indexed = [
        _indexed(read_index(path), paths)
        for name, path in paths.items()
        if name.endswith(INDEX_SUFFIX)
    ]
    claimed = {path.name for found in indexed for path in found.paths}
    free = {n: p for n, p in paths.items() if n.endswith(SUFFIX) and n not in claimed}
    if folder.named is not None and names_set(folder):
        return [_named(folder.named, indexed, free)]
    for found in indexed:
        _require_none_beside(found, free)
    return [*indexed, *_unindexed(free)]


def _by_name(folder: TagFolder) -> dict[str, Path]:
    found = {}
    for name, places in folder.listing().items():
        if not name.endswith(WEIGHT_SUFFIXES):
            continue
        if len(places) > 1:
            raise CheckpointError(
                "a file is in two folders",
                file=places[0],
                found=places[1],
                next_step="leave one of the folders out",
            )
        found[name] = places[0]
    return found


def _named(name: str, indexed: Iterable[FileSet], free: Mapping[str, Path]) -> FileSet:
    """The set that a file belongs to; a file that no index names is a set by itself."""
    for found in indexed:
        if name in {found.index.path.name if found.index else "", *(p.name for p in found.paths)}:
            return found
    return FileSet(_stem(name), (free[name],))


def _stem(name: str) -> str:
    shard = _SHARD.fullmatch(name)
    return shard["stem"] if shard else name.removesuffix(SUFFIX)


def _indexed(index: Index, paths: Mapping[str, Path]) -> FileSet:
    names = sorted(set(index.weight_map.values()))
    for name in names:
        if name not in paths:
            raise MissingFileError(
                "the index names a file that is not there",
                file=index.path.parent / name,
                expected=count_text(len(names), "file"),
                found=f"{sum(name in paths for name in names)}",
                next_step="fetch it again, or name its folder with --also",
            )
    stem = index.path.name.removesuffix(INDEX_SUFFIX)
    return FileSet(stem, tuple(paths[name] for name in names), index)


def _require_none_beside(found: FileSet, free: Mapping[str, Path]) -> None:
    for name, path in free.items():
        if _stem(name) == found.stem:
            raise CheckpointError(
                "a file of the set is not named by its index",
                file=path,
                found=f"an index of {len(found.paths)} other files",
                next_step="remove what is stale, or name the index, or this file, itself",
            )


def _unindexed(free: Mapping[str, Path]) -> Iterator[FileSet]:
    rows: dict[str, list[Path]] = {}
    for name, path in sorted(free.items()):
        rows.setdefault(_stem(name), []).append(path)
    for stem, row in rows.items():
        _require_whole_row(stem, row)
        yield FileSet(stem, tuple(row))


def _require_whole_row(stem: str, row: list[Path]) -> None:
    """All files of a numbered row must be there, and no others of the same stem."""
    shards = [_SHARD.fullmatch(path.name) for path in row]
    counts = {int(shard["count"]) if shard else 1 for shard in shards}
    count = max(counts)
    wanted = {shard_name(stem, number, count) for number in range(min(count, len(row) + 1))}
    missing = sorted(wanted - {path.name for path in row})
    if missing:
        raise MissingFileError(
            "a file of the set is missing",
            file=row[0].with_name(missing[0]),
            expected=count_text(count, "file"),
            found=len(row),
            next_step="fetch it again, or name a file to read it alone",
        )
    if len(row) != count or len(counts) > 1:
        raise CheckpointError(
            "files of two sets lie in one folder",
            file=row[0].parent,
            found=", ".join(path.name for path in row[:4]),
            next_step="remove what is stale, or name a file to read it alone",
        )


# --------------------------------------------------------------------------- the index


def read_index(path: Path) -> Index:
    """Read an index file.

    Raises
    ------
    ArchiveError
        It is no sound JSON.
    CheckpointError
        It is not an index, or leads out of its folder.
    """
    if path.stat().st_size > LARGEST_INDEX:
        raise ArchiveError("the index is too long", file=path, found=path.stat().st_size)
    try:
        root = json.loads(path.read_text("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ArchiveError("the index is no sound JSON", file=path, found=str(error)) from error
    cursor = Cursor(root, str(path))
    weight_map = {name: _file_name(value) for name, value in cursor.at("weight_map").named()}
    metadata = cursor.maybe("metadata")
    total = metadata.maybe("total_size") if metadata else None
    return Index(path, weight_map, _whole(total.value) if total else None)


def _whole(value: object) -> int | str:
    """A number of bytes, which some writers state as a float; else what is stated, as text."""
    if isinstance(value, float) and value.is_integer() and abs(value) < LARGEST:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST:
        return value
    return shown(value)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name is there twice")
    return entries


def _file_name(value: Cursor) -> str:
    name = value.text()
    if "/" in name or "\\" in name or not name.endswith(SUFFIX):
        raise value.unexpected(f"the name of a {SUFFIX} file beside the index", shown(name))
    return name
