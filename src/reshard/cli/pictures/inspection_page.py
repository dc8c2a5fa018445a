"""The page of ``reshard inspect --html``: ranks and their files, states, tensors, problems.

Theory. The grid of ranks comes from a survey of the folder, which does not need the checkpoint to
be whole: so a page can be made of a folder that no reader opens, and shows what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from reshard.api import states_in_order
from reshard.cli.pictures.page import Cell, facts, node, page, section, table
from reshard.cli.render_inspect import facts_of
from reshard.cli.units import counted, format_bytes, format_count, format_shape
from reshard.formats.survey import Presence, RankFile

if TYPE_CHECKING:
    from reshard.api import Diagnosis, Inspection
    from reshard.formats.checkpoint import Problem, StoredTensor, Topology
    from reshard.formats.survey import Survey

MOST_CELLS = 4096
"""Cells of a grid that are drawn."""

_CLASSES = {
    Presence.PRESENT: "present",
    Presence.MISSING: "missing",
    Presence.STALE: "stale",
    Presence.DAMAGED: "damaged",
}


def inspection_page(
    diagnosis: Diagnosis, inspection: Inspection | None, refusal: str | None
) -> str:
    """Return the page of a checkpoint.

    Parameters
    ----------
    diagnosis
        What lies in the folder, and what is wrong with it.
    inspection
        What it holds, None when it could not be opened.
    refusal
        Why it could not be opened.
    """
    sections: list[ET.Element] = []
    if inspection is not None:
        sections.append(_facts(inspection))
    if refusal is not None:
        sections.append(node("p", f"It cannot be opened: {refusal}", klass="error"))
    sections += _problems((*diagnosis.faults, *diagnosis.notes))
    for path, survey in diagnosis.folders:
        sections += _folder(path, survey, several=len(diagnosis.folders) > 1)
    if inspection is not None:
        sections += _contents(inspection)
    title = Path(diagnosis.path).name
    told = inspection.checkpoint.path if inspection is not None else diagnosis.path
    return page(f"Checkpoint {title}", told, *sections)


def _facts(inspection: Inspection) -> ET.Element:
    files = inspection.checkpoint.files
    return facts(
        (
            *facts_of(inspection),
            ("files", format_count(len(files))),
            ("file bytes", format_bytes(sum(file.nbytes for file in files))),
        )
    )


def _problems(findings: Sequence[Problem]) -> Iterator[ET.Element]:
    if findings:
        yield section("Problems", *(node("p", str(found), klass="problem") for found in findings))


# --------------------------------------------------------------------------- the grid of ranks


def _folder(path: str, survey: Survey, *, several: bool) -> Iterator[ET.Element]:
    name = f" of {Path(path).name}" if several else ""
    ranked = [file for file in survey.files if file.mp is not None]
    if ranked:
        yield section(
            f"Ranks{name}",
            _grid(ranked, survey.topology),
            note="a cell is the file of one rank; dp is its data-parallel rank, mp its "
            "model-parallel one (pipeline stage × tp + tensor rank)",
        )
    yield section(
        f"Files{name}",
        table(
            ("name", "kind", "state", ">bytes"),
            (
                (
                    Path(file.file).name if file.mp is not None else _below(file.file, path),
                    file.kind,
                    file.presence.value,
                    Cell(format_count(file.nbytes), file.nbytes),
                )
                for file in survey.files
            ),
            filtered=True,
        ),
    )


def _below(file: str, folder: str) -> str:
    return file.removeprefix(folder.rstrip("/") + "/")


def _grid(files: Sequence[RankFile], topology: Topology | None) -> ET.Element:
    """One table for each kind of file, the longer axis down."""
    kinds = dict.fromkeys(file.kind for file in files)
    held = {kind: [file for file in files if file.kind == kind] for kind in kinds}
    return node("div", *(_grid_of(kind, held[kind], topology) for kind in kinds), klass="grids")


def _grid_of(kind: str, files: Sequence[RankFile], topology: Topology | None) -> ET.Element:
    places = {(file.dp, file.mp): file for file in files}
    dps = {dp: "every dp" if dp is None else f"dp {dp}" for dp in _ascending(f.dp for f in files)}
    mps = {mp: _rank_name(mp, topology) for mp in _ascending(f.mp for f in files)}
    tall = len(dps) > len(mps)
    down, across = (dps, mps) if tall else (mps, dps)
    shown = list(down)[: max(1, MOST_CELLS // len(across))]
    head = node("tr", node("th", ""), *(node("th", name) for name in across.values()))
    rows = (
        node(
            "tr",
            node("th", down[row]),
            *(_cell(places.get((row, column) if tall else (column, row))) for column in across),
        )
        for row in shown
    )
    drawn = node("table", node("thead", head), node("tbody", *rows), klass="grid")
    more = len(down) - len(shown)
    told = [node("p", f"not drawn: {counted(more, 'more row')}")] if more else []
    return node("figure", node("figcaption", kind), node("div", drawn, klass="scroll"), *told)


def _ascending(ranks: Iterable[int | None]) -> list[int | None]:
    return sorted(set(ranks), key=lambda rank: -1 if rank is None else rank)


def _rank_name(mp: int | None, topology: Topology | None) -> str:
    if mp is None or topology is None or topology.pp == 1:
        return f"mp {mp}"
    return f"mp {mp} (pp {mp // topology.tp}, tp {mp % topology.tp})"


def _cell(file: RankFile | None) -> ET.Element:
    if file is None:
        return node("td", "-", klass="absent")
    size = "" if file.presence is Presence.MISSING else format_bytes(file.nbytes)
    return node(
        "td",
        node("b", file.presence.value),
        size,
        klass=_CLASSES[file.presence],
        title=file.file,
    )


# --------------------------------------------------------------------------- what it holds


def _contents(inspection: Inspection) -> Iterator[ET.Element]:
    checkpoint = inspection.checkpoint
    yield section("Bytes of each state", _bars(inspection))
    yield section(
        "Tensors",
        table(
            ("name", "shape", "states", "dtype", ">elements", ">bytes", ">holders", "role", "map"),
            _tensor_rows(checkpoint.tensors.values()),
            filtered=True,
        ),
        note="one row for each parameter, with all its states",
    )
    if checkpoint.scalars:
        yield section("Scalars", table(("name", "state", "value"), _scalar_rows(inspection)))
    if checkpoint.aliases:
        yield section("Tied names", table(("name", "is"), sorted(checkpoint.aliases.items())))
    if inspection.inert:
        rows = ((found.where, found.what, found.file) for found in inspection.inert)
        yield section("Inert records", table(("where", "what", "file"), rows))


def _bars(inspection: Inspection) -> ET.Element:
    largest = max((state.nbytes for state in inspection.states), default=0) or 1
    parts: list[ET.Element] = []
    for state in inspection.states:
        width = f"width:{100 * state.nbytes / largest:.1f}%"
        size = f"{format_bytes(state.nbytes)} · {counted(state.tensors, 'tensor')} · "
        parts += [
            node("code", state.state),
            node("span", node("i", style=width)),
            node("div", size + ", ".join(state.dtypes)),
        ]
    return node("div", *parts, klass="bars")


def _tensor_rows(tensors: Iterable[StoredTensor]) -> Iterator[tuple[object, ...]]:
    held: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        held.setdefault(tensor.name, []).append(tensor)
    for name, states in held.items():
        first, nbytes = states[0], sum(tensor.nbytes for tensor in states)
        yield (
            node("code", name),
            format_shape(first.shape),
            ", ".join(states_in_order(tensor.state for tensor in states)),
            ", ".join(dict.fromkeys(str(tensor.dtype) for tensor in states)),
            Cell(format_count(first.numel), first.numel),
            Cell(format_count(nbytes), nbytes),
            Cell(str(len(first.regions)), len(first.regions)),
            first.role.value,
            "; ".join(dict.fromkeys(tensor.provenance for tensor in states)),
        )


def _scalar_rows(inspection: Inspection) -> Iterator[tuple[str, str, str]]:
    for (name, state), scalar in inspection.checkpoint.scalars.items():
        yield name, state, repr(scalar.value)
