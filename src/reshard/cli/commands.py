"""What each command does: one verb of the API, then a report.

Theory. A command opens nothing, plans nothing and compares nothing itself. It calls one verb,
shows progress while that runs, renders what came back, as text or as JSON, and says by its exit
code whether the answer was good. Errors are not handled here; they pass through to
:mod:`reshard.cli.failure`. What draws or renders for one command only is imported by that command:
a conversion does not wait for it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard import api
from reshard.cli import failure
from reshard.cli.blocks import Block, fields
from reshard.cli.progress import Report, meter
from reshard.cli.reading import ReadingFlags
from reshard.cli.screen import show
from reshard.cli.writing import WritingFlags, write_options
from reshard.errors import ReshardError, UnknownLayoutError, UsageError
from reshard.formats.renaming import Renaming, renaming_of

if TYPE_CHECKING:
    from reshard.cli.pictures.drawing import MapPictures


@dataclass(frozen=True, slots=True)
class Source:
    """The checkpoint that a command was given: path, further folders, file of rules."""

    path: str
    also: tuple[str, ...] = ()
    layout: str | None = None
    reading: ReadingFlags = field(default_factory=ReadingFlags)

    def open(self) -> api.Checkpoint:
        """Open it."""
        return api.open_checkpoint(
            self.path, also=self.also, layout=self.layout, reading=self.reading.options()
        )


@dataclass(frozen=True, slots=True)
class Selection:
    """The options that say what is carried or compared, and under which names, as given."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    trainable: bool = False
    rename: tuple[str, ...] = ()
    rename_table: str | None = None
    names: tuple[str, ...] = ()
    names_states: str = "all"

    def renaming(self) -> Renaming:
        """Return the renaming, which may be empty."""
        return renaming_of(self.rename, self.rename_table)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The options of ``reshard convert``, as given; ``max_memory`` still as text."""

    to: str
    selection: Selection
    replicas: str
    dry_run: bool
    resume: bool
    overwrite: bool
    verify: bool
    fsync: bool
    workers: int | None
    max_memory: str | None
    writing: WritingFlags


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How ``reshard annotate`` runs, as given; ``max_memory`` still as text."""

    dry_run: bool
    resume: bool
    overwrite: bool
    fsync: bool
    workers: int | None
    max_memory: str | None


def inspect(
    source: Source,
    *,
    tensors: str | None,
    names: tuple[str, ...] = (),
    html: str | None,
    json: bool,
) -> int:
    """Run ``reshard inspect``."""
    from reshard.cli import documents
    from reshard.cli.pictures.files import require_ending
    from reshard.cli.render_inspect import inspection_blocks, names_blocks

    if html is not None:
        require_ending(html, ".html")
    try:
        inspection = api.inspect(
            source.path,
            tensors=tensors,
            also=source.also,
            layout=source.layout,
            reading=source.reading.options(),
        )
    except UsageError:
        raise
    except ReshardError as error:
        shown = list(_what_there_is(source, error))
        if html is not None:
            with contextlib.suppress(ReshardError):  # the first error says it all
                _draw(html, source, error)
                shown.append(fields("pictures", (("html", html),)))
        if not json:
            _show(shown)
        raise
    if html is not None:
        _draw(html, source, inspection)
    spelled = api.named(inspection.checkpoint, names, also=source.also).translations
    if json:
        document = documents.inspection_document(inspection)
        documents.write({**document, **documents.names_document(spelled)}, sys.stdout)
    else:
        blocks = (*inspection_blocks(inspection), *names_blocks(spelled))
        _show((*blocks, fields("pictures", (("html", html),))))
    return failure.DONE


def _draw(html: str, source: Source, found: api.Inspection | ReshardError) -> None:
    from reshard.cli.pictures.drawing import draw_inspection

    options = source.reading.options()
    draw_inspection(html, source.path, source.also, source.layout, options, found)


def doctor(source: Source, *, json: bool) -> int:
    """Run ``reshard doctor``."""
    from reshard.cli import documents
    from reshard.cli.render_doctor import diagnosis_blocks

    found = api.diagnose(
        source.path, also=source.also, layout=source.layout, reading=source.reading.options()
    )
    if json:
        documents.write(documents.diagnosis_document(found), sys.stdout)
    else:
        _show(diagnosis_blocks(found))
    return failure.DONE if found.healthy else failure.DIFFERENT


def map_(
    source: Source,
    name: str,
    pictures: MapPictures,
    *,
    state: str | None,
    files: bool,
    json: bool,
) -> int:
    """Run ``reshard map``."""
    from reshard.cli import documents
    from reshard.cli.render_map import map_blocks

    pictures.check()
    checkpoint = source.open()
    tensor = api.find_tensor(checkpoint, name, state)
    ranges = api.piece_ranges(tensor) if files else None
    pictures.draw(checkpoint, tensor)
    if json:
        documents.write(documents.map_document(tensor, ranges), sys.stdout)
    else:
        _show((*map_blocks(checkpoint, tensor, ranges), fields("pictures", pictures.wanted())))
    return failure.DONE


