"""Plain text is whole and can be searched; a terminal gets rich; nothing foreign moves the
cursor."""

from __future__ import annotations

import io

import pytest

from reshard.cli.blocks import Block, Tone, fields, lines, table
from reshard.cli.screen import plain, show, wants_rich
from reshard.cli.text import visible

HOSTILE = "w\x1b[2J\x07\r\n\u202eb\udcff\x9b0m"
LONG = "model." + "layers." * 40 + "weight"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def on_terminal(block: Block, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    show([block], stream)
    return stream.getvalue()


def test_plain_columns_are_two_blanks_apart_and_numbers_to_the_right() -> None:
    block = table("files", "kind >files >size", [("model", 2, "1.50 kB"), ("optimizer", 12, "3 B")])
    assert plain(block) == (
        "files\n"
        "  kind       files     size\n"
        "  model          2  1.50 kB\n"
        "  optimizer     12      3 B\n"
    )


def test_fields_without_a_value_are_left_out() -> None:
    assert plain(fields("x", [("a", 1), ("b", None), ("c", ""), ("dd", 0)])) == (
        "x\n  a   1\n  dd  0\n"
    )


def test_blocks_are_a_blank_line_apart_and_empty_ones_left_out() -> None:
    stream = io.StringIO()
    blocks: list[Block] = [
        lines("", ["one"]),
        table("none", "a b", []),
        lines("two", ["2"]),
        fields("f", []),
    ]
    show(blocks, stream)
    assert stream.getvalue() == "one\n\ntwo\n  2\n"


def test_plain_text_never_shortens_a_name() -> None:
    assert LONG in plain(table("t", "name >n", [(LONG, 1)]))


def test_a_terminal_folds_a_long_name_and_loses_none_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = on_terminal(table("t", "name", [(LONG,)]), monkeypatch)
    assert "…" not in drawn
    assert "".join(drawn.split()).count("layers.") == 40


@pytest.mark.parametrize(
    "block",
    [
        table("t", "name", [(HOSTILE,)]),
        fields("f", [("name", HOSTILE)]),
        lines("l", [HOSTILE], Tone.NOTICE),
    ],
)
def test_control_characters_are_shown_as_escapes(
    block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    for drawn in (plain(block), on_terminal(block, monkeypatch)):
        assert r"w\x1b[2J\x07\r\n\u202eb\udcff\x9b0m" in drawn
        assert not {"\x07", "\r", "\u202e", "\udcff", "\x9b"} & set(drawn)
        assert "\x1b[2J" not in drawn


def test_brackets_of_a_name_are_not_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    block = table("t", "name", [("w[bold red]x[/] :smile:",)])
    assert "w[bold red]x[/] :smile:" in on_terminal(block, monkeypatch)


def test_printable_text_stays_as_it_is() -> None:
    assert visible("größe/权重.weight [0] 'x' \\n") == "größe/权重.weight [0] 'x' \\n"


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), (None, None)])
def test_rich_is_for_terminals_that_want_it(
    variable: str | None, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert not wants_rich(io.StringIO())
    if variable and value:
        monkeypatch.setenv(variable, value)
    assert wants_rich(Terminal()) is (variable is None)
