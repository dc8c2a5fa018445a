"""Writes a tree of inert values as the pickle that ``torch.save`` would write.

Theory. A pickle is emitted by hand, opcode by opcode, in protocol 2 and in the order and with the
memo of CPython's own pickler, so that torch, its ``weights_only`` unpickler and every other reader
of such files meets what it knows. Values that were read from another archive are emitted as the
program that they stand for. Containers that occur twice are emitted once and referred to, so
sharing and cycles survive; equal texts are emitted once. Equal trees give equal bytes: members of
sets, which have no order, are sorted.

A qualified name with a dot (a nested class) exists from protocol 4 on only; as in CPython, protocol
2 writes ``getattr`` of the outer class and the inner name.
"""

from __future__ import annotations

from collections import OrderedDict

from reshard.formats.dtypes import DType
from reshard.formats.torch_archive.emission import (
    Act,
    Emission,
    Storages,
    emit_code,
    exactly,
    item_acts,
    pair_acts,
    python2_name,
    save,
    save_made,
)
from reshard.formats.torch_archive.object_savers import OBJECT_SAVERS
from reshard.formats.torch_archive.scalar_codes import float_code, int_code, text_code
from reshard.formats.torch_archive.tensors import NewTensor, StorageRecord
from reshard.formats.torch_archive.values import DefaultDict, Global

