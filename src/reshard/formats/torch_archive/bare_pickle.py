"""A pickle that is a whole file, without an archive around it, such as DCP's ``.metadata``.

Theory. Such a file holds no tensors, so a persistent id in it is an error. It is written by one
library with a handful of classes, so its reader says which; a pickle that names any other global
is refused by that name, although nothing of it would be run.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from reshard.errors import ArchiveError, HostileFileError, UsageError, count_text
from reshard.formats.dtypes import DType
from reshard.formats.torch_archive.budget import INDEX
from reshard.formats.torch_archive.construction import Construction
from reshard.formats.torch_archive.machine import Machine
from reshard.formats.torch_archive.pickler import dump
from reshard.formats.torch_archive.reader import LARGEST_PICKLE
from reshard.formats.torch_archive.tensors import NewTensor, StorageRecord
from reshard.formats.torch_archive.values import Global, short_repr
from reshard.formats.torch_archive.zip_directory import FileBytes


def read_pickle(path: str | os.PathLike[str], known: Collection[str]) -> object:
    """Read a bare pickle as a tree of inert values, without running anything in it.

    Parameters
    ----------
    path
        The file.
    known
        Paths of the classes and functions that it may name, beside torch's dtypes.

    Raises
    ------
    MissingFileError
        There is no such file.
    ArchiveError
        It is not one whole pickle.
    HostileFileError
        It names a global that is not among the known ones.
    """
    with FileBytes(os.fspath(path), tail=0) as source:
        if source.size > LARGEST_PICKLE:
            raise ArchiveError(
                "the pickle is too large to be that of a checkpoint",
                file=source.path,
                expected=f"at most {LARGEST_PICKLE} bytes",
                found=count_text(source.size, "byte"),
            )
        data = source.read(0, source.size)
        return _read(data, source.path, known)


def _read(data: bytes, path: str, known: Collection[str]) -> object:
    construction = Construction(path, len(data), _no_storage)
    root, end = Machine(data, construction, INDEX).run()
    try:
        construction.finish(root)
    except ArchiveError as error:
        raise construction.located(error, end) from error
    _require_known(construction, path, known)
    if end != len(data):
        raise ArchiveError(
            f"{len(data) - end} bytes follow the end of the pickle",
            file=path,
            next_step="the file is damaged or was made by hand; copy it again",
        )
    return root


def _require_known(construction: Construction, path: str, known: Collection[str]) -> None:
    for (module, name), value in construction.globals.items():
        if not isinstance(value, DType) and f"{module}.{name}" not in known:
            raise HostileFileError(
                f"the file names {short_repr(f'{module}.{name}')}, which its format does not have",
                file=path,
                next_step="get the file again from a source you trust",
            )


def _no_storage(
    key: str, cls: Global, dtype: DType | None, location: str, numel: int
) -> StorageRecord:
    del cls, dtype, location, numel
    raise ArchiveError("the pickle names a storage, and there is none", found=short_repr(key))


class _NoStorages:
    """Refuses tensors in a pickle that is written without an archive."""

    def place(self, storage: NewTensor | StorageRecord) -> tuple[Global, str, str, int]:
        raise UsageError("a bare pickle holds no tensors", found=type(storage).__name__)


def write_pickle(root: object) -> bytes:
    """Return the pickle of a tree of inert values without tensors, in protocol 2.

    Parameters
    ----------
    root
        The tree. Equal trees give equal bytes.

    Raises
    ------
    UsageError
        The tree holds a value that cannot be written.

    Examples
    --------
    >>> import pickle
    >>> pickle.loads(write_pickle({"a": (1, 2.0)}))
    {'a': (1, 2.0)}
    """
    return dump(root, _NoStorages())
