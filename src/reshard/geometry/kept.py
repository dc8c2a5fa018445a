"""Results that are kept for when the same is asked again, within a bound of bytes.

Theory. The layers of a model ask for the same few compositions hundreds of times, so these are
kept. What they take is bounded in bytes, and not in number: one plan may have millions of rows.
What was asked for longest ago goes first; a result larger than the bound is not kept at all.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

LEAST = 1024
"""Bytes that an entry counts for at least: the objects around its columns."""


class Kept(Generic[Key, Value]):
    """Results by what was asked, of at most so many bytes together.

    Examples
    --------
    >>> kept = Kept(3000)
    >>> for key in "abc":
    ...     kept.keep(key, key.upper(), 0)
    >>> kept.get("a"), kept.get("c")
    (None, 'C')
    """

    __slots__ = ("_entries", "_lock", "_most", "_nbytes")

    def __init__(self, most: int) -> None:
        self._most = most
        self._nbytes = 0
        self._entries: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept, about."""
        return self._nbytes

    def get(self, key: Key) -> Value | None:
        """Return what was kept, None where it is not there."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            self._entries.move_to_end(key)
            return found[0]

    def keep(self, key: Key, value: Value, nbytes: int) -> None:
        """Keep a result of so many bytes; the oldest ones make room for it."""
        size = nbytes + LEAST
        if size > self._most:
            return
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = value, size
            self._nbytes += size
            while self._nbytes > self._most:
                _, (_, gone) = self._entries.popitem(last=False)
                self._nbytes -= gone

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._nbytes = 0
