"""Opens a torch archive: a tree of inert values, and where each tensor lies in the file.

Theory. ``torch.save`` writes a zip archive with one folder: ``data.pkl`` is the object as a pickle
in which every storage is a persistent id, ``data/<key>`` are the bytes of the storages, and a few
small records say versions and byte order. So the tree can be had from the pickle alone, and a
tensor is a place in the file. Opening reads the end of the file, the pickle and one local header
per storage.

What torch does not check is checked here: that the pickle's checksum holds is *noted*, not
required, because torch writes files without checksums on request and two processes that write one
file leave it whole with a wrong one.

Source: ``torch/serialization.py`` (``_save``, ``_load``), torch 1.6 to 2.13;
``caffe2/serialize/inline_container.cc``.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from reshard.errors import ArchiveError, count_text
from reshard.formats.dtypes import DType
from reshard.formats.torch_archive.construction import Construction
from reshard.formats.torch_archive.machine import Machine
from reshard.formats.torch_archive.tensors import StorageRecord, TensorRecord
from reshard.formats.torch_archive.values import Global, short_repr
from reshard.formats.torch_archive.zip_directory import FileBytes, ZipEntry, locate, read_directory

LARGEST_PICKLE = 1 << 30
"""Largest pickle that is read, in bytes. Real ones are below a few megabytes."""

WRONG_CHECKSUM = (
    "the checksum of the pickle does not hold: the file was written without checksums, by two "
    "processes at once, or it is damaged"
)
"""Told of an archive whose pickle can be read and is not what its checksum is of."""

_NEWEST_VERSION = 10
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Archive:
    """A torch file that was opened."""

    path: str
    """The file."""
    size: int
    """Length of the file in bytes."""
    name: str
    """The one folder of the archive, which ``torch.save`` calls after the file it wrote."""
    root: object
    """The saved object, as a tree of inert values."""
    tensors: tuple[TensorRecord, ...]
    """Every tensor of the tree, in the order of the pickle."""
    storages: Mapping[str, StorageRecord]
    """Every storage of the tree by key."""
    globals: tuple[str, ...]
    """Paths of the classes and functions that the pickle names, sorted."""
    problems: tuple[str, ...]
    """What is wrong or unusual and does not make the content inexact."""

    def __repr__(self) -> str:
        return f"Archive({self.path!r}, {self.size} bytes, {len(self.tensors)} tensors)"


def read_archive(path: str | os.PathLike[str]) -> Archive:
    """Open a file that ``torch.save`` wrote, without running anything in it.

    Parameters
    ----------
    path
        The file.

    Returns
    -------
    Archive
        The tree; no tensor bytes have been read.

    Raises
    ------
    MissingFileError
        There is no such file.
    ArchiveError
        It is not a whole torch archive, or one of another kind.
    HostileFileError
        Its pickle names a global that never belongs in a checkpoint.
    """
    with FileBytes(os.fspath(path)) as source:
        return read_archive_within(source)


def read_archive_within(source: FileBytes) -> Archive:
    """Open an archive that is a byte range of an open file, or the whole of it.

    Parameters
    ----------
    source
        The file, or a :class:`~reshard.formats.torch_archive.zip_directory.ByteWindow` of one.

    Returns
    -------
    Archive
        The tree; places of storages are counted from the start of the file.

    Raises
    ------
    ArchiveError, HostileFileError
        As for :func:`read_archive`.
    """
    _refuse_other_formats(source)
    return _Opening(source, read_directory(source)).archive()


def archive_name(path: str | os.PathLike[str]) -> str:
    """Return the folder of an archive, called after the file it was written to; no more is read.

    Raises
    ------
    MissingFileError, ArchiveError
        As for :func:`read_archive`.
    """
    with FileBytes(os.fspath(path)) as source:
        _refuse_other_formats(source)
        return _folder_of(read_directory(source))


def _folder_of(entries: Mapping[str, ZipEntry]) -> str:
    return next(iter(entries), "").split("/")[0]


def _refuse_other_formats(source: FileBytes) -> None:
    head = source.read(0, min(source.size, len(_LEGACY_MAGIC)))
    if head == _LEGACY_MAGIC:
        raise ArchiveError(
            "the file has the format of torch before 1.6 (no zip)",
            file=source.path,
            next_step="load it with torch.load and write it again with torch.save",
        )


class _Opening:
    """One archive while it is being opened."""

    def __init__(self, source: FileBytes, entries: dict[str, ZipEntry]) -> None:
        self.source = source
        self.entries = entries
        self.problems: list[str] = []
        self.folder = _folder_of(entries)

    def archive(self) -> Archive:
        self._check_kind()
        data = self._pickle()
        construction = Construction(self.source.path, len(data), self._find_storage)
        root, end = Machine(data, construction).run()
        if end != len(data):
            self.problems.append(f"{len(data) - end} bytes follow the end of the pickle")
        try:
            construction.finish(root)
        except ArchiveError as error:
            raise construction.located(error, end) from error
        return Archive(
            path=self.source.path,
            size=self.source.file_size,
            name=self.folder,
            root=root,
            tensors=tuple(construction.tensors),
            storages=dict(construction.storages),
            globals=tuple(sorted(f"{module}.{name}" for module, name in construction.globals)),
            problems=tuple(self.problems),
        )

    def _entry(self, name: str) -> ZipEntry | None:
        return self.entries.get(f"{self.folder}/{name}")

    def _small(self, name: str) -> bytes | None:
        """Return the bytes of a record that should have a few, None when it is not there."""
        entry = self._entry(name)
        if entry is None:
            return None
        return self.source.read(locate(self.source, entry), min(entry.nbytes, 64))

    def _check_kind(self) -> None:
        path = self.source.path
        if self._entry("constants.pkl") or any(
            name.startswith(f"{self.folder}/code/") for name in self.entries
        ):
            raise ArchiveError(
                "the file is a TorchScript program and not a checkpoint",
                file=path,
                next_step="save the state_dict of the module with torch.save",
            )
        if self._entry("data.pkl") is None:
            raise ArchiveError(
                "the archive has no pickle, so torch.save did not write it",
                file=path,
                expected=f"a record {short_repr(f'{self.folder}/data.pkl')}",
                found=f"{len(self.entries)} other records",
            )
        order = self._small("byteorder") or b"little"
        if order != b"little":
            raise ArchiveError(
                "the file was written on a big-endian machine",
                file=path,
                expected="byteorder little",
                found=repr(order),
                next_step="load and save it again with torch on a little-endian machine",
            )
        version = self._small("version") or b"3"
        if not version.strip().isdigit() or int(version) > _NEWEST_VERSION:
            raise ArchiveError(
                "the archive is of an unknown version",
                file=path,
                expected=f"at most {_NEWEST_VERSION}",
                found=repr(version),
            )

    def _pickle(self) -> bytes:
        entry = self.entries[f"{self.folder}/data.pkl"]
        if entry.nbytes > LARGEST_PICKLE:
            raise ArchiveError(
                "the pickle is too large to be that of a checkpoint",
                file=self.source.path,
                expected=f"at most {LARGEST_PICKLE} bytes",
                found=count_text(entry.nbytes, "byte"),
            )
        data = self.source.read(locate(self.source, entry), entry.nbytes)
        if zlib.crc32(data) != entry.crc32:
            self.problems.append(WRONG_CHECKSUM)
        return data

    def _find_storage(
        self, key: str, cls: Global, dtype: DType | None, location: str, numel: int
    ) -> StorageRecord:
        entry = self._entry(f"data/{key}")
        if entry is None:
            raise ArchiveError(
                f"the archive lacks the bytes of storage {short_repr(key)}",
                file=self.source.path,
                expected=f"a record {short_repr(f'{self.folder}/data/{key}')}",
                next_step="the file is damaged; copy it again from where it was written",
            )
        nbytes = numel * (1 if dtype is None else dtype.itemsize)
        if not 0 <= nbytes <= entry.nbytes:
            raise ArchiveError(
                f"storage {short_repr(key)} is shorter than the pickle says",
                file=self.source.path,
                expected=count_text(nbytes, "byte"),
                found=count_text(entry.nbytes, "byte"),
                next_step="the file is damaged; copy it again from where it was written",
            )
        if entry.nbytes - nbytes >= (1 if dtype is None else dtype.itemsize):
            self.problems.append(
                f"storage {short_repr(key)} has {count_text(entry.nbytes, 'byte')} where the "
                f"pickle says {nbytes}"
            )
        return StorageRecord(
            path=self.source.path,
            key=key,
            storage_class=cls,
            dtype=dtype,
            numel=numel,
            location=location,
            offset=self.source.start + locate(self.source, entry),
            nbytes=entry.nbytes,
            crc32=entry.crc32,
        )
