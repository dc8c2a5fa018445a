"""Plain values as bytes and back, exactly: what is no tensor, and what ranks tell each other.

Theory. JSON, in which everything that it would change is written as a list with a tag first: a
tuple and a list stay what they were, and keys need not be texts. Floats are exact (``repr`` gives
them back), infinities and NaN are JSON's extensions of them in Python.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from reshard.errors import UnsupportedError


def dumped(value: object, where: str) -> bytes:
    """Return a plain value as bytes.

    Raises
    ------
    UnsupportedError
        When there is something else in it than scalars, texts, lists, tuples and mappings.

    Examples
    --------
    >>> loaded(dumped({"betas": (0.9, 0.999), 3: [None, True]}, "it"))
    {'betas': (0.9, 0.999), 3: [None, True]}
    """
    return json.dumps(_tagged(value, where), separators=(",", ":")).encode()


def loaded(data: bytes) -> object:
    """Return the value that :func:`dumped` wrote."""
    return _untagged(json.loads(data))


def _tagged(value: object, where: str) -> object:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (list, tuple)):
        tag = "t" if isinstance(value, tuple) else "l"
        return [tag, *[_tagged(item, f"{where}[{i}]") for i, item in enumerate(value)]]
    if isinstance(value, Mapping):
        pairs = value.items()
        return ["d", *[[_tagged(k, where), _tagged(v, f"{where}[{k!r}]")] for k, v in pairs]]
    raise UnsupportedError(
        f"a value that is no tensor is not plain: {where}",
        expected="scalars, texts, lists, tuples and dictionaries",
        found=type(value).__name__,
        next_step="leave it out of the state, or turn it into plain values",
    )


def _untagged(value: object) -> object:
    if not isinstance(value, list):
        return value
    tag, *items = value
    if tag == "d":
        return {_untagged(k): _untagged(v) for k, v in items}
    made = [_untagged(item) for item in items]
    return tuple(made) if tag == "t" else made
