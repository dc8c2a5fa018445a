"""Foreign data, parsed once at the border.

Theory. What a checkpoint file holds is a tree that anybody may have written. A :class:`Cursor` is a
place in such a tree that knows its way there, so every step either gives a value of the expected
kind or an error with the file and the path (``optimizer_state_dict.partition_count[2]``). Behind
the border, code sees typed values and never asks again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from reshard.errors import CheckpointError

_LONGEST = 60


def shown(value: object) -> str:
    """A foreign value for a message: a text or a number, cut to what a line can hold, or its kind.

    Examples
    --------
    >>> shown("../a"), shown(float("nan")), shown(10**5000), shown([1])
    ("'../a'", 'nan', 'a number beyond 2^64', 'list')
    """
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "a number beyond 2^64"
    if not isinstance(value, str | int | float):
        return type(value).__name__
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


@dataclass(frozen=True, slots=True)
class Cursor:
    """A value in a foreign tree, and where it is.

    Examples
    --------
    >>> Cursor({"a": [1, 2]}, "x.pt").at("a").at(1).integer()
    2
    >>> Cursor({"a": [1, 2]}, "x.pt").at("a").text()
    Traceback (most recent call last):
    reshard.errors.CheckpointError: unexpected content at a: x.pt: expected text, found list
    """

    value: object
    """The value itself."""
    file: str
    """The file the tree came from."""
    path: str = ""
    """Keys and indices from the root to the value."""

    def at(self, key: str | int) -> Cursor:
        """The value under a key or index, which must be there."""
        child = self.maybe(key)
        if child is None:
            raise CheckpointError(
                f"a key is missing: {self._join(key)}",
                file=self.file,
                next_step="the file is of another format or version; reshard inspect shows it",
            )
        return child

    def maybe(self, key: str | int) -> Cursor | None:
        """The value under a key or index, or None when it is absent or None."""
        value: object = None
        if isinstance(self.value, Mapping):
            value = self.value.get(key)
        elif isinstance(self.value, (list, tuple)) and isinstance(key, int):
            value = self.value[key] if 0 <= key < len(self.value) else None
        else:
            raise self.unexpected("a mapping" if isinstance(key, str) else "a list")
        return None if value is None else Cursor(value, self.file, self._join(key))

    def _join(self, key: str | int) -> str:
        if isinstance(key, int):
            return f"{self.path}[{key}]"
        return f"{self.path}.{key}" if self.path else key

    def unexpected(self, expected: str, found: str | None = None) -> CheckpointError:
        """The error that says that this value is not what was expected; `found` is its kind."""
        return CheckpointError(
            f"unexpected content at {self.path or 'the top'}",
            file=self.file,
            expected=expected,
            found=type(self.value).__name__ if found is None else found,
        )

    def mapping(self) -> Mapping[object, object]:
        """The value as a mapping."""
        if not isinstance(self.value, Mapping):
            raise self.unexpected("a mapping")
        return self.value

    def named(self) -> Iterator[tuple[str, Cursor]]:
        """The entries of a mapping whose keys are text."""
        for key, value in self.mapping().items():
            if not isinstance(key, str):
                raise self.unexpected("a mapping with text keys")
            yield key, Cursor(value, self.file, self._join(key))

    def each(self) -> list[Cursor]:
        """The elements of a list or tuple."""
        if not isinstance(self.value, (list, tuple)):
            raise self.unexpected("a list")
        return [
            Cursor(value, self.file, f"{self.path}[{index}]")
            for index, value in enumerate(self.value)
        ]

    def integer(self, minimum: int = 0) -> int:
        """The value as an integer that is at least `minimum`; a bool is none."""
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise self.unexpected("an integer")
        if self.value < minimum:
            raise self.unexpected(f"an integer of at least {minimum}, not {self.value}")
        return self.value

    def text(self) -> str:
        """The value as text."""
        if not isinstance(self.value, str):
            raise self.unexpected("text")
        return self.value

    def shape(self) -> tuple[int, ...]:
        """The value as a shape: a tuple or list of non-negative integers."""
        return tuple(extent.integer() for extent in self.each())
