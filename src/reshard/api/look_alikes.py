"""Names that some file systems cannot tell apart.

Theory. In a universal folder the name of a parameter is the name of a folder. The file systems of
macOS and Windows, and shares of them, take no notice of case, nor of how Unicode spells a letter:
`é` is one character, or `e` and an accent. Two names that differ in nothing else are one folder
there, and one parameter would replace the other. Where a checkpoint is read or written now they may
be well apart, so this is told and not refused.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from reshard.formats.checkpoint import Problem

_SHOWN = 3


def look_alikes(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the names, in groups, that differ only in case or in Unicode's spelling.

    Examples
    --------
    >>> look_alikes(["a.w", "A.W", "b.w"])
    [('a.w', 'A.W')]
    """
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        groups.setdefault(_folded(name), []).append(name)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _folded(name: str) -> str:
    if name.isascii():
        return name.lower()
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", name).casefold())


def look_alike_problems(names: Iterable[str], folder: str) -> Iterator[Problem]:
    """Yield one problem for all such names, if there are any."""
    groups = look_alikes(names)
    if groups:
        yield Problem(
            "names differ only in case or in how Unicode spells them, and are one folder on file "
            f"systems that take no notice of it (macOS, Windows): {_told(groups)}",
            folder,
            next_step="keep universal folders of it on a file system that tells them apart",
        )


def _told(groups: Sequence[Sequence[str]]) -> str:
    shown = "; ".join(" and ".join(map(ascii, group)) for group in groups[:_SHOWN])
    return shown + (f"; and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else "")
