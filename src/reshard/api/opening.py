"""Opening a checkpoint of any format, the beginning of every verb."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath

from reshard.formats import registry
from reshard.formats.checkpoint import Checkpoint, SourceFile
from reshard.formats.folders import resolve_folder
from reshard.formats.registry import ReadOptions

AnyPath = str | PathLike[str]


def open_checkpoint(
    path: AnyPath,
    *,
    also: Sequence[AnyPath] = (),
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
    return registry.open_checkpoint(
        fspath(path),
        also=tuple(fspath(folder) for folder in also),
        layout=layout,
        reading=reading,
    )


def files_of(path: AnyPath, *, also: Sequence[AnyPath] = ()) -> tuple[SourceFile, ...]:
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
    folder = resolve_folder(fspath(path), tuple(fspath(other) for other in also))
    return tuple(
        SourceFile(str(file), file.stat().st_size, "file")
        for places in folder.listing().values()
        for file in places
    )
