"""A place in a foreign tree gives a value of the expected kind, or an error that says where."""

from __future__ import annotations

import pytest

from reshard.errors import CheckpointError
from reshard.formats.parsing import Cursor

TREE = {"groups": [{"count": 2, "shape": [3, 4], "name": "w"}], "empty": None}


def at(*keys: str | int) -> Cursor:
    cursor = Cursor(TREE, "x.pt")
    for key in keys:
        cursor = cursor.at(key)
    return cursor


def test_values_of_the_expected_kind() -> None:
    assert at("groups", 0, "count").integer() == 2
    assert at("groups", 0, "shape").shape() == (3, 4)
    assert at("groups", 0, "name").text() == "w"
    assert [name for name, _ in at("groups", 0).named()] == ["count", "shape", "name"]
    assert len(at("groups").each()) == 1


def test_absent_and_none_are_the_same() -> None:
    assert Cursor(TREE, "x.pt").maybe("empty") is None
    assert Cursor(TREE, "x.pt").maybe("absent") is None


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda: at("absent"), "a key is missing: absent: x.pt"),
        (lambda: at("groups", 3), r"a key is missing: groups\[3\]"),
        (lambda: at("groups", 0, "name").integer(), r"groups\[0\]\.name.*integer, found str"),
        (lambda: at("groups", 0, "count").text(), r"groups\[0\]\.count.*text, found int"),
        (lambda: at("groups", 0, "count").integer(3), "at least 3"),
        (lambda: at("groups").mapping(), "a mapping, found list"),
        (lambda: at("groups", 0).each(), "a list, found dict"),
        (lambda: at("groups", 0, "name").at("x"), "a mapping, found str"),
        (lambda: list(Cursor({1: 2}, "x.pt").named()), "text keys"),
        (lambda: Cursor(True, "x.pt").integer(), "an integer, found bool"),
    ],
)
def test_anything_else_says_where(read: object, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read()  # type: ignore[operator]
