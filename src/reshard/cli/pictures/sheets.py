"""Blocks laid onto a sheet of given size: the rectangles that are drawn, and what they leave out.

Theory. All blocks of a sheet are placed together, for bands that interleave must be widened alike.
What is drawn otherwise than it is gets a note with the exact numbers, so that the picture may be
coarse and is never wrong without saying so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reshard.cli.pictures.bands import MOST_BANDS, Lattice, Progression, Sheet, lattices, zoomed
from reshard.cli.units import counted, format_count

LEAST_BAND = 2.5
"""Points that a repeated band is wide at least."""

LEAST_SIDE = 0.6
"""Points that anything drawn is wide at least."""

MOST_RECTS = 8000
"""Rectangles on one sheet."""

Block = tuple[Sequence[int], int, Sequence[int]]
"""`(shape, offset, strides)` of a block of the tensor on the sheet."""


@dataclass(frozen=True, slots=True)
class Box:
    """Where a sheet is drawn."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Placed:
    """What blocks look like on a sheet."""

    blocks: list[list[tuple[float, float, float, float]] | None]
    """The rectangles `(x, y, width, height)` of each block, in points; None for a block that is
    too irregular to be drawn."""
    notes: tuple[str, ...]
    """What is drawn otherwise than it is."""


def place(blocks: Sequence[Block], sheet: Sheet, box: Box) -> Placed:
    """Lay blocks onto a sheet.

    Examples
    --------
    >>> left = ((4, 2), 0, (4, 1))  # the left half of 4 rows of 4 elements
    >>> place([left], Sheet(4, 4, 1), Box(0, 0, 40, 40)).blocks
    [[(0.0, 0.0, 20.0, 40.0)]]
    """
    cells = [lattices(*block, sheet.columns) for block in blocks]
    flat = [part for parts in cells for part in parts or ()]
    drawn = _drawable(flat, sheet, box)
    notes = dict.fromkeys(note for pair in zip(flat, drawn, strict=True) for note in _notes(*pair))
    unit_x, unit_y = box.width / max(1, sheet.columns), box.height / max(1, sheet.rows)
    left = iter(drawn)
    placed: list[list[tuple[float, float, float, float]] | None] = [
        None
        if parts is None
        else [
            (
                box.x + x * unit_x,
                box.y + y * unit_y,
                max(width * unit_x, LEAST_SIDE),
                max(height * unit_y, LEAST_SIDE),
            )
            for _ in parts
            for lattice in (next(left),)
            for y, height in lattice.rows.intervals()
            for x, width in lattice.columns.intervals()
        ]
        for parts in cells
    ]
    irregular = placed.count(None)
    said = [f"Not drawn, too irregular: {counted(irregular, 'piece')}"] if irregular else []
    return Placed(placed, (*notes, *said))


def _drawable(parts: list[Lattice], sheet: Sheet, box: Box) -> list[Lattice]:
    """Lattices with as few bands as there is room for."""
    drawn = parts
    for most in (MOST_BANDS, MOST_BANDS // 3, 2, 1):
        rows = zoomed(
            [part.rows for part in parts],
            box.height / max(1, sheet.rows),
            least=LEAST_BAND,
            most=most,
        )
        columns = zoomed(
            [part.columns for part in parts],
            box.width / max(1, sheet.columns),
            least=LEAST_BAND,
            most=most,
        )
        drawn = [Lattice(r, c) for r, c in zip(rows, columns, strict=True)]
        if sum(part.count for part in drawn) <= MOST_RECTS:
            break
    return drawn


def _notes(real: Lattice, drawn: Lattice) -> Iterator[str]:
    yield from _note(real.rows, drawn.rows, "row")
    yield from _note(real.columns, drawn.columns, "column")


def _note(real: Progression, drawn: Progression, noun: str) -> Iterator[str]:
    if real.count != drawn.count:
        width = round(real.width)
        yield (
            f"Not to scale: {format_count(real.count)} bands of {format_count(width)} "
            f"{noun}{'s' if width > 1 else ''} are drawn as {drawn.count}"
        )
