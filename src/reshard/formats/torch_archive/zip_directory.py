"""The directory of a zip archive, read with every length checked.

Theory. A zip archive ends with an *end record*, which says where the *central directory* is, which
names every record: its length, its checksum, and where its *local header* starts. The bytes of a
record follow its local header, whose own length only the local header tells (torch pads it so that
the bytes are aligned). Archives or records beyond 4 GiB keep 64-bit numbers in a *zip64* end record
and in extra fields. Nothing follows the end record in a file that torch wrote; so a file that was
cut short has no end record, and one that was overwritten by a shorter one has something after it.

torch stores records uncompressed; compressed ones cannot be used in place and are refused.

Source: PKWARE APPNOTE 6.3.10, sections 4.3 to 4.5.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from reshard.errors import ArchiveError, MissingFileError, count_text
from reshard.formats.torch_archive.values import short_repr

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_END64_LOCATOR = struct.Struct("<4sIQI")
_FULL16 = 0xFFFF
_FULL32 = 0xFFFFFFFF
_ENCRYPTED = 0x0001
_ZIP64_EXTRA = 0x0001
_TAIL = 1 << 16
_WINDOW_TAIL = _TAIL + _END.size
"""All of the end of an archive in which its end record is looked for."""
_CUT_SHORT = "the file is cut short or damaged; copy it again from where it was written"


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipEntry:
    """One record of a zip archive, as its central directory describes it."""

    name: str
    """Full name, with the archive's folder."""
    header_offset: int
    """Where its local header starts, in bytes."""
    nbytes: int
    """Length of its bytes as stored."""
    crc32: int
    """Checksum of its bytes as stated."""
    problem: str
    """Why its bytes cannot be used in place (``"compressed"``, ``"encrypted"``), else empty."""


class FileBytes:
    """An open file, read by position; its end is read at once and kept.

    Parameters
    ----------
    path
        The file.
    tail
        How many bytes of its end to keep.
    """

    __slots__ = ("_descriptor", "_tail", "_tail_start", "file_size", "path", "size", "start")

    def __init__(self, path: str, *, tail: int = _TAIL) -> None:
        self.path = path
        self.start = 0
        try:
            # Without O_NONBLOCK, opening a pipe would wait for a writer.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise MissingFileError("the file is not there", file=path) from None
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        self._tail = b""
        self._tail_start = self.size = 0
        try:
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ArchiveError("this is a folder or a device and not a file", file=path)
            self._tail_start = self.size = self.file_size = status.st_size
            self._tail = self.read(max(0, self.size - tail), min(self.size, tail))
            self._tail_start -= len(self._tail)
        except (ArchiveError, OSError):
            self.close()
            raise

    def __enter__(self) -> FileBytes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return exactly ``nbytes`` bytes from ``offset`` on."""
        if offset >= self._tail_start and offset + nbytes <= self.size:
            start = offset - self._tail_start
            return self._tail[start : start + nbytes]
        parts = []
        missing = nbytes
        try:
            while missing > 0:
                # One read call gives at most 2 GiB on Linux.
                at = self.start + offset + nbytes - missing
                part = os.pread(self._descriptor, min(missing, 1 << 30), at)
                if not part:
                    break
                parts.append(part)
                missing -= len(part)
        except (OSError, OverflowError) as error:
            raise _unreadable(self.path, error) from error
        if missing > 0:
            raise ArchiveError(
                f"the file ends early: no {count_text(nbytes, 'byte')} at {offset}",
                file=self.path,
                expected=f"{offset + nbytes} bytes",
                found=f"{offset + nbytes - missing} bytes",
                next_step=_CUT_SHORT,
            )
        return parts[0] if len(parts) == 1 else b"".join(parts)


class ByteWindow(FileBytes):
    """A byte range of an open file, read like a file of its own; closing it closes nothing.

    Parameters
    ----------
    source
        The file, which stays open as long as the window is read.
    start, size
        The range, in bytes.

    Raises
    ------
    ArchiveError
        The range does not lie inside the file.
    """

    __slots__ = ()

    def __init__(self, source: FileBytes, start: int, size: int) -> None:
        if start + size > source.size:
            raise ArchiveError(
                f"the file ends early: no {count_text(size, 'byte')} at {start}",
                file=source.path,
                expected=f"{start + size} bytes",
                found=count_text(source.size, "byte"),
                next_step=_CUT_SHORT,
            )
        self.path = source.path
        self._descriptor = source._descriptor  # noqa: SLF001 - one class, two kinds of range
        self.start = source.start + start
        self.size = self._tail_start = size
        self.file_size = source.file_size
        self._tail = b""
        self._tail = self.read(max(0, size - _WINDOW_TAIL), min(size, _WINDOW_TAIL))
        self._tail_start -= len(self._tail)

    def close(self) -> None:
        """Do nothing: the file is the source's."""


