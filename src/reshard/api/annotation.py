"""Adding maps to a checkpoint that has none.

Theory. A checkpoint is annotated like it is converted: it is opened, which refuses what is not
whole or sound; the files to be are laid out; a plan is made and carried out. Files that do not
change are planned as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import fspath

from reshard.api.arguments import destination_of, paths_of, size_of, workers_of
from reshard.api.budgets import DEFAULT_MAX_MEMORY_BYTES, Progress
from reshard.api.opening import AnyPath, open_checkpoint
from reshard.api.pointing import named_by
from reshard.execution import execute
from reshard.execution.destination import check_apart, check_free, check_names
from reshard.formats import registry
from reshard.planning import plan


@dataclass(frozen=True, slots=True)
class AnnotationReport:
    """What annotating did, or with ``dry_run`` would do."""

    destination: str
    """The folder that was written."""
    sources: Mapping[str, str]
    """Parameter -> where its map is from, in words."""
    nbytes: int
    files: int = 0
    """Bytes written, in how many files."""
    pointer: str | None = None
    """Path of the pointer file that was written, None when there is one that names another
    folder."""
    dry_run: bool = False
    """Whether nothing was written."""


def annotate(  # noqa: PLR0913 - keyword-only, and each is an option of the command
    source: AnyPath,
    destination: AnyPath,
    *,
    also: Sequence[AnyPath] | AnyPath = (),
    layout: AnyPath | None = None,
    workers: int | None = None,
    max_memory: int | str = DEFAULT_MAX_MEMORY_BYTES,
    fsync: bool = True,
    dry_run: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> AnnotationReport:
    """Write a checkpoint again with an ``affine_map`` for every tensor-parallel parameter.

    Parameters
    ----------
    source, also, layout
        As for :func:`~reshard.api.open_checkpoint`.
    destination
        The folder to write. The pointer file ``latest`` is written beside it, unless there is one
        that names another folder.
    workers, max_memory, fsync, dry_run, resume, overwrite, progress
        As for :func:`~reshard.api.convert`.

    Raises
    ------
    ReshardError
        The input is no whole and sound native checkpoint of several tensor-parallel ranks, a layout
        is not known, or the destination cannot be written.
    """
    memory = size_of(max_memory)
    open_checkpoint(source, also=also, layout=layout)
    final = destination_of(destination)
    made = registry.annotated(
        fspath(source),
        tag=final.name,
        also=paths_of("also", also),
        layout=layout,
        pointer=named_by(final.parent / "latest") in (None, final.name),
    )
    job = plan(made.source, made.target)
    report = AnnotationReport(
        str(final),
        {name: found.provenance for name, found in made.maps.items()},
        sum(file.size for file in job.files),
        len(job.files),
        str(final.parent / job.pointer[0]) if job.pointer else None,
        dry_run,
    )
    if dry_run:
        check_names(job)
        check_apart(job, final)
        check_free(final, overwrite=overwrite or resume)
        return report
    execute(
        job,
        final,
        workers=workers_of(workers),
        max_memory=memory,
        fsync=fsync,
        resume=resume,
        overwrite=overwrite,
        progress=progress,
    )
    return report
