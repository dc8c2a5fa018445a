"""Packs archives into data files: what the files will be, and where each entry lies.

Theory. A data file is archives one after the other, each a ``torch.save`` file of one chunk or one
object, at a multiple of the alignment that torch gives to bytes inside one. An archive of a chunk
depends on element type and shape alone, so it is laid out once per kind and shifted to its place.
Objects with equal bytes are stored once. A file is closed when the next archive would make it
larger than the limit.

A tensor is cut along dim 0, in chunks of as many rows as fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path as FilePath

from reshard.errors import InternalError
from reshard.formats.checkpoint import StoredTensor
from reshard.formats.dcp.index import DATA_SUFFIX, Chunk, Place
from reshard.formats.dtypes import DType
from reshard.formats.target import Fill, OutputFile, Slot
from reshard.formats.torch_archive import ArchiveLayout, NewTensor, crc32, lay_out_archive
from reshard.geometry import ParamAffineMap
from reshard.layouts.builders import contiguous_split_map, replicated_map

ALIGNMENT = 64
_ARCHIVE = "archive"
"""Folder inside an archive, as ``torch.save`` calls it where it writes to a stream."""


@dataclass(slots=True)
class _File:
    """A data file while it is being packed."""

    path: str
    size: int = 0
    literals: list[tuple[int, bytes]] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)


class Packing:
    """Data files, filled one after the other.

    Parameters
    ----------
    limit
        Largest file, in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._files: list[_File] = []
        self._objects: dict[tuple[tuple[int, bytes], ...], Place] = {}

    def add_object(self, value: object) -> Place:
        """Add an object whose bytes are all known."""
        archive = lay_out_archive(value, _ARCHIVE)
        literals = tuple(sorted((*archive.literals, *_copied(archive))))
        known = self._objects.get(literals)
        if known is None:
            known = self._objects[literals] = self._place(archive.size, literals, ())
        return known

    def add_chunk(self, dtype: DType, sizes: tuple[int, ...], fill: Fill) -> Place:
        """Add a chunk that is to be filled."""
        archive = _chunk_archive(dtype, sizes)
        slots = tuple(
            Slot(slot.offset, slot.nbytes, (fill,), slot.crc_offsets) for slot in archive.slots
        )
        return self._place(archive.size, archive.literals, slots)

    def files(self) -> Iterator[OutputFile]:
        """The files, complete."""
        for file in self._files:
            yield OutputFile(file.path, file.size, tuple(file.literals), tuple(file.slots))

    def _place(
        self, nbytes: int, literals: tuple[tuple[int, bytes], ...], slots: tuple[Slot, ...]
    ) -> Place:
        file = self._room(nbytes)
        start = -(-file.size // ALIGNMENT) * ALIGNMENT
        file.literals += [(start + offset, data) for offset, data in literals]
        file.slots += [_shifted(slot, start) for slot in slots]
        file.size = start + nbytes
        return Place(file.path, start, nbytes)

    def _room(self, nbytes: int) -> _File:
        last = self._files[-1] if self._files else None
        if last is None or (last.size and last.size + ALIGNMENT + nbytes > self._limit):
            last = _File(f"__0_{len(self._files)}{DATA_SUFFIX}")
            self._files.append(last)
        return last


def _shifted(slot: Slot, start: int) -> Slot:
    places = tuple(start + offset for offset in slot.crc_offsets)
    return Slot(start + slot.offset, slot.nbytes, slot.fills, places)


@lru_cache(maxsize=4096)
def _chunk_archive(dtype: DType, sizes: tuple[int, ...]) -> ArchiveLayout:
    return lay_out_archive(NewTensor(dtype, sizes), _ARCHIVE)


def _copied(archive: ArchiveLayout) -> Iterator[tuple[int, bytes]]:
    """Tensors of the source inside an object (such as an RNG state): small, copied as they are."""
    for slot in archive.slots:
        if slot.source is None:
            raise InternalError("an object has a tensor without bytes", found=slot.label)
        with FilePath(slot.source.path).open("rb") as file:
            file.seek(slot.source.offset)
            data = file.read(slot.source.nbytes)
        yield slot.offset, data
        for place in slot.crc_offsets:
            yield place, crc32(data).to_bytes(4, "little")


# --------------------------------------------------------------------------- chunks


class Cutter:
    """Cuts tensors into chunks along dim 0; equal shapes share their maps.

    Parameters
    ----------
    limit
        Largest chunk, in bytes; one row may exceed it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._made: dict[tuple[tuple[int, ...], int], tuple[ParamAffineMap, tuple[Chunk, ...]]] = {}

    def cut(
        self, shape: tuple[int, ...], itemsize: int
    ) -> tuple[ParamAffineMap, tuple[Chunk, ...]]:
        """The map from a tensor to its chunks, rank by rank, and their boxes."""
        rows = max(1, self._limit // max(1, prod(shape[1:]) * itemsize))
        found = self._made.get((shape, rows))
        if found is None:
            found = self._made[shape, rows] = _cut(shape, rows)
        return found


def _cut(shape: tuple[int, ...], rows: int) -> tuple[ParamAffineMap, tuple[Chunk, ...]]:
    zeros = (0,) * len(shape)
    if not shape or prod(shape) == 0 or rows >= shape[0]:
        return replicated_map(shape, 1), (Chunk(zeros, shape),)
    starts = range(0, shape[0], rows)
    sizes = [min(rows, shape[0] - start) for start in starts]
    chunks = tuple(
        Chunk((start, *zeros[1:]), (size, *shape[1:]))
        for start, size in zip(starts, sizes, strict=True)
    )
    return contiguous_split_map(shape, sizes, 0), chunks


def chunk_fill(tensor: StoredTensor, dtype: DType, target: ParamAffineMap, rank: int) -> Fill:
    """What fills the chunk `rank` of a tensor."""
    return Fill(tensor.key, dtype, target, rank, cast=dtype != tensor.dtype)
