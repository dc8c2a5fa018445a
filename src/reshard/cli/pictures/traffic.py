"""How many bytes a plan moves from which source file to which output file.

Theory. A fill reads from the holders of its route, and each holder's shard lies in one source file;
so its traffic follows from the plan alone. A universal folder has thousands of files: then files
are gathered under a common beginning of their names, the finest that is few enough to be read, or,
where names have none, neighbours in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard.planning.plan import Plan, PlannedFill, Route

MOST_GROUPS = 64
"""Rows, and columns, of a matrix that is still readable."""


@dataclass(frozen=True, slots=True)
class OutputTraffic:
    """What one output file takes."""

    path: str
    nbytes: int
    """The file, and its size."""
    fills: int = 0
    moves: int = 0
    """Shards of tensors in it, and strided copies that fill them."""
    sources: dict[str, int] = field(default_factory=dict)
    """Source file -> bytes taken from it."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Bytes into groups of output files (rows) from groups of source files (columns)."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[int, ...], ...]


def traffic_of(plan: Plan) -> list[OutputTraffic]:
    """Return what every output file takes, in the order of the plan."""
    moved: dict[int, tuple[int, ...]] = {}
    found = []
    for file in plan.files:
        fills = [fill for slot in file.slots for fill in slot.fills]
        sources: dict[str, int] = {}
        for fill in fills:
            for source, nbytes in _taken(plan, fill, moved):
                sources[source] = sources.get(source, 0) + nbytes
        moves = sum(len(fill.route.moves) for fill in fills)
        found.append(OutputTraffic(file.path, file.size, len(fills), moves, sources))
    return found


def _taken(
    plan: Plan, fill: PlannedFill, moved: dict[int, tuple[int, ...]]
) -> Iterator[tuple[str, int]]:
    counts = moved.get(id(fill.route))
    if counts is None:
        counts = moved[id(fill.route)] = _elements(fill.route)
    itemsize = (fill.stored or fill.dtype).itemsize
    for place, count in zip(fill.places, counts, strict=True):
        if count:
            yield plan.sources[place.source].name, count * itemsize


def _elements(route: Route) -> tuple[int, ...]:
    """Elements that each holder of a route gives."""
    counts = [0] * len(route.holders)
    for move in route.moves:
        counts[move.holder] += move.numel
    return tuple(counts)


def matrix_of(traffic: Sequence[OutputTraffic]) -> Matrix:
    """Return the bytes between groups of source files and groups of output files."""
    taking = [output for output in traffic if output.sources]
    row_of = grouped([output.path for output in taking])
    column_of = grouped(sorted({source for output in taking for source in output.sources}))
    cells: dict[tuple[str, str], int] = {}
    for output in taking:
        for source, nbytes in output.sources.items():
            key = row_of[output.path], column_of[source]
            cells[key] = cells.get(key, 0) + nbytes
    rows = tuple(dict.fromkeys(row_of.values()))
    columns = tuple(dict.fromkeys(column_of.values()))
    return Matrix(rows, columns, tuple(tuple(cells.get((r, c), 0) for c in columns) for r in rows))


def grouped(names: Sequence[str], most: int = MOST_GROUPS) -> dict[str, str]:
    """Return the group of each name: itself, a beginning that several share, or a run of names.

    Examples
    --------
    >>> grouped(["zero/a.w/fp32.pt", "zero/a.w/step.pt", "zero/b.w/fp32.pt"], most=2)
    {'zero/a.w/fp32.pt': 'zero/a.w', 'zero/a.w/step.pt': 'zero/a.w', 'zero/b.w/fp32.pt': 'zero/b.w'}
    """
    several = list(dict.fromkeys(names))
    if len(several) <= most:
        return {name: name for name in several}
    folders = {name: str(PurePath(name).parent) for name in several}
    depth = max(len(_parts(folder)) for folder in folders.values())
    for length in range(depth, 0, -1):
        groups = {name: "".join(_parts(folder)[:length]) for name, folder in folders.items()}
        if 1 < len(set(groups.values())) <= most:
            return groups
    return _neighbours(several, most)


def _neighbours(names: Sequence[str], most: int) -> dict[str, str]:
    """Runs of names that follow each other.

    >>> _neighbours(["a", "b", "c"], 2)
    {'a': 'a … b', 'b': 'a … b', 'c': 'c'}
    """
    size = -(-len(names) // most)
    runs = (names[start : start + size] for start in range(0, len(names), size))
    return {name: f"{run[0]} … {run[-1]}" if len(run) > 1 else name for run in runs for name in run}


def _parts(folder: str) -> list[str]:
    """A path in pieces that end before each dot or slash."""
    return re.findall(r"[./]?[^./]+", folder)


def without_the_shared(names: Sequence[str]) -> tuple[str, list[str]]:
    """Return what all names share, with ``*`` where they differ, and of each what stands there.

    Examples
    --------
    >>> without_the_shared(["zero_pp_rank_0_mp_rank_00.pt", "zero_pp_rank_1_mp_rank_01.pt"])
    ('zero_pp_rank_*.pt', ['0_mp_rank_00', '1_mp_rank_01'])
    >>> without_the_shared(["model.safetensors"])
    ('', ['model.safetensors'])
    """
    words = [re.split(r"(?<=[_/.-])|(?=[_/.-])", name) for name in names]
    before = _shared(words)
    after = _shared([word[before:][::-1] for word in words])
    if len(names) < 2 or not before + after:
        return "", list(names)
    short = ["".join(word[before : len(word) - after]) for word in words]
    first = words[0]
    return "".join((*first[:before], "*", *first[len(first) - after :])), short


def _shared(lists: Sequence[Sequence[str]]) -> int:
    """How many words all lists begin with."""
    columns = zip(*lists, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
