"""The report of ``reshard convert``: what was done, or with ``--dry-run`` what would be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from reshard.api import states_in_order
from reshard.cli.blocks import Block, Tone, fields, lines, table
from reshard.cli.render_verify import difference_blocks, format_largest
from reshard.cli.units import (
    counted,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    format_shape,
)

if TYPE_CHECKING:
    from reshard.api import AnnotationReport, ConversionReport
    from reshard.formats.checkpoint import StoredTensor


def conversion_blocks(report: ConversionReport) -> Iterator[Block]:
    """Give the blocks of a report, in reading order."""
    if report.dry_run:
        yield _tensor_rows(report)
        yield fields("dry run: nothing was written", _forecast(report))
    else:
        yield fields("converted", _summary(report))
    yield _drift(report)
    yield lines("notes", report.notes, Tone.NOTICE)
    yield lines("problems of the input", report.source.problems, Tone.NOTICE)
    if report.comparison is not None:
        yield from difference_blocks(report.comparison)
        yield _verdict(report)


def annotation_block(report: AnnotationReport) -> Block:
    """Return what annotating did, or with ``--dry-run`` would do."""
    return fields(
        "dry run: nothing was written" if report.dry_run else "annotated",
        (
            ("to", report.destination),
            ("pointer", report.pointer),
            ("parameters", f"{len(report.sources)} with a map"),
            ("maps from", ", ".join(sorted(set(report.sources.values())))),
            (
                "would write" if report.dry_run else "written",
                f"{format_bytes(report.nbytes)} in {counted(report.files, 'file')}",
            ),
        ),
    )


def _tensor_rows(report: ConversionReport) -> Block:
    """One row for each parameter, with all its states."""
    held: dict[str, list[StoredTensor]] = {}
    for (name, _), tensor in report.source.tensors.items():
        held.setdefault(name, []).append(tensor)
    return table(
        "tensors",
        "name shape states dtype >bytes >holders role map",
        (
            (
                name,
                format_shape(states[0].shape),
                ",".join(states_in_order(tensor.state for tensor in states)),
                ",".join(dict.fromkeys(str(tensor.dtype) for tensor in states)),
                format_count(sum(tensor.nbytes for tensor in states)),
                "/".join(dict.fromkeys(str(len(tensor.regions)) for tensor in states)),
                states[0].role.value,
                "; ".join(dict.fromkeys(tensor.provenance for tensor in states)),
            )
            for name, states in held.items()
        ),
    )


def _verdict(report: ConversionReport) -> Block:
    if not report.sound:
        said = f"NOT EQUAL: the output differs from its source: {report.destination}"
        return lines("", (said,), Tone.BAD)
    if report.drift:
        count = len(report.drift)
        said = (
            f"verified, but {count} tensor{'s have' if count > 1 else ' has'} copies that differ "
            f"in the source; taken: {report.replicas}"
        )
        return lines("", (said,), Tone.NOTICE)
    rounded = report.comparison is not None and report.comparison.casts
    how = "rounded as said above and otherwise bit for bit" if rounded else "bit for bit"
    what = "what was selected of its source" if report.left_out else "what its source holds"
    said = f"verified: the output holds {what}, {how}"
    return lines("", (said,), Tone.GOOD)


def _from_and_to(report: ConversionReport) -> Iterator[tuple[str, object]]:
    source = report.source
    yield "from", f"{source.path} ({source.format}, {source.topology})"
    yield "to", f"{report.destination} ({report.kind})"
    yield "pointer", _pointer(report)
    yield "tensors", _tensors(report)


def _pointer(report: ConversionReport) -> str | None:
    if report.pointer is None or report.pointed_to is None:
        return report.pointer
    said = "names" if report.dry_run else "named"
    until = "now" if report.dry_run else "before"
    return f"{report.pointer} ({said} {report.pointed_to!r} {until})"


def _tensors(report: ConversionReport) -> str:
    states = states_in_order(state for _, state in report.source.tensors)
    said = (
        f"{format_count(len(report.source.tensors))} "
        f"({counted(len(report.source.names), 'name')}; {', '.join(states)})"
    )
    return f"{said}, {format_count(report.left_out)} left out" if report.left_out else said


def _summary(report: ConversionReport) -> Iterator[tuple[str, object]]:
    yield from _from_and_to(report)
    if report.kept:
        kept = f"{counted(report.kept, 'tensor')} ({format_bytes(report.kept_bytes)})"
        yield "kept", f"{kept} that an interrupted run had finished"
    cost = report.cost
    written = max(cost.write_nbytes - report.kept_bytes, 0)
    if not report.kept:  # else it is not known how much was read
        yield "read", format_bytes(cost.read_nbytes)
    yield "written", f"{format_bytes(written)} in {counted(cost.files, 'file')}"
    rate = format_rate(written, report.seconds)
    yield "time", f"{format_seconds(report.seconds)} ({rate})"


def _forecast(report: ConversionReport) -> Iterator[tuple[str, object]]:
    yield from _from_and_to(report)
    cost = report.cost
    size = format_bytes(cost.compared_nbytes)
    compared = f", {size} of it to compare copies, which this dry run did not"
    yield "would read", format_bytes(cost.read_nbytes) + (compared if cost.compared_nbytes else "")
    yield "would write", f"{format_bytes(cost.write_nbytes)} in {counted(cost.files, 'file')}"
    free = format_bytes(report.disk_free_bytes)
    short = " - NOT ENOUGH" if report.disk_bytes > report.disk_free_bytes else ""
    yield "disk", f"{format_bytes(report.disk_bytes)} of {free} free{short}"
    if report.expected_seconds is not None:
        yield "time", f"about {format_seconds(report.expected_seconds)}, by a probe of the disks"
    workers = counted(report.workers, "worker")
    yield "memory", f"{format_bytes(report.memory_bytes)} of buffers for {workers}"
    yield "geometries", format_count(cost.routes)
    yield "strided", f"{format_bytes(cost.strided_nbytes)} go through strided copies"
    yield "replicas", report.replicas


def _drift(report: ConversionReport) -> Block:
    return table(
        f"copies that differ (--replicas {report.replicas})",
        "name state >elements >first >largest files",
        (
            (
                *finding.key,
                format_count(finding.count),
                finding.first,
                format_largest(finding.largest),
                ", ".join(finding.files),
            )
            for finding in report.drift
        ),
    )
