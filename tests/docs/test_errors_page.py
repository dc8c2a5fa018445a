"""The catalogue of errors has all classes, and quotes messages that exist."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

from reshard import errors
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
