"""Showing values of a checkpoint that are not tensors, briefly.

Theory. Hyperparameters and counters are read at a glance or not at all: one line each, numbers as
Python writes them, nested content by its size. The full values are for ``--json`` and for Python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set, Sized

from reshard.cli.units import counted

_LIMIT = 96
_MANY = 64
_PLAIN = (bool, int, float, str, type(None))


def brief(value: object, limit: int = _LIMIT) -> str:
    """Return a value on one line of about `limit` characters.

    Examples
    --------
    >>> brief({"lr": 0.01, "betas": (0.9, 0.95)})
    'lr=0.01, betas=(0.9, 0.95)'
    >>> brief([{"lr": 0.1}, {"lr": 0.2}])
    '[lr=0.1; lr=0.2]'
    >>> brief(list(range(1000)), limit=20)
    '1,000 values'
    """
    whole = _one_line(value)
    return whole if len(whole) <= limit else _size(value, whole, limit)


def plain_value(value: object) -> object:
    """Return a number as JSON can hold it; NaN and infinities become text.

    Examples
    --------
    >>> plain_value(float("nan")), plain_value(3)
    ('nan', 3)
    """
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _one_line(value: object, depth: int = 0) -> str:
    if isinstance(value, str):
        return value if depth == 0 else repr(value)
    if isinstance(value, _PLAIN):
        return repr(value)
    if depth > 2 or (isinstance(value, Sized) and len(value) > _MANY):
        return _size(value, "", _LIMIT)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_one_line(entry, depth + 1)}" for key, entry in value.items())
    if isinstance(value, tuple):
        return f"({', '.join(_one_line(entry, depth + 1) for entry in value)})"
    if isinstance(value, list):
        apart = "; " if any(isinstance(entry, Mapping) for entry in value) else ", "
        return f"[{apart.join(_one_line(entry, depth + 1) for entry in value)}]"
    return str(value)


def _size(value: object, whole: str, limit: int) -> str:
    if isinstance(value, Mapping):
        names = ", ".join(map(str, value)) if len(value) <= _MANY else ""
        keys = counted(len(value), "key")
        return f"{keys}: {names}" if 0 < len(names) < limit else keys
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray):
        return counted(len(value), "value")
    return f"{whole[:limit]}…" if whole else type(value).__name__
