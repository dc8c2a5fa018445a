"""The journal: what is finished, so that an interrupted run can go on.

Theory. A text file of one JSON list a line. The first line says what it is, which plan and sources
it belongs to, and the *stamps* of the source files (size and time of last change) when the run
began; then one line a finished slot (its CRC, the digests of its fills, replicas that were let
through), one a finished file (the digest of its bytes outside the slots), and marks of the stages
of publication. A line is appended with a single write, after the bytes it speaks of were written; a
last line that was cut off does not count.

A journal is a claim, not a proof: after a power loss it may have survived bytes that did not, and a
source file may have changed since. Whoever continues compares the digests with the bytes, and where
stamps differ with the sources too, and then begins a new journal with what was borne out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from reshard.execution.replicas import ReplicaFinding

JOURNAL_FORMAT = "reshard-journal-1"
FOREIGN = "of another version"
"""The mark of a journal that this version cannot read."""

Stamps = tuple[tuple[int, int], ...]
"""Size in bytes and time of last change in nanoseconds of every source file."""


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """A finished slot: CRC-32, digest of each fill, and replicas that were let through."""

    crc: int
    digests: tuple[str, ...]
    findings: tuple[ReplicaFinding, ...] = ()

    def same_bytes(self, other: SlotRecord) -> bool:
        """Whether both speak of the same bytes."""
        return (self.crc, self.digests) == (other.crc, other.digests)


@dataclass(frozen=True, slots=True)
class Records:
    """What is finished: slots by `(file, slot)`, and the digest of the rest of finished files."""

    slots: dict[tuple[int, int], SlotRecord] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a run is about: digests of its plan and of the ends of its sources, and their stamps."""

    plan: str
    sources: str
    stamps: Stamps

    def same_work(self, other: Identity) -> bool:
        """Whether one run can continue the other."""
        return (self.plan, self.sources) == (other.plan, other.sources)


@dataclass(frozen=True, slots=True)
class JournalContent:
    """A journal as it was found: what it is about, its records and its marks."""

    identity: Identity
    records: Records = field(default_factory=Records)
    marks: set[str] = field(default_factory=set)


class Journal:
    """A journal open for appending, begun anew.

    Parameters
    ----------
    path
        The file; an older one is replaced in one step.
    identity
        What the run is about.
    records
        What is finished already.
    fsync
        Whether the beginning and marks are made durable; then a folder is known to be ours.
    """

    def __init__(self, path: Path, identity: Identity, records: Records, *, fsync: bool) -> None:
        self._fsync = fsync
        fresh = path.with_suffix(".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._handle = os.open(fresh, flags, 0o644)
        self._append([[JOURNAL_FORMAT, identity.plan, identity.sources, identity.stamps]])
        self._append(_slot_line(*key, record) for key, record in records.slots.items())
        self._append(["file", file, rest] for file, rest in records.files.items())
        if fsync:
            os.fsync(self._handle)
        fresh.rename(path)

    def finished(self, file: int, slots: Mapping[int, SlotRecord], rest: str | None) -> None:
        """Note finished slots of a file and, when it is finished itself, the rest's digest."""
        lines = [_slot_line(file, slot, record) for slot, record in slots.items()]
        self._append(lines if rest is None else [*lines, ["file", file, rest]])

    def mark(self, stage: str) -> None:
        """Note that a stage of publication is reached."""
        self._append([["mark", stage]])
        if self._fsync:
            os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def _append(self, lines: Iterable[list[object]]) -> None:
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        data = memoryview(text.encode())
        while data:
            data = data[os.write(self._handle, data) :]


def _slot_line(file: int, slot: int, record: SlotRecord) -> list[object]:
    findings = [
        [
            *finding.key,
            finding.count,
            finding.first,
            finding.largest,
            finding.holders,
            finding.files,
        ]
        for finding in record.findings
    ]
    return ["slot", file, slot, record.crc, record.digests, findings]


def read_journal(path: Path) -> JournalContent | None:
    """Read a journal.

    Parameters
    ----------
    path
        The file.

    Returns
    -------
    JournalContent or None
        None when there is no journal or not even its first line is whole; with the mark `FOREIGN`
        when another version of reshard wrote it.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    lines = text.split("\n")[:-1]
    if not lines:
        return None
    content = _content(_line(lines[0]))
    for line in lines[1:]:
        if FOREIGN in content.marks or not _note(content, _line(line)):
            break
    return content


def _content(first: object) -> JournalContent:
    match first:
        case [str(version), str(plan), str(sources), [*stamps]] if version == JOURNAL_FORMAT:
            return JournalContent(Identity(plan, sources, tuple(map(_stamp, stamps))))
    return JournalContent(Identity("", "", ()), marks={FOREIGN})


def _stamp(value: object) -> tuple[int, int]:
    match value:
        case [int(size), int(changed)]:
            return size, changed
    return -1, -1


def _line(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _note(content: JournalContent, record: object) -> bool:
    """Take one line into the content; whether it was understood."""
    match record:
        case ["slot", int(file), int(slot), int(crc), [*digests], [*findings]] if (
            file >= 0 and slot >= 0
        ):
            found = tuple(filter(None, map(_finding, findings)))
            content.records.slots[file, slot] = SlotRecord(crc, tuple(map(str, digests)), found)
            return len(found) == len(findings)
        case ["file", int(file), str(rest)] if file >= 0:
            content.records.files[file] = rest
        case ["mark", str(stage)]:
            content.marks.add(stage)
        case _:
            return False
    return True


def _finding(value: object) -> ReplicaFinding | None:
    match value:
        case [str(name), str(state), int(count), int(first), float(largest), [*holders], [*files]]:
            ranks = tuple(holder for holder in holders if isinstance(holder, int))
            names = tuple(map(str, files))
            return ReplicaFinding((name, state), count, first, largest, ranks, names)
    return None
