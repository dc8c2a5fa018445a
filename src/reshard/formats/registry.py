"""Which format a folder is of, and who reads and writes it.

Theory. Formats do not know each other; this table knows all of them. A format is recognised by the
files it cannot do without, never by a guess at their content. A new format is one entry here: how
it is recognised, its reader and, where it is a target, its writer with the type of its options,
which joins :data:`WriteOptions`.

Reading or writing a format imports its code only then: most runs need two of them, and what is
imported in vain is time that every run waits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from reshard.errors import UsageError
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.dcp.options import DcpOptions, DcpReading
from reshard.formats.deepspeed.writing.options import NativeOptions
from reshard.formats.folders import (
    TagFolder,
    holds_index,
    holds_sets,
    names_set,
    resolve_folder,
    unknown_folder,
)
from reshard.formats.manifest import read_listing
from reshard.formats.safetensors.options import WEIGHTS, SafetensorsOptions
from reshard.formats.stated_layouts import StatedLayouts, read_stated_layouts
from reshard.formats.step_values import require_steps
from reshard.formats.survey import Survey, listed_files, with_losses
from reshard.formats.target import Target
from reshard.formats.universal.options import UniversalOptions

if TYPE_CHECKING:
    from reshard.formats.deepspeed.annotate import Annotated

Laid = tuple[Checkpoint, Target]
"""What to plan from (the source, with a trainer's files for a drop-in), and the files to be."""

WriteOptions = UniversalOptions | NativeOptions | SafetensorsOptions | DcpOptions
"""What the user may choose about an output: one type a writer, owned by its format."""

ReadOptions = DcpReading
"""What the user may state about a source that its files leave open: one type a format."""

Chosen = TypeVar("Chosen", bound=WriteOptions)


@dataclass(frozen=True, slots=True)
class Writer(Generic[Chosen]):
    """How a format is written, and what may be chosen about it."""

    options: type[Chosen]
    """Type of the options."""
    lay_out: Callable[[Checkpoint, str, Chosen], Laid]
    """Says what the files will be: from checkpoint, name of the output folder, and options."""
    default: Chosen | None = None
    """The options when the user gives none; None when some must be given."""
    states: tuple[str, ...] = ()
    """The states that are carried when the user names none; empty for all."""

    def chosen(self, to: str, given: WriteOptions | None) -> Chosen:
        """Return the options to write with; those of another format are refused."""
        options = self.default if given is None else given
        if options is None:
            raise UsageError(
                f"the format {to!r} is not written without options",
                next_step=f"say how: options=reshard.{self.options.__name__}(...)",
            )
        if not isinstance(options, self.options):
            raise UsageError(
                f"these options are not of the format {to!r}",
                expected=self.options.__name__,
                found=type(options).__name__,
            )
        return options


@dataclass(frozen=True, slots=True)
class Format:
    """One entry of the table."""

    name: str
    """As the user writes it after ``--to``."""
    recognises: Callable[[TagFolder], bool]
    """Whether a tag folder is of this format."""
    read: Callable[[TagFolder, StatedLayouts | None, ReadOptions | None], Checkpoint]
    """The reader."""
    writer: Writer[Any] | None = None
    """The writer, None when the format is read only."""
    survey: Callable[[TagFolder], Survey] | None = None
    """Opens every file by itself and collects what is wrong, None where only the reader knows."""
    is_cut: bool = False
    """Whether tensors may be cut over tensor ranks, so that their layout can be stated."""


def _is_universal(folder: TagFolder) -> bool:
    return not names_set(folder) and (folder.path / "zero").is_dir()


def _is_deepspeed(folder: TagFolder) -> bool:
    return not names_set(folder) and any(name.endswith("_states.pt") for name in folder.listing())


def _require_none(folder: TagFolder, reading: ReadOptions | None) -> None:
    if reading is not None:
        raise UsageError(
            "this checkpoint says itself where its model and optimizer are",
            file=folder.path,
            next_step="leave --model-key, --optimizer-key and --frozen out",
        )


def _open_deepspeed(
    folder: TagFolder, stated: StatedLayouts | None, reading: ReadOptions | None
) -> Checkpoint:
    from reshard.formats.deepspeed.reader import open_deepspeed

    _require_none(folder, reading)
    return open_deepspeed(folder, stated)


def _open_universal(
    folder: TagFolder, stated: StatedLayouts | None, reading: ReadOptions | None
) -> Checkpoint:
    from reshard.formats.universal.reader import open_universal

    _require_none(folder, reading)
    _require_unstated(folder, stated)
    return open_universal(folder)


def _open_safetensors(
    folder: TagFolder, stated: StatedLayouts | None, reading: ReadOptions | None
) -> Checkpoint:
    from reshard.formats.safetensors.reader import open_safetensors

    _require_none(folder, reading)
    _require_unstated(folder, stated)
    return open_safetensors(folder)


def _require_unstated(folder: TagFolder, stated: StatedLayouts | None) -> None:
    if stated is not None:
        raise UsageError(
            "the folder holds whole tensors, so there is no layout to state",
            file=folder.path,
            next_step="leave --layout out",
        )


def _lay_out_universal(checkpoint: Checkpoint, tag: str, options: UniversalOptions) -> Laid:
    from reshard.formats.universal.writer import lay_out_universal

    del options
    return checkpoint, lay_out_universal(checkpoint, tag=tag)


def _lay_out_deepspeed(checkpoint: Checkpoint, tag: str, options: NativeOptions) -> Laid:
    from reshard.formats.deepspeed.writing.drop_in import lay_out_drop_in
    from reshard.formats.deepspeed.writing.writer import lay_out_deepspeed

    if options.drop_in:
        return lay_out_drop_in(checkpoint, options)
    return checkpoint, lay_out_deepspeed(checkpoint, tag=tag, options=options)


def _lay_out_safetensors(checkpoint: Checkpoint, tag: str, options: SafetensorsOptions) -> Laid:
    from reshard.formats.safetensors.writer import lay_out_safetensors

    del tag
    return checkpoint, lay_out_safetensors(checkpoint, options=options)


def _open_dcp(
    folder: TagFolder, stated: StatedLayouts | None, reading: ReadOptions | None
) -> Checkpoint:
    from reshard.formats.dcp.reader import open_dcp

    if stated is not None:
        raise UsageError(
            "a DCP folder says where each chunk is, so there is no layout to state",
            file=folder.path,
            next_step="leave --layout out",
        )
    return open_dcp(folder, reading)


def _lay_out_dcp(checkpoint: Checkpoint, tag: str, options: DcpOptions) -> Laid:
    from reshard.formats.dcp.writer import lay_out_dcp

    del tag
    return checkpoint, lay_out_dcp(checkpoint, options=options)


def _survey_universal(folder: TagFolder) -> Survey:
    from reshard.formats.universal.survey import survey_universal

    return survey_universal(folder)


def _survey_deepspeed(folder: TagFolder) -> Survey:
    from reshard.formats.deepspeed.survey import survey_deepspeed

    return survey_deepspeed(folder)


def _survey_dcp(folder: TagFolder) -> Survey:
    from reshard.formats.dcp.survey import survey_dcp

    return survey_dcp(folder)


FORMATS: Mapping[str, Format] = {
    entry.name: entry
    for entry in (
        Format(
            "universal",
            _is_universal,
            _open_universal,
            Writer(UniversalOptions, _lay_out_universal, UniversalOptions()),
            _survey_universal,
        ),
        Format(
            "deepspeed",
            _is_deepspeed,
            _open_deepspeed,
            Writer(NativeOptions, _lay_out_deepspeed),
            _survey_deepspeed,
            is_cut=True,
        ),
        Format(
            "safetensors",
            holds_sets,
            _open_safetensors,
            Writer(
                SafetensorsOptions,
                _lay_out_safetensors,
                SafetensorsOptions(),
                states=(WEIGHTS,),
            ),
        ),
        Format(
            "dcp",
            holds_index,
            _open_dcp,
            Writer(DcpOptions, _lay_out_dcp, DcpOptions()),
            _survey_dcp,
        ),
    )
}
"""Every format, in the order in which they are tried."""


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    also: Sequence[str] = (),
    layout: str | os.PathLike[str] | None = None,
    reading: ReadOptions | None = None,
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
    reading
        What else the user states about it, of the type that the format takes.
    """
    folder = resolve_folder(path, also)
    stated = None if layout is None else read_stated_layouts(layout)
    for entry in FORMATS.values():
        if entry.recognises(folder):
            checkpoint = entry.read(folder, stated, reading)
            require_steps(checkpoint.scalars, checkpoint.path)
            listing = checkpoint.listing or read_listing(folder)
            return replace(checkpoint, listing=listing)
    raise unknown_folder(folder)


def is_cut(path: str | os.PathLike[str], *, also: Sequence[str] = ()) -> bool:
    """Whether tensors of a checkpoint may be cut, so that the user may state their layout.

    Parameters
    ----------
    path, also
        As for :func:`open_checkpoint`.
    """
    folder = resolve_folder(path, also)
    return next((entry.is_cut for entry in FORMATS.values() if entry.recognises(folder)), True)


def survey(folder: TagFolder) -> Survey:
    """Open every file of a tag folder by itself, and collect all that is wrong.

    Parameters
    ----------
    folder
        The tag folder, and where its other ranks are.
    """
    surveys = (entry.survey for entry in FORMATS.values() if entry.recognises(folder))
    look = next(surveys, None) or listed_files
    return with_losses(look(folder), folder)


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
    from reshard.formats.deepspeed.annotate import lay_out_annotated

    stated = None if layout is None else read_stated_layouts(layout)
    return lay_out_annotated(resolve_folder(path, also), tag=tag, stated=stated, pointer=pointer)


def lay_out(
    checkpoint: Checkpoint, *, to: str, tag: str, options: WriteOptions | None = None
) -> Laid:
    """Lay out a checkpoint in a format.

    Parameters
    ----------
    checkpoint
        What to write.
    to
        Name of the format.
    tag
        Name of the output folder.
    options
        What was chosen about the output, of the type that the format's writer takes; None for its
        defaults, where it has any.

    Returns
    -------
    checkpoint, target
        What to plan from (with the trainer's files, for a drop-in), and the files to be.
    """
    writer = writer_of(to)
    return writer.lay_out(checkpoint, tag, writer.chosen(to, options))


def writer_of(to: str) -> Writer[Any]:
    """Return the writer of a format.

    Raises
    ------
    UsageError
        There is no such format, or it is read only.
    """
    entry = FORMATS.get(to)
    if entry is None or entry.writer is None:
        written = [entry.name for entry in FORMATS.values() if entry.writer is not None]
        raise UsageError(
            f"cannot write the format {to!r}",
            expected=" or ".join(written),
            next_step="safetensors is for from_pretrained, dcp for torch.distributed.checkpoint",
        )
    return entry.writer
