"""From chunks to a map: what lies at each place, and whether the chunks make up the tensor.

Theory. A chunk is a box of the logical tensor, so one affine piece; its holder is the storage of
the archive at its place. Boxes may be cut by any mesh and any placements, evenly or not: nothing
of that is needed, for the box says it all. Three things make a set of boxes a tensor: each lies
inside it, no two share an element, and together they leave none out. Empty boxes (of ranks beyond
the last row) hold nothing and are passed over.

Every archive is opened, for the index does not say where in it the elements are: a few reads of a
few hundred bytes each. What it says of itself must agree with the index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path as FilePath

import numpy as np

from reshard.errors import ArchiveError, CheckpointError, MissingFileError, ReshardError, count_text
from reshard.formats.assembly import record_region, stored_order
from reshard.formats.checkpoint import Region
from reshard.formats.dcp.index import Chunk, Index, Place, TensorEntry
from reshard.formats.torch_archive import (
    Archive,
    ByteWindow,
    FileBytes,
    TensorRecord,
    read_archive_within,
    short_repr,
)
from reshard.geometry import AffinePiece, ParamAffineMap
from reshard.geometry.holes import holes_of
from reshard.layouts.builders import row_major_strides

Strides = tuple[int, ...]

MOST_OPEN = 64
"""Data files that stay open: a save of thousands of ranks has more than a process may open."""

LARGEST = 1 << 62
"""Most elements of a tensor, the bound of the geometry."""


class DataFiles:
    """The data files of a folder, the last few of them open; a context that closes them.

    Parameters
    ----------
    folder
        The folder.
    index
        What its index says.
    """

    def __init__(self, folder: FilePath, index: Index) -> None:
        self.folder = folder
        self.index = index
        self._open: dict[str, FileBytes] = {}

    def __enter__(self) -> DataFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for source in self._open.values():
            source.close()

    def archive(self, name: str, offsets: tuple[int, ...] | None) -> Archive:
        """Open the archive of a chunk, or of an object when ``offsets`` is None."""
        place = self.index.places.get((name, offsets))
        if place is None:
            raise CheckpointError(
                "the index does not say where a part of an entry lies",
                file=self.index.file,
                parameter=name,
                found=None if offsets is None else f"no place for the chunk at {offsets}",
                next_step="the save did not finish; take another checkpoint",
            )
        source = self._file(name, place)
        try:
            return read_archive_within(ByteWindow(source, place.offset, place.nbytes))
        except ReshardError as error:
            raise _of_the_entry(error, name) from error

    def _file(self, name: str, place: Place) -> FileBytes:
        source = self._open.pop(place.file, None)
        if source is None:
            path = self.folder / place.file
            try:
                source = FileBytes(str(path), tail=0)
            except MissingFileError:
                raise MissingFileError(
                    "a data file that the index names is not there",
                    file=path,
                    rank=saving_rank(place.file),
                    parameter=name,
                    next_step="copy it from the node that wrote it",
                ) from None
            if len(self._open) == MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
        self._open[place.file] = source
        return source


def saving_rank(file: str) -> int | None:
    """The rank that wrote a data file, by torch's naming: ``__<rank>_<number>.distcp``."""
    parts = file.rsplit("/", 1)[-1].removeprefix("__").split("_")
    return int(parts[0]) if file.startswith("__") and parts[0].isdecimal() else None


def _of_the_entry(error: ReshardError, name: str) -> ReshardError:
    """The same error, with the entry that it was met in."""
    if type(error) is not ArchiveError:
        return error
    return ArchiveError(
        error.what,
        file=error.file,
        parameter=name,
        expected=error.expected,
        found=error.found,
        next_step=error.next_step,
    )


# --------------------------------------------------------------------------- tensors


@dataclass(frozen=True, slots=True)
class _Stored:
    """A chunk whose archive was opened: its box, strides of its elements, and its bytes."""

    chunk: Chunk
    strides: Strides
    region: Region


class ChunkMaps:
    """Makes maps of tensors from their chunks, each geometry once.

    Parameters
    ----------
    files
        The data files.
    """

    def __init__(self, files: DataFiles) -> None:
        self._files = files
        self._made: dict[tuple[object, ...], ParamAffineMap] = {}

    def locate(self, name: str, entry: TensorEntry) -> tuple[ParamAffineMap, dict[int, Region]]:
        """The map of an entry, and the byte range of each holder.

        Raises
        ------
        CheckpointError
            The chunks do not make up the tensor, or an archive contradicts the index.
        """
        chunks = [chunk for chunk in entry.chunks if chunk.numel] or list(entry.chunks[:1])
        geometry = (entry.shape, tuple(chunks))
        if geometry not in self._made:
            require_whole(name, entry, chunks, self._files.folder)
        stored = [self._stored(name, entry, chunk) for chunk in chunks]
        if len({one.region for one in stored}) < len(stored):
            raise CheckpointError(
                "two chunks of a tensor lie at one place",
                file=self._files.index.file,
                parameter=name,
                next_step="the index was changed, or is of two saves; take another checkpoint",
            )
        key = (geometry, tuple(one.strides for one in stored))
        found = self._made.get(key)
        if found is None:
            found = self._made[geometry] = self._made[key] = _map(entry.shape, stored)
        return found, {holder: one.region for holder, one in enumerate(stored)}

    def record(self, name: str, entry: TensorEntry, chunk: Chunk) -> tuple[TensorRecord, Archive]:
        """The tensor in the archive of a chunk, which must be what the index says."""
        archive = self._files.archive(name, chunk.offsets)
        record = archive.root
        if not isinstance(record, TensorRecord):
            raise _contradiction(name, archive, "the archive of a chunk holds no tensor", chunk)
        if record.dtype != entry.dtype:
            raise CheckpointError(
                "a chunk is of another element type than the index says",
                file=archive.path,
                rank=saving_rank(FilePath(archive.path).name),
                parameter=name,
                expected=entry.dtype,
                found=record.dtype,
            )
        if record.shape != chunk.sizes:
            raise CheckpointError(
                "a chunk has another shape than the index says",
                file=archive.path,
                rank=saving_rank(FilePath(archive.path).name),
                parameter=name,
                expected=chunk.sizes,
                found=record.shape,
            )
        return record, archive

    def _stored(self, name: str, entry: TensorEntry, chunk: Chunk) -> _Stored:
        record, archive = self.record(name, entry, chunk)
        permuted = stored_order(record, name, archive.path) is not None
        strides = record.strides if permuted else row_major_strides(chunk.sizes)
        return _Stored(chunk, strides, record_region(record, archive.path))


