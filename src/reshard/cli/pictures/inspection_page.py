"""The page of ``reshard inspect --html``: ranks and their files, states, tensors, problems.

Theory. The grid of ranks comes from a survey of the folder, which does not need the checkpoint to
be whole: so a page can be made of a folder that no reader opens, and shows what is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

_NARROW = 4
"""Columns of a grid that is cut into blocks beside each other."""

_BLOCK = 16
"""Rows of such a block."""

_ROOMY = 12
"""Columns of a grid whose cells have room for words."""

_SIGNS = {
    Presence.PRESENT: "✓",
    Presence.MISSING: "✗",
    Presence.STALE: "?",
    Presence.DAMAGED: "!",
}
_SIGNS_TOLD = ", ".join(f"{sign} {presence.value}" for presence, sign in _SIGNS.items())

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
    sections += _findings(diagnosis, opened=inspection is not None)
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


def _findings(diagnosis: Diagnosis, *, opened: bool) -> Iterator[ET.Element]:
    """What is to be mended, each with the fix; then what is good to know."""
    if diagnosis.faults:
        listed = (_fault(number, fault) for number, fault in enumerate(diagnosis.faults, 1))
        yield section(f"{counted(len(diagnosis.faults), 'thing')} to mend", *listed)
    elif opened:
        yield node("p", "Healthy: nothing to mend.", klass="healthy")
    if diagnosis.notes:
        notes = (node("p", str(note), klass="problem") for note in diagnosis.notes)
        yield section("Good to know", *notes)


def _fault(number: int, fault: Problem) -> ET.Element:
    where = ", ".join(filter(None, (fault.file, fault.parameter)))
    return node(
        "div",
        node("b", f"{number}. {fault.what}"),
        *([node("code", where)] if where else []),
        node("span", f"→ {fault.next_step}"),
        klass="fault",
    )


# --------------------------------------------------------------------------- the grid of ranks


def _folder(path: str, survey: Survey, *, several: bool) -> Iterator[ET.Element]:
    name = f" of {Path(path).name}" if several else ""
    ranked = [file for file in survey.files if file.mp is not None]
    if ranked:
        yield section(
            f"Ranks{name}",
            _grid(ranked, survey.topology),
            note=f"{_tally(survey.files)}. A cell is the file of one rank: down its data-parallel "
            "rank (dp), across its model-parallel one (mp = pipeline stage × tp + tensor rank).",
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


def _tally(files: Sequence[RankFile]) -> str:
    """How many files there are, and in which state."""
    found = Counter(file.presence for file in files)
    if set(found) == {Presence.PRESENT}:
        return f"All {counted(len(files), 'file')} are there" if len(files) > 1 else "It is there"
    return "; ".join(f"{found[state]} {state.value}" for state in Presence if found[state])


def _below(file: str, folder: str) -> str:
    return file.removeprefix(folder.rstrip("/") + "/")


def _grid(files: Sequence[RankFile], topology: Topology | None) -> ET.Element:
    """One figure for each kind of file."""
    kinds = dict.fromkeys(file.kind for file in files)
    held = {kind: [file for file in files if file.kind == kind] for kind in kinds}
    return node("div", *(_grid_of(kind, held[kind], topology) for kind in kinds), klass="grids")


def _grid_of(kind: str, files: Sequence[RankFile], topology: Topology | None) -> ET.Element:
    """Data-parallel ranks down, model-parallel ranks across; high and narrow ones in blocks."""
    places = {(file.dp, file.mp): file for file in files}
    across = _ascending(file.mp for file in files)
    down = _ascending(file.dp for file in files)
    shown = down[: max(1, MOST_CELLS // len(across))]
    dense = len(across) > _ROOMY
    height = _BLOCK if len(across) <= _NARROW else len(shown)
    blocks = (
        node(
            "table",
            _grid_head(across, topology, dense),
            node(
                "tbody",
                *(_grid_row(dp, across, places, dense) for dp in shown[start : start + height]),
            ),
            klass="grid dense" if dense else "grid",
        )
        for start in range(0, len(shown), height)
    )
    more = len(down) - len(shown)
    told = [node("p", f"not drawn: {counted(more, 'more row')}")] if more else []
    drawn = node("div", *blocks, klass="scroll blocks")
    caption = f"{kind} ({_SIGNS_TOLD})" if dense else kind
    return node("figure", node("figcaption", caption), drawn, *told)


def _grid_row(
    dp: int | None,
    across: Sequence[int | None],
    places: Mapping[tuple[int | None, int | None], RankFile],
    dense: bool,
) -> ET.Element:
    head = node("th", "every dp" if dp is None else f"dp {dp}")
    return node("tr", head, *(_cell(places.get((dp, mp)), dense) for mp in across))


def _grid_head(across: Sequence[int | None], topology: Topology | None, dense: bool) -> ET.Element:
    """Model-parallel ranks; in a pipeline each stage over its tensor ranks."""
    if topology is None or topology.pp == 1:
        ranks = (node("th", str(mp) if dense else f"mp {mp}") for mp in across)
        return node("thead", node("tr", node("th", "mp" if dense else ""), *ranks))
    stages = Counter(None if mp is None else mp // topology.tp for mp in across)
    upper = (node("th", f"pp {stage}", colspan=str(many)) for stage, many in stages.items())
    lower = (
        node(
            "th", str(mp) if dense else f"mp {mp}", node("small", _tensor_rank(mp, topology, dense))
        )
        for mp in across
    )
    corner = node("th", "mp", node("small", "tp")) if dense else node("th", "")
    return node("thead", node("tr", node("th", ""), *upper), node("tr", corner, *lower))


def _tensor_rank(mp: int | None, topology: Topology, dense: bool) -> str:
    if mp is None or (topology.tp == 1 and not dense):
        return ""
    return f"{mp % topology.tp}" if dense else f"tp {mp % topology.tp}"


def _ascending(ranks: Iterable[int | None]) -> list[int | None]:
    return sorted(set(ranks), key=lambda rank: -1 if rank is None else rank)


def _cell(file: RankFile | None, dense: bool) -> ET.Element:
    if file is None:
        return node("td", "-", klass="absent")
    if dense:
        said = f"{file.presence.value}: {file.file}"
        return node("td", _SIGNS[file.presence], klass=_CLASSES[file.presence], title=said)
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
            node("span", format_shape(first.shape), klass="nowrap"),
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
