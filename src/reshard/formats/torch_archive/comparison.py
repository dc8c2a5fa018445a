"""Whether two inert values stand for the same object.

Theory. Two trees are the same when loading them would give equal objects: the same containers with
the same content, the same numbers bit for bit (NaN is NaN, and 0.0 is not -0.0), records that make
the same calls, tensors of one dtype and shape with the same bytes. How bytes are shared between
storages is not part of it. Records may form cycles, so a pair that is being compared counts as the
same.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from reshard.formats.torch_archive.contents import fetch, same_region
from reshard.formats.torch_archive.pickler import in_order
from reshard.formats.torch_archive.tensors import StorageRecord, TensorRecord
from reshard.formats.torch_archive.values import DefaultDict, ObjectRecord

Pair = tuple[object, object]


def same_value(left: object, right: object) -> bool:
    """Return whether two values that were read from archives stand for the same object.

    Reads the bytes of tensors that have equal dtypes and shapes.

    >>> same_value({"a": [1, 2.0]}, {"a": [1, 2.0]}), same_value([1], [True])
    (True, False)
    """
    pending: list[Pair] = [(left, right)]
    seen: set[tuple[int, int]] = set()
    while pending:
        one, other = pending.pop()
        if one is other or (id(one), id(other)) in seen:
            continue
        if type(one) is not type(other):
            return False
        parts = _parts(one, other)
        if parts is None:
            return False
        pairs = list(parts)
        if pairs:
            seen.add((id(one), id(other)))
        pending.extend(pairs)
    return True


def _parts(one: object, other: object) -> Iterable[Pair] | None:
    """Return the pairs that must be the same for two values to be; None when they are not."""
    if isinstance(one, TensorRecord) and isinstance(other, TensorRecord):
        return _tensor_parts(one, other)
    if isinstance(one, StorageRecord) and isinstance(other, StorageRecord):
        return _storage_parts(one, other)
    if isinstance(one, ObjectRecord) and isinstance(other, ObjectRecord):
        return _record_parts(one, other)
    return _plain_parts(one, other)


def _plain_parts(one: object, other: object) -> Iterable[Pair] | None:
    if isinstance(one, dict) and isinstance(other, dict):
        return _dict_parts(one, other)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return zip(one, other, strict=True) if len(one) == len(other) else None
    if isinstance(one, (float, complex)) and isinstance(other, (float, complex)):
        return () if _bits(one) == _bits(other) else None
    if isinstance(one, (set, frozenset)) and isinstance(other, (set, frozenset)):
        return () if one == other or in_order(one) == in_order(other) else None
    return () if one == other else None


def _bits(number: float | complex) -> bytes:
    return struct.pack("<2d", number.real, number.imag)


def _dict_parts(one: dict[object, object], other: dict[object, object]) -> Iterable[Pair] | None:
    if len(one) != len(other):
        return None
    attributes: list[Pair] = [(_attributes(one), _attributes(other))]
    if isinstance(one, DefaultDict) and isinstance(other, DefaultDict):
        attributes.append((one.default_factory, other.default_factory))
    if one.keys() == other.keys():
        # Equal keys may differ in type: 1, 1.0 and True are one key.
        keys = zip(sorted(map(repr, one)), sorted(map(repr, other)), strict=True)
        return [*attributes, *keys, *((value, other[key]) for key, value in one.items())]
    # Records are keys by identity; those of two archives can only be matched by order.
    items = zip(one.items(), other.items(), strict=True)
    return [*attributes, *((mine, theirs) for mine, theirs in items)]


def _attributes(value: object) -> Mapping[str, object]:
    found: Mapping[str, object] = getattr(value, "__dict__", None) or {}
    return found


def _record_parts(one: ObjectRecord, other: ObjectRecord) -> Iterable[Pair] | None:
    kinds = [step.kind for step in one.steps]
    if one.form != other.form or kinds != [step.kind for step in other.steps]:
        return None
    payloads = ((a.payload, b.payload) for a, b in zip(one.steps, other.steps, strict=True))
    head = ((one.callable, other.callable), (one.args, other.args), (one.kwargs, other.kwargs))
    return [*head, *payloads]


def _storage_parts(one: StorageRecord, other: StorageRecord) -> Iterable[Pair] | None:
    if (one.storage_class, one.numel) != (other.storage_class, other.numel):
        return None
    nbytes = min(one.nbytes, other.nbytes)
    return () if same_region((one.path, one.offset), (other.path, other.offset), nbytes) else None


def _same_elements(one: TensorRecord, other: TensorRecord) -> bool:
    if one.is_contiguous and other.is_contiguous:
        return same_region((one.path, one.offset), (other.path, other.offset), one.nbytes)
    largest = max(one.nbytes, one.storage.nbytes, other.storage.nbytes)
    return fetch(one, largest=largest) == fetch(other, largest=largest)


def _tensor_parts(one: TensorRecord, other: TensorRecord) -> Iterable[Pair] | None:
    if (one.dtype, one.shape, one.requires_grad) != (other.dtype, other.shape, other.requires_grad):
        return None
    if one.is_parameter != other.is_parameter or not _same_elements(one, other):
        return None
    mine, theirs = one.subclass, other.subclass
    types = (None if mine is None else mine.type, None if theirs is None else theirs.type)
    return [types, (one.attributes, other.attributes), (one.metadata, other.metadata)]
