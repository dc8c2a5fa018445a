"""Tables of patterns: regular expressions over names, looked up fast.

Theory. Training programs state things about parameters by patterns that match from the start of a
name (`re.match`). AutoTP writes one exact pattern a parameter, `^re.escape(name)$`, so a table of a
large model has ten thousand patterns that each match one name. Those are kept in a dictionary and
never compiled; only the others are tried one after the other. A look-up gives the entries in the
order of the table, whichever way they were found.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from reshard.errors import LayoutError

Entry = TypeVar("Entry")


def literal_name(pattern: str) -> str | None:
    r"""The one name that an exact-match pattern (`^re.escape(name)$`) stands for, else None.

    Examples
    --------
    >>> literal_name(r"^lm_head\.weight$")
    'lm_head.weight'
    >>> literal_name(r".*\.weight$") is None
    True
    """
    if not (pattern.startswith("^") and pattern.endswith("$")):
        return None
    name = re.sub(r"\\(.)", r"\1", pattern[1:-1], flags=re.DOTALL)
    return name if re.escape(name) == pattern[1:-1] else None


def exact(name: str) -> str:
    r"""The pattern that matches one name and no other.

    >>> exact("lm_head.weight")
    '^lm_head\\.weight$'
    """
    return f"^{re.escape(name)}$"


def quoted(pattern: str) -> str:
    r"""A pattern as it is written, in quotes; what cannot be shown is escaped.

    >>> print(quoted(r".*\.weight"), quoted("a\nb"))
    '.*\.weight' 'a\nb'
    """
    return repr(pattern).replace("\\\\", "\\")


def compile_pattern(pattern: str, file: str) -> re.Pattern[str]:
    """A pattern of the checkpoint or of the user as a regular expression.

    Raises
    ------
    LayoutError
        When it is none.
    """
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise LayoutError(
            f"a pattern is no regular expression: {error}", file=file, found=repr(pattern)
        ) from error


@dataclass(frozen=True, slots=True)
class PatternTable(Generic[Entry]):
    """Entries by pattern, in an order that counts.

    Parameters
    ----------
    texts
        The patterns as written.
    entries
        What each stands for.

    Examples
    --------
    >>> table = PatternTable.of([("^a$", 1), ("a|b", 2), ("^a$", 3)], "a file")
    >>> table.matching("a"), table.matching("bb"), list(table.unmatched({"b"}))
    ([1, 2, 3], [2], [('^a$', 1), ('^a$', 3)])
    """

    texts: tuple[str, ...] = ()
    entries: tuple[Entry, ...] = ()
    _literal: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    _general: tuple[tuple[int, re.Pattern[str]], ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, entries: Iterable[tuple[str, Entry]], file: str) -> PatternTable[Entry]:
        """A table of `(pattern, entry)` pairs.

        Raises
        ------
        LayoutError
            When a pattern is no regular expression.
        """
        listed = list(entries)
        literal: dict[str, tuple[int, ...]] = {}
        general = []
        for number, (text, _) in enumerate(listed):
            name = literal_name(text)
            if name is None:
                general.append((number, compile_pattern(text, file)))
            else:
                literal[name] = (*literal.get(name, ()), number)
        texts, values = tuple(text for text, _ in listed), tuple(value for _, value in listed)
        return cls(texts, values, literal, tuple(general))

    def __bool__(self) -> bool:
        return bool(self.texts)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def items(self) -> Iterator[tuple[str, Entry]]:
        """Every pattern and what it stands for, in order."""
        return zip(self.texts, self.entries, strict=True)

    @property
    def names(self) -> Iterable[str]:
        """The names that exact patterns stand for."""
        return self._literal.keys()

    def matching(self, name: str) -> list[Entry]:
        """The entries whose pattern matches from the start of a name, in order."""
        numbers = [number for number, pattern in self._general if pattern.match(name)]
        numbers += self._literal.get(name, ())
        return [self.entries[number] for number in sorted(numbers)]

    def matches(self, name: str) -> bool:
        """Whether some pattern matches a name."""
        return name in self._literal or any(p.match(name) for _, p in self._general)

    def unmatched(self, names: Collection[str]) -> Iterator[tuple[str, Entry]]:
        """The patterns that match none of the names, in order."""
        general = dict(self._general)
        for number, (text, entry) in enumerate(self.items()):
            pattern = general.get(number)
            if pattern is None:
                used = literal_name(text) in names
            else:
                used = any(map(pattern.match, names))
            if not used:
                yield text, entry
