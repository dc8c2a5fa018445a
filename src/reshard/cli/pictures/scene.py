"""A scene: what stands where in a picture, before anyone decides on a file format.

Theory. Lengths are points, from the upper left corner. Paints are names (of
:data:`~reshard.cli.pictures.colours.PAINTS`, or ``h0``, ``h1``, … for the colour of a holder), so
that one scene serves light and dark, SVG and PNG. What belongs together (all bands of a piece) is a
group with a title, which a browser shows under the pointer and reads aloud.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from reshard.cli.pictures.colours import Colour

Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True, slots=True)
class Rect:
    """A filled rectangle; ``hatched`` lays stripes over it, ``edge`` a line around it."""

    x: float
    y: float
    width: float
    height: float
    paint: str
    hatched: bool = False
    edge: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text; `y` is its base line."""

    x: float
    y: float
    text: str
    size: float = 12.0
    paint: str = "ink"
    anchor: Anchor = "start"
    bold: bool = False
    mono: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    paint: str = "line"


Mark = Rect | Text | Line


@dataclass(frozen=True, slots=True)
class Group:
    """Marks that are one thing."""

    marks: tuple[Mark, ...]
    """In the order of drawing."""
    title: str = ""
    """What it is; empty for what explains itself."""
    kind: str = ""
    """A word for what it is: ``"piece"``, ``"shard"``, ``"padding"``, …"""
    holder: int | None = None
    """Index of the holder it belongs to, in the order of drawing."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A whole picture."""

    width: float
    height: float
    """Points."""
    title: str
    description: str
    """For whoever cannot see it."""
    groups: tuple[Group, ...]
    """In the order of drawing."""
    colours: Sequence[Colour] = ()
    """Of the holders."""


def text_width(text: str, size: float, *, mono: bool = False) -> float:
    """Return about how wide a text is; rather too much than too little."""
    return len(text) * size * (0.62 if mono else 0.56)


def clipped(text: str, width: float, size: float, *, mono: bool = False) -> str:
    """Return a text shortened in its middle until it fits; the whole one stands in titles.

    Examples
    --------
    >>> clipped("zero_pp_rank_0_mp_rank_00_optim_states.pt", 120, 10)
    'zero_pp_ra…_states.pt'
    """
    most = int(width / text_width("x", size, mono=mono))
    if len(text) <= most:
        return text
    kept = max(2, most - 1)
    return f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"