_GETATTR = Global("builtins", "getattr")
_ORDERED_DICT = Global("collections", "OrderedDict")


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
        The tree holds a value that cannot be written.
    """
    return Emission(storages, _SAVERS).run(save, root)


# -------------------------------------------------------------------------------- numbers, text


def _save_none(out: Emission, _value: object) -> None:
    out.emit(b"N")


def _save_bool(out: Emission, value: object) -> None:
    out.emit(b"\x88" if value else b"\x89")


def _save_int(out: Emission, value: object) -> None:
    out.emit(int_code(exactly(int, value)))


def _save_float(out: Emission, value: object) -> None:
    out.emit(float_code(exactly(float, value)))


def _save_complex(out: Emission, value: object) -> None:
    number = exactly(complex, value)
    save_made(out, value, Global("builtins", "complex"), (number.real, number.imag))


def _save_text(out: Emission, value: object) -> None:
    text = exactly(str, value)
    if not out.recall(text):
        out.emit(text_code(text))
        out.memoise(text)


def _save_bytes(out: Emission, value: object) -> None:
    raw = exactly(bytes, value)
    if out.recall(raw):
        return
    function = Global("_codecs", "encode") if raw else Global("builtins", "bytes")
    args = (raw.decode("latin1"), "latin1") if raw else ()
    out.then((save, function), (save, out.keep(args)), (emit_code, b"R"), (_memoise_value, value))


def _memoise_value(out: Emission, value: object) -> None:
    """Put bytes or a global into the memo, by value."""
    out.memoise(value)


def _save_bytearray(out: Emission, value: object) -> None:
    raw = exactly(bytearray, value)
    args = (raw.decode("latin1"), "latin-1") if raw else ()
    save_made(out, value, Global("builtins", "bytearray"), args)


def _save_global(out: Emission, value: object) -> None:
    named = exactly(Global, value)
    if out.recall(named):
        return
    outer, dot, inner = named.name.rpartition(".")
    if dot:
        args = out.keep((Global(named.module, outer), inner))
        out.then((save, _GETATTR), (save, args), (emit_code, b"R"), (_memoise_value, named))
    else:
        module, name = python2_name(named.module, named.name)
        out.emit(f"c{module}\n{name}\n".encode())
        out.memoise(named)


def _save_dtype(out: Emission, value: object) -> None:
    _save_global(out, Global("torch", exactly(DType, value).name))


# -------------------------------------------------------------------------------- containers


def _save_tuple(out: Emission, value: object) -> None:
    items: tuple[object, ...] = exactly(tuple, value)
    if not items:
        out.emit(b")")
    elif not out.recall(id(value)):
        if len(items) > 3:
            out.emit(b"(")
        out.then(*((save, item) for item in items), (_close_tuple, value))


def _close_tuple(out: Emission, value: object) -> None:
    count = len(exactly(tuple, value))
    if out.knows(id(value)):
        # A list inside holds this tuple and has emitted it: drop these items for that one.
        out.emit(b"1" if count > 3 else b"0" * count)
        out.recall(id(value))
    else:
        out.emit(b"t" if count > 3 else b"\x85\x86\x87"[count - 1 : count])
        out.memoise(id(value))


def _save_list(out: Emission, value: object) -> None:
    if not out.recall(id(value)):
        out.emit(b"]")
        out.memoise(id(value))
        out.then(*item_acts(exactly(list, value)))


def _save_dict(out: Emission, value: object) -> None:
    if not out.recall(id(value)):
        out.emit(b"}")
        out.memoise(id(value))
        out.then(*pair_acts(list(exactly(dict, value).items())))


def _save_ordered_dict(out: Emission, value: object) -> None:
    if out.recall(id(value)):
        return
    pairs: OrderedDict[object, object] = exactly(OrderedDict, value)
    attributes = vars(pairs)
    _save_global(out, _ORDERED_DICT)
    out.emit(b")R")
    out.memoise(id(value))
    state: list[tuple[Act, object]] = []
    if attributes:
        state = [(save, out.keep(dict(attributes))), (emit_code, b"b")]
    out.then(*pair_acts(list(pairs.items())), *state)


def _save_default_dict(out: Emission, value: object) -> None:
    made = exactly(DefaultDict, value)
    factory = made.default_factory
    args = () if factory is None else (factory,)
    pairs = pair_acts(list(made.items()))
    save_made(out, value, Global("collections", "defaultdict"), args, pairs)


def _save_set(out: Emission, value: object) -> None:
    _save_members(out, value, Global("builtins", "set"), exactly(set, value))


def _save_frozenset(out: Emission, value: object) -> None:
    _save_members(out, value, Global("builtins", "frozenset"), exactly(frozenset, value))


def _save_members(
    out: Emission, value: object, function: Global, members: set[object] | frozenset[object]
) -> None:
    if not out.recall(id(value)):
        order = sorted(members, key=lambda member: _pickled(member, out.pickles))
        save_made(out, value, function, (order,))


class _NoPlace:
    """Stands in for storages where only an order of values is wanted."""

    def place(self, storage: NewTensor | StorageRecord) -> tuple[Global, str, str, int]:
        key = storage.key if isinstance(storage, StorageRecord) else repr(storage.label)
        return Global("torch.storage", "UntypedStorage"), key, "cpu", 0


def in_order(members: set[object] | frozenset[object]) -> list[bytes]:
    """Return the pickles of the members of a set, sorted."""
    known: dict[int, bytes] = {}
    return sorted(_pickled(member, known) for member in members)


def _pickled(member: object, known: dict[int, bytes]) -> bytes:
    """Return the pickle of a member of a set, which depends on its value alone."""
    found = known.get(id(member))
    if found is None:
        found = known[id(member)] = Emission(_NoPlace(), _SAVERS, known).run(save, member)
    return found


_SAVERS: dict[type, Act] = {
    **OBJECT_SAVERS,
    type(None): _save_none,
    bool: _save_bool,
    int: _save_int,
    float: _save_float,
    complex: _save_complex,
    str: _save_text,
    bytes: _save_bytes,
    bytearray: _save_bytearray,
    tuple: _save_tuple,
    list: _save_list,
    dict: _save_dict,
    set: _save_set,
    frozenset: _save_frozenset,
    OrderedDict: _save_ordered_dict,
    DefaultDict: _save_default_dict,
    Global: _save_global,
    DType: _save_dtype,
}
