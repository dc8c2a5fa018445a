"""Everything that is wrong with a folder, each with what to do about it.

Theory. The other verbs refuse at the first fault; this one is asked for all of them. It looks in
turn at the pointer files, at every file by itself and the grid of ranks (a *survey*), at what
interrupted runs left, and, if all files are whole, at what the reader of the format finds. What
stops one of these does not stop the others. A checkpoint that can be opened is then asked all that
a conversion asks, whether the copies of one value agree among it: no other bytes of tensors are
read. A *fault* is to be mended, and says how. What readers remark about a checkpoint that they do
open is a *note*: it does not make a folder unhealthy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reshard.api.arguments import paths_of, workers_of
from reshard.api.budgets import DEFAULT_MAX_MEMORY_BYTES
from reshard.api.leftovers import leftovers
from reshard.api.opening import AnyPath, open_checkpoint
from reshard.errors import CheckpointError, MissingFileError, ReshardError
from reshard.execution import compare_copies
from reshard.formats import registry
from reshard.formats.checkpoint import Checkpoint, Problem
from reshard.formats.folders import (
    POINTERS,
    TagFolder,
    holds_checkpoint,
    holds_weights,
    pointer_bytes,
    resolve_folder,
    unknown_folder,
)
from reshard.formats.registry import ReadOptions
from reshard.formats.soundness import objections
from reshard.formats.survey import Survey, problem_of

FAR_APART_HOURS = 1.0
"""From when on the modification times of a checkpoint are told; a save takes minutes."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `diagnose` found."""

    path: str
    """The folder that was given."""
    folders: tuple[tuple[str, Survey], ...]
    """The tag folders that were looked at, with what lies in each."""
    faults: tuple[Problem, ...]
    """All that is to be mended, each with how in its ``next_step``."""
    notes: tuple[Problem, ...] = ()
    """What is good to know."""

    @property
    def healthy(self) -> bool:
        """Whether there is nothing to mend."""
        return not self.faults


def diagnose(
    path: AnyPath,
    *,
    also: Sequence[AnyPath] | AnyPath = (),
    layout: AnyPath | None = None,
    reading: ReadOptions | None = None,
) -> Diagnosis:
    """Collect everything that is wrong with a checkpoint folder.

    Parameters
    ----------
    path, also, layout, reading
        As for :func:`~reshard.api.open_checkpoint`.

    Raises
    ------
    MissingFileError, CheckpointError
        There is no checkpoint at all. What is wrong with one is no error: it is in the result.
    """
    given = Path(os.fspath(path)).absolute()
    if not given.exists():
        raise MissingFileError("no such file or folder", file=given, next_step="check the path")
    sources = _Sources(paths_of("also", also), layout, reading)
    folder = given if given.is_dir() else given.parent
    found, tags = _tag_folders(folder) if given.is_dir() else ([], [given])
    if not tags:
        raise unknown_folder(resolve_folder(folder, sources.also))
    surveys: list[tuple[str, Survey]] = []
    notes: list[Problem] = []
    for tag in tags:
        resolved = resolve_folder(tag, sources.also)
        looked = _in_folder(tag, resolved, registry.survey(resolved), sources)
        surveys.append((str(resolved.path), looked.survey))
        found += looked.faults
        notes += looked.notes
    found += leftovers((folder, folder.parent, *(Path(path) for path, _ in surveys)))
    notes += (problem for problem in found if not problem.next_step)
    mendable = tuple(dict.fromkeys(problem for problem in found if problem.next_step))
    told = tuple(dict.fromkeys(note for note in notes if note not in mendable))
    return Diagnosis(str(folder), tuple(surveys), mendable, told)


@dataclass(frozen=True, slots=True)
class _Sources:
    """What was given beside the path."""

    also: tuple[str, ...]
    layout: AnyPath | None
    reading: ReadOptions | None

    def open(self, path: Path) -> Checkpoint:
        """Ask the reader."""
        return open_checkpoint(path, also=self.also, layout=self.layout, reading=self.reading)


# --------------------------------------------------------------------------- pointers


def _tag_folders(folder: Path) -> tuple[list[Problem], list[Path]]:
    """What is wrong with the pointer files, and the tag folders to look at."""
    if _holds_any(folder):
        return list(_pointers_beside(folder)), [folder]
    findings: list[Problem] = []
    named: list[Path] = []
    for pointer in POINTERS:
        if (folder / pointer).exists():
            try:
                named.append(resolve_pointer(folder, pointer))
            except ReshardError as error:
                findings.append(_pointer_problem(error, folder, pointer))
    tags = _tags_in(folder)
    if not findings and not named and tags:
        findings.append(_no_pointer(folder, tags))
    return findings, list(dict.fromkeys(named)) or tags


def _holds_any(folder: Path) -> bool:
    """Whether a folder holds a checkpoint itself, not where a pointer leads."""
    if holds_checkpoint(folder):
        return True
    return holds_weights(folder) and not any((folder / name).is_file() for name in POINTERS)


