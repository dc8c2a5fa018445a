"""The values of ``.metadata``, the index of a DCP folder, behind the border.

Theory. A DCP folder holds *entries* by fully qualified name (FQN). An entry is a tensor, made of
*chunks* (boxes of it, in any cut whatever), or an object (*bytes*: one ``torch.save`` archive).
Each chunk, and each object, lies at a :class:`Place`: an archive of its own, a byte range of a data
file. The planner flattened a tree of dicts and lists into FQNs; ``paths`` says which keys each came
from, so that ``("optim", "state", "a.b", "exp_avg")`` is not mistaken for anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from reshard.formats.dtypes import DType

METADATA = ".metadata"
"""The index of a folder."""

DATA_SUFFIX = ".distcp"
"""The ending of data files; their names are in the index, so nothing depends on it."""

Path = tuple[str | int, ...]
"""Keys from the root of the saved tree to an entry."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor: first index and extent in every dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def __str__(self) -> str:
        bounds = zip(self.offsets, self.sizes, strict=True)
        return "[" + ", ".join(f"{start}:{start + size}" for start, size in bounds) + "]"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of the index: element type, shape, and the chunks that hold it."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """An archive inside a data file: file name in the folder, first byte, and length in bytes."""

    file: str
    offset: int
    nbytes: int


PlaceKey = tuple[str, tuple[int, ...] | None]
"""FQN, and the offsets of a chunk; None for an object."""


@dataclass(frozen=True, slots=True)
class Index:
    """What ``.metadata`` says."""

    file: str
    """Its path."""
    tensors: Mapping[str, TensorEntry]
    """Tensors by FQN, in the order of the file."""
    objects: tuple[str, ...]
    """FQNs of the entries that are no tensors."""
    paths: Mapping[str, Path]
    """FQN -> keys that it was flattened from."""
    places: Mapping[PlaceKey, Place]
    """Where each chunk and each object lies."""
    version: str = ""
    """As the file states it, empty when it does not (torch before 2.9)."""
