"""The opcodes of a pickle while it is being written: output, memo and pending work.

Theory. The work is a stack of pending *acts* instead of recursion, so depth costs nothing. An act
is a function with its argument; what emits a container pushes its parts and the closing opcode. The
memo is keyed by value for what is equal when it looks equal (texts, bytes, globals) and by ``id``
for objects.
"""

from __future__ import annotations

import _compat_pickle
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol

from reshard.formats.torch_archive.tensors import NewTensor, StorageRecord
from reshard.formats.torch_archive.values import Global

Act = Callable[["Emission", object], None]


class Storages(Protocol):
    """Gives each storage its place in the archive that is being written."""

    def place(self, storage: NewTensor | StorageRecord) -> tuple[Global, str, str, int]:
        """Return ``(class, key, location, numel)`` of a storage."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call that exists for the time of emission only: ``function(*args)``."""

    function: Global
    args: tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A persistent id."""

    identity: tuple[object, ...]


class Emission:
    """One pickle in the making.

    Parameters
    ----------
    storages
        Where storages go.
    """

    __slots__ = ("_kept", "_memo", "_out", "_pending", "storages")

    def __init__(self, storages: Storages) -> None:
        self.storages = storages
        self._out: list[bytes] = [b"\x80\x02"]
        self._memo: dict[Hashable, int] = {}
        self._pending: list[tuple[Act, object]] = []
        self._kept: list[object] = []

    def run(self, act: Act, value: object) -> bytes:
        """Do an act and all that it asks for; return the pickle."""
        self._pending.append((act, value))
        while self._pending:
            act, value = self._pending.pop()
            act(self, value)
        self.emit(b".")
        return b"".join(self._out)

    def then(self, *acts: tuple[Act, object]) -> None:
        """Do these acts next, in this order."""
        self._pending.extend(reversed(acts))

    def emit(self, code: bytes) -> None:
        """Emit opcodes."""
        self._out.append(code)

    def keep(self, value: object) -> object:
        """Return a value that was made for emission, kept alive because the memo goes by ``id``."""
        self._kept.append(value)
        return value

    def knows(self, key: Hashable) -> bool:
        """Return whether the memo has something under ``key``."""
        return key in self._memo

    def recall(self, key: Hashable) -> bool:
        """Emit a reference to what the memo has under ``key``; return whether it has anything."""
        index = self._memo.get(key)
        if index is None:
            return False
        self.emit(b"h" + bytes((index,)) if index < 256 else b"j" + index.to_bytes(4, "little"))
        return True

    def memoise(self, key: Hashable) -> None:
        """Put what was emitted last into the memo under ``key``."""
        index = self._memo[key] = len(self._memo)
        self.emit(b"q" + bytes((index,)) if index < 256 else b"r" + index.to_bytes(4, "little"))


def python2_name(module: str, name: str) -> tuple[str, str]:
    """Return the Python 2 spelling of a global, which protocol 2 is read by."""
    names: Mapping[tuple[str, str], tuple[str, str]] = _compat_pickle.REVERSE_NAME_MAPPING
    renamed = names.get((module, name))
    if renamed is not None:
        return renamed
    return _compat_pickle.REVERSE_IMPORT_MAPPING.get(module, module), name
