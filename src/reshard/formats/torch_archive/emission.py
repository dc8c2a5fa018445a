"""The opcodes of a pickle while it is being written: output, memo and pending work.

Theory. The work is a stack of pending *acts* instead of recursion, so depth costs nothing. An act
is a function with its argument; what emits a container pushes its parts and the closing opcode. The
memo is keyed by value for what is equal when it looks equal (texts, bytes, globals) and by ``id``
for objects.
"""

from __future__ import annotations

import _compat_pickle
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from reshard.errors import InternalError, UsageError
from reshard.formats.torch_archive.tensors import NewTensor, StorageRecord
from reshard.formats.torch_archive.values import Global, ObjectRecord, short_repr

_BATCH = 1000
"""Items that one opcode stores, as CPython does."""

Kind = TypeVar("Kind")

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
    savers
        What emits a value, by its exact type; that of :class:`ObjectRecord` for all records.
    pickles
        Pickles of members of sets by ``id``, which put the members in order; each is made once.
    """

    __slots__ = ("_kept", "_memo", "_out", "_pending", "pickles", "savers", "storages")

    def __init__(
        self,
        storages: Storages,
        savers: Mapping[type, Act],
        pickles: dict[int, bytes] | None = None,
    ) -> None:
        self.storages = storages
        self.savers = savers
        self.pickles = {} if pickles is None else pickles
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


def save(out: Emission, value: object) -> None:
    """Emit a value, or a reference to it when it has been emitted before."""
    saver = out.savers.get(type(value))
    if saver is None:
        saver = out.savers[ObjectRecord] if isinstance(value, ObjectRecord) else _refuse
    saver(out, value)


def _refuse(_out: Emission, value: object) -> None:
    raise UsageError(
        "a value cannot be written to a torch archive",
        found=f"a {type(value).__name__}: {short_repr(value)}",
    )


def exactly(kind: type[Kind], value: object) -> Kind:
    """Return a value that the table of savers has found to be of a kind."""
    if isinstance(value, kind):
        return value
    raise InternalError(f"a {type(value).__name__} where a {kind.__name__} was dispatched")


def emit_code(out: Emission, code: object) -> None:
    """Emit opcodes, as an act."""
    out.emit(exactly(bytes, code))


def save_made(
    out: Emission,
    value: object,
    function: object,
    args: tuple[object, ...],
    after: Sequence[tuple[Act, object]] = (),
) -> None:
    """Emit the call that makes ``value``, and what is done to it afterwards."""
    if not out.recall(id(value)):
        out.then(
            (save, out.keep(function)),
            (save, out.keep(args)),
            (emit_code, b"R"),
            (memoise_made, value),
            *after,
        )


def memoise_made(out: Emission, value: object) -> None:
    """Put an object that a call has just made into the memo."""
    if out.knows(id(value)):
        # Its arguments hold it and have emitted it: drop this one for that.
        out.emit(b"0")
        out.recall(id(value))
    else:
        out.memoise(id(value))


def item_acts(
    items: Sequence[object], one: bytes = b"a", many: bytes = b"e"
) -> list[tuple[Act, object]]:
    """Return the acts that append items to what has been emitted last."""
    return _batches([((save, item),) for item in items], one, many)


def pair_acts(pairs: Sequence[tuple[object, object]]) -> list[tuple[Act, object]]:
    """Return the acts that store pairs in what has been emitted last."""
    return _batches([((save, key), (save, value)) for key, value in pairs], b"s", b"u")


def _batches(
    entries: Sequence[tuple[tuple[Act, object], ...]], one: bytes, many: bytes
) -> list[tuple[Act, object]]:
    acts: list[tuple[Act, object]] = []
    for start in range(0, len(entries), _BATCH):
        batch = entries[start : start + _BATCH]
        alone = len(batch) == 1 and bool(one)
        if not alone:
            acts.append((emit_code, b"("))
        for entry in batch:
            acts.extend(entry)
        acts.append((emit_code, one if alone else many))
    return acts
