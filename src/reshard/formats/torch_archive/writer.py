"""Lays out torch archives as pure data, and writes small ones.

Theory. What ``torch.save`` writes is fixed by the tree alone, but for the bytes of the storages. So
a file can be described before any tensor exists: its length, the bytes that are known (*literals*),
and for each storage a *slot* to be filled by anyone, in any order, in parallel. A checksum is known
when its slot is full; the slot says where it goes.

Storages get keys in order of first mention, as in torch. Tensors with one label share a storage, as
do tensors that were read from one storage of another archive: that storage is then copied whole.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path

from reshard.errors import UsageError, count_text
from reshard.formats.dtypes import DType
from reshard.formats.torch_archive.checksum import crc32
from reshard.formats.torch_archive.pickler import dump
from reshard.formats.torch_archive.tensor_calls import storage_class
from reshard.formats.torch_archive.tensors import NewTensor, StorageRecord
from reshard.formats.torch_archive.values import Global, short_repr
from reshard.formats.torch_archive.zip_directory import FileBytes
from reshard.formats.torch_archive.zip_layout import ALIGNMENT, ZipLayout

_BLOCK = 1 << 22
_LONGEST_NAME = 1024


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StorageSlot:
    """The byte range of a storage that is still to be filled."""

    key: str
    """Key of the storage in the archive."""
    label: Hashable | None
    """Label of the :class:`NewTensor` values in it, None without one."""
    source: StorageRecord | None
    """The storage of another archive whose bytes go here, None for new tensors."""
    tensors: tuple[NewTensor, ...]
    """The new tensors in it."""
    offset: int
    """First byte in the file, a multiple of 64."""
    nbytes: int
    """Length in bytes."""
    crc_offsets: tuple[int, ...]
    """Where the CRC-32 of the bytes goes in the file, 4 bytes little-endian each."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ArchiveLayout:
    """A torch archive to be."""

    name: str
    """Name of the folder inside the archive."""
    size: int
    """Length of the file in bytes."""
    literals: tuple[tuple[int, bytes], ...]
    """``(file offset, bytes)`` of everything that is known, ascending and disjoint."""
    slots: tuple[StorageSlot, ...]
    """The storages to fill, ascending. Empty storages and those whose bytes are known have none."""


@dataclass(slots=True, eq=False)
class _Placed:
    """A storage while the pickle is being emitted."""

    key: str
    cls: Global
    dtype: DType | None
    location: str
    numel: int
    label: Hashable | None = None
    source: StorageRecord | None = None
    tensors: list[NewTensor] = field(default_factory=list)

    @property
    def itemsize(self) -> int:
        return 1 if self.dtype is None else self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


class _Placing:
    """Numbers storages in order of first mention, and grows them to hold their tensors."""

    def __init__(self) -> None:
        self.placed: dict[Hashable, _Placed] = {}
        self.has_grown = False

    def place(self, storage: NewTensor | StorageRecord) -> tuple[Global, str, str, int]:
        if isinstance(storage, StorageRecord):
            found = self._place_record(storage)
        else:
            found = self._place_new(storage)
        return found.cls, found.key, found.location, found.numel

    def _place_record(self, storage: StorageRecord) -> _Placed:
        identity = ("record", storage.path, storage.key)
        found = self.placed.get(identity)
        if found is None:
            found = self.placed[identity] = _Placed(
                key=str(len(self.placed)),
                cls=storage.storage_class,
                dtype=storage.dtype,
                location=storage.location,
                numel=storage.numel,
                source=storage,
            )
        return found

    def _place_new(self, tensor: NewTensor) -> _Placed:
        identity = ("own", id(tensor)) if tensor.label is None else ("label", tensor.label)
        cls = storage_class(tensor.dtype)
        # An untyped storage counts bytes.
        scale = 1 if tensor.dtype.storage_class else tensor.dtype.itemsize
        needed = scale * max(tensor.extent, tensor.storage_numel or 0)
        found = self.placed.get(identity)
        if found is None:
            dtype = tensor.dtype if tensor.dtype.storage_class else None
            found = self.placed[identity] = _Placed(
                key=str(len(self.placed)), cls=cls, dtype=dtype, location="cpu", numel=needed
            )
            found.label = tensor.label
        if found.cls != cls:
            raise UsageError(
                f"tensors with label {short_repr(tensor.label)} would share a storage of two types",
                expected=found.cls.name,
                found=cls.name,
            )
        if needed > found.numel:
            found.numel = needed
            self.has_grown = True
        if not any(known is tensor for known in found.tensors):
            found.tensors.append(tensor)
        return found


