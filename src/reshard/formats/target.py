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
    """One tensor state inside a slot.

    Parameters
    ----------
    key
        Which tensor state of the source.
    dtype
        Element type in the slot; the planner refuses it when it differs from the source's, unless
        ``cast`` is set.
    map
        Target map `M_t` from the logical tensor.
    rank
        The rank of `map` whose shard lies here.
    offset
        First byte of that shard inside the slot.
    cast
        Whether floating-point elements are rounded to ``dtype``, to nearest, ties to even.
    """

    key: TensorKey
    dtype: DType
    map: ParamAffineMap
    rank: int
    offset: int = 0
    cast: bool = False


@dataclass(frozen=True, slots=True)
class Slot:
    """A byte range of an output file that holds tensor elements.

    Bytes that no fill covers are written as zeros.

    Parameters
    ----------
    offset
        First byte of the slot in its file.
    nbytes
        Length in bytes.
    fills
        The tensors in it; their byte ranges do not overlap.
    crc_offsets
        Places in the file where the slot's CRC-32 goes, four bytes little-endian each.
    """

    offset: int
    nbytes: int
    fills: tuple[Fill, ...]
    crc_offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file to be.

    Parameters
    ----------
    path
        Path relative to the output folder, with forward slashes.
    size
        Length in bytes.
    literals
        `(offset, bytes)` of everything that is known before any tensor byte is read.
    slots
        The byte ranges to fill, ascending, disjoint from each other and from the literals.
    """

    path: str
    size: int
    literals: tuple[tuple[int, bytes], ...]
    slots: tuple[Slot, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """A whole output.

    Parameters
    ----------
    format
        Name of the format that will be written.
    files
        All files inside the output folder.
    pointer
        `(file name, text)` of the pointer file beside the output folder, written last, or None.
    notes
        What the user should know: what was left out, and why.
    topology
        The degrees that it is written for, None where it is the same for all.
    """

    format: str
    files: tuple[OutputFile, ...]
    pointer: tuple[str, str] | None = None
    notes: tuple[str, ...] = ()
    topology: Topology | None = None
