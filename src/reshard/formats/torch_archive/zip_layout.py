"""Lays out a zip archive as torch writes it, before the bytes of its records are known.

Theory. A record is a local header, its bytes, and a *data descriptor* with length and checksum,
which follows the bytes because torch streams. Lengths are known when the file is laid out,
checksums need not be: each is four bytes in the descriptor and four in the central directory, whose
places are handed out to be patched. An extra field ``FB`` in the local header pads it so that the
bytes start at a multiple of the alignment. The layout follows torch's writer byte for byte, zip64
included, since torch can compute the places of storages from it without reading headers
(``torch.utils.serialization.config.load.calculate_storage_offsets``).

There are no dates and no file modes in it: equal content gives equal bytes.

Source: ``caffe2/serialize/inline_container.cc`` (``getPadding``) and the archives that torch 2.13
writes, compared byte for byte; PKWARE APPNOTE 6.3.10 for the fields.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

ALIGNMENT = 64
"""Bytes of a record start at a multiple of this, as ``.storage_alignment`` says."""

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_DESCRIPTOR = struct.Struct("<4sI2I")
_DESCRIPTOR64 = struct.Struct("<4sI2Q")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_END64_LOCATOR = struct.Struct("<4sIQI")
_CRC_IN_DESCRIPTOR = 4
_CRC_IN_CENTRAL = 16
_FULL16 = 0xFFFF
_FULL32 = 0xFFFFFFFF
_UTF8_NAME = 0x0800
_DESCRIPTOR_FOLLOWS = 0x0008
_ZIP64_EXTRA = 1
_MADE_BY = 0x031E
_NEEDS_ZIP64 = 0x002D


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipRecord:
    """One record of an archive that is being laid out."""

    name: str
    """Full name."""
    header_offset: int
    """Where its local header starts, in bytes."""
    offset: int
    """Where its bytes start."""
    nbytes: int
    """Their length."""
    crc32: int
    """Their checksum, 0 while it is not known."""
    crc_offsets: tuple[int, ...] = ()
    """Where the checksum goes, 4 bytes little-endian each; empty for a record without bytes."""


class ZipLayout:
    """An archive that grows record by record."""

    def __init__(self) -> None:
        self._position = 0
        # Offset of each run of known bytes, and its parts.
        self._literals: list[tuple[int, list[bytes]]] = []
        self._run_end = -1
        self._records: list[ZipRecord] = []

    def add(self, name: str, nbytes: int, *, data: bytes | None = None, crc32: int = 0) -> int:
        """Add a record; return the offset of its bytes.

        Parameters
        ----------
        name
            Full name.
        nbytes
            Length of its bytes.
        data, crc32
            The bytes and their checksum, when they are known.
        """
        start = self._position
        raw_name = name.encode()
        wide = self._wide_local(nbytes)
        padding = -(start + _LOCAL.size + len(raw_name) + len(wide) + 4) % ALIGNMENT
        extra = wide + b"FB" + struct.pack("<H", padding) + b"Z" * padding
        flags = _UTF8_NAME | (_DESCRIPTOR_FOLLOWS if nbytes else 0)
        header = _LOCAL.pack(b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(raw_name), len(extra))
        self._literal(header + raw_name + extra)
        offset = self._position
        if data is not None:
            self._literal(data)
        self._position = offset + nbytes
        if nbytes:
            layout = _DESCRIPTOR64 if wide else _DESCRIPTOR
            self._literal(layout.pack(b"PK\7\x08", crc32, nbytes, nbytes))
        self._records.append(
            ZipRecord(name=name, header_offset=start, offset=offset, nbytes=nbytes, crc32=crc32)
        )
        return offset

    def finish(self) -> tuple[int, tuple[tuple[int, bytes], ...], dict[str, ZipRecord]]:
        """Add directory and end records.

        Returns
        -------
        tuple
            Size of the file, the literals as ``(offset, bytes)`` with neighbours joined, and the
            records by name with the places of their checksums.
        """
        start = self._position
        placed = {}
        for record in self._records:
            at = self._position
            self._literal(_central(record))
            descriptor = record.offset + record.nbytes + _CRC_IN_DESCRIPTOR
            places = (descriptor, at + _CRC_IN_CENTRAL) if record.nbytes else ()
            placed[record.name] = replace(record, crc_offsets=places)
        self._end(start, self._position - start)
        literals = tuple((offset, b"".join(parts)) for offset, parts in self._literals)
        return self._position, literals, placed

    def _wide_local(self, nbytes: int) -> bytes:
        """Return the zip64 field of a local header, empty where 32 bits do."""
        values = b""
        if nbytes >= _FULL32:
            # The packed length is not known when torch writes the header.
            values += struct.pack("<2Q", nbytes, 0)
        if self._position >= _FULL32:
            values += struct.pack("<Q", self._position)
        return struct.pack("<2H", _ZIP64_EXTRA, len(values)) + values if values else b""

    def _literal(self, data: bytes) -> None:
        if self._position != self._run_end:
            self._literals.append((self._position, []))
        self._literals[-1][1].append(data)
        self._position += len(data)
        self._run_end = self._position

    def _end(self, start: int, size: int) -> None:
        count = len(self._records)
        at = self._position
        end64 = _END64.pack(
            b"PK\6\6", _END64.size - 12, _MADE_BY, _NEEDS_ZIP64, 0, 0, count, count, size, start
        )
        locator = _END64_LOCATOR.pack(b"PK\6\7", 0, at, 1)
        few = min(count, _FULL16)
        end = _END.pack(b"PK\5\6", 0, 0, few, few, min(size, _FULL32), min(start, _FULL32), 0)
        self._literal(end64 + locator + end)


def _central(record: ZipRecord) -> bytes:
    raw_name = record.name.encode()
    values = b""
    if record.nbytes >= _FULL32:
        values += struct.pack("<2Q", record.nbytes, record.nbytes)
    if record.header_offset >= _FULL32:
        values += struct.pack("<Q", record.header_offset)
    extra = struct.pack("<2H", _ZIP64_EXTRA, len(values)) + values if values else b""
    size = min(record.nbytes, _FULL32)
    flags = _UTF8_NAME | (_DESCRIPTOR_FOLLOWS if record.nbytes else 0)
    header = _CENTRAL.pack(
        b"PK\1\2",
        *(0, 0, flags, 0, 0, 0, record.crc32, size, size),
        *(len(raw_name), len(extra), 0, 0, 0, 0),
        min(record.header_offset, _FULL32),
    )
    return header + raw_name + extra
