"""The journal: what is finished, so that an interrupted run can go on.

Theory. A text file of one JSON list a line, only ever appended to. The first line says what it is
and which plan and sources it belongs to; then one line a finished slot (with its CRC and the
digests of its fills), one a finished file (with the digest of its bytes outside the slots), and
marks of the stages of publication. A line is appended with a single write after the bytes it speaks
of were written; a last line that was cut off is dropped when the journal is read.

A journal is a claim, not a proof: after a power loss it may have survived bytes that did not.
Whoever continues compares the digests with the bytes before trusting a line.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from reshard.errors import OutputError

JOURNAL_FORMAT = "reshard-journal-1"


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """A finished slot: its CRC-32 and the digest of each of its fills."""

    crc: int
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Records:
    """What is finished: slots by `(file, slot)`, and the digest of the rest of finished files."""

    slots: dict[tuple[int, int], SlotRecord] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JournalContent:
    """A journal as it was found: its two identities, its records and its marks."""

    plan: str
    sources: str
    records: Records = field(default_factory=Records)
    marks: set[str] = field(default_factory=set)


class Journal:
    """A journal open for appending.

    Parameters
    ----------
    path
        The file; it is created when missing.
    """

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def begin(self, plan: str, sources: str, *, fsync: bool) -> None:
        """Write the first line; once it is durable the folder is known to be ours."""
        self._append([[JOURNAL_FORMAT, plan, sources]])
        if fsync:
            os.fsync(self._handle)

    def finished(self, file: int, slots: dict[int, SlotRecord], rest: str | None) -> None:
        """Note finished slots of a file and, when it is finished itself, the rest's digest."""
        lines: list[list[object]] = [
            ["slot", file, slot, record.crc, list(record.digests)] for slot, record in slots.items()
        ]
        if rest is not None:
            lines.append(["file", file, rest])
        self._append(lines)

    def mark(self, stage: str) -> None:
        """Note that a stage of publication is reached, durably."""
        self._append([["mark", stage]])
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def _append(self, lines: list[list[object]]) -> None:
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        data = memoryview(text.encode())
        while data:
            data = data[os.write(self._handle, data) :]


def read_journal(path: Path) -> JournalContent | None:
    """Read a journal.

    Parameters
    ----------
    path
        The file.

    Returns
    -------
    JournalContent or None
        None when there is no journal or not even its first line is whole.

    Raises
    ------
    OutputError
        When the file is something else, or of another version of reshard.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    lines = text.split("\n")[:-1]
    if not lines:
        return None
    first = _line(lines[0])
    if first is None or len(first) != 3 or first[0] != JOURNAL_FORMAT:
        raise OutputError(
            "this is not a journal that this version of reshard can continue",
            file=path,
            next_step="remove its folder, or run again with --overwrite",
        )
    content = JournalContent(str(first[1]), str(first[2]))
    for line in lines[1:]:
        record = _line(line)
        if record is None or not _note(content, record):
            break
    return content


def _line(text: str) -> list[object] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, list) else None


def _note(content: JournalContent, record: list[object]) -> bool:
    """Take one line into the content; whether it was understood."""
    match record:
        case ["slot", int(file), int(slot), int(crc), [*digests]]:
            content.records.slots[file, slot] = SlotRecord(crc, tuple(map(str, digests)))
        case ["file", int(file), str(rest)]:
            content.records.files[file] = rest
        case ["mark", str(stage)]:
            content.marks.add(stage)
        case _:
            return False
    return True
