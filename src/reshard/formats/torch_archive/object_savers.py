"""How torch's values, tensors and records are emitted.

Theory. Each is a call with its arguments, as :mod:`.calls`, :mod:`.rebuild` and
:class:`~.construction.Construction` read it; a record adds what was done to the object afterwards.
"""

from __future__ import annotations

from reshard.formats.torch_archive.emission import (
    Act,
    Call,
    Emission,
    Persistent,
    emit_code,
    exactly,
    item_acts,
    memoise_made,
    pair_acts,
    save,
    save_made,
)
from reshard.formats.torch_archive.tensor_calls import new_call, record_call, storage_id
from reshard.formats.torch_archive.tensors import NewTensor, StorageRecord, TensorRecord
from reshard.formats.torch_archive.values import Device, Global, ObjectRecord, Size, Step


def _save_size(out: Emission, value: object) -> None:
    save_made(out, value, Global("torch", "Size"), (tuple(exactly(Size, value)),))


def _save_device(out: Emission, value: object) -> None:
    device = exactly(Device, value)
    args = (device.type,) if device.index is None else (device.type, device.index)
    save_made(out, value, Global("torch", "device"), args)


def _save_slice(out: Emission, value: object) -> None:
    cut = exactly(slice, value)
    save_made(out, value, Global("builtins", "slice"), (cut.start, cut.stop, cut.step))


def _save_range(out: Emission, value: object) -> None:
    numbers = exactly(range, value)
    args = (numbers.start, numbers.stop, numbers.step)
    save_made(out, value, Global("builtins", "range"), args)


def _save_call(out: Emission, value: object) -> None:
    call = exactly(Call, value)
    save_made(out, value, call.function, call.args)


def _save_persistent(out: Emission, value: object) -> None:
    out.then((save, exactly(Persistent, value).identity), (emit_code, b"Q"))


def _save_storage(out: Emission, value: object) -> None:
    save(out, out.keep(storage_id(out.storages, exactly(StorageRecord, value))))


def _save_tensor_record(out: Emission, value: object) -> None:
    if not out.recall(id(value)):
        call = record_call(exactly(TensorRecord, value), out.storages)
        save_made(out, value, call.function, call.args)


def _save_new_tensor(out: Emission, value: object) -> None:
    if not out.recall(id(value)):
        call = new_call(exactly(NewTensor, value), out.storages)
        save_made(out, value, call.function, call.args)


def _save_record(out: Emission, value: object) -> None:
    if out.recall(id(value)):
        return
    record = exactly(ObjectRecord, value)
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
    out.then(*head, (emit_code, opcode), (memoise_made, value), *steps)


def _step_acts(step: Step) -> list[tuple[Act, object]]:
    if step.kind == "state":
        return [(save, step.payload), (emit_code, b"b")]
    items = exactly(list, step.payload)
    if step.kind == "dict":
        return pair_acts(items)
    if step.kind == "set":
        return item_acts(items, b"", b"\x90")
    return item_acts(items)


OBJECT_SAVERS: dict[type, Act] = {
    slice: _save_slice,
    range: _save_range,
    Size: _save_size,
    Device: _save_device,
    StorageRecord: _save_storage,
    TensorRecord: _save_tensor_record,
    NewTensor: _save_new_tensor,
    Call: _save_call,
    Persistent: _save_persistent,
    ObjectRecord: _save_record,
}
"""What emits a value, by its type."""