def lay_out_archive(root: object, name: str) -> ArchiveLayout:
    """Lay out the file that ``torch.save`` would write for a tree.

    Parameters
    ----------
    root
        A tree of Python containers and numbers, :class:`NewTensor` values, and anything that was
        read from another archive.
    name
        Name of the folder inside the archive; torch uses the stem of the file name.

    Returns
    -------
    ArchiveLayout
        Equal arguments give equal layouts, bytes included.

    Raises
    ------
    UsageError
        The name is not one, or the tree holds something that cannot be written.

    Examples
    --------
    >>> from reshard.formats.dtypes import DTYPES
    >>> layout = lay_out_archive({"w": NewTensor(DTYPES["float32"], (2, 3), "w")}, "model")
    >>> [(slot.label, slot.offset % 64, slot.nbytes) for slot in layout.slots]
    [('w', 0, 24)]
    """
    if not name or "/" in name or "\0" in name or len(name.encode()) > _LONGEST_NAME:
        raise UsageError("the folder of an archive needs a plain name", found=short_repr(name))
    placing = _Placing()
    pickled = dump(root, placing)
    while placing.has_grown:
        # A storage was mentioned before the tensor that makes it longest.
        placing.has_grown = False
        pickled = dump(root, placing)
    return _lay_out(name, pickled, list(placing.placed.values()))


def _lay_out(name: str, pickled: bytes, storages: list[_Placed]) -> ArchiveLayout:
    layout = ZipLayout()
    _add_known(layout, f"{name}/data.pkl", pickled)
    _add_known(layout, f"{name}/.format_version", b"1")
    _add_known(layout, f"{name}/.storage_alignment", str(ALIGNMENT).encode())
    _add_known(layout, f"{name}/byteorder", b"little")
    waiting = []
    for storage in storages:
        data = _known_data(storage)
        if data is not None:
            _add_known(layout, f"{name}/data/{storage.key}", data)
        else:
            waiting.append(storage)
            layout.add(f"{name}/data/{storage.key}", storage.nbytes)
    _add_known(layout, f"{name}/version", b"3\n")
    size, literals, records = layout.finish()
    slots = []
    for storage in waiting:
        record = records[f"{name}/data/{storage.key}"]
        if record.nbytes:
            slots.append(
                StorageSlot(
                    key=storage.key,
                    label=storage.label,
                    source=storage.source,
                    tensors=tuple(storage.tensors),
                    offset=record.offset,
                    nbytes=record.nbytes,
                    crc_offsets=record.crc_offsets,
                )
            )
    return ArchiveLayout(name=name, size=size, literals=literals, slots=tuple(slots))


def _add_known(layout: ZipLayout, name: str, data: bytes) -> None:
    layout.add(name, len(data), data=data, crc32=crc32(data))


def _known_data(storage: _Placed) -> bytes | None:
    """Return the bytes of a storage when its tensors bring them."""
    known = {tensor.data for tensor in storage.tensors if tensor.data is not None}
    if not known:
        return None
    data = known.pop()
    if known or len(data) != storage.nbytes:
        raise UsageError(
            f"the bytes for storage {short_repr(storage.label)} are not those of all of it",
            expected=count_text(storage.nbytes, "byte"),
            found=count_text(len(data), "byte") + (" and others" if known else ""),
        )
    return data


def write_archive(path: str | os.PathLike[str], root: object, name: str | None = None) -> None:
    """Write a tree whose bytes are all known.

    Parameters
    ----------
    path
        The file to write.
    root
        A tree as in :func:`lay_out_archive`; every new tensor has ``data``, and tensors of other
        archives are copied from their files.
    name
        Name of the folder inside the archive, the stem of ``path`` when None.

    Raises
    ------
    UsageError
        A new tensor has no bytes.
    """
    target = Path(path)
    layout = lay_out_archive(root, target.stem if name is None else name)
    for slot in layout.slots:
        if slot.source is None:
            raise UsageError("a tensor to be written has no bytes", found=short_repr(slot.label))
    with target.open("wb") as out:
        out.truncate(layout.size)
        for offset, literal in layout.literals:
            out.seek(offset)
            out.write(literal)
        for slot in layout.slots:
            if slot.source is None:
                continue
            checksum = 0
            with FileBytes(slot.source.path, tail=0) as source:
                out.seek(slot.offset)
                for start in range(0, slot.nbytes, _BLOCK):
                    length = min(_BLOCK, slot.nbytes - start)
                    block = source.read(slot.source.offset + start, length)
                    checksum = crc32(block, checksum)
                    out.write(block)
            for offset in slot.crc_offsets:
                out.seek(offset)
                out.write(checksum.to_bytes(4, "little"))
