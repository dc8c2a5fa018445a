"""Patterns of names, with captures: ``model.layers.{i}.mlp.up_proj.weight``.

Theory. A capture stands for one part of a name without a dot (``{i}``), for a number (``{i:#}``),
or for any parts (``{rest:*}``). What it met in a name of one side is put into the pattern of the
other side.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from reshard.errors import UsageError

_CAPTURE = re.compile(r"\{([A-Za-z_]\w*)(:[*#])?\}")
_MEETS = {"": "[^.]+", ":*": ".+", ":#": "[0-9]+"}


@dataclass(frozen=True, slots=True)
class Pattern:
    """A name with captures.

    Examples
    --------
    >>> gate = Pattern("layers.{i}.gate.{rest:*}")
    >>> gate.match("layers.12.gate.proj.weight")
    {'i': '12', 'rest': 'proj.weight'}
    >>> Pattern("decoder.{i}.{rest}").filled({"i": "12", "rest": "proj.weight"})
    'decoder.12.proj.weight'
    """

    text: str
    """As it is written in the file of rules."""

    @property
    def captures(self) -> frozenset[str]:
        """Names of its captures."""
        return frozenset(name for name, _ in _CAPTURE.findall(self.text))

    def match(self, name: str) -> dict[str, str] | None:
        """Return what each capture meets in a name, None when the name is another one."""
        found = _compiled(self.text).fullmatch(name)
        return None if found is None else found.groupdict()

    def filled(self, captures: Mapping[str, str]) -> str:
        """Return the name with its captures filled in."""
        return _CAPTURE.sub(lambda found: captures[found[1]], self.text)


@lru_cache(maxsize=1024)
def _compiled(text: str) -> re.Pattern[str]:
    return re.compile("".join(_parts(text)))


def _parts(text: str) -> Iterator[str]:
    """A regular expression that meets each name in linear time: few captures, no nesting."""
    at = 0
    seen: set[str] = set()
    for found in _CAPTURE.finditer(text):
        yield re.escape(text[at : found.start()])
        name = found[1]
        if name in seen:
            yield f"(?P={name})"
        else:
            yield f"(?P<{name}>{_MEETS[found[2] or '']})"
        seen.add(name)
        at = found.end()
    rest = text[at:]
    if "{" in rest or "}" in rest:
        raise UsageError(
            "not a pattern of names", expected="captures like {i} or {rest:*}", found=repr(text)
        )
    yield re.escape(rest)
