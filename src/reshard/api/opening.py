"""Opening a checkpoint of any format, the beginning of every verb."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path

from reshard.api.arguments import paths_of
from reshard.api.look_alikes import look_alike_problems
from reshard.formats import registry
from reshard.formats.checkpoint import Checkpoint, Problem, SourceFile
from reshard.formats.folders import resolve_folder
from reshard.formats.manifest import require_as_written
from reshard.formats.registry import ReadOptions

AnyPath = str | PathLike[str]


def open_checkpoint(
    path: AnyPath,
    *,
    also: Sequence[AnyPath] | AnyPath = (),
    layout: AnyPath | None = None,
    reading: ReadOptions | None = None,
) -> Checkpoint:
    """Open a checkpoint of any format; headers and metadata are read, never tensor bytes.

    Parameters
    ----------
    path
        The folder that holds ``latest``, a tag folder, or a file inside one.
    also
        Further folders that hold ranks of the same checkpoint.
    layout
        A file of rules that say how parameters are cut, for a checkpoint that does not say so.
    reading
        What else its files leave open, of the type that its format takes:
        :class:`~reshard.formats.dcp.reader.DcpReading`.

    Raises
    ------
    ReshardError
        The input is not a whole and sound checkpoint; the subclass and the text say why.
    """
    checkpoint = opened(path, also=also, layout=layout, reading=reading)
    if checkpoint.listing is not None:
        require_as_written(checkpoint.listing, (file.path for file in checkpoint.files))
    return checkpoint


def opened(
    path: AnyPath,
    *,
    also: Sequence[AnyPath] | AnyPath = (),
    layout: AnyPath | None = None,
    reading: ReadOptions | None = None,
) -> Checkpoint:
    """As :func:`open_checkpoint`, for whoever compares the folder with its manifest itself."""
    folders = paths_of("also", also)
    checkpoint = registry.open_checkpoint(
        fspath(path), also=folders, layout=layout, reading=reading
    )
    more = (
        *idle_folders(checkpoint, folders),
        *look_alike_problems(checkpoint.names, checkpoint.path),
    )
    return replace(checkpoint, problems=(*checkpoint.problems, *more)) if more else checkpoint


def idle_folders(checkpoint: Checkpoint, also: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each further folder that holds no file of the checkpoint."""
    used = {Path(file.path).parent for file in checkpoint.files}
    for folder in also:
        given = Path(folder).absolute()
        if not used & {given, given / Path(checkpoint.path).name}:
            yield Problem(
                "--also names a folder that adds nothing: no file in it is read",
                str(given),
                next_step="check the path, or leave it out",
            )


def files_of(path: AnyPath, *, also: Sequence[AnyPath] | AnyPath = ()) -> tuple[SourceFile, ...]:
    """List the files of a checkpoint folder by name, whether or not it can be opened.

    Parameters
    ----------
    path, also
        As for :func:`open_checkpoint`.

    Raises
    ------
    ReshardError
        The path leads to no folder with files of a checkpoint.
    """
    folder = resolve_folder(fspath(path), paths_of("also", also))
    return tuple(
        SourceFile(str(file), file.stat().st_size, "file")
        for places in folder.listing().values()
        for file in places
    )
