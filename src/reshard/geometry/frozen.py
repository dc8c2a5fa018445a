"""Frozen values: classes that are set once, in their constructor."""

from __future__ import annotations

from typing import NoReturn


class Frozen:
    """A base whose attributes cannot be assigned; constructors use ``object.__setattr__``.

    >>> Frozen().anything = 1
    Traceback (most recent call last):
        ...
    AttributeError: Frozen is frozen: cannot set anything
    """

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is frozen: cannot set {name}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is frozen: cannot delete {name}")
