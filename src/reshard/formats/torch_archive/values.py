"""The inert values that the tree of an archive is made of, beside Python's own.

Theory. A pickle is a program that builds objects by calling globals. Reading one *inertly* means to
keep the program's meaning and run none of it: what it builds out of containers, numbers, strings
and bytes becomes those values; what it would build by calling code becomes an
:class:`ObjectRecord`, which says what would have been called, with which arguments, and what would
have been done to the result afterwards. Nothing is lost, so a record can be written back as the
same program.

Records compare and hash by identity: a tree may hold itself through a record, and equality of what
two programs build is a question for :func:`~reshard.formats.torch_archive.comparison.same_value`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from reprlib import Repr

from reshard.errors import ArchiveError


class Size(tuple[int, ...]):
    """A ``torch.Size``: a tuple of extents that is written back as a ``torch.Size``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Size({', '.join(map(str, self))})"


class DefaultDict(dict[object, object]):
    """A ``collections.defaultdict`` whose factory is kept and never called.

    Parameters
    ----------
    default_factory
        The factory as a value of the tree: a :class:`Global`, a record or None.
    """

    __slots__ = ("default_factory",)

    def __init__(self, default_factory: object = None) -> None:
        super().__init__()
        self.default_factory = default_factory


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class or function, by its Python 3 spelling; it is never imported."""

    module: str
    """Dotted module name."""
    name: str
    """Qualified name inside the module."""

    @property
    def path(self) -> str:
        """``module.name``."""
        return f"{self.module}.{self.name}"

    def __repr__(self) -> str:
        return f"<{self.path}>"


class AttributeGetter:
    """``builtins.getattr`` while a pickle is being read; no tree ever holds it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Device:
    """A ``torch.device``, by the arguments that torch's own reduction calls it with."""

    type: str
    """For example ``"cuda"``."""
    index: int | None = None
    """Its number, None when unsaid."""

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Step:
    """Something that is done to an object after it has been created."""

    kind: str
    """``"list"`` (items appended), ``"set"`` (items added), ``"dict"`` (a list of ``(key,
    value)`` stored as items) or ``"state"`` (``__setstate__`` or attributes)."""
    payload: object
    """The list of items or pairs, or the state."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ObjectRecord:
    """An object that would have been made by code: what would have made it, kept inert."""

    form: str
    """How it is made: ``"reduce"`` (``callable(*args)``), ``"newobj"`` (``callable.__new__``
    with the callable itself, args and kwargs) or ``"obj"`` (protocol 0 and 1 instances)."""
    callable: object
    """What is called: a :class:`Global`, or another record."""
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] | None = None
    """Its arguments."""
    steps: list[Step] = field(default_factory=list)
    """What is done to the object afterwards, in order."""

    @property
    def type_name(self) -> str:
        """``module.name`` of the class or function that makes the object."""
        return _short_name(self)

    @property
    def made_by(self) -> object:
        """The class of the object where the form tells it, else what is called."""
        return maker_of(self.callable, self.args)

    @property
    def state(self) -> object:
        """The state it was given last (attributes, as a rule a dict), None without one."""
        return next((step.payload for step in reversed(self.steps) if step.kind == "state"), None)

    @property
    def fields(self) -> Mapping[str, object]:
        """Its attributes by name: the string keys of its state, instance dict and slots alike."""
        return dict(self._named())

    def attribute(self, name: str) -> object:
        """Return one attribute, None when it has none of that name."""
        found = (part[name] for part in reversed(self._attributes()) if name in part)
        return next(found, None)

    def _attributes(self) -> list[Mapping[object, object]]:
        state = self.state
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        return [part for part in parts if isinstance(part, Mapping)]

    def _named(self) -> Iterator[tuple[str, object]]:
        for part in self._attributes():
            for key, value in part.items():
                if isinstance(key, str):
                    yield key, value

    def first_fields(self, count: int) -> list[tuple[str, object]]:
        """Return its first attributes with their names."""
        return list(islice(self._named(), count))

    @property
    def list_items(self) -> list[object]:
        """Items appended or added to it, in order."""
        return [item for kind in ("list", "set") for item in self._items(kind)]

    @property
    def dict_items(self) -> list[tuple[object, object]]:
        """``(key, value)`` pairs stored in it, in order."""
        return [pair for pair in self._items("dict") if isinstance(pair, tuple) and len(pair) == 2]

    def _items(self, kind: str) -> Iterator[object]:
        for step in self.steps:
            if step.kind == kind and isinstance(step.payload, list):
                yield from step.payload

    def check(self) -> None:
        """Raise :class:`ArchiveError` when a known class lacks a field or has one of wrong type."""

    def __repr__(self) -> str:
        return _BOUNDED.repr(self)


def maker_of(function: object, args: tuple[object, ...]) -> object:
    """Return the class of what a call makes, where the call says it, else what it calls."""
    if args and isinstance(function, Global) and function.path in _CLASS_FIRST:
        return args[0]
    return function


class _BoundedRepr(Repr):
    """Shows a few parts of a few levels, whatever a value is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 8
        self.maxstring = self.maxother = 120

    def repr_int(self, x: int, level: int) -> str:
        """Show a number, or its length where its digits would be thousands."""
        if x.bit_length() > self.maxlong * 8:
            return f"<an int of {x.bit_length()} bits>"
        return super().repr_int(x, level)

    def repr_bytes(self, x: bytes, _level: int) -> str:
        """Show the first bytes."""
        return f"{x[:32]!r}..." if len(x) > 32 else repr(x)

    def repr_bytearray(self, x: bytearray, level: int) -> str:
        """Show the first bytes."""
        return f"bytearray({self.repr_bytes(bytes(x[:33]), level)})"

    def repr_instance(self, x: object, level: int) -> str:
        """Show what no other method is for: classes of this module, records among them."""
        name = type(x).__name__
        if isinstance(x, dict):
            return f"{name}({self.repr_dict(x, level)})"
        if isinstance(x, tuple):
            return f"{name}({self.repr_tuple(x, level)})"
        return (
            self._record(x, level)
            if isinstance(x, ObjectRecord)
            else super().repr_instance(x, level)
        )

    def _record(self, x: ObjectRecord, level: int) -> str:
        if level <= 0:
            return f"{_short_name(x)}(...)"
        shown = [self.repr1(argument, level - 1) for argument in x.args[:8]]
        shown += [f"{key}={self.repr1(value, level - 1)}" for key, value in x.first_fields(8)]
        for items in (x.list_items, x.dict_items):
            if items:
                shown.append(self.repr1(items, level - 1))
        return f"{_short_name(x)}({', '.join(shown)})"


def _short_name(record: ObjectRecord) -> str:
    maker = record.made_by
    return maker.path if isinstance(maker, Global) else "<object>"


_LONGEST_LINE = 300
_BOUNDED = _BoundedRepr()
_CLASS_FIRST = frozenset(
    (
        "copyreg._reconstructor",
        "copyreg.__newobj__",
        "copyreg.__newobj_ex__",
        "builtins.getattr",
    )
)
"""Functions whose first argument is the class of what they make."""


def short_repr(value: object) -> str:
    """Return a ``repr`` of at most a few hundred characters, in as little time.

    The ``repr`` of Python walks shared parts again and again and fails on deep ones, so it must not
    be used on a tree that anybody may have made.
    """
    shown = _BOUNDED.repr(value)
    return shown if len(shown) <= _LONGEST_LINE else f"{shown[:_LONGEST_LINE]}..."


def wrong_field(record: ObjectRecord, name: str, expected: str) -> ArchiveError:
    """Return the error for a known class whose field ``name`` is missing or not ``expected``."""
    return ArchiveError(
        f"a {record.type_name} without a valid {name}",
        expected=expected,
        found=type(record.attribute(name)).__name__,
        next_step="the file is damaged or of an unknown version",
    )
