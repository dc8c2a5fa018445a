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

import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

from reshard.errors import InternalError, UsageError
from reshard.formats.dtypes import DType
from reshard.formats.torch_archive.emission import (
    Act,
    Call,
    Emission,
    Persistent,
    Storages,
    python2_name,
)
from reshard.formats.torch_archive.tensor_calls import new_call, record_call, storage_id
from reshard.formats.torch_archive.tensors import NewTensor, StorageRecord, TensorRecord
from reshard.formats.torch_archive.values import (
    DefaultDict,
    Device,
    Global,
    ObjectRecord,
    Size,
    Step,
    short_repr,
)

Kind = TypeVar("Kind")

_BATCH = 1000
"""Items that one opcode stores, as CPython does."""

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
    return Emission(storages).run(save, root)


def save(out: Emission, value: object) -> None:
    """Emit a value, or a reference to it when it has been emitted before."""
    saver = _SAVERS.get(type(value))
    if saver is None:
        saver = _save_record if isinstance(value, ObjectRecord) else _refuse
    saver(out, value)


def _refuse(_out: Emission, value: object) -> None:
    raise UsageError(
        "a value cannot be written to a torch archive",
        found=f"a {type(value).__name__}: {short_repr(value)}",
    )


def _as(kind: type[Kind], value: object) -> Kind:
    """Return a value that the table of savers has found to be of a kind."""
    if isinstance(value, kind):
        return value
    raise InternalError(f"a {type(value).__name__} where a {kind.__name__} was dispatched")


def _emit(out: Emission, code: object) -> None:
    out.emit(_as(bytes, code))


# -------------------------------------------------------------------------------- numbers, text


def _save_none(out: Emission, _value: object) -> None:
    out.emit(b"N")


def _save_bool(out: Emission, value: object) -> None:
    out.emit(b"\x88" if value else b"\x89")


