"""What the calls of a pickle mean: values for what is known, records for the rest.

Theory. A pickle builds objects in three ways: it calls a global with a tuple (``REDUCE``), makes an
instance of a class without calling ``__init__`` (``NEWOBJ``), and changes an object afterwards
(items, state). The few globals in :mod:`.calls` are ours to evaluate, because the result is a plain
value: containers, bytes, tensors. All others become an :class:`~.values.ObjectRecord` of the class
that :mod:`.known` has for them. Nothing else can be called, so nothing can run.

Evaluating a call copies its argument, so each draws the size of what it makes from a budget in
proportion to the file.
"""

from __future__ import annotations

import _compat_pickle
from collections import OrderedDict
from collections.abc import Callable

from reshard.errors import ArchiveError, HostileFileError, ReshardError
from reshard.formats.dtypes import DTYPES, STORAGE_DTYPES, DType
from reshard.formats.torch_archive.calls import CALLS, Call
from reshard.formats.torch_archive.known import ZERO_STAGE, EnumRecord, record_class
from reshard.formats.torch_archive.policy import check_global
from reshard.formats.torch_archive.rebuild import UNTYPED_STORAGES, check_kind
from reshard.formats.torch_archive.shape_check import check_tree
from reshard.formats.torch_archive.tensors import StorageRecord, TensorRecord
from reshard.formats.torch_archive.values import (
    AttributeGetter,
    Global,
    ObjectRecord,
    Step,
    short_repr,
)

FindStorage = Callable[[str, Global, DType | None, str, int], StorageRecord]
"""Finds a storage by key, class, dtype, location and length, or raises ``ArchiveError``."""

_PY2_PROTOCOLS = 3
"""Protocols below this one spell globals as Python 2 does; torch writes protocol 2."""

_GETATTR = Global("builtins", "getattr")
_BUDGET_FLOOR = 1 << 20
_BUDGET_PER_BYTE = 4
_LARGEST_KEY = 512