def _unreadable(path: str, error: Exception) -> ArchiveError:
    reason = getattr(error, "strerror", None) or error
    return ArchiveError("the file cannot be read", file=path, found=reason)


def read_directory(source: FileBytes) -> dict[str, ZipEntry]:
    """Return the records of an archive by name, in the order of its directory.

    Raises
    ------
    ArchiveError
        The file is not a whole zip archive, or its directory contradicts itself.
    """
    start, size, count = _find_directory(source)
    raw = source.read(start, size)
    entries: dict[str, ZipEntry] = {}
    for entry in _entries(source.path, raw):
        if entry.name in entries:
            raise ArchiveError(
                f"two records have the name {short_repr(entry.name)}", file=source.path
            )
        entries[entry.name] = entry
    if len(entries) != count:
        raise ArchiveError(
            "the directory has not as many records as the end record says",
            file=source.path,
            expected=count,
            found=len(entries),
            next_step=_CUT_SHORT,
        )
    _check_extents(source.path, entries, start)
    return entries


def locate(source: FileBytes, entry: ZipEntry) -> int:
    """Return the file offset of a record's first byte, from its local header.

    Raises
    ------
    ArchiveError
        The record is compressed or encrypted, its local header is another record's, or its bytes
        do not lie inside the file.
    """
    if entry.problem:
        raise ArchiveError(
            f"record {short_repr(entry.name)} is {entry.problem}",
            file=source.path,
            expected="a stored record, as torch writes them",
            next_step="unpack the archive and pack it again without compression (zip -0)",
        )
    raw_name = entry.name.encode()
    header = source.read(entry.header_offset, _LOCAL.size + len(raw_name))
    fields = _LOCAL.unpack_from(header)
    name_length, extra_length = fields[9], fields[10]
    if fields[0] != b"PK\3\4" or header[_LOCAL.size :][:name_length] != raw_name:
        raise ArchiveError(
            f"no local header of record {short_repr(entry.name)} where the directory says",
            file=source.path,
            expected=f"one at byte {entry.header_offset}",
            next_step=_CUT_SHORT,
        )
    start: int = entry.header_offset + _LOCAL.size + name_length + extra_length
    if start + entry.nbytes > source.size:
        raise ArchiveError(
            f"record {short_repr(entry.name)} reaches beyond the file",
            file=source.path,
            expected=f"{start + entry.nbytes} bytes",
            found=count_text(source.size, "byte"),
            next_step=_CUT_SHORT,
        )
    return start


def _find_directory(source: FileBytes) -> tuple[int, int, int]:
    """Return start, length and number of records of the central directory."""
    tail_start = max(0, source.size - _END.size - _FULL16)
    tail = source.read(tail_start, source.size - tail_start)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or at + _END.size > len(tail):
        raise _no_end(source, tail)
    end_offset = tail_start + at
    _, disk, start_disk, _, count, size, start, comment = _END.unpack_from(tail, at)
    if end_offset + _END.size + comment != source.size:
        raise ArchiveError(
            "something follows the end of the archive, or its end is missing",
            file=source.path,
            expected=f"{end_offset + _END.size + comment} bytes",
            found=count_text(source.size, "byte"),
            next_step=_CUT_SHORT,
        )
    directory_end = end_offset
    locator_offset = end_offset - _END64_LOCATOR.size
    if locator_offset >= 0 and source.read(locator_offset, 4) == b"PK\6\7":
        locator = _END64_LOCATOR.unpack(source.read(locator_offset, _END64_LOCATOR.size))
        directory_end = locator[2]
        disk, start_disk, count, size, start = _end64(source, directory_end, locator_offset)
    if disk or start_disk:
        raise ArchiveError("the archive is one part of several", file=source.path)
    if start + size != directory_end:
        raise ArchiveError(
            "the directory is not where the end record says",
            file=source.path,
            expected=f"its end at byte {start + size}",
            found=f"at byte {directory_end}",
            next_step=_CUT_SHORT,
        )
    return start, size, count


def _end64(source: FileBytes, offset: int, limit: int) -> tuple[int, int, int, int, int]:
    """Return disks, count, size and start from the zip64 end record at an offset."""
    record = b""
    if offset + _END64.size <= limit:
        record = source.read(offset, _END64.size)
    if not record.startswith(b"PK\6\6"):
        raise ArchiveError(
            "bytes are missing from the middle of the file, or were added to it",
            file=source.path,
            expected=f"{source.size - limit + offset + _END64.size} bytes",
            found=count_text(source.size, "byte"),
            next_step=_CUT_SHORT,
        )
    _, _, _, _, disk, start_disk, _, count, size, start = _END64.unpack(record)
    return disk, start_disk, count, size, start


