"""What the user may choose about a DCP folder that is written.

Theory. DCP fixes how a tree is stored and leaves the tree to the training loop. Two trees are in
use: that of PyTorch's own examples, with ``get_state_dict`` under ``model`` and ``optim``, and that
of torchtitan, with the model at the root and the flattened optimizer under ``optimizer``. A third
one is a :class:`Tree` of one's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reshard.errors import UsageError
from reshard.formats.dtypes import DType

DEFAULT_SHARD_BYTES = 1 << 30
"""Largest data file unless told otherwise. A file system takes one writer a file, so that several
files are written faster than one."""

LARGEST_CHUNK_BYTES = 64 << 20
"""Largest chunk. A rank that needs a part of a chunk reads all of it (``FileSystemReader``), so a
chunk of a whole embedding would be read by every rank."""


ARCHIVE_BYTES = 2048
"""What an archive takes beside the elements of its chunk, at most."""


ADAMS = ("adamw", "adam")
"""With weight decay apart from the gradients, and as a part of them."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Where the model and the optimizer are in the tree."""

    model: str = "model"
    optimizer: str = "optim"
    """Key of each; an empty one is the root."""
    flattened: bool = False
    """Whether the optimizer is in the form of ``flatten_optimizer_state_dict=True``."""


TREES: Mapping[str, Tree] = {
    "get_state_dict": Tree(),
    "torchtitan": Tree("", "optimizer", flattened=True),
}
"""Trees by the name that the user knows them by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpOptions:
    """What to choose about the output.

    Raises
    ------
    UsageError
        A size that is none, or an element type that weights cannot be rounded to.
    """

    tree: Tree = field(default_factory=Tree)
    """Where things are."""
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    """Largest data file, in bytes; one row of a tensor may exceed it."""
    dtype: DType | None = None
    """Element type of the weights of parameters; None keeps the source's, which for a trained
    parameter is that of its master weights."""
    adam: str | None = None
    """Which of torch's two Adams, ``"adamw"`` or ``"adam"``, the optimizer is, where the source
    does not say it."""

    @property
    def chunk_bytes(self) -> int:
        """Largest chunk, such that its archive fits into a data file."""
        return max(1, min(self.max_shard_bytes - ARCHIVE_BYTES, LARGEST_CHUNK_BYTES))

    def __post_init__(self) -> None:
        if self.max_shard_bytes < 1:
            raise UsageError("a data file needs a size", found=self.max_shard_bytes)
        if self.adam not in (None, *ADAMS):
            raise UsageError("no Adam of torch", expected=" or ".join(ADAMS), found=self.adam)
        if self.dtype is not None and not self.dtype.is_floating:
            raise UsageError("weights are floating point", found=self.dtype)


@dataclass(frozen=True, slots=True)
class Keys:
    """Where the user says that the model and the optimizer are; None where the tree says it."""

    model: str | None = None
    optimizer: str | None = None
    """Keys from the root joined by dots, ``""`` for the root itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpReading:
    """What the user may state about a DCP folder."""

    keys: Keys = field(default_factory=Keys)
    """Where the model and the optimizer are in the saved tree."""
    frozen: tuple[str, ...] = ()
    """Globs over names that are frozen parameters rather than buffers."""
