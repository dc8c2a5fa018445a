"""Adding maps to a checkpoint that has none.

Theory. A checkpoint is annotated like it is converted: it is opened, which refuses what is not
whole or sound; the files to be are laid out; a plan is made and carried out. Files that do not
change are planned as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import fspath

from reshard.api.budgets import DEFAULT_MAX_MEMORY_BYTES, Progress, default_workers
from reshard.api.opening import AnyPath, open_checkpoint
from reshard.execution import execute
from reshard.execution.destination import resolved
from reshard.formats import registry
from reshard.planning import plan


@dataclass(frozen=True, slots=True)
class AnnotationReport:
    """What annotating did.

    Parameters
    ----------
    destination
        The folder that was written.
    sources
        Parameter -> where its map is from, in words.
    nbytes
        Bytes written.
    """

    destination: str
    sources: Mapping[str, str]
    nbytes: int


def annotate(  # noqa: PLR0913 - keyword-only, and each is an option of the command
    source: AnyPath,
    destination: AnyPath,
    *,
    also: Sequence[AnyPath] = (),
    layout: AnyPath | None = None,
    workers: int | None = None,
    max_memory: int = DEFAULT_MAX_MEMORY_BYTES,
    fsync: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> AnnotationReport:
    """Write a checkpoint again with an ``affine_map`` for every tensor-parallel parameter.

    Parameters
    ----------
    source, also, layout
        As for :func:`~reshard.api.open_checkpoint`.
    destination
        The folder to write. The pointer file ``latest`` is written beside it, unless there is one.
    workers, max_memory, fsync, overwrite, progress
        As for :func:`~reshard.api.convert`.

    Raises
    ------
    ReshardError
        The input is no whole and sound native checkpoint of several tensor-parallel ranks, a layout
        is not known, or the destination cannot be written.
    """
    open_checkpoint(source, also=also, layout=layout)
    final = resolved(destination)
    made = registry.annotated(
        fspath(source),
        tag=final.name,
        also=tuple(fspath(folder) for folder in also),
        layout=layout,
        pointer=not (final.parent / "latest").exists(),
    )
    done = execute(
        plan(made.source, made.target),
        final,
        workers=workers if workers is not None else default_workers(),
        max_memory=max_memory,
        fsync=fsync,
        overwrite=overwrite,
        progress=progress,
    )
    told = {name: found.provenance for name, found in made.maps.items()}
    return AnnotationReport(done.destination, told, done.nbytes)
