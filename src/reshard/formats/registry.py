"""Which format a folder is of, and who reads and writes it.

Theory. Formats do not know each other; this table knows all of them. A format is recognised by the
files it cannot do without, never by a guess at their content. A new format is one entry here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from reshard.errors import CheckpointError, UsageError
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.deepspeed.annotate import Annotated, lay_out_annotated
from reshard.formats.deepspeed.reader import open_deepspeed
from reshard.formats.deepspeed.writing import NativeOptions, lay_out_deepspeed
from reshard.formats.deepspeed.writing.drop_in import lay_out_drop_in
from reshard.formats.folders import TagFolder, resolve_folder
from reshard.formats.stated_layouts import StatedLayouts, read_stated_layouts
from reshard.formats.target import Target
from reshard.formats.universal.reader import open_universal
from reshard.formats.universal.writer import lay_out_universal


class LayOut(Protocol):
    """A writer: says what the files of a checkpoint will be."""

    def __call__(self, checkpoint: Checkpoint, *, tag: str) -> Target:
        """Lay out the output folder named `tag`."""


@dataclass(frozen=True, slots=True)
class Format:
    """One entry of the table.

    Parameters
    ----------
    name
        As the user writes it after ``--to``.
    recognises
        Whether a tag folder is of this format.
    read
        The reader.
    lay_out
        The writer, None when the format is read only.
    """

    name: str
    recognises: Callable[[TagFolder], bool]
    read: Callable[[TagFolder, StatedLayouts | None], Checkpoint]
    lay_out: LayOut | None = None


def _is_universal(folder: TagFolder) -> bool:
    return (folder.path / "zero").is_dir()


def _is_deepspeed(folder: TagFolder) -> bool:
    return any(name.endswith("_states.pt") for name in folder.listing())


def _open_universal(folder: TagFolder, stated: StatedLayouts | None) -> Checkpoint:
    if stated is not None:
        raise UsageError(
            "a universal folder holds whole tensors, so there is no layout to state",
            file=folder.path,
            next_step="leave --layout out",
        )
    return open_universal(folder)


FORMATS: Mapping[str, Format] = {
    entry.name: entry
    for entry in (
        Format("universal", _is_universal, _open_universal, lay_out_universal),
        Format("deepspeed", _is_deepspeed, open_deepspeed),
    )
}
"""Every format, in the order in which they are tried."""


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    also: Sequence[str] = (),
    layout: str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """Open a checkpoint of any format: headers and metadata, no tensor bytes.

    Parameters
    ----------
    path
        A folder with a pointer file, a tag folder, or a file in one.
    also
        Further folders that hold ranks of the same checkpoint.
    layout
        A file of layouts that the user states.
    """
    folder = resolve_folder(path, also)
    stated = None if layout is None else read_stated_layouts(layout)
    for entry in FORMATS.values():
        if entry.recognises(folder):
            return entry.read(folder, stated)
    raise CheckpointError(
        "the folder is of no format that is known",
        file=folder.path,
        expected=f"one of {', '.join(FORMATS)}",
        next_step="name the tag folder itself",
    )


def annotated(
    path: str | os.PathLike[str],
    *,
    tag: str,
    also: Sequence[str] = (),
    layout: str | os.PathLike[str] | None = None,
    pointer: bool = True,
) -> Annotated:
    """Lay out a native checkpoint with a map for every tensor-parallel parameter.

    Parameters
    ----------
    path, also, layout
        As for :func:`open_checkpoint`.
    tag
        Name of the output folder.
    pointer
        Whether the pointer file is written beside it.
    """
    stated = None if layout is None else read_stated_layouts(layout)
    return lay_out_annotated(resolve_folder(path, also), tag=tag, stated=stated, pointer=pointer)


def lay_out(
    checkpoint: Checkpoint,
    *,
    to: str,
    tag: str,
    native: NativeOptions | None = None,
    drop_in: bool = False,
) -> tuple[Checkpoint, Target]:
    """Lay out a checkpoint in a format.

    Parameters
    ----------
    checkpoint
        What to write.
    to
        Name of the format.
    tag
        Name of the output folder.
    native
        The topology to write for, which the format ``deepspeed`` needs and no other takes.
    drop_in
        Lay out the whole trainer's folder that the checkpoint lies in (``deepspeed`` only).

    Returns
    -------
    checkpoint, target
        What to plan from (with the trainer's files, for a drop-in), and the files to be.
    """
    if to == "deepspeed":
        if native is None:
            raise UsageError(
                "a native DeepSpeed checkpoint is written for one topology",
                next_step="name it with --stage and --dp (and --tp, --pp, --ep)",
            )
        if drop_in:
            return lay_out_drop_in(checkpoint, native)
        return checkpoint, lay_out_deepspeed(checkpoint, tag=tag, options=native)
    entry = FORMATS.get(to)
    if entry is None or entry.lay_out is None:
        raise UsageError(f"cannot write the format {to!r}", expected="universal or deepspeed")
    if native is not None or drop_in:
        raise UsageError(
            f"the format {to!r} serves every topology, so there is none to name",
            next_step="leave --stage, --dp, --tp, --pp, --ep and --drop-in out, "
            "or write with --to deepspeed",
        )
    return checkpoint, entry.lay_out(checkpoint, tag=tag)
