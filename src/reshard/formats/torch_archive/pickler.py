"""Writes a tree of inert values as the pickle that ``torch.save`` would write.

Theory. The standard library's pickler, written in Python, does the work in protocol 2, so torch,
its ``weights_only`` unpickler and every other reader of such files meets what it knows: opcodes,
batches, the memo, recursive tuples. What is added here is a table of what the values of a tree
stand for: a value that was read from another archive is written as the program that made it. A
value of any other type is refused; no object is ever asked how it wants to be pickled.

Containers that occur twice are written once and referred to, so sharing and cycles survive; equal
texts, bytes and globals are written once. Equal trees give equal bytes: members of sets, which have
no order, are sorted.

A qualified name with a dot (a nested class) exists from protocol 4 on only; as in CPython, protocol
2 writes ``getattr`` of the outer class and the inner name.

Source: ``Lib/pickle.py`` of CPython 3.10 to 3.14, of which nothing is used whose signature differs
between them.
"""

from __future__ import annotations

import _compat_pickle
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.errors import UsageError
from reshard.formats.dtypes import DType
from reshard.formats.torch_archive.tensor_calls import (
    Call,
    Persistent,
    Storages,
    new_call,
    record_call,
    storage_id,
)
from reshard.formats.torch_archive.tensors import NewTensor, StorageRecord, TensorRecord
from reshard.formats.torch_archive.values import (
    DefaultDict,
    Device,
    Global,
    ObjectRecord,
    Size,
    short_repr,
)

if TYPE_CHECKING:
    # The type stubs know the public pickler only, which has no table that could be replaced.
    _PythonPickler = Any
else:
    _PythonPickler = pickle._Pickler  # noqa: SLF001 - the C one takes no savers of one's own

Value = TypeVar("Value", bound=Hashable)

_BATCH = 1000
"""Items that one opcode stores, as CPython does."""


def dump(root: object, storages: Storages) -> bytes:
    """Return the pickle of a tree.

    Parameters
    ----------
    root
        The tree.
    storages
        Where its storages go.

    Raises
    ------
    UsageError
        The tree holds a value that cannot be written, or is nested too deep.
    """
    return _pickled(root, storages, {})


def in_order(members: set[object] | frozenset[object]) -> list[bytes]:
    """Return the pickles of the members of a set, sorted."""
    known: dict[int, bytes] = {}
    return sorted(_member_key(member, known) for member in members)


def _pickled(root: object, storages: Storages, members: dict[int, bytes]) -> bytes:
    out = io.BytesIO()
    try:
        _TreePickler(out, storages, members).dump(root)
    except RecursionError as error:
        raise UsageError("a value is nested too deep to be written to a torch archive") from error
    return out.getvalue()


def _member_key(member: object, known: dict[int, bytes]) -> bytes:
    """Return the pickle of a member of a set, which depends on its value alone."""
    found = known.get(id(member))
    if found is None:
        found = known[id(member)] = _pickled(member, _NoPlace(), known)
    return found


class _NoPlace:
    """Stands in for storages where only an order of values is wanted."""

    def place(self, storage: NewTensor | StorageRecord) -> tuple[Global, str, str, int]:
        key = storage.key if isinstance(storage, StorageRecord) else repr(storage.label)
        return Global("torch.storage", "UntypedStorage"), key, "cpu", 0


class _TreePickler(_PythonPickler):  # type: ignore[misc]
    """The standard pickler with a table of its own, and nothing but the table.

    Parameters
    ----------
    file
        Where the pickle goes.
    storages
        Where storages go.
    members
        Pickles of members of sets by ``id``, which put the members in order; each is made once.
    """

    dispatch: Mapping[type, Callable[[_TreePickler, Any], None]]

    def __init__(self, file: io.BytesIO, storages: Storages, members: dict[int, bytes]) -> None:
        super().__init__(file, 2)
        self.storages = storages
        self.members = members
        self._first: dict[tuple[type, Hashable], Hashable] = {}

    def persistent_id(self, value: object) -> object:
        """Return what names a storage."""
        return value.identity if isinstance(value, Persistent) else None

    def save(self, value: object, save_persistent_id: bool = True) -> None:  # noqa: FBT001, FBT002 - as in the base
        """Write a value, or a reference to it when it has been written before."""
        if type(value) not in self.dispatch:
            if not isinstance(value, ObjectRecord):
                raise UsageError(
                    "a value cannot be written to a torch archive",
                    found=f"a {type(value).__name__}: {short_repr(value)}",
                )
            if id(value) not in self.memo:
                _save_record(self, value)
                return
        super().save(value, save_persistent_id)

    def is_known(self, value: Value) -> tuple[Value, bool]:
        """Return the first value that is equal, and whether a reference to it has been written."""
        first: Any = self._first.setdefault((type(value), value), value)
        if id(first) not in self.memo:
            return first, False
        self.write(self.get(self.memo[id(first)][0]))
        return first, True

    def make(self, value: object, function: object, *args: object) -> None:
        """Write the call that makes a value."""
        self.save(function)
        self.save(args)
        self.write(b"R")
        self.made(value)

    def made(self, value: object) -> None:
        """Remember an object that a call has just made."""
        if id(value) in self.memo:
            # Its arguments hold it and have written it: drop this one for that.
            self.write(b"0" + self.get(self.memo[id(value)][0]))
        else:
            self.memoize(value)

    def store(
        self, entries: Sequence[tuple[object, ...]], many: bytes, one: bytes | None = None
    ) -> None:
        """Store items, or keys with their values, in what has been written last."""
        for start in range(0, len(entries), _BATCH):
            batch = entries[start : start + _BATCH]
            alone = one if len(batch) == 1 else None
            self.write(b"" if alone else b"(")
            for entry in batch:
                for part in entry:
                    self.save(part)
            self.write(alone or many)


