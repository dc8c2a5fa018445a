"""From a tree with tensors to be filled to an output file.

Theory. A rank's file is one tree (:func:`~reshard.formats.torch_archive.lay_out_archive`) whose
bulk lies in storages. Here every storage that is to be filled has a label, and a table says what
goes into it. What the tree carries along from other archives (a client's RNG states) is small and
its bytes become literals, so an output file needs nothing but the plan.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from reshard.errors import InternalError
from reshard.formats.checkpoint import Scalar, TensorKey
from reshard.formats.deepspeed.writing.flat_groups import Window
from reshard.formats.dtypes import DType
from reshard.formats.target import Fill, OutputFile, Slot
from reshard.formats.torch_archive import (
    ArchiveLayout,
    NewTensor,
    StorageSlot,
    crc32,
    lay_out_archive,
)
from reshard.geometry import ParamAffineMap

Label = tuple[str, ...]
"""Names a storage inside one file."""


@dataclass(frozen=True, slots=True)
class Bulk:
    """The storages of one file that are still to be filled."""

    fills: dict[Label, tuple[Fill, ...]] = field(default_factory=dict)
    """Label of the storage -> what lies in it."""

    def shard(
        self,
        label: Label,
        key: TensorKey,
        dtype: DType,
        shape: tuple[int, ...],
        target: ParamAffineMap,
        rank: int,
        stored: DType,
    ) -> NewTensor:
        """A tensor that is one holder of one map.

        Parameters
        ----------
        label
            Of its storage.
        key
            Tensor state of the source.
        dtype, shape
            Of the tensor.
        target, rank
            The map and the holder.
        stored
            Element type in the source; where it differs from ``dtype`` the elements are cast.
        """
        self.fills[label] = (Fill(key, dtype, target, rank, 0, cast=stored != dtype),)
        return NewTensor(dtype, shape, label=label)

    def flat(
        self, label: Label, state: str, dtype: DType, numel: int, windows: tuple[Window, ...]
    ) -> NewTensor:
        """A one-dimensional tensor with a part of many parameters; the rest of it is zeros."""
        self.fills[label] = tuple(
            Fill((part.name, state), dtype, part.map, part.rank, part.start * dtype.itemsize)
            for part in windows
            if part.map is not None
        )
        return NewTensor(dtype, (numel,), label=label)


FOLDER = "archive"
"""Name of the folder inside every archive, as torch names it when it writes to a stream."""


@dataclass(frozen=True, slots=True)
class ArchiveShelf:
    """Layouts of archives whose trees are the same for several ranks; only their bulk differs."""

    made: dict[Hashable, ArchiveLayout] = field(default_factory=dict)
    """Layouts by kind of file."""

    def file(self, path: str, root: object, bulk: Bulk, kind: Hashable) -> OutputFile:
        """Lay out one file.

        Parameters
        ----------
        path
            Relative to the output folder.
        root
            The tree.
        bulk
            What goes into its storages.
        kind
            Equal for files whose trees are equal; None for a tree of its own.
        """
        layout = self.made.get(kind) if kind is not None else None
        if layout is None:
            layout = lay_out_archive(root, FOLDER)
            if kind is not None:
                self.made[kind] = layout
        return output_file(path, layout, bulk)


def output_file(path: str, layout: ArchiveLayout, bulk: Bulk) -> OutputFile:
    """An archive as an output file.

    Parameters
    ----------
    path
        Relative to the output folder.
    layout
        The archive.
    bulk
        What goes into its storages.
    """
    literals = list(layout.literals)
    slots = []
    for slot in layout.slots:
        if slot.source is not None:
            literals += _carried_bytes(slot)
            continue
        if not isinstance(slot.label, tuple):
            raise InternalError("a storage has no label", file=path, found=slot.key)
        fills = bulk.fills[slot.label]
        slots.append(Slot(slot.offset, slot.nbytes, fills, slot.crc_offsets))
    return OutputFile(path, layout.size, tuple(sorted(literals)), tuple(slots))


def _carried_bytes(slot: StorageSlot) -> Iterator[tuple[int, bytes]]:
    if slot.source is None:
        return
    with Path(slot.source.path).open("rb") as file:
        file.seek(slot.source.offset)
        data = file.read(slot.source.nbytes)
    yield slot.offset, data
    for place in slot.crc_offsets:
        yield place, crc32(data).to_bytes(4, "little")


def scalar_value(scalar: Scalar) -> object:
    """A scalar state as the optimizer keeps it: a 0-dimensional tensor, or a number."""
    if scalar.dtype is None:
        return scalar.value
    data = np.array(scalar.value, dtype=scalar.dtype.numpy()).tobytes()
    return NewTensor(scalar.dtype, (), data=data)
