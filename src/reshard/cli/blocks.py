"""What a command has to say, before anyone decides how it looks.

Theory. A report is a sequence of *blocks*: a table, a list of named fields, or lines. Blocks are
plain values, built by the pure functions of the ``render_*`` modules and compared in tests as
such. Two renderers draw them (:mod:`reshard.cli.screen`): plain text for files, pipes and
``NO_COLOR``, rich text for a terminal. Neither shortens a name: what cannot be found with ``grep``
or copied with the mouse was not said.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from reshard.cli.text import visible


class Tone(Enum):
    """How a line is meant; a terminal shows it as a colour, plain text in the words alone."""

    PLAIN = ""
    GOOD = "green"
    NOTICE = "yellow"
    BAD = "bold red"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; numbers are set to the right."""

    title: str
    right: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Fields:
    """Named values under a title."""

    title: str
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Lines:
    """Free lines under a title (none when it is empty)."""

    title: str
    lines: tuple[str, ...]
    tone: Tone = Tone.PLAIN


Block = Table | Fields | Lines


def table(title: str, titles: str, rows: Iterable[Sequence[object]]) -> Table:
    """Return a table; `titles` are separated by blanks, and ``>`` before one sets it to the right.

    Examples
    --------
    >>> table("files", "name >bytes", [("a", 1)]).columns[1]
    Column(title='bytes', right=True)
    """
    columns = tuple(Column(word.lstrip(">"), word.startswith(">")) for word in titles.split())
    return Table(
        visible(title), columns, tuple(tuple(visible(cell) for cell in row) for row in rows)
    )


def fields(title: str, pairs: Iterable[tuple[str, object]]) -> Fields:
    """Return named values, those without a value left out."""
    shown = ((name, visible(value)) for name, value in pairs if value not in (None, ""))
    return Fields(visible(title), tuple(shown))


def lines(title: str, texts: Iterable[object], tone: Tone = Tone.PLAIN) -> Lines:
    """Return free lines."""
    return Lines(visible(title), tuple(visible(text) for text in texts), tone)