def _save_text(out: _TreePickler, value: str) -> None:
    text, known = out.is_known(value)
    if not known:
        _PythonPickler.save_str(out, text)


def _save_bytes(out: _TreePickler, value: bytes) -> None:
    raw, known = out.is_known(value)
    if known:
        return
    if raw:
        out.make(raw, Global("_codecs", "encode"), raw.decode("latin1"), "latin1")
    else:
        out.make(raw, Global("builtins", "bytes"))


def _save_bytearray(out: _TreePickler, value: bytearray) -> None:
    args = (value.decode("latin1"), "latin-1") if value else ()
    out.make(value, Global("builtins", "bytearray"), *args)


def _save_global(out: _TreePickler, value: Global) -> None:
    named, known = out.is_known(value)
    if known:
        return
    outer, dot, inner = named.name.rpartition(".")
    if dot:
        out.make(named, Global("builtins", "getattr"), Global(named.module, outer), inner)
    else:
        module, name = python2_name(named.module, named.name)
        out.write(f"c{module}\n{name}\n".encode())
        out.memoize(named)


def python2_name(module: str, name: str) -> tuple[str, str]:
    """Return the Python 2 spelling of a global, which protocol 2 is read by."""
    names: Mapping[tuple[str, str], tuple[str, str]] = _compat_pickle.REVERSE_NAME_MAPPING
    renamed = names.get((module, name))
    if renamed is not None:
        return renamed
    return _compat_pickle.REVERSE_IMPORT_MAPPING.get(module, module), name


def _save_ordered_dict(out: _TreePickler, value: OrderedDict[object, object]) -> None:
    out.make(value, Global("collections", "OrderedDict"))
    out.store(list(value.items()), b"u", b"s")
    if vars(value):
        out.save(dict(vars(value)))
        out.write(b"b")


def _save_default_dict(out: _TreePickler, value: DefaultDict) -> None:
    args = () if value.default_factory is None else (value.default_factory,)
    out.make(value, Global("collections", "defaultdict"), *args)
    out.store(list(value.items()), b"u", b"s")


def _save_members(out: _TreePickler, value: set[object] | frozenset[object]) -> None:
    order = sorted(value, key=lambda member: _member_key(member, out.members))
    out.make(value, Global("builtins", type(value).__name__), order)


def _save_device(out: _TreePickler, value: Device) -> None:
    args = (value.type,) if value.index is None else (value.type, value.index)
    out.make(value, Global("torch", "device"), *args)


def _save_cut(out: _TreePickler, value: slice | range) -> None:
    out.make(value, Global("builtins", type(value).__name__), value.start, value.stop, value.step)


def _save_call(out: _TreePickler, value: Call) -> None:
    out.make(value, value.function, *value.args)


def _save_tensor(out: _TreePickler, value: TensorRecord | NewTensor) -> None:
    if isinstance(value, TensorRecord):
        call = record_call(value, out.storages)
    else:
        call = new_call(value, out.storages)
    out.make(value, call.function, *call.args)


def _save_record(out: _TreePickler, record: ObjectRecord) -> None:
    if record.form == "obj":
        out.write(b"(")
    out.save(record.callable)
    if record.form == "obj":
        for argument in record.args:
            out.save(argument)
        out.write(b"o")
    else:
        out.save(record.args)
        if record.kwargs is not None:
            out.save(dict(record.kwargs))
            out.write(b"\x92")
        else:
            out.write(b"R" if record.form == "reduce" else b"\x81")
    out.made(record)
    for step in record.steps:
        _save_step(out, step.kind, step.payload)


def _save_step(out: _TreePickler, kind: str, payload: Any) -> None:
    """Write what is done to an object after it has been made."""
    if kind == "state":
        out.save(payload)
        out.write(b"b")
    elif kind == "dict":
        out.store(payload, b"u", b"s")
    else:
        items = [(item,) for item in payload]
        out.store(items, b"\x90" if kind == "set" else b"e", None if kind == "set" else b"a")


_KEPT = (type(None), bool, int, float, tuple, list, dict)
"""Types that the standard pickler writes as it always does."""

_TreePickler.dispatch = {
    **{kind: _PythonPickler.dispatch[kind] for kind in _KEPT},
    str: _save_text,
    bytes: _save_bytes,
    bytearray: _save_bytearray,
    complex: lambda out, value: out.make(
        value, Global("builtins", "complex"), value.real, value.imag
    ),
    slice: _save_cut,
    range: _save_cut,
    set: _save_members,
    frozenset: _save_members,
    OrderedDict: _save_ordered_dict,
    DefaultDict: _save_default_dict,
    Global: _save_global,
    DType: lambda out, value: _save_global(out, Global("torch", value.name)),
    Size: lambda out, value: out.make(value, Global("torch", "Size"), tuple(value)),
    Device: _save_device,
    Call: _save_call,
    # Written by the hook for persistent ids, before the table is asked.
    Persistent: lambda out, value: out.save_pers(value.identity),
    StorageRecord: lambda out, value: out.save(storage_id(out.storages, value)),
    TensorRecord: _save_tensor,
    NewTensor: _save_tensor,
}
