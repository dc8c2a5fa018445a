"""The page of ``reshard convert --dry-run --html``: what would move from where to where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from reshard.cli.pictures.page import Cell, facts, node, page, section, table
from reshard.cli.pictures.traffic import (
    Matrix,
    OutputTraffic,
    matrix_of,
    traffic_of,
    without_the_shared,
)
from reshard.cli.units import counted, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from reshard.api import ConversionReport
    from reshard.planning.plan import Plan, Route

MOST_ROUTES = 500
"""Geometries that are listed, those that move the most first."""


def plan_page(report: ConversionReport) -> str:
    """Return the page of a conversion that was planned."""
    traffic = traffic_of(report.plan)
    source, notes = report.source, list(_notes(report))
    return page(
        "Plan of a conversion",
        f"{source.path} ({source.format}, {source.topology}) → {report.destination} "
        f"({report.kind})",
        _facts(report),
        *([section("Notes", *notes)] if notes else []),
        section(
            "Traffic",
            _heat(matrix_of(traffic)),
            note="bytes into output files (rows) from source files (columns); where there are "
            "many, neighbours are one",
        ),
        section("Output files", _outputs(traffic)),
        section(
            "Geometries",
            _routes(report.plan),
            note="each distinct way in which a shard is put together; moves are strided copies",
        ),
    )


def _facts(report: ConversionReport) -> ET.Element:
    cost = report.cost
    short = " - not enough" if report.disk_bytes > report.disk_free_bytes else ""
    return facts(
        (
            ("would read", format_bytes(cost.read_nbytes)),
            ("of it to compare copies", format_bytes(cost.compared_nbytes)),
            ("would write", f"{format_bytes(cost.write_nbytes)} in {counted(cost.files, 'file')}"),
            ("copied in strides", format_bytes(cost.strided_nbytes)),
            ("disk", f"{format_bytes(report.disk_bytes)} of {_free(report)} free{short}"),
            ("time", _time(report)),
            (
                "buffers",
                f"{format_bytes(report.memory_bytes)}, {counted(report.workers, 'worker')}",
            ),
            ("copies that differ", report.replicas),
            ("left out", report.left_out or ""),
            ("pointer", report.pointer),
        )
    )


def _time(report: ConversionReport) -> str:
    seconds = report.expected_seconds
    return "" if seconds is None else f"about {format_seconds(seconds)}, by a probe of the disks"


def _free(report: ConversionReport) -> str:
    return format_bytes(report.disk_free_bytes)


def _notes(report: ConversionReport) -> Iterator[ET.Element]:
    for said in (*report.notes, *map(str, report.source.problems)):
        yield node("p", said, klass="problem")


# --------------------------------------------------------------------------- the matrix


def _heat(matrix: Matrix) -> ET.Element:
    largest = max((nbytes for row in matrix.cells for nbytes in row), default=0) or 1
    shared, short = without_the_shared(matrix.columns)
    head = node(
        "tr",
        node("th", f"from {shared}" if shared else "", klass="muted"),
        *(
            node("th", node("span", said), title=name)
            for said, name in zip(short, matrix.columns, strict=True)
        ),
        node("th", node("span", "all")),
    )
    rows = [
        node(
            "tr",
            node("th", name),
            *(_warm(nbytes, largest) for nbytes in row),
            node("td", format_bytes(sum(row))),
        )
        for name, row in zip(matrix.rows, matrix.cells, strict=True)
    ]
    sums = [sum(column) for column in zip(*matrix.cells, strict=True)]
    foot = node(
        "tr",
        node("th", "all"),
        *(node("td", format_bytes(nbytes)) for nbytes in (*sums, sum(sums))),
    )
    body = node("tbody", *rows, foot)
    return node("div", node("table", node("thead", head), body, klass="grid heat"), klass="scroll")


def _warm(nbytes: int, largest: int) -> ET.Element:
    if not nbytes:
        return node("td", "", klass="absent")
    strength = f"background:rgba(64,132,220,{0.12 + 0.55 * nbytes / largest:.3f})"
    return node("td", format_bytes(nbytes), style=strength)


# --------------------------------------------------------------------------- tables


def _outputs(traffic: Sequence[OutputTraffic]) -> ET.Element:
    return table(
        ("file", ">bytes", ">tensors", ">moves", ">source files"),
        (
            (
                node("code", output.path),
                Cell(format_count(output.nbytes), output.nbytes),
                Cell(format_count(output.fills), output.fills),
                Cell(format_count(output.moves), output.moves),
                Cell(format_count(len(output.sources)), len(output.sources)),
            )
            for output in traffic
        ),
        filtered=True,
    )


def _routes(plan: Plan) -> ET.Element:
    used: dict[int, list[str]] = {}
    weight: dict[int, int] = {}
    routes: dict[int, Route] = {}
    for fill in plan.fills():
        key = id(fill.route)
        routes[key] = fill.route
        used.setdefault(key, []).append(fill.key[0])
        weight[key] = weight.get(key, 0) + fill.nbytes
    heaviest = sorted(routes, key=lambda key: -weight[key])[:MOST_ROUTES]
    return table(
        ("for example", ">used by", ">elements", ">holders", ">moves", ">compared", ">bytes"),
        (
            (
                node("code", used[key][0]),
                Cell(format_count(len(used[key])), len(used[key])),
                Cell(format_count(routes[key].numel), routes[key].numel),
                Cell(str(len(routes[key].holders)), len(routes[key].holders)),
                Cell(format_count(len(routes[key].moves)), len(routes[key].moves)),
                Cell(format_count(len(routes[key].checks)), len(routes[key].checks)),
                Cell(format_bytes(weight[key]), weight[key]),
            )
            for key in heaviest
        ),
        filtered=True,
    )
