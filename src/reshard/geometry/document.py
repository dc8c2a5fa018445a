"""The JSON document of maps (§6.2, §6.3 of the specification), read strictly.

Theory. A document is foreign data: every value is checked before it is used, and an error names
the path to it (``params."^w$".ranks.0.pieces[2].source``). What is written is plain scalars and
lists, nothing that needs this package to be read. ``scale`` is left out when it is 1. Versions
above 1 are refused, because what they mean is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from reshard.errors import DocumentError, InvalidMapError
from reshard.geometry.index_math import MAX_OFFSET
from reshard.geometry.piece import AffinePiece

_RANK_DIGITS = 19
DOCUMENT_VERSION = 1
"""The version of the map document that is written, and the newest that is read."""

Entry = tuple[tuple[int, ...], Mapping[int, tuple[int, ...]], Mapping[int, tuple[AffinePiece, ...]]]
"""Logical shape, shard shapes and pieces of one parameter."""


def refuse(path: str, what: str, expected: str, found: object) -> NoReturn:
    """Raise a :class:`DocumentError` that names a place in a document."""
    raise DocumentError(f"{path}: {what}", expected=expected, found=_shown(found))


def _shown(found: object) -> str:
    text = repr(found)
    return text if len(text) <= 80 else text[:77] + "..."


def as_mapping(value: object, path: str) -> Mapping[object, object]:
    """Return ``value`` when it is a mapping.

    Raises
    ------
    DocumentError
        When it is something else.
    """
    if not isinstance(value, Mapping):
        refuse(path, "not an object", "an object", value)
    return value


def as_list(value: object, path: str) -> list[object]:
    """Return ``value`` when it is a list or tuple.

    Raises
    ------
    DocumentError
        When it is something else.
    """
    if not isinstance(value, (list, tuple)):
        refuse(path, "not a list", "a list", value)
    return list(value)


def as_integers(value: object, path: str) -> tuple[int, ...]:
    """Return a list of non-negative integers.

    Raises
    ------
    DocumentError
        When it is anything else; booleans and floats are not integers.
    """
    for index, item in enumerate(as_list(value, path)):
        as_integer(item, f"{path}[{index}]")
    return tuple(value)  # type: ignore[arg-type]


def as_integer(value: object, path: str) -> int:
    """Return a non-negative integer.

    Raises
    ------
    DocumentError
        When it is anything else; booleans and floats are not integers.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        refuse(path, "not a non-negative integer", "an integer from 0", value)
    return value


def as_offset(value: object, path: str) -> int:
    """Return an integer from 0 to :data:`~reshard.geometry.index_math.MAX_OFFSET`.

    Raises
    ------
    DocumentError
        When it is anything else.
    """
    offset = as_integer(value, path)
    if offset > MAX_OFFSET:
        refuse(path, "out of range", "0 … 2^62", value)
    return offset


def as_offsets(value: object, path: str) -> tuple[int, ...]:
    """Return a list of integers from 0 to :data:`~reshard.geometry.index_math.MAX_OFFSET`.

    Raises
    ------
    DocumentError
        When it is anything else.
    """
    listed = as_list(value, path)
    return tuple([as_offset(item, f"{path}[{i}]") for i, item in enumerate(listed)])


def as_rank(key: object, path: str) -> int:
    """Return the rank that a key names, as a number or as JSON's text of one.

    Raises
    ------
    DocumentError
        When it names none.
    """
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < _RANK_DIGITS:
        return int(key)
    if isinstance(key, str):
        refuse(path, "a rank that is not an integer", "an integer from 0", key)
    return as_integer(key, path)


def as_number(value: object, path: str) -> float:
    """Return a number; 1 when there is none.

    Raises
    ------
    DocumentError
        When it is anything else, or too large for a float.
    """
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse(path, "not a number", "a finite non-zero number", value)
    try:
        return float(value)
    except OverflowError:
        refuse(path, "too large a number", "a finite non-zero number", value)


def check_version(record: Mapping[object, object], path: str, newest: int) -> None:
    """Refuse a document of another version.

    Raises
    ------
    DocumentError
        When its version is not the one that is known.
    """
    version = record.get("version")
    if type(version) is not int or version != newest:
        refuse(f"{path}.version", "unknown version", str(newest), version)


