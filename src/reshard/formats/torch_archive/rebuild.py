"""What torch's rebuild functions mean: strided views of storages, and what is wrapped around them.

Theory. torch pickles a tensor as a call of ``_rebuild_tensor_v2(storage, offset, size, stride,
requires_grad, hooks[, metadata])``, or of ``_v3`` with a dtype when the storage is untyped. A
``Parameter`` is a call around that; Python attributes and subclasses are a call around either,
which holds the inner function and its arguments unevaluated. Each is checked here as a whole,
against the storage, before anyone computes an offset from it. Forms that are not strided views
(sparse, quantised, nested) stay records.

Source: ``torch/_utils.py``, ``torch/_tensor.py``, torch 1.6 to 2.13.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, TypeVar

from reshard.errors import ArchiveError, count_text
from reshard.formats.dtypes import DType
from reshard.formats.torch_archive.tensors import (
    ParameterForm,
    StorageRecord,
    SubclassForm,
    TensorRecord,
    needed_extent,
)
from reshard.formats.torch_archive.values import Global, short_repr

if TYPE_CHECKING:
    from reshard.formats.torch_archive.construction import Construction

Kind = TypeVar("Kind")

UNTYPED_STORAGES = frozenset(
    ("torch.storage.UntypedStorage", "torch.UntypedStorage", "torch.storage._UntypedStorage")
)
"""Storage classes whose length counts bytes, by path."""

_MOST_DIMS = 64
_LARGEST_OFFSET = 1 << 62


def check_kind(value: object, kind: type[Kind], what: str) -> Kind:
    """Return a value that is exactly of a kind; a bool is not an int."""
    if type(value) is not kind:
        raise ArchiveError(
            f"the {what} is of a wrong type", expected=kind.__name__, found=type(value).__name__
        )
    return value


def _numbers(value: object, what: str) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or len(value) > _MOST_DIMS:
        raise ArchiveError(f"the {what} of a tensor is not a tuple of at most {_MOST_DIMS} numbers")
    for part in value:
        if type(part) is not int:
            check_kind(part, int, f"{what} of a tensor")
        elif not 0 <= part < _LARGEST_OFFSET:
            raise ArchiveError(f"the {what} of a tensor is out of range", found=part)
    return tuple(value)


def _storage(value: object) -> StorageRecord:
    if isinstance(value, StorageRecord):
        return value
    raise ArchiveError("a tensor without a storage", found=type(value).__name__)


def _hooks(value: object) -> object:
    """Return the hooks, None for the empty ``OrderedDict`` that stands for "none"."""
    is_empty = isinstance(value, OrderedDict) and not value and not vars(value)
    return None if is_empty else value


def _view(
    rebuild: str,
    place: tuple[object, ...],
    dtype: DType | None,
    rest: tuple[object, object, object] = (False, None, None),
) -> TensorRecord:
    """Return the checked record of ``(storage, offset, size, stride)``."""
    storage = _storage(place[0])
    if dtype is None:
        raise ArchiveError(
            f"a tensor in untyped storage {short_repr(storage.key)} does not say its dtype"
        )
    (offset,) = _numbers((place[1],), "storage offset")
    shape = _numbers(place[2], "shape")
    strides = _numbers(place[3], "stride")
    requires_grad, hooks, metadata = rest
    if len(strides) != len(shape):
        raise ArchiveError("a tensor has not as many strides as extents", found=(shape, strides))
    if prod(shape) * dtype.itemsize >= _LARGEST_OFFSET:
        raise ArchiveError("a tensor has more elements than memory has bytes", found=shape)
    needed = needed_extent(shape, strides, offset) * dtype.itemsize
    if needed > storage.nbytes:
        raise ArchiveError(
            f"storage {short_repr(storage.key)} is shorter than its tensor of shape {shape}",
            expected=count_text(needed, "byte"),
            found=count_text(storage.nbytes, "byte"),
            next_step="the file is damaged; copy it again",
        )
    return TensorRecord(
        storage=storage,
        dtype=dtype,
        shape=shape,
        strides=strides,
        storage_offset=offset,
        requires_grad=check_kind(requires_grad, bool, "requires_grad of a tensor"),
        hooks=_hooks(hooks),
        metadata=metadata,
        rebuild=rebuild,
    )


def _tensor_v1(make: Construction, function: Global, args: tuple[object, ...]) -> object:
    _count(function, args, 4, 4)
    return _kept(make, _view(function.name, args, _storage(args[0]).dtype))


def _tensor_v2(make: Construction, function: Global, args: tuple[object, ...]) -> object:
    _count(function, args, 6, 7)
    metadata = args[6] if len(args) > 6 else None
    rest = (args[4], args[5], metadata)
    return _kept(make, _view(function.name, args, _storage(args[0]).dtype, rest))


def _tensor_v3(make: Construction, function: Global, args: tuple[object, ...]) -> object:
    _count(function, args, 7, 8)
    metadata = args[7] if len(args) > 7 else None
    dtype = check_kind(args[6], DType, "dtype of a tensor")
    return _kept(make, _view(function.name, args, dtype, (args[4], args[5], metadata)))


def _parameter(make: Construction, function: Global, args: tuple[object, ...]) -> object:
    has_state = function.name.endswith("_with_state")
    _count(function, args, 3 + has_state, 3 + has_state)
    data = args[0]
    if not isinstance(data, TensorRecord):
        # A parameter around a sparse or quantised tensor stays as inert as what it holds.
        return make.record(function, args)
    form = ParameterForm(
        data=data,
        requires_grad=check_kind(args[1], bool, "requires_grad of a parameter"),
        hooks=_hooks(args[2]),
        state=args[3] if has_state else None,
        has_state=has_state,
    )
    if make.tensors and make.tensors[-1] is data:
        make.tensors.pop()
    return _kept(make, replace(data, requires_grad=form.requires_grad, parameter=form))


def _from_type(make: Construction, function: Global, args: tuple[object, ...]) -> object:
    _count(function, args, 4, 4)
    inner, cls, inner_args, state = args
    rebuild = REBUILD_CALLS.get(inner.path) if isinstance(inner, Global) else None
    if rebuild is None or rebuild is _from_type or not isinstance(cls, Global):
        return make.record(function, args)
    if not isinstance(inner, Global) or not isinstance(inner_args, tuple):
        raise ArchiveError(f"{function.path} is called with arguments that torch never writes")
    made = rebuild(make, inner, inner_args)
    if not isinstance(made, TensorRecord):
        return make.record(function, args)
    make.tensors.pop()
    return _kept(make, replace(made, subclass=SubclassForm(cls, state)))


def _kept(make: Construction, tensor: TensorRecord) -> TensorRecord:
    make.tensors.append(tensor)
    return tensor


def _count(function: Global, args: tuple[object, ...], least: int, most: int) -> None:
    if not least <= len(args) <= most:
        raise ArchiveError(
            f"{function.path} is called with a wrong number of arguments",
            expected=least if least == most else f"{least} to {most}",
            found=len(args),
        )


REBUILD_CALLS: dict[str, Callable[[Construction, Global, tuple[object, ...]], object]] = {
    "torch._utils._rebuild_tensor": _tensor_v1,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
}
"""The rebuild functions whose calls are evaluated, by path."""
