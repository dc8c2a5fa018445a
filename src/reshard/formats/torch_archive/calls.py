"""Calls of Python's and torch's plain types, evaluated.

Theory. Protocol 2 has opcodes for lists, dicts, tuples, numbers and text only; everything else that
is a plain value is pickled as a call: ``set([...])``, ``codecs.encode(text, "latin1")`` for bytes,
``torch.Size((...))``. These calls are evaluated with their arguments checked to be what a pickler
writes. A call that is not, and could be something else, stays a record.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from reshard.errors import ArchiveError, HostileFileError
from reshard.formats.torch_archive.rebuild import REBUILD_CALLS, check_kind
from reshard.formats.torch_archive.values import DefaultDict, Device, Global, Size, short_repr

if TYPE_CHECKING:
    from reshard.formats.torch_archive.construction import Construction

Call = Callable[["Construction", Global, tuple[object, ...]], object]
"""Evaluates the call of a global with a tuple of arguments."""


def _ordered_dict(make: Construction, function: Global, args: tuple[object, ...]) -> object:
    made: OrderedDict[object, object] = OrderedDict()
    if args:
        pairs = _items(function, args)
        make.spend(len(pairs))
        for pair in pairs:
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise ArchiveError("an OrderedDict is not made from pairs")
            make.set_items(made, list(pair))
    return made


def _default_dict(make: Construction, function: Global, args: tuple[object, ...]) -> object:
    if len(args) > 1:
        return make.record(function, args)
    return DefaultDict(*args)


def _set(make: Construction, function: Global, args: tuple[object, ...]) -> object:
    return set(make.hashable(_items(function, args))) if args else set()


def _frozen_set(make: Construction, function: Global, args: tuple[object, ...]) -> object:
    return frozenset(make.hashable(_items(function, args))) if args else frozenset()


def _list(make: Construction, function: Global, args: tuple[object, ...]) -> object:
    items = list(_items(function, args)) if args else []
    make.spend(len(items))
    return items


def _size(make: Construction, function: Global, args: tuple[object, ...]) -> object:
    extents = _items(function, args) if args else ()
    make.spend(len(extents))
    return Size(check_kind(extent, int, "extent of a torch.Size") for extent in extents)


def _complex(_make: Construction, _function: Global, args: tuple[object, ...]) -> object:
    real, imaginary = (check_kind(part, float, "part of a complex number") for part in args)
    return complex(real, imaginary)


def _bytes(make: Construction, function: Global, args: tuple[object, ...]) -> object:
    if not args:
        return b""
    raw = _raw(function, args)
    make.spend(len(raw))
    return bytes(raw)


def _byte_array(make: Construction, function: Global, args: tuple[object, ...]) -> object:
    if not args:
        return bytearray()
    content = _encoded(make, args) if len(args) == 2 else _raw(function, args)
    make.spend(len(content))
    return bytearray(content)


def _encode(make: Construction, _function: Global, args: tuple[object, ...]) -> object:
    return _encoded(make, args)


def _encoded(make: Construction, args: tuple[object, ...]) -> bytes:
    """Return the bytes that protocol 2 writes as text: ``codecs.encode(text, "latin1")``."""
    if len(args) != 2 or not isinstance(args[0], str) or args[1] not in ("latin1", "latin-1"):
        raise ArchiveError("bytes are not encoded as latin1 text", found=short_repr(args))
    make.spend(len(args[0]))
    return args[0].encode("latin1")


def _slice(_make: Construction, _function: Global, args: tuple[object, ...]) -> object:
    if not 1 <= len(args) <= 3:
        raise ArchiveError("a slice does not have one to three bounds")
    return slice(*args)


def _range(_make: Construction, _function: Global, args: tuple[object, ...]) -> object:
    return range(*(check_kind(bound, int, "bound of a range") for bound in args))


def _device(make: Construction, function: Global, args: tuple[object, ...]) -> object:
    kind, index = (*args, None, None)[:2]
    if isinstance(kind, str) and (index is None or type(index) is int):
        return Device(kind, index)
    return make.record(function, args)


def _type(make: Construction, function: Global, args: tuple[object, ...]) -> object:
    """``type(None)`` is how the class of None is pickled; with three arguments it makes classes."""
    if args in ((None,), (Global("builtins", "Ellipsis"),)):
        return make.record(function, args)
    raise HostileFileError("the file calls builtins.type to make a class", found=short_repr(args))


def _items(function: Global, args: tuple[object, ...]) -> list[object] | tuple[object, ...]:
    """Return the one argument of a call, a list or tuple."""
    if len(args) == 1 and isinstance(args[0], (list, tuple)):
        return args[0]
    raise _unlike_pickle(function, args)


def _raw(function: Global, args: tuple[object, ...]) -> bytes:
    """Return the one argument of a call, bytes."""
    if len(args) == 1 and isinstance(args[0], bytes):
        return args[0]
    raise _unlike_pickle(function, args)


def _unlike_pickle(function: Global, args: tuple[object, ...]) -> ArchiveError:
    return ArchiveError(
        f"{function.path} is called with arguments that pickle never writes",
        found=", ".join(type(arg).__name__ for arg in args[:8]),
    )


CALLS: dict[str, Call] = {
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": _default_dict,
    "builtins.set": _set,
    "builtins.frozenset": _frozen_set,
    "builtins.list": _list,
    "builtins.complex": _complex,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _byte_array,
    "builtins.slice": _slice,
    "builtins.range": _range,
    "builtins.type": _type,
    "_codecs.encode": _encode,
    "codecs.encode": _encode,
    "torch.Size": _size,
    "torch.device": _device,
    **REBUILD_CALLS,
}
"""The globals whose calls are evaluated, by path."""