def convert(
    source: Source, out: str, options: Conversion, *, html: str | None, json: bool, quiet: bool
) -> int:
    """Run ``reshard convert``."""
    from reshard.cli.render_convert import conversion_blocks

    if html is not None:
        _require_plan_page(html, options)
    try:
        with meter(quiet=quiet) as progress:
            report = _converted(source, out, options, progress)
    except KeyboardInterrupt:
        way_on = "the same command with --resume goes on from here"
        raise failure.InterruptedRunError(way_on) from None
    if html is not None:
        _draw_plan(html, report)
    if json:
        _write_conversion(report)
    else:
        _show((*conversion_blocks(report), fields("pictures", (("html", html),))))
    return failure.DONE if report.sound else failure.DIFFERENT


def _require_plan_page(html: str, options: Conversion) -> None:
    from reshard.cli.pictures.files import require_ending

    require_ending(html, ".html")
    if not options.dry_run:
        raise UsageError("--html shows a plan", next_step="add --dry-run, or leave it out")


def _draw_plan(html: str, report: api.ConversionReport) -> None:
    from reshard.cli.pictures.drawing import draw_plan

    draw_plan(html, report)


def _write_conversion(report: api.ConversionReport) -> None:
    from reshard.cli import documents, outcomes

    documents.write(outcomes.conversion_document(report), sys.stdout)


def _converted(
    source: Source, out: str, options: Conversion, progress: Report | None
) -> api.ConversionReport:
    return api.convert(
        source.path,
        out,
        to=options.to,
        workers=options.workers,
        max_memory=_cap(options.max_memory),
        fsync=options.fsync,
        include=options.selection.include,
        exclude=options.selection.exclude,
        states=_listed(options.selection.states),
        trainable=options.selection.trainable,
        rename=options.selection.renaming(),
        names=options.selection.names,
        names_states=options.selection.names_states,
        dry_run=options.dry_run,
        resume=options.resume,
        overwrite=options.overwrite,
        verify=options.verify,
        replicas=options.replicas,
        also=source.also,
        layout=source.layout,
        reading=source.reading.options(),
        options=write_options(options.to, options.writing),
        progress=progress,
    )


def verify(
    source: Source, out: str, selection: Selection, *, replicas: str, json: bool, quiet: bool
) -> int:
    """Run ``reshard verify``."""
    from reshard.cli import documents, outcomes
    from reshard.cli.render_verify import comparison_blocks

    with meter(quiet=quiet) as progress:
        found = api.verify(
            source.path,
            out,
            also=source.also,
            layout=source.layout,
            reading=source.reading.options(),
            include=selection.include,
            exclude=selection.exclude,
            states=_listed(selection.states),
            trainable=selection.trainable,
            rename=selection.renaming(),
            replicas=replicas,
            names=selection.names,
            names_states=selection.names_states,
            progress=progress,
        )
    accepted = api.accepts(found, replicas)
    if json:
        document = outcomes.comparison_document(found, source.path, out)
        documents.write(document | {"policy": replicas, "accepted": accepted}, sys.stdout)
    else:
        _show(comparison_blocks(found, source.path, out, replicas, accepted=accepted))
    return failure.DONE if accepted else failure.DIFFERENT


def annotate(source: Source, out: str, how: Run, *, json: bool, quiet: bool) -> int:
    """Run ``reshard annotate``."""
    from reshard.cli import documents, outcomes
    from reshard.cli.render_convert import annotation_block

    with meter(quiet=quiet) as progress:
        report = api.annotate(
            source.path,
            out,
            also=source.also,
            layout=source.layout,
            workers=how.workers,
            max_memory=_cap(how.max_memory),
            fsync=how.fsync,
            dry_run=how.dry_run,
            resume=how.resume,
            overwrite=how.overwrite,
            progress=progress,
        )
    if json:
        documents.write(outcomes.annotation_document(report), sys.stdout)
    else:
        _show([annotation_block(report)])
    return failure.DONE


def _cap(text: str | None) -> int | str:
    return api.DEFAULT_MAX_MEMORY_BYTES if text is None else text


def _listed(states: Iterable[str]) -> tuple[str, ...]:
    return tuple(state.strip() for listed in states for state in listed.split(","))


def _what_there_is(source: Source, error: ReshardError) -> Iterator[Block]:
    """The files, and what of them is not understood; the error that follows says the rest."""
    from reshard.cli.render_inspect import file_table, unknown_layouts

    with contextlib.suppress(ReshardError, OSError):
        yield file_table(api.files_of(source.path, also=source.also))
    if isinstance(error, UnknownLayoutError):
        yield unknown_layouts(error)


def _show(blocks: Iterable[Block]) -> None:
    show(blocks, sys.stdout)