def _contradiction(name: str, archive: Archive, what: str, chunk: Chunk) -> CheckpointError:
    return CheckpointError(
        what,
        file=archive.path,
        rank=saving_rank(FilePath(archive.path).name),
        parameter=name,
        expected=f"the chunk {chunk}",
        found=short_repr(archive.root),
    )


def _map(shape: tuple[int, ...], stored: Sequence[_Stored]) -> ParamAffineMap:
    strides = row_major_strides(shape)
    pieces = {}
    for holder, one in enumerate(stored):
        start = sum(at * step for at, step in zip(one.chunk.offsets, strides, strict=True))
        pieces[holder] = [AffinePiece(one.chunk.sizes, start, strides, 0, one.strides, (holder,))]
    shards = {holder: (one.chunk.numel,) for holder, one in enumerate(stored)}
    return ParamAffineMap(shape, shards, pieces)


# --------------------------------------------------------------------------- coverage


def require_whole(name: str, entry: TensorEntry, chunks: Sequence[Chunk], folder: FilePath) -> None:
    """Refuse chunks that do not make up the tensor, each element exactly once."""
    whole = prod(entry.shape)
    if whole > LARGEST:
        raise CheckpointError(
            "a tensor is too large to be real",
            file=folder,
            parameter=name,
            expected=f"at most {LARGEST} elements",
            found=f"shape {entry.shape}",
        )
    for chunk in chunks:
        for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            if start + size > entry.shape[dim]:
                raise CheckpointError(
                    "a chunk reaches beyond its tensor",
                    file=folder,
                    parameter=name,
                    dim=dim,
                    expected=f"at most {entry.shape[dim]}",
                    found=str(chunk),
                )
    pair = next(_overlaps(chunks), None)
    if pair is not None:
        raise CheckpointError(
            "two chunks hold the same elements",
            file=folder,
            parameter=name,
            found=f"{pair[0]} and {pair[1]}",
            next_step="the index is of two saves; take another checkpoint",
        )
    held = sum(chunk.numel for chunk in chunks)
    if held != whole:
        raise CheckpointError(
            "chunks are missing: elements of the tensor are in none of the files",
            file=folder,
            parameter=name,
            expected=count_text(whole, "element"),
            found=f"{held} in {count_text(len(chunks), 'chunk')}; the first missing is at "
            f"{_hole(entry, chunks)}",
            next_step="the save did not finish, or a rank did not take part; take another one",
        )


def _hole(entry: TensorEntry, chunks: Sequence[Chunk]) -> tuple[int, ...]:
    """Index of the first element that no chunk holds."""
    nowhere = Region("", 0, 0)
    stored = [_Stored(chunk, row_major_strides(chunk.sizes), nowhere) for chunk in chunks]
    held = _map(entry.shape, stored)
    offset = holes_of(held.table.link, held.numel).start
    return tuple(offset // step % extent for step, extent in _digits(entry.shape))


def _digits(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    return zip(row_major_strides(shape), shape, strict=True)


def _overlaps(chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, Chunk]]:
    """Pairs of boxes that share an element: a sweep along one dim, the rest compared at once.

    The dim is the one with most cuts, so that few boxes of it meet: of chunks cut along a single
    dim none do, and the time is that of sorting.
    """
    if len(chunks) < 2:
        return
    if not chunks[0].offsets:
        yield chunks[0], chunks[1]
        return
    low = np.array([chunk.offsets for chunk in chunks], dtype=np.int64)
    high = low + np.array([chunk.sizes for chunk in chunks], dtype=np.int64)
    swept = int(np.argmax([len(np.unique(starts)) for starts in low.T]))
    order = np.lexsort((*low.T[::-1], low[:, swept]))
    low, high = low[order], high[order]
    stops = np.searchsorted(low[:, swept], high[:, swept], side="left")
    for index in np.flatnonzero(stops > np.arange(1, len(chunks) + 1)).tolist():
        rest = slice(index + 1, int(stops[index]))
        shared = (low[rest] < high[index]) & (high[rest] > low[index])
        hit = np.flatnonzero(shared.all(axis=1))
        if len(hit):
            yield chunks[order[index]], chunks[order[index + 1 + int(hit[0])]]
