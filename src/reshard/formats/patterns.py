"""Tables of patterns: regular expressions over names, looked up fast.

Theory. Training programs state things about parameters by patterns that match from the start of a
name (`re.match`). AutoTP writes one exact pattern a parameter, `^re.escape(name)$`, so a table of a
large model has ten thousand patterns that each match one name. Those are kept in a dictionary and
never compiled; only the others are tried one after the other. A look-up gives the entries in the
order of the table, whichever way they were found.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

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


@dataclass(frozen=True, slots=True)
class BoundedPattern:
    """A regular expression that comes from a file, with the ways in which it can repeat.

    A backtracking matcher may try every way to share a name out among the repeats, so the number of
    ways is bounded: repeats are of plain characters, not of other repeats or of alternatives, and
    the product of how often each can repeat in a name is no more than :data:`MOST_WAYS`.
    """

    expression: re.Pattern[str]
    repeats: tuple[int, ...]
    """How often each repeat can repeat at most; 0 where the name alone bounds it."""
    file: str
    """Where it is from, for messages."""

    def match(self, name: str) -> bool:
        """Whether it matches from the start of a name.

        Raises
        ------
        LayoutError
            When that could take too long.
        """
        ways = 1
        for most in self.repeats:
            ways *= 1 + (min(most, len(name)) if most else len(name))
        if ways > MOST_WAYS:
            raise _unbounded(self.expression.pattern, self.file, f"a name of {len(name)} letters")
        return self.expression.match(name) is not None


def compile_pattern(pattern: str, file: str) -> re.Pattern[str]:
    """A pattern of the user as a regular expression.

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


def bounded_pattern(pattern: str, file: str) -> BoundedPattern:
    """A pattern of the checkpoint, which anybody may have written.

    Raises
    ------
    LayoutError
        When it is no regular expression, or could take forever.
    """
    compiled = compile_pattern(pattern, file)
    return BoundedPattern(compiled, tuple(_repeats(_PARSER.parse(pattern), pattern, file)), file)


MOST_WAYS = 300_000_000
"""Ways to share a name out among the repeats of a pattern; trying all takes a few seconds."""

_PARSER: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_PLAIN = frozenset(("LITERAL", "NOT_LITERAL", "ANY", "IN", "CATEGORY", "AT"))
_INSIDE = frozenset(("SUBPATTERN", "ASSERT", "ASSERT_NOT"))
_REPEATS = frozenset(("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"))


def _repeats(parsed: Any, pattern: str, file: str) -> Iterator[int]:
    """How often each repeat of a parsed pattern can repeat; what could take forever is refused."""
    for operator, argument in parsed:
        kind = str(operator)
        if kind in _PLAIN:
            continue
        if kind in _REPEATS:
            _, most, inner = argument
            plain = all(str(inside) in _PLAIN for inside, _ in inner)
            if plain:
                yield 0 if most is _PARSER.MAXREPEAT else int(most)
            elif most == 1:
                yield 1
                yield from _repeats(inner, pattern, file)
            else:
                raise _unbounded(pattern, file, "a repeat of something that varies")
        elif kind in _INSIDE:
            yield from _repeats(argument[-1], pattern, file)
        elif kind == "BRANCH":
            yield len(argument[1])
            for one in argument[1]:
                yield from _repeats(one, pattern, file)
        else:
            raise _unbounded(pattern, file, kind.lower().replace("_", " "))


def _unbounded(pattern: str, file: str, found: str) -> LayoutError:
    return LayoutError(
        "a pattern could take forever to match",
        file=file,
        expected="repeats of plain characters, and few of them",
        found=f"{found} in {quoted(pattern)[:200]}",
        next_step="state the layout with --layout FILE, in patterns without nested repeats",
    )


@dataclass(frozen=True, slots=True)
class PatternTable(Generic[Entry]):
    """Entries by pattern, in an order that counts.

    Examples
    --------
    >>> table = PatternTable.of([("^a$", 1), ("a|b", 2), ("^a$", 3)], "a file")
    >>> table.matching("a"), table.matching("bb"), list(table.unmatched({"b"}))
    ([1, 2, 3], [2], [('^a$', 1), ('^a$', 3)])
    """

    texts: tuple[str, ...] = ()
    """The patterns as written."""
    entries: tuple[Entry, ...] = ()
    """What each stands for."""
    _literal: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    _general: tuple[tuple[int, BoundedPattern], ...] = field(default=(), repr=False)

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
                general.append((number, bounded_pattern(text, file)))
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