def _no_end(source: FileBytes, tail: bytes) -> ArchiveError:
    """Return the error for a file without an end record, saying what it is instead."""
    head = source.read(0, min(source.size, 64))
    if not tail:
        what, next_step = "the file has zero bytes", "copy it again from where it was written"
    elif head.startswith(b"version https://git-lfs"):
        what, next_step = "the file is a Git LFS pointer and not the data", "run git lfs pull"
    elif not any(tail[-_END.size :]):
        what, next_step = "the file ends in zeros: it was never written to its end", _CUT_SHORT
    elif head.startswith(b"PK\3\4"):
        what, next_step = "the file is cut short: its zip end record is missing", _CUT_SHORT
    else:
        what, next_step = (
            "the file is not a torch archive (no zip)",
            "check that it is the right one",
        )
    return ArchiveError(
        what,
        file=source.path,
        expected="a zip archive with an end record",
        found=count_text(source.size, "byte"),
        next_step=next_step,
    )


def _entries(path: str, raw: bytes) -> Iterator[ZipEntry]:
    position = 0
    while position < len(raw):
        if position + _CENTRAL.size > len(raw):
            raise ArchiveError("the directory ends inside a record", file=path)
        fields = _CENTRAL.unpack_from(raw, position)
        lengths = fields[10:13]
        after = position + _CENTRAL.size + sum(lengths)
        if fields[0] != b"PK\1\2" or after > len(raw):
            raise ArchiveError("the directory has a malformed record", file=path)
        name_end = position + _CENTRAL.size + lengths[0]
        name = _decoded(path, raw[position + _CENTRAL.size : name_end])
        packed, unpacked, header = _wide(path, name, fields, raw[name_end : name_end + lengths[1]])
        yield ZipEntry(
            name=name,
            header_offset=header,
            nbytes=unpacked,
            crc32=fields[7],
            problem=_problem(fields[3], fields[4], packed, unpacked),
        )
        position = after


def _decoded(path: str, raw: bytes) -> str:
    name = raw.decode("utf-8", "replace")
    if "\ufffd" in name or not name.isprintable():
        raise ArchiveError(
            "a record has a name that is not printable UTF-8", file=path, found=short_repr(raw)
        )
    return name


def _problem(flags: int, method: int, packed: int, unpacked: int) -> str:
    if flags & _ENCRYPTED:
        return "encrypted"
    if method:
        return "compressed"
    return "" if packed == unpacked else "stored with two lengths"


def _wide(path: str, name: str, fields: tuple[int, ...], extra: bytes) -> tuple[int, int, int]:
    """Return packed size, unpacked size and header offset, from the zip64 extra where needed."""
    packed, unpacked, header = fields[8], fields[9], fields[16]
    if _FULL32 not in (packed, unpacked, header):
        return packed, unpacked, header
    wide = _zip64_extra(extra)
    values = []
    # The extra field holds, in this order, only those numbers that did not fit.
    for narrow in (unpacked, packed, header):
        value = narrow
        if narrow == _FULL32 and wide is not None:
            if len(wide) < 8:
                raise ArchiveError(
                    f"record {short_repr(name)} has a malformed zip64 field", file=path
                )
            value, wide = int.from_bytes(wide[:8], "little"), wide[8:]
        values.append(value)
    return values[1], values[0], values[2]


def _zip64_extra(extra: bytes) -> bytes | None:
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, position)
        if kind == _ZIP64_EXTRA:
            return extra[position + 4 : position + 4 + size]
        position += 4 + size
    return None


def _check_extents(path: str, entries: dict[str, ZipEntry], directory: int) -> None:
    """Refuse records that overlap each other or the directory."""
    end, previous = 0, ""
    for entry in sorted(entries.values(), key=lambda entry: entry.header_offset):
        if entry.header_offset < end:
            raise ArchiveError(
                f"records {short_repr(previous)} and {short_repr(entry.name)} overlap",
                file=path,
                next_step=_CUT_SHORT,
            )
        packed = 0 if entry.problem else entry.nbytes
        end = entry.header_offset + _LOCAL.size + len(entry.name.encode()) + packed
        previous = entry.name
    if end > directory:
        raise ArchiveError(
            f"record {short_repr(previous)} reaches into the directory",
            file=path,
            expected=f"{count_text(end, 'byte')} before it",
            found=count_text(directory, "byte"),
            next_step=_CUT_SHORT,
        )