class Construction:
    """Makes the objects of one pickle.

    Parameters
    ----------
    file
        Name of the file, for messages.
    size
        Length of the pickle in bytes, which bounds what calls may copy.
    find_storage
        Finds the storage that a persistent id names.
    """

    __slots__ = (
        "_budget",
        "_calls",
        "_size",
        "_storages",
        "attributes",
        "file",
        "find_storage",
        "globals",
        "records",
        "tensors",
    )

    def __init__(self, file: str, size: int, find_storage: FindStorage) -> None:
        self.file = file
        self.find_storage = find_storage
        self.globals: dict[tuple[str, str], object] = {}
        self.records: list[ObjectRecord] = []
        self.tensors: list[TensorRecord] = []
        self.attributes = 0
        # By `id`, since every global of a pickle is one object, held by `globals`.
        self._calls: dict[int, Call] = {}
        self._storages: dict[str, StorageRecord] = {}
        self._size = size
        self._budget = _BUDGET_FLOOR + _BUDGET_PER_BYTE * size

    @property
    def storages(self) -> dict[str, StorageRecord]:
        """Every storage that the pickle names, by key, in order of first mention."""
        return self._storages

    def located(self, error: ReshardError, position: int) -> ReshardError:
        """Return ``error`` with the name of the file in it."""
        if error.file is not None:
            return error
        return type(error)(
            f"{error.what} (in the pickle, at byte {position})",
            file=self.file,
            expected=error.expected,
            found=error.found,
            next_step=error.next_step or "the file is damaged or was made by hand; copy it again",
        )

    def spend(self, size: int) -> None:
        """Draw ``size`` bytes or items from the budget."""
        self._budget -= size
        if self._budget < 0:
            raise ArchiveError("the pickle unpacks to far more than its own size")

    # ---------------------------------------------------------------------------- names

    def find_global(self, module: str, name: str, protocol: int) -> object:
        """Return the inert value for a global: a dtype or a :class:`Global`."""
        renamed = _python3_name(module, name)
        if protocol < _PY2_PROTOCOLS:
            module, name = renamed
        found = self.globals.get((module, name))
        if found is None:
            check_global(module, name, self.file)
            if renamed != (module, name):
                # A reader that takes the protocol for another one finds this.
                check_global(*renamed, self.file)
            found = self.globals[module, name] = _inert(module, name)
            known = CALLS.get(f"{module}.{name}")
            if known is not None:
                self._calls[id(found)] = known
        return found

    def storage(self, identity: object) -> StorageRecord:
        """Return the storage that a persistent id names.

        torch's ids are ``("storage", class, key, location, numel)``.
        """
        if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
            raise ArchiveError(
                "a persistent id is not that of a storage",
                expected="('storage', class, key, location, numel)",
                found=short_repr(identity),
            )
        _, cls, key, location, numel = identity
        if not (isinstance(cls, Global) and isinstance(key, str) and isinstance(location, str)):
            raise ArchiveError("a storage id has fields of wrong types", found=short_repr(identity))
        numel = check_kind(numel, int, "length of a storage")
        known = self._storages.get(key)
        if known is None:
            dtype = _storage_dtype(cls)
            known = self.find_storage(key, cls, dtype, location, numel)
            self._storages[key] = known
        elif known.storage_class != cls or known.numel != numel:
            raise ArchiveError(
                f"storage {short_repr(key)} is named twice with different classes or lengths",
                expected=f"{known.storage_class.path} of {known.numel}",
                found=f"{cls.path} of {numel}",
            )
        return known

    # ---------------------------------------------------------------------------- objects

    def call(self, function: object, args: tuple[object, ...]) -> object:
        """Return what ``function(*args)`` stands for."""
        if isinstance(function, Global):
            known = self._calls.get(id(function))
            if known is not None:
                return known(self, function, args)
        elif isinstance(function, AttributeGetter):
            self.attributes += 1
            return self._attribute(args)
        return self.record(function, args)

    def _attribute(self, args: tuple[object, ...]) -> object:
        """Return what ``getattr(cls, name)`` stands for: a nested class or a member of an enum.

        Protocol 2 has no other form for the former, and early Python 3.11 none for the latter.
        """
        outer, name = args if len(args) == 2 else (None, None)
        if not isinstance(outer, Global) or not isinstance(name, str):
            raise _hostile_getattr(self.file, args)
        inner = Global(outer.module, f"{outer.name}.{name}")
        check_global(inner.module, inner.name, self.file)
        if outer == ZERO_STAGE:
            member = EnumRecord(form="reduce", callable=_GETATTR, args=args)
            self.records.append(member)
            return member
        return inner

    def finish(self, root: object) -> None:
        """Check the whole tree, when the pickle has been read."""
        for record in self.records:
            record.check()
        check_tree(root, self.file, self._size, self.tensors)
        if not self.attributes and ("builtins", "getattr") in self.globals:
            raise _hostile_getattr(self.file, ())

    def record(self, function: object, args: tuple[object, ...]) -> ObjectRecord:
        """Return the inert record of a call."""
        return self._record("reduce", function, args, None)

    def new(
        self, cls: object, args: tuple[object, ...], kwargs: dict[str, object] | None
    ) -> object:
        """Return what ``cls.__new__(cls, *args, **kwargs)`` stands for."""
        return self._record("newobj", cls, args, kwargs)

    def instance(self, cls: object, args: tuple[object, ...]) -> object:
        """Return what the instance opcodes of protocols 0 and 1 stand for."""
        return self._record("obj", cls, args, None)

    def _record(
        self,
        form: str,
        function: object,
        args: tuple[object, ...],
        kwargs: dict[str, object] | None,
    ) -> ObjectRecord:
        if not isinstance(function, (Global, ObjectRecord)):
            raise ArchiveError(
                "the pickle calls something that is not a class or function",
                found=type(function).__name__,
            )
        cls = record_class(function, args)
        record = cls(form=form, callable=function, args=args, kwargs=kwargs)
        self.records.append(record)
        return record

    # ---------------------------------------------------------------------------- changes

    def append(self, target: object, items: list[object]) -> None:
        """Append items to a list, or note that they are appended to an object."""
        if type(target) is list:
            target.extend(items)
        else:
            self._note(target, "list", items)

    def add(self, target: object, items: list[object]) -> None:
        """Add items to a set, or note that they are added to an object."""
        if type(target) is set:
            target.update(self.hashable(items))
        else:
            self._note(target, "set", items)

    def set_items(self, target: object, items: list[object]) -> None:
        """Store alternating keys and values in a dict, or note that they are stored."""
        if len(items) % 2:
            raise ArchiveError("a dict has a key without a value")
        keys, values = items[::2], items[1::2]
        if isinstance(target, dict):
            for key, value in zip(keys, values, strict=True):
                if type(key) is not str:
                    check_key(key)
                target[key] = value
        else:
            self._note(target, "dict", list(zip(keys, values, strict=True)))

    def set_state(self, target: object, state: object) -> None:
        """Note that an object is given a state."""
        if isinstance(target, OrderedDict):
            self.spend(len(state) if isinstance(state, dict) else 0)
            set_attributes(target, state)
        elif isinstance(target, ObjectRecord):
            target.steps.append(Step("state", state))
        else:
            raise ArchiveError(
                "the pickle sets attributes of something that has none",
                found=type(target).__name__,
            )

    def _note(self, target: object, kind: str, payload: list[object]) -> None:
        if not isinstance(target, ObjectRecord):
            raise ArchiveError(
                f"the pickle puts {kind} items into something that holds none",
                found=type(target).__name__,
            )
        last = target.steps[-1] if target.steps else None
        if last is not None and last.kind == kind and isinstance(last.payload, list):
            last.payload.extend(payload)
        else:
            target.steps.append(Step(kind, payload))

    def hashable(self, items: object) -> list[object]:
        """Return the items of a list, tuple or set, checked to be usable as keys."""
        if not isinstance(items, (list, tuple, set, frozenset)):
            raise ArchiveError("a set is not made from a list", found=type(items).__name__)
        self.spend(len(items))
        for item in items:
            check_key(item)
        return list(items)


