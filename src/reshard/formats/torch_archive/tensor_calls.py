"""The calls by which torch rebuilds a tensor, made from records and from new tensors.

Theory. The inverse of :mod:`.rebuild`: from the inside out, a view of a storage, then a parameter
around it, then a Python class and attributes around either. Source: ``torch/_tensor.py``
(``__reduce_ex__``), ``torch/nn/parameter.py``, torch 2.13.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from reshard.formats.dtypes import DType
from reshard.formats.torch_archive.tensors import NewTensor, StorageRecord, TensorRecord
from reshard.formats.torch_archive.values import Global

UNTYPED_STORAGE = Global("torch.storage", "UntypedStorage")


class Storages(Protocol):
    """Gives each storage its place in the archive that is being written."""

    def place(self, storage: NewTensor | StorageRecord) -> tuple[Global, str, str, int]:
        """Return ``(class, key, location, numel)`` of a storage."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call that exists while a pickle is written only: ``function(*args)``."""

    function: Global
    args: tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A persistent id."""

    identity: tuple[object, ...]


_FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
_PARAMETER = Global("torch._utils", "_rebuild_parameter")
_PARAMETER_WITH_STATE = Global("torch._utils", "_rebuild_parameter_with_state")
_TENSOR = Global("torch", "Tensor")


def storage_class(dtype: DType) -> Global:
    """Return the class of storage that torch keeps elements of a dtype in."""
    name = dtype.storage_class
    return UNTYPED_STORAGE if name is None else Global("torch", name)


def storage_id(storages: Storages, storage: NewTensor | StorageRecord) -> Persistent:
    """Return the persistent id of a storage."""
    return Persistent(("storage", *storages.place(storage)))


def record_call(tensor: TensorRecord, storages: Storages) -> Call:
    """Return the call that rebuilds a tensor that was read from an archive."""
    parameter = tensor.parameter
    if parameter is None:
        call = _view_call(tensor, storages)
    else:
        args: tuple[object, ...] = (
            parameter.data,
            parameter.requires_grad,
            _hooks(parameter.hooks),
        )
        call = Call(_PARAMETER, args)
        if parameter.has_state:
            call = Call(_PARAMETER_WITH_STATE, (*args, parameter.state))
    if tensor.subclass is None:
        return call
    form = tensor.subclass
    return Call(_FROM_TYPE, (call.function, form.type, call.args, form.state))


def _view_call(tensor: TensorRecord, storages: Storages) -> Call:
    function = Global("torch._utils", tensor.rebuild)
    args: tuple[object, ...] = (
        storage_id(storages, tensor.storage),
        tensor.storage_offset,
        tensor.shape,
        tensor.strides,
    )
    if tensor.rebuild != "_rebuild_tensor":
        args += (tensor.requires_grad, _hooks(tensor.hooks))
    if tensor.rebuild == "_rebuild_tensor_v3":
        args += (tensor.dtype,)
    if tensor.metadata is not None:
        args += (tensor.metadata,)
    return Call(function, args)


def _hooks(hooks: object) -> object:
    return OrderedDict() if hooks is None else hooks


def new_call(tensor: NewTensor, storages: Storages) -> Call:
    """Return the call that builds a tensor that is to be written."""
    typed = tensor.dtype.storage_class is not None
    args: tuple[object, ...] = (
        storage_id(storages, tensor),
        tensor.storage_offset,
        tuple(tensor.shape),
        tensor.element_strides,
        tensor.requires_grad and not tensor.is_parameter,
        OrderedDict(),
    )
    view = Call(
        Global("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3"),
        args if typed else (*args, tensor.dtype),
    )
    state = dict(tensor.attributes or {})
    if tensor.is_parameter:
        outer: tuple[object, ...] = (view, tensor.requires_grad, OrderedDict())
        return Call(_PARAMETER_WITH_STATE, (*outer, state)) if state else Call(_PARAMETER, outer)
    if state:
        return Call(_FROM_TYPE, (view.function, _TENSOR, view.args, state))
    return view
