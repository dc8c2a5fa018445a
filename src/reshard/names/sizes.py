"""Extents of axes, out of the configuration of the model.

Theory. A size is a number, or an expression over the keys of ``config.json``: alternatives divided
by ``|``, each a chain of keys and numbers with ``*`` and ``/``. The first alternative counts whose
keys are all there. One that no alternative gives stays unknown; whether that matters is decided by
the shapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from reshard.errors import UsageError

_TERM = re.compile(r"\s*([A-Za-z_][\w.]*|\d+)\s*([*/]?)")


def known_sizes(sizes: Mapping[str, int | str], config: Mapping[str, object]) -> dict[str, int]:
    """Return the sizes that are known.

    Parameters
    ----------
    sizes
        As a file of rules has them.
    config
        The model's configuration, empty where there is none.

    Examples
    --------
    >>> known_sizes({"d": "head_dim | h / n", "g": 2}, {"h": 64, "n": 4})
    {'d': 16, 'g': 2}
    """
    found = {}
    for axis, size in sizes.items():
        value = size if isinstance(size, int) else _first(size, config, axis)
        if value is not None:
            found[axis] = value
    return found


def _first(text: str, config: Mapping[str, object], axis: str) -> int | None:
    values = (_value(part, config, axis) for part in text.split("|"))
    return next((value for value in values if value is not None), None)


def _value(text: str, config: Mapping[str, object], axis: str) -> int | None:
    value, operator, at = 1, "*", 0
    while operator:
        found = _TERM.match(text, at)
        if found is None or not (found[2] or not text[found.end() :].strip()):
            raise UsageError(
                "not the size of an axis",
                expected="keys of config.json and numbers, with * / and |",
                found=f"{axis} = {text!r}",
            )
        term = int(found[1]) if found[1].isdigit() else _key(found[1], config)
        if term is None:
            return None
        if operator == "/" and (not term or value % term):
            raise UsageError(
                "a size does not divide", found=f"{axis} = {text.strip()!r}: {value} / {term}"
            )
        value = value * term if operator == "*" else value // term
        operator, at = found[2], found.end()
    return value


def _key(path: str, config: Mapping[str, object]) -> int | None:
    value: object = config
    for word in path.split("."):
        value = value.get(word) if isinstance(value, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