def check_key(key: object) -> None:
    """Raise when hashing a key would take long: a large tuple, or a number of many digits.

    Hashing a tuple walks its parts again wherever they are shared, so thirty nested pairs take a
    billion steps; integers beyond 64 bits can be chosen to collide.
    """
    pending = [key]
    seen = 0
    while pending:
        part = pending.pop()
        if isinstance(part, tuple):
            seen += 1 + len(part)
            if seen > _LARGEST_KEY:
                raise ArchiveError("a key of a dict or set is too large")
            pending.extend(part)
        elif isinstance(part, int) and not -(1 << 63) <= part < 1 << 64:
            raise ArchiveError("a key of a dict or set is a number of more than 64 bits")


def set_attributes(target: OrderedDict[object, object], state: object) -> None:
    """Give an ``OrderedDict`` the attributes of its state, as ``_metadata`` of a state dict."""
    if not isinstance(state, dict):
        raise ArchiveError("the state of an OrderedDict is not a dict", found=type(state).__name__)
    for name, value in state.items():
        # An attribute called `items` would hide the method from everyone who reads the dict.
        if not isinstance(name, str) or hasattr(OrderedDict, name):
            raise ArchiveError(
                "an OrderedDict has an attribute of a reserved name", found=short_repr(name)
            )
        vars(target)[name] = value


def _python3_name(module: str, name: str) -> tuple[str, str]:
    """Return the Python 3 spelling of a global, as the unpickler of Python 3 finds it."""
    renamed = _compat_pickle.NAME_MAPPING.get((module, name))
    if renamed is not None:
        return renamed
    return _compat_pickle.IMPORT_MAPPING.get(module, module), name


def _hostile_getattr(file: str, args: tuple[object, ...]) -> HostileFileError:
    return HostileFileError(
        "the file names builtins.getattr for something else than a part of a class",
        file=file,
        found=short_repr(args) if args else None,
        next_step="do not open it with torch.load; get the file again from a source you trust",
    )


def _inert(module: str, name: str) -> object:
    if (module, name) == (_GETATTR.module, _GETATTR.name):
        return AttributeGetter()
    dtype = DTYPES.get(name) if module == "torch" else None
    return Global(module, name) if dtype is None else dtype


def _storage_dtype(cls: Global) -> DType | None:
    """Return the element type of a storage class, None for untyped storages."""
    if cls.path in UNTYPED_STORAGES:
        return None
    dtype = STORAGE_DTYPES.get(cls.name) if cls.module in ("torch", "torch.cuda") else None
    if dtype is None:
        raise ArchiveError("a storage has an unknown class", found=cls.path)
    return dtype
