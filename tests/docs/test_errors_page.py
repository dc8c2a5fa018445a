"""The catalogue of errors has all classes and all messages, and quotes messages that exist."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from reshard import errors
from scripts import messages_page
from tests.truth import ROOT

PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
CLASSES = [
    name
    for name, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, errors.ReshardError)
]


def texts() -> list[str]:
    """Return every text of the source, those inside f-strings too; joined where Python joins."""
    return [
        node.value
        for file in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def quoted() -> list[str]:
    """Return the messages of the tables' first column, cut at what varies."""
    rows = re.findall(r"^\| (`.*?`) \| ", PAGE, re.MULTILINE)
    return [part for row in rows for part in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_has_a_section(name: str) -> None:
    assert re.search(rf"^## {name}$", PAGE, re.MULTILINE)


def test_no_section_is_of_a_class_that_is_gone() -> None:
    assert set(re.findall(r"^## (\w+)$", PAGE, re.MULTILINE)) == set(CLASSES)


def test_each_quoted_message_is_in_the_source() -> None:
    known = texts()
    parts = quoted()
    assert len(parts) > 40
    assert [part for part in parts if not any(part in text for text in known)] == []


def test_every_message_is_listed() -> None:
    """A new one fails here: `python -m scripts.messages_page` lists it."""
    listed = messages_page.PAGE.read_text(encoding="utf-8")
    assert listed == messages_page.page()


def test_the_list_has_what_a_plain_search_of_the_source_finds() -> None:
    listed = messages_page.PAGE.read_text(encoding="utf-8")
    found = [text for file in (ROOT / "src").rglob("*.py") for text in first_arguments(file)]
    assert len(found) > 400
    assert [text for text in found if text.strip() not in listed] == []


def first_arguments(file: Path) -> list[str]:
    """Return the longest constant part of the text of every error that is made in a file."""
    calls = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
    made = [call.args[0] for call in calls if call.args and ast.unparse(call.func) in CLASSES]
    whole = [text for text in made if isinstance(text, ast.Constant | ast.JoinedStr)]
    return [max(constants(text), key=len) for text in whole]


def constants(text: ast.Constant | ast.JoinedStr) -> list[str]:
    """Return what is certain of a text."""
    parts = [text] if isinstance(text, ast.Constant) else text.values
    return [str(part.value) for part in parts if isinstance(part, ast.Constant)]


MET_MOST = [
    "the file is cut short: its zip end record is missing",
    "a file of optimizer states is missing",
    "the checksum of the pickle does not hold",
    "leave open how it is cut",
    "no rule that is known made its map",
    "the source does not keep the hyperparameters of every optimizer group",
    "the output cannot be written",
    "no such parameter",
    "no such state",
    "not a size",
    "cannot write the format",
    "weights are not rounded to this element type",
    "does not take",
    "no such file of layouts",
]


@pytest.mark.parametrize("message", MET_MOST)
def test_what_is_met_most_is_explained(message: str) -> None:
    assert any(message in row for row in PAGE.splitlines() if row.startswith("| `"))