def _save_int(out: Emission, value: object) -> None:
    number = _as(int, value)
    if 0 <= number < 1 << 8:
        out.emit(b"K" + bytes((number,)))
    elif 0 <= number < 1 << 16:
        out.emit(b"M" + number.to_bytes(2, "little"))
    elif -(1 << 31) <= number < 1 << 31:
        out.emit(b"J" + number.to_bytes(4, "little", signed=True))
    else:
        # The fewest bytes that hold the number and its sign.
        bits = (number if number >= 0 else ~number).bit_length()
        raw = number.to_bytes(bits // 8 + 1, "little", signed=True)
        short = len(raw) < 256
        length = bytes((len(raw),)) if short else len(raw).to_bytes(4, "little")
        out.emit((b"\x8a" if short else b"\x8b") + length + raw)


def _save_float(out: Emission, value: object) -> None:
    out.emit(b"G" + struct.pack(">d", value))


def _save_complex(out: Emission, value: object) -> None:
    number = _as(complex, value)
    _save_made(out, value, Global("builtins", "complex"), (number.real, number.imag))


def _save_text(out: Emission, value: object) -> None:
    text = _as(str, value)
    if not out.recall(text):
        raw = text.encode("utf-8", "surrogatepass")
        out.emit(b"X" + len(raw).to_bytes(4, "little") + raw)
        out.memoise(text)


def _save_bytes(out: Emission, value: object) -> None:
    raw = _as(bytes, value)
    if out.recall(raw):
        return
    function = Global("_codecs", "encode") if raw else Global("builtins", "bytes")
    args = (raw.decode("latin1"), "latin1") if raw else ()
    out.then((save, function), (save, out.keep(args)), (_emit, b"R"), (_memoise_value, value))


def _memoise_value(out: Emission, value: object) -> None:
    """Put bytes or a global into the memo, by value."""
    out.memoise(value)


def _save_bytearray(out: Emission, value: object) -> None:
    raw = _as(bytearray, value)
    args = (raw.decode("latin1"), "latin-1") if raw else ()
    _save_made(out, value, Global("builtins", "bytearray"), args)


def _save_global(out: Emission, value: object) -> None:
    named = _as(Global, value)
    if out.recall(named):
        return
    outer, dot, inner = named.name.rpartition(".")
    if dot:
        args = out.keep((Global(named.module, outer), inner))
        out.then((save, _GETATTR), (save, args), (_emit, b"R"), (_memoise_value, named))
    else:
        module, name = python2_name(named.module, named.name)
        out.emit(f"c{module}\n{name}\n".encode())
        out.memoise(named)


def _save_dtype(out: Emission, value: object) -> None:
    _save_global(out, Global("torch", _as(DType, value).name))


# -------------------------------------------------------------------------------- containers


def _save_tuple(out: Emission, value: object) -> None:
    items: tuple[object, ...] = _as(tuple, value)
    if not items:
        out.emit(b")")
    elif not out.recall(id(value)):
        if len(items) > 3:
            out.emit(b"(")
        out.then(*((save, item) for item in items), (_close_tuple, value))


def _close_tuple(out: Emission, value: object) -> None:
    count = len(_as(tuple, value))
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
        out.then(*_item_acts(_as(list, value)))


def _save_dict(out: Emission, value: object) -> None:
    if not out.recall(id(value)):
        out.emit(b"}")
        out.memoise(id(value))
        out.then(*_pair_acts(list(_as(dict, value).items())))


def _item_acts(
    items: Sequence[object], one: bytes = b"a", many: bytes = b"e"
) -> list[tuple[Act, object]]:
    """Return the acts that append items to what has been emitted last."""
    return _batches([((save, item),) for item in items], one, many)


def _pair_acts(pairs: Sequence[tuple[object, object]]) -> list[tuple[Act, object]]:
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
            acts.append((_emit, b"("))
        for entry in batch:
            acts.extend(entry)
        acts.append((_emit, one if alone else many))
    return acts


def _save_ordered_dict(out: Emission, value: object) -> None:
    if out.recall(id(value)):
        return
    pairs: OrderedDict[object, object] = _as(OrderedDict, value)
    attributes = vars(pairs)
    _save_global(out, _ORDERED_DICT)
    out.emit(b")R")
    out.memoise(id(value))
    state: list[tuple[Act, object]] = []
    if attributes:
        state = [(save, out.keep(dict(attributes))), (_emit, b"b")]
    out.then(*_pair_acts(list(pairs.items())), *state)


def _save_default_dict(out: Emission, value: object) -> None:
    made = _as(DefaultDict, value)
    factory = made.default_factory
    args = () if factory is None else (factory,)
    pairs = _pair_acts(list(made.items()))
    _save_made(out, value, Global("collections", "defaultdict"), args, pairs)


def _save_set(out: Emission, value: object) -> None:
    _save_made(out, value, Global("builtins", "set"), (_ordered(_as(set, value)),))


def _save_frozenset(out: Emission, value: object) -> None:
    _save_made(out, value, Global("builtins", "frozenset"), (_ordered(_as(frozenset, value)),))


class _NoPlace:
    """Stands in for storages where only an order of values is wanted."""

    def place(self, storage: NewTensor | StorageRecord) -> tuple[Global, str, str, int]:
        key = storage.key if isinstance(storage, StorageRecord) else repr(storage.label)
        return Global("torch.storage", "UntypedStorage"), key, "cpu", 0


def _ordered(members: set[object] | frozenset[object]) -> list[object]:
    """Return the members of a set in an order that depends on their values alone."""
    return sorted(members, key=lambda member: dump(member, _NoPlace()))


# -------------------------------------------------------------------------------- objects


def _save_made(
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
            (_emit, b"R"),
            (_memoise_made, value),
            *after,
        )


def _memoise_made(out: Emission, value: object) -> None:
    if out.knows(id(value)):
        # Its arguments hold it and have emitted it: drop this one for that.
        out.emit(b"0")
        out.recall(id(value))
    else:
        out.memoise(id(value))


def _save_size(out: Emission, value: object) -> None:
    _save_made(out, value, Global("torch", "Size"), (tuple(_as(Size, value)),))


def _save_device(out: Emission, value: object) -> None:
    device = _as(Device, value)
    args = (device.type,) if device.index is None else (device.type, device.index)
    _save_made(out, value, Global("torch", "device"), args)


def _save_slice(out: Emission, value: object) -> None:
    cut = _as(slice, value)
    _save_made(out, value, Global("builtins", "slice"), (cut.start, cut.stop, cut.step))


def _save_range(out: Emission, value: object) -> None:
    numbers = _as(range, value)
    args = (numbers.start, numbers.stop, numbers.step)
    _save_made(out, value, Global("builtins", "range"), args)


def _save_call(out: Emission, value: object) -> None:
    call = _as(Call, value)
    _save_made(out, value, call.function, call.args)


def _save_persistent(out: Emission, value: object) -> None:
    out.then((save, _as(Persistent, value).identity), (_emit, b"Q"))


def _save_storage(out: Emission, value: object) -> None:
    save(out, out.keep(storage_id(out.storages, _as(StorageRecord, value))))


def _save_tensor_record(out: Emission, value: object) -> None:
    if not out.recall(id(value)):
        call = record_call(_as(TensorRecord, value), out.storages)
        _save_made(out, value, call.function, call.args)


def _save_new_tensor(out: Emission, value: object) -> None:
    if not out.recall(id(value)):
        call = new_call(_as(NewTensor, value), out.storages)
        _save_made(out, value, call.function, call.args)


def _save_record(out: Emission, value: object) -> None:
    if out.recall(id(value)):
        return
    record = _as(ObjectRecord, value)
    head: list[tuple[Act, object]] = [(save, record.callable)]
    if record.form == "obj":
        out.emit(b"(")
        head += [(save, argument) for argument in record.args]
        opcode = b"o"
    else:
        head.append((save, record.args))
        opcode = b"R" if record.form == "reduce" else b"\x81"
        if record.kwargs is not None:
            head.append((save, out.keep(dict(record.kwargs))))
            opcode = b"\x92"
    steps = [act for step in record.steps for act in _step_acts(step)]
    out.then(*head, (_emit, opcode), (_memoise_made, value), *steps)


def _step_acts(step: Step) -> list[tuple[Act, object]]:
    if step.kind == "state":
        return [(save, step.payload), (_emit, b"b")]
    items = _as(list, step.payload)
    if step.kind == "dict":
        return _pair_acts(items)
    if step.kind == "set":
        return _item_acts(items, b"", b"\x90")
    return _item_acts(items)


_SAVERS: dict[type, Act] = {
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
    slice: _save_slice,
    range: _save_range,
    OrderedDict: _save_ordered_dict,
    DefaultDict: _save_default_dict,
    Size: _save_size,
    Device: _save_device,
    Global: _save_global,
    DType: _save_dtype,
    StorageRecord: _save_storage,
    TensorRecord: _save_tensor_record,
    NewTensor: _save_new_tensor,
    Call: _save_call,
    Persistent: _save_persistent,
}
