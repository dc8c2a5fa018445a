"""The header of a safetensors file, read from anybody and written as the library writes it.

Theory. A file is ``N`` (8 bytes, little-endian), ``N`` bytes of JSON, and the data::

    {"__metadata__": {text: text}, name: {"dtype": "BF16", "shape": [2, 3], "data_offsets": [a, b]}}

with offsets from the start of the data. The ranges must tile the data: no hole, no overlap, no
byte beyond the end. That is checked here in full, so whoever has a :class:`Header` may trust it;
there is nothing else in a file that could lie.

The library orders tensors by element type (its own order, larger alignment first) and then by name,
and pads the JSON with spaces so that the data start at a multiple of eight. With the same order and
padding, what is written here is what the library would have written.

Source: ``safetensors/src/tensor.rs``, version 0.8.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from reshard.errors import ArchiveError, CheckpointError, UnsupportedError, count_text
from reshard.formats.dtypes import DTYPES, DType

LENGTH_NBYTES = 8
ALIGNMENT = 8
LARGEST_HEADER = 100_000_000
"""Bytes of JSON that a file may have, as in the library."""

MOST_DIMS = 64
LARGEST = 1 << 63
"""No sound shape or position is as large, and arithmetic on what is larger may take for ever."""

METADATA = "__metadata__"

CODES: Mapping[str, DType] = {
    code: DTYPES[name]
    for code, name in (
        ("BOOL", "bool"),
        ("U8", "uint8"),
        ("I8", "int8"),
        ("F8_E5M2", "float8_e5m2"),
        ("F8_E4M3", "float8_e4m3fn"),
        ("F8_E8M0", "float8_e8m0fnu"),
        ("F8_E4M3FNUZ", "float8_e4m3fnuz"),
        ("F8_E5M2FNUZ", "float8_e5m2fnuz"),
        ("I16", "int16"),
        ("U16", "uint16"),
        ("F16", "float16"),
        ("BF16", "bfloat16"),
        ("I32", "int32"),
        ("U32", "uint32"),
        ("F32", "float32"),
        ("C64", "complex64"),
        ("F64", "float64"),
        ("I64", "int64"),
        ("U64", "uint64"),
    )
}
"""Element types by their code, in the library's order."""

_CODE_OF = {dtype.name: code for code, dtype in CODES.items()}
_ORDER = {code: number for number, code in enumerate(CODES)}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    """What it is."""
    start: int
    stop: int
    """Its bytes: positions in the data, the header not counted."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one file."""

    metadata: Mapping[str, str]
    """What the file says about itself."""
    entries: tuple[Entry, ...]
    """Its tensors, ascending by position."""
    data: int
    """Position in the file at which the data start."""
    nbytes: int
    """Size of the whole file."""


# --------------------------------------------------------------------------- writing


def code_of(dtype: DType, name: str) -> str:
    """Return the code of an element type.

    Raises
    ------
    UnsupportedError
        The format has none for it.
    """
    code = _CODE_OF.get(dtype.name)
    if code is None:
        raise UnsupportedError(
            "safetensors has no such element type",
            parameter=name,
            found=dtype,
            next_step="leave it out with --exclude",
        )
    return code


