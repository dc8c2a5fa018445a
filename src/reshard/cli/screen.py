"""Drawing blocks: as plain text, or as rich text on a terminal.

Theory. Plain text is the reference: columns apart by two blanks, every row on one line however
long, nothing shortened, so that ``grep``, ``awk`` and a log file get all of it. On a terminal the
same blocks are drawn by rich, but for tables wider than the terminal: folded into narrow columns
they could be neither read nor copied. Rich is imported when the first block
is drawn there and never otherwise: it costs as much as all the rest of a start.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from reshard.cli.blocks import Block, Fields, Lines, Table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_MARGIN = "  "


def wants_rich(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal on which colour and boxes are welcome."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream is not None and stream.isatty()


def show(blocks: Iterable[Block], stream: TextIO) -> None:
    """Write blocks to a stream, a blank line between them, empty ones left out."""
    shown = [block for block in blocks if _has_content(block)]
    if wants_rich(stream):
        _show_rich(shown, stream)
    else:
        stream.write("\n".join(plain(block) for block in shown))


def plain(block: Block) -> str:
    r"""Return a block as plain text, ended by a line feed.

    Examples
    --------
    >>> from reshard.cli.blocks import table
    >>> plain(table("files", "name >bytes", [("a.pt", 7), ("long name.pt", 1234)]))
    'files\n  name          bytes\n  a.pt              7\n  long name.pt   1234\n'
    """
    body = "".join(f"{_MARGIN if block.title else ''}{line}\n" for line in _plain_lines(block))
    return f"{block.title}\n{body}" if block.title else body


def _has_content(block: Block) -> bool:
    match block:
        case Table():
            return bool(block.rows)
        case Fields():
            return bool(block.pairs)
        case Lines():
            return bool(block.lines)


def _plain_lines(block: Block) -> Iterator[str]:
    match block:
        case Table():
            header = tuple(column.title for column in block.columns)
            rights = tuple(column.right for column in block.columns)
            return _aligned((header, *block.rows), rights)
        case Fields():
            return _aligned(block.pairs, (False, False))
        case Lines():
            return iter(block.lines)


def _aligned(rows: Sequence[Sequence[str]], rights: Sequence[bool]) -> Iterator[str]:
    widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, rights, strict=True)
        )
        yield "  ".join(cells).rstrip()


def _show_rich(blocks: Sequence[Block], stream: TextIO) -> None:
    from rich.console import Console

    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    for index, block in enumerate(blocks):
        if index:
            console.print()
        _print_rich(console, block)


def _print_rich(console: Console, block: Block) -> None:
    from rich.text import Text

    if block.title:
        console.print(Text(block.title, style="bold"))
    match block:
        case Table():
            drawn = _rich_table(block)
            if console.measure(drawn).maximum < console.width:
                console.print(drawn)
            else:
                console.print(Text("\n".join(_plain_lines(block))), soft_wrap=True)
        case Fields():
            console.print(_rich_fields(block))
        case Lines():
            for line in block.lines:
                console.print(Text(line, style=block.tone.value))


def _rich_table(block: Table) -> RenderableType:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=True, header_style="dim")
    for column in block.columns:
        drawn.add_column(column.title, justify="right" if column.right else "left", no_wrap=True)
    for row in block.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn


def _rich_fields(block: Fields) -> RenderableType:
    from rich.table import Table as RichTable
    from rich.text import Text

    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, value in block.pairs:
        grid.add_row(Text(f" {name}"), Text(value))
    return grid
