"""The report of ``reshard doctor``: every finding with its fix, and a verdict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.cli.blocks import Block, Tone, fields, lines
from reshard.cli.units import counted, format_bytes
from reshard.formats.survey import Presence

if TYPE_CHECKING:
    from reshard.api import Diagnosis
    from reshard.formats.checkpoint import Problem


def diagnosis_blocks(found: Diagnosis) -> Iterator[Block]:
    """Give the blocks of a diagnosis."""
    yield fields("looked at", _looked_at(found))
    for number, finding in enumerate(found.faults, 1):
        yield lines(f"{number}. {finding.what}", _details(finding), Tone.NOTICE)
    yield lines("good to know", found.notes)
    if found.faults:
        said = f"{counted(len(found.faults), 'thing')} to mend"
        yield lines("", (said,), Tone.BAD)
    else:
        yield lines("", ("healthy: nothing to mend",), Tone.GOOD)


def _looked_at(found: Diagnosis) -> Iterator[tuple[str, str]]:
    yield "folder", found.path
    for path, survey in found.folders:
        files = [file for file in survey.files if file.presence is not Presence.MISSING]
        size = format_bytes(sum(file.nbytes for file in files))
        stated = f", {survey.topology}" if survey.topology else ""
        yield Path(path).name, f"{counted(len(files), 'file')}, {size}{stated}"


def _details(finding: Problem) -> Iterator[str]:
    if finding.file:
        yield f"where  {finding.file}"
    if finding.parameter:
        yield f"of     {finding.parameter}"
    yield f"fix    {finding.next_step}"
