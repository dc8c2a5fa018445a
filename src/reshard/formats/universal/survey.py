"""A survey of a universal folder: every state file by itself."""

from __future__ import annotations

from pathlib import Path

from reshard.formats.folders import TagFolder
from reshard.formats.survey import Findings, Presence, RankFile, Survey
from reshard.formats.universal.names import ZERO


def survey_universal(folder: TagFolder) -> Survey:
    """Open every file of a universal folder, and collect what is wrong."""
    findings = Findings()
    paths = sorted((folder.path / ZERO).rglob("*.pt"))
    paths += sorted(folder.path.glob("*_model_states.pt"))
    files = tuple(_surveyed(path, folder, findings) for path in paths)
    whole = all(file.presence is Presence.PRESENT for file in files)
    return Survey(files, tuple(findings.problems), whole=whole)


def _surveyed(path: Path, folder: TagFolder, findings: Findings) -> RankFile:
    state = path.is_relative_to(folder.path / ZERO)
    presence = Presence.DAMAGED if findings.archive(path) is None else Presence.PRESENT
    kind = "parameter state" if state else "model states"
    return RankFile(kind, None, None, presence, str(path), path.stat().st_size)