def fields(
    value: object, path: str, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> tuple[object, ...]:
    """Return the named fields of an object, optional ones as None when they are absent.

    Raises
    ------
    DocumentError
        When a required field is missing or an unknown one is present.
    """
    record = as_mapping(value, path)
    missing = [name for name in required if name not in record]
    if missing:
        refuse(
            path, f"no {missing[0]!r}", f"fields {', '.join(required)}", sorted(map(str, record))
        )
    unknown = [key for key in record if key not in required and key not in optional]
    if unknown:
        refuse(
            path,
            f"unknown field {_shown(unknown[0])}",
            ", ".join((*required, *optional)),
            unknown[0],
        )
    return tuple([record.get(name) for name in (*required, *optional)])


def read_entry(value: object, path: str) -> Entry:
    """Read the map of one parameter.

    Raises
    ------
    DocumentError
        With the path of the first malformed value.
    """
    shape, ranks = fields(value, path, ("logical_shape", "ranks"))
    logical_shape = as_integers(shape, f"{path}.logical_shape")
    shapes: dict[int, tuple[int, ...]] = {}
    pieces: dict[int, tuple[AffinePiece, ...]] = {}
    for key, held in as_mapping(ranks, f"{path}.ranks").items():
        rank = as_rank(key, f"{path}.ranks")
        here = f"{path}.ranks.{rank}"
        if rank in shapes:
            refuse(here, "rank given twice", "each rank once", key)
        shard_shape, listed = fields(held, here, ("shard_shape", "pieces"))
        shapes[rank] = as_integers(shard_shape, f"{here}.shard_shape")
        pieces[rank] = tuple(
            [
                _read_piece(item, f"{here}.pieces[{index}]")
                for index, item in enumerate(as_list(listed, f"{here}.pieces"))
            ]
        )
    return logical_shape, shapes, pieces


def _read_piece(value: object, path: str) -> AffinePiece:
    names = ("shape", "source", "dest", "locations")
    shape, source, dest, locations, scale = fields(value, path, names, ("scale",))
    source_offset, source_strides = _read_side(source, f"{path}.source")
    dest_offset, dest_strides = _read_side(dest, f"{path}.dest")
    factor = as_number(scale, f"{path}.scale")
    try:
        return AffinePiece(
            as_integers(shape, f"{path}.shape"),
            source_offset,
            source_strides,
            dest_offset,
            dest_strides,
            as_integers(locations, f"{path}.locations"),
            factor,
        )
    except InvalidMapError as error:
        raise DocumentError(f"{path}: {error}") from error


def _read_side(value: object, path: str) -> tuple[int, tuple[int, ...]]:
    pair = as_list(value, path)
    if len(pair) != 2:
        refuse(path, "not a pair", "[offset, strides]", value)
    return as_integer(pair[0], f"{path}[0]"), as_integers(pair[1], f"{path}[1]")


def write_entry(entry: Entry) -> dict[str, object]:
    """Return the map of one parameter as plain scalars, lists and dictionaries."""
    logical_shape, shapes, pieces = entry
    return {
        "logical_shape": list(logical_shape),
        "ranks": {
            rank: {
                "shard_shape": list(shapes[rank]),
                "pieces": [_write_piece(piece) for piece in pieces[rank]],
            }
            for rank in sorted(shapes)
        },
    }


def _write_piece(piece: AffinePiece) -> dict[str, object]:
    written: dict[str, object] = {
        "shape": list(piece.shape),
        "source": [piece.source_offset, list(piece.source_strides)],
        "dest": [piece.dest_offset, list(piece.dest_strides)],
        "locations": list(piece.locations),
    }
    if piece.scale != 1.0:
        written["scale"] = piece.scale
    return written


def read_params(document: object, path: str = "affine_map") -> dict[str, Entry]:
    """Read a whole document, ``{"version": 1, "params": {pattern: map}}``.

    Raises
    ------
    DocumentError
        When it is malformed or of an unknown version.
    """
    record = as_mapping(document, path)
    check_version(record, path, DOCUMENT_VERSION)
    _, params = fields(document, path, ("version", "params"))
    entries = {}
    for pattern, entry in as_mapping(params, f"{path}.params").items():
        if not isinstance(pattern, str):
            refuse(f"{path}.params", "a name that is not text", "text", pattern)
        entries[pattern] = read_entry(entry, f'{path}.params."{pattern}"')
    return entries


def write_params(entries: Mapping[str, Entry]) -> dict[str, object]:
    """Return a whole document as plain scalars, lists and dictionaries."""
    return {
        "version": DOCUMENT_VERSION,
        "params": {pattern: write_entry(entry) for pattern, entry in entries.items()},
    }