def header_of(
    tensors: Sequence[tuple[str, DType, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, tuple[Entry, ...]]:
    """Lay out a file: its first bytes, and where each tensor lies in the data after them.

    Parameters
    ----------
    tensors
        Name, element type and shape of each.
    metadata
        What the file says about itself.

    Examples
    --------
    >>> head, entries = header_of([("w", DTYPES["bfloat16"], (2, 3))], {"format": "pt"})
    >>> len(head) % 8, entries[0].start, entries[0].stop
    (0, 0, 12)
    """
    entries, at = [], 0
    ordered = sorted(tensors, key=lambda one: (-_ORDER[code_of(one[1], one[0])], one[0]))
    for name, dtype, shape in ordered:
        _require_name(name)
        stop = at + prod(shape) * dtype.itemsize
        entries.append(Entry(name, dtype, shape, at, stop))
        at = stop
    table: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    table |= {entry.name: _described(entry) for entry in entries}
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > LARGEST_HEADER:
        raise UnsupportedError(
            "the header of a file would be too long",
            expected=f"at most {LARGEST_HEADER} bytes",
            found=len(text),
            next_step="choose a smaller --max-shard-size",
        )
    return len(text).to_bytes(LENGTH_NBYTES, "little") + text, tuple(entries)


def _described(entry: Entry) -> dict[str, object]:
    return {
        "dtype": code_of(entry.dtype, entry.name),
        "shape": list(entry.shape),
        "data_offsets": [entry.start, entry.stop],
    }


def _require_name(name: str) -> None:
    bad = name == METADATA or any("\ud800" <= character <= "\udfff" for character in name)
    if bad:
        raise CheckpointError(
            "a name cannot stand in a safetensors file",
            parameter=repr(name),
            next_step="give it another with --rename, or leave it out with --exclude",
        )


# --------------------------------------------------------------------------- reading


def read_header(path: str) -> Header:
    """Read and check the header of a file; no tensor byte is read.

    Raises
    ------
    ArchiveError
        The file is cut short, too long, or its header is not what the format says.
    UnsupportedError
        It holds an element type that is not known here.
    """
    with Path(path).open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        head = file.read(LENGTH_NBYTES)
        length = int.from_bytes(head, "little")
        if len(head) < LENGTH_NBYTES or length > nbytes - LENGTH_NBYTES:
            raise ArchiveError(
                "the file is cut short, or no safetensors file",
                file=path,
                expected=f"a header of {count_text(length, 'byte')}"
                if len(head) == LENGTH_NBYTES
                else "8 bytes",
                found=f"{count_text(nbytes, 'byte')} in all",
            )
        if length > LARGEST_HEADER:
            raise ArchiveError(
                "the header is too long",
                file=path,
                expected=f"at most {LARGEST_HEADER} bytes",
                found=length,
            )
        text = file.read(length)
    table = _parsed(text, path)
    metadata = _metadata(table.pop(METADATA, {}), path)
    entries = sorted(_entries(table, path), key=lambda one: (one.start, one.stop))
    data = LENGTH_NBYTES + length
    _require_tiling(entries, nbytes - data, path)
    return Header(metadata, tuple(entries), data, nbytes)


def _parsed(text: bytes, path: str) -> dict[str, object]:
    try:
        found = json.loads(
            text.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise ArchiveError("the header is no sound JSON", file=path, found=str(error)) from error
    if not isinstance(found, dict) or not text.startswith(b"{"):
        raise ArchiveError("the header is no JSON object", file=path)
    return found


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries: dict[str, object] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"{name!r} is there twice")
        entries[name] = value
    return entries


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is no JSON")


def _metadata(value: object, path: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ArchiveError(f"{METADATA} is no table of texts", file=path)
    return value


def _entries(table: Mapping[str, object], path: str) -> Iterator[Entry]:
    for name, value in table.items():
        if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
            raise _unsound(name, path, "dtype, shape and data_offsets", value)
        dtype = _dtype(name, value["dtype"], path)
        shape = _naturals(name, value["shape"], path)
        offsets = _naturals(name, value["data_offsets"], path)
        if len(offsets) != 2 or offsets[1] < offsets[0]:
            raise _unsound(name, path, "data_offsets [start, stop]", list(offsets))
        needed = prod(shape) * dtype.itemsize
        if offsets[1] - offsets[0] != needed:
            raise ArchiveError(
                "the bytes of a tensor are not as many as its shape and type need",
                file=path,
                parameter=name,
                expected=f"{count_text(needed, 'byte')} for {value['dtype']} {list(shape)}",
                found=f"data_offsets {list(offsets)}",
            )
        yield Entry(name, dtype, shape, *offsets)


def _dtype(name: str, code: object, path: str) -> DType:
    if not isinstance(code, str):
        raise _unsound(name, path, "a dtype", code)
    dtype = CODES.get(code)
    if dtype is None:
        raise UnsupportedError(
            "an element type that is not known here",
            file=path,
            parameter=name,
            expected=f"one of {', '.join(CODES)}",
            found=code[:40],
        )
    return dtype


def _naturals(name: str, value: object, path: str) -> tuple[int, ...]:
    if isinstance(value, list) and len(value) <= MOST_DIMS:
        whole = [one for one in value if isinstance(one, int) and not isinstance(one, bool)]
        if len(whole) == len(value) and all(0 <= one < LARGEST for one in whole):
            return tuple(whole)
    raise _unsound(name, path, "a list of natural numbers", value)


def _unsound(name: str, path: str, expected: str, found: object) -> ArchiveError:
    return ArchiveError(
        "an entry of the header is unsound",
        file=path,
        parameter=name,
        expected=expected,
        found=repr(found)[:80],
    )


def _require_tiling(entries: Sequence[Entry], nbytes: int, path: str) -> None:
    """Refuse holes, overlaps and bytes beyond the end: the data are the tensors and no more."""
    at = 0
    for entry in entries:
        if entry.start != at:
            raise ArchiveError(
                "tensors overlap" if entry.start < at else "there is a hole between tensors",
                file=path,
                parameter=entry.name,
                expected=f"byte {at} of the data",
                found=f"byte {entry.start}",
            )
        at = entry.stop
    if at != nbytes:
        raise ArchiveError(
            "the file is cut short" if at > nbytes else "there are bytes after the last tensor",
            file=path,
            expected=f"{count_text(at, 'byte')} of data",
            found=nbytes,
        )