def resolve_pointer(folder: Path, pointer: str) -> Path:
    """Return the folder that one pointer file names.

    Raises
    ------
    ReshardError
        It names none that holds a checkpoint.
    """
    text = pointer_bytes(folder / pointer).decode("utf-8", "backslashreplace").strip()
    if not text or Path(text).name != text or text in (".", ".."):
        raise CheckpointError(
            "the pointer file does not hold one folder name",
            file=folder / pointer,
            found=repr(text[:40]),
        )
    if not (folder / text).is_dir() or not holds_checkpoint(folder / text):
        raise MissingFileError(
            f"the pointer file names no folder with a checkpoint: {text!r}", file=folder / pointer
        )
    return folder / text


def _pointer_problem(error: ReshardError, folder: Path, pointer: str) -> Problem:
    tags = [tag.name for tag in _tags_in(folder)]
    fix = f"write one of these names into it: {', '.join(tags)}" if tags else "remove it"
    return Problem(problem_of(error).what, str(folder / pointer), next_step=fix)


def _no_pointer(folder: Path, tags: Sequence[Path]) -> Problem:
    names = ", ".join(tag.name for tag in tags)
    return Problem(
        f"no pointer file, so nothing says which of these folders is the newest: {names}",
        str(folder),
        next_step=f"write its name into {folder / POINTERS[0]}, or name the folder itself",
    )


def _pointers_beside(tag: Path) -> Iterator[Problem]:
    """Pointer files beside a tag folder that lead nowhere."""
    for pointer in POINTERS:
        if (tag.parent / pointer).is_file():
            try:
                resolve_pointer(tag.parent, pointer)
            except ReshardError as error:
                yield _pointer_problem(error, tag.parent, pointer)


def _tags_in(folder: Path) -> list[Path]:
    return [
        Path(entry.path)
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name)
        if Path(entry.path).is_dir()
        and not entry.name.startswith(".")
        and holds_checkpoint(Path(entry.path))
    ]


# --------------------------------------------------------------------------- one tag folder


@dataclass(frozen=True, slots=True)
class _Looked:
    """What a tag folder holds, its faults, and what its reader remarks."""

    survey: Survey
    faults: list[Problem]
    notes: list[Problem]


def _in_folder(path: Path, folder: TagFolder, survey: Survey, sources: _Sources) -> _Looked:
    """Ask survey and reader; the reader knows the degrees of experts too."""
    stated = sources.layout is not None
    faults = [found for found in survey.problems if not (stated and _is_layout(found, survey))]
    faults += _idle(folder, survey, sources.also)
    notes: list[Problem] = []
    if _is_readable(survey, sources):
        try:
            checkpoint = sources.open(path)
            notes += (*checkpoint.problems, *checkpoint.unproved, *_times_apart(checkpoint))
            faults += _unsound(checkpoint)
            if survey.topology is not None:
                survey = replace(survey, topology=checkpoint.topology)
        except ReshardError as error:
            faults.append(problem_of(error, str(folder.path)))
    elif not survey.whole:
        said = "layouts, shapes and lengths were not compared: that needs every file"
        notes.append(Problem(said, str(folder.path)))
    return _Looked(survey, faults, notes)


def _unsound(checkpoint: Checkpoint) -> Iterator[Problem]:
    """What a conversion would refuse of a checkpoint that can be opened."""
    yield from (problem_of(objection.error) for objection in objections(checkpoint))
    workers, cap = workers_of(None), DEFAULT_MAX_MEMORY_BYTES
    differing = compare_copies(checkpoint, workers=workers, max_memory=cap)
    if differing:
        first = problem_of(differing[0].error())
        more = f", in {len(differing)} states of tensors" if len(differing) > 1 else ""
        yield replace(first, what=f"{first.what}{more}")


def _times_apart(checkpoint: Checkpoint) -> Iterator[Problem]:
    """A hint: files of one save are written within moments, and copied together."""
    times = {file.path: file.stamp[-1] for file in checkpoint.files if file.stamp}
    if len(times) < 2:
        return
    first, last = min(times, key=times.__getitem__), max(times, key=times.__getitem__)
    hours = (times[last] - times[first]) / 3.6e12
    if hours >= FAR_APART_HOURS:
        yield Problem(
            f"modification times stand far apart: {Path(last).name} is {hours:.0f} h younger than "
            f"{Path(first).name}, as where a file was copied in later",
            checkpoint.path,
        )


def _is_readable(survey: Survey, sources: _Sources) -> bool:
    """Whether the reader could say more than the survey did."""
    return survey.whole and (survey.states_layouts or sources.layout is not None)


def _is_layout(problem: Problem, survey: Survey) -> bool:
    """Whether a problem is that nobody states layouts; it is the last one of a survey."""
    return not survey.states_layouts and problem is survey.problems[-1]


def _idle(folder: TagFolder, survey: Survey, also: Sequence[str]) -> Iterator[Problem]:
    used = {Path(file.file).parent for file in survey.files}
    for given, place in zip(also, folder.also, strict=True):
        if place not in used and survey.files:
            yield Problem(
                "--also names a folder that adds nothing: no file in it is read",
                str(Path(given).absolute()),
                next_step="check the path, or leave it out",
            )
