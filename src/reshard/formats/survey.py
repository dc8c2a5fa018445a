"""What lies in a folder, file by file, and all that is wrong with it.

Theory. A reader stops at the first thing that makes a checkpoint inexact, as it must. Whoever has
to mend the folder wants all of it at once. So a *survey* opens every file by itself, goes on after
each failure, and collects: what is damaged, what is missing or left over on the grid of ranks, what
contradicts the rest. It says nothing of what only a reader can know, and it never reads tensor
bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TypeVar

from reshard.errors import ReshardError
from reshard.formats.checkpoint import Problem, Topology
from reshard.formats.folders import TagFolder
from reshard.formats.manifest import MANIFEST_NAME, read_listing
from reshard.formats.torch_archive import Archive, read_archive

AGAIN = "copy it again from where it was written"

Read = TypeVar("Read")


class Presence(Enum):
    """Whether a file that should be there is, and one that is should be."""

    PRESENT = "present"
    MISSING = "missing"
    STALE = "left over"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class RankFile:
    """A file of a rank, there or not."""

    kind: str
    """What it holds, in words."""
    dp: int | None
    mp: int | None
    """Data-parallel and model-parallel rank of its writer; None where a kind has no such axis."""
    presence: Presence
    """Whether it is there, and should be."""
    file: str
    """Its path, or the path where it is missed."""
    nbytes: int = 0
    """Its size."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a survey found."""

    files: tuple[RankFile, ...] = ()
    """Every file of a rank, and those that are missed."""
    problems: tuple[Problem, ...] = ()
    """What is wrong, each with what to do."""
    topology: Topology | None = None
    """The degrees that most files state, None when none says."""
    whole: bool = True
    """Whether a reader can be asked for the rest."""
    states_layouts: bool = True
    """Whether the files say how parameters are cut over tensor-parallel ranks, or need not."""


@dataclass(slots=True)
class Findings:
    """Problems as they are found."""

    problems: list[Problem] = field(default_factory=list)

    def add(self, what: str, file: object = "", fix: str = "") -> None:
        """Note a problem."""
        self.problems.append(Problem(what, str(file), next_step=fix))

    def opened(self, path: Path, read: Callable[[str], Read]) -> Read | None:
        """Read a file; None when that fails, which is noted."""
        try:
            return read(str(path))
        except ReshardError as error:
            self.problems.append(problem_of(error, str(path)))
        except OSError as error:
            self.add(f"the file cannot be read: {error.strerror}", path, "check its permissions")
        return None

    def archive(self, path: Path) -> Archive | None:
        """Open a torch archive, and note what is wrong inside it."""
        found = self.opened(path, read_archive)
        if found is not None:
            self.inside(found)
        return found

    def inside(self, archive: Archive) -> None:
        """Note what is wrong inside an archive that could be opened."""
        for text in archive.problems:
            self.add(text, archive.path, AGAIN)


def listed_files(folder: TagFolder) -> Survey:
    """Return the survey of a folder of a format that only its reader can look into."""
    paths = (path for places in folder.listing().values() for path in places)
    return Survey(
        tuple(
            RankFile("file", None, None, Presence.PRESENT, str(path), path.stat().st_size)
            for path in paths
        )
    )


def with_losses(survey: Survey, folder: TagFolder) -> Survey:
    """Return a survey with the files that the manifest of the folder lists and are not there."""
    findings = Findings(list(survey.problems))
    count = len(findings.problems)
    listing = findings.opened(folder.path / MANIFEST_NAME, lambda _: read_listing(folder))
    missed = {file.file for file in survey.files if file.presence is Presence.MISSING}
    files = list(survey.files)
    for loss in listing.lost if listing else ():
        error = loss.error(folder.path)
        if error.file is not None and error.file not in missed:
            findings.problems.append(problem_of(error))
            files.append(RankFile("listed file", None, None, Presence.MISSING, error.file))
    whole = survey.whole and len(findings.problems) == count
    return replace(survey, files=tuple(files), problems=tuple(findings.problems), whole=whole)


def problem_of(error: ReshardError, file: str = "") -> Problem:
    """Return an error as a problem among others.

    Examples
    --------
    >>> str(problem_of(ReshardError("sizes differ", file="a.pt", expected=4, found=3), "a.pt"))
    'sizes differ (expected 4, found 3): a.pt; next: copy it again from where it was written'
    """
    numbers = ((word, getattr(error, word)) for word in ("expected", "found"))
    said = ", ".join(f"{word} {value}" for word, value in numbers if value is not None)
    return Problem(
        f"{error.what} ({said})" if said else error.what,
        error.file or file,
        error.parameter or "",
        error.next_step or AGAIN,
    )
