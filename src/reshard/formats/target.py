"""What a writer promises: the files to be, as pure data.

Theory. A writer never moves a byte. It says which files there will be, how large each is, which
bytes of it are known already (headers, pickles, directories: *literals*), and which byte ranges are
to be filled with tensor elements (*slots*). Of a slot it says which tensors lie in it and by which
map (*fills*): the target map `M_t`, whose one interesting rank is the slot itself. Everything else
— which source supplies an element, in which order, under which memory bound — is the planner's and
the executor's business.

Some containers carry a checksum of a slot in their header. It is known only when the slot has been
filled, so the target names the places where it must be patched in (:class:`CrcField`).
"""

from __future__ import annotations

from dataclasses import dataclass

from reshard.formats.checkpoint import TensorKey, Topology
from reshard.formats.dtypes import DType
from reshard.geometry import ParamAffineMap


@dataclass(frozen=True, slots=True)
class Fill:
    """One tensor state inside a slot."""

    key: TensorKey
    """Which tensor state of the source."""
    dtype: DType
    """Element type in the slot; the planner refuses it when it differs from the source's, unless
    ``cast`` is set."""
    map: ParamAffineMap
    """Target map `M_t` from the logical tensor."""
    rank: int
    """The rank of `map` whose shard lies here."""
    offset: int = 0
    """First byte of that shard inside the slot."""
    cast: bool = False
    """Whether floating-point elements are rounded to ``dtype``, to nearest, ties to even."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A byte range of an output file that holds tensor elements.

    Bytes that no fill covers are written as zeros.
    """

    offset: int
    """First byte of the slot in its file."""
    nbytes: int
    """Length in bytes."""
    fills: tuple[Fill, ...]
    """The tensors in it; their byte ranges do not overlap."""
    crc_offsets: tuple[int, ...] = ()
    """Places in the file where the slot's CRC-32 goes, four bytes little-endian each."""


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file to be."""

    path: str
    """Path relative to the output folder, with forward slashes."""
    size: int
    """Length in bytes."""
    literals: tuple[tuple[int, bytes], ...]
    """`(offset, bytes)` of everything that is known before any tensor byte is read."""
    slots: tuple[Slot, ...] = ()
    """The byte ranges to fill, ascending, disjoint from each other and from the literals."""


@dataclass(frozen=True, slots=True)
class Target:
    """A whole output."""

    format: str
    """Name of the format that will be written."""
    files: tuple[OutputFile, ...]
    """All files inside the output folder."""
    pointer: tuple[str, str] | None = None
    """`(file name, text)` of the pointer file beside the output folder, written last, or None."""
    notes: tuple[str, ...] = ()
    """What the user should know: what was left out, and why."""
    topology: Topology | None = None
    """The degrees that it is written for, None where it is the same for all."""
