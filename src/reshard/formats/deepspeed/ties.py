"""What ties the files of a folder to one save, beside their names.

Theory. Two files that hold the same value of one save can be caught when they are of two: weights
beside their masters, a parameter that several ranks have whole, a buffer. Files that share no value
with others have only counters and settings in common with them, which two runs of one recipe share
as well. So files are joined wherever a value is held twice, and where more than one set of files
remains, this is said: no tool can tell whether the sets were always together. ZeRO-3 keeps no
element twice, so there it is the rule.

One thing is known even there: files of two data ranks hold different elements, and after a step
they hold different moments. Two with the same bytes are one file under two names.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from reshard.errors import CheckpointError
from reshard.formats.checkpoint import Problem, RoundedCopy, StoredTensor
from reshard.formats.deepspeed.optimizer_records import OptimizerStates
from reshard.formats.deepspeed.partitions import MASTER
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.torch_archive import WRONG_CHECKSUM, Archive, TensorRecord

Cell = tuple[int, int]
_SHOWN = 3
_BLOCK = 1 << 20
_COPIED = (
    "one file was copied over the other: copy the right one again from the node that wrote it; "
    "--replicas first takes the files as they are"
)

# --------------------------------------------------------------------------- one file, two names


def twins(
    models: Mapping[Cell, ModelStates],
    ranks: Mapping[Cell, OptimizerStates],
) -> Iterator[CheckpointError]:
    """Files of two ranks with the same content, which no step leaves behind.

    Parameters
    ----------
    models, ranks
        The model-state and optimizer files.
    """
    moved = {cell: (rank.archive, _moments(rank)) for cell, rank in ranks.items()}
    frozen = {
        cell: (model.archive, tuple(model.frozen_fragments.values()))
        for cell, model in models.items()
        if ranks and ranks[0, 0].stage == 3
    }
    for files, what in ((moved, "optimizer states"), (frozen, "frozen parameters")):
        for first, second in _equal(files):
            yield CheckpointError(
                f"the files of two ranks hold the same {what}, which are different elements",
                file=second,
                found=f"the content of {Path(first).name}",
                next_step=_COPIED,
            )


def _moments(rank: OptimizerStates) -> tuple[TensorRecord, ...]:
    return tuple(record for group in rank.groups for record in group.states.values())


def _equal(
    files: Mapping[Cell, tuple[Archive, Sequence[TensorRecord]]],
) -> Iterator[tuple[str, str]]:
    """Pairs of files of one column with the same checksums, not of one value throughout.

    Columns are not compared: tensor ranks that began alike stay alike.
    """
    seen: dict[tuple[object, ...], tuple[Cell, str]] = {}
    for cell, (archive, records) in sorted(files.items(), key=lambda item: item[0]):
        if not records or WRONG_CHECKSUM in archive.problems:
            continue
        first, path = seen.setdefault((cell[1], *_checksums(archive)), (cell, archive.path))
        if first != cell and any(_varies(archive.path, one) for one in records):
            yield path, archive.path


def _checksums(archive: Archive) -> tuple[tuple[int, int], ...]:
    return tuple((storage.nbytes, storage.crc32) for storage in archive.storages.values())


def _varies(path: str, record: TensorRecord) -> bool:
    """Whether a tensor holds more than one value, by its checksum."""
    size, storage = record.dtype.itemsize, record.storage
    if not record.shape or storage.nbytes < 2 * size:
        return False
    with Path(path).open("rb") as file:
        file.seek(storage.offset)
        value = file.read(size)
    block, left, checksum = value * (_BLOCK // size), storage.nbytes, 0
    while left:
        checksum = zlib.crc32(block[:left], checksum)
        left -= min(left, len(block))
    return checksum != storage.crc32


# --------------------------------------------------------------------------- what is untied


def untied(copies: Sequence[RoundedCopy], tensors: Sequence[StoredTensor]) -> Iterator[Problem]:
    """Say which files share no value with the others; files without tensors have none to share.

    Parameters
    ----------
    copies
        Weights beside their masters.
    tensors
        All tensors.
    """
    regions = (region for tensor in tensors for region in tensor.regions.values())
    parent = {region.file: region.file for region in regions}
    parent |= {copy.copy.file: copy.copy.file for copy in copies}

    def root(file: str) -> str:
        while parent[file] != file:
            parent[file] = parent[parent[file]]
            file = parent[file]
        return file

    def join(one: str, other: str) -> None:
        if one in parent and other in parent:
            parent[root(one)] = root(other)

    for copy in copies:
        join(copy.master.file, copy.copy.file)
    if len({root(file) for file in parent}) > 1:
        for one, other in _replicas(tensors):
            join(one, other)
    sets: dict[str, list[str]] = {}
    for file in parent:
        sets.setdefault(root(file), []).append(file)
    if len(sets) > 1:
        firsts = [Path(held[0]).name for held in sets.values()]
        more = f" and {len(firsts) - _SHOWN} more" if len(firsts) > _SHOWN else ""
        yield Problem(
            f"the {len(parent)} files are {len(sets)} sets that share no value; nothing but names, "
            "counters and settings ties the sets to one save, and these are alike in two runs of "
            f"one recipe (they begin with {', '.join(firsts[:_SHOWN])}{more})"
        )


def _replicas(tensors: Iterable[StoredTensor]) -> Iterator[tuple[str, str]]:
    """Files that hold the same elements of one tensor."""
    for tensor in tensors:
        if tensor.state != MASTER or len(tensor.regions) < 2:
            continue
        first: dict[object, str] = {}
        for holder, region in tensor.regions.items():
            pieces = tensor.map.pieces_by_rank.get(holder, ())
            key = tuple((p.source_offset, p.source_strides, p.shape) for p in pieces)
            if key and (owner := first.setdefault(key, region.file)) != region.file:
                yield owner, region.file
