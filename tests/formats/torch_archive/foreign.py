"""Classes of all the ways in which objects are pickled, as a training script may have them."""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field

import torch


@dataclass
class Config:
    """A plain instance with a `__dict__`."""

    hidden: int = 8
    names: list[str] = field(default_factory=lambda: ["a", "b"])


@dataclass(slots=True)
class Slotted:
    """An instance without a `__dict__`."""

    left: int
    right: object = None


class Registry(dict[str, object]):
    """A dict with attributes."""

    def __init__(self, *args: object, owner: str = "") -> None:
        super().__init__(*args)
        self.owner = owner

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and vars(self) == vars(other)

    __hash__ = None


class Names(list[str]):
    """A list of its own class."""


class Members(set[str]):
    """A set of its own class."""


class Pair(tuple[int, int]):
    """A tuple of its own class, made by `__new__`."""

    __slots__ = ()

    def __new__(cls, first: int, second: int) -> Pair:
        return super().__new__(cls, (first, second))

    def __getnewargs__(self) -> tuple[int, int]:
        return (self[0], self[1])


class Keyword:
    """Made by `__new__` with keywords."""

    def __new__(cls, *, size: int) -> Keyword:
        made = super().__new__(cls)
        made.size = size
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"size": self.size}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keyword) and other.size == self.size

    __hash__ = None  # type: ignore[assignment]

    size: int


class Stateful:
    """Pickled through a state of its own."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __getstate__(self) -> object:
        return ("state", self.value)

    def __setstate__(self, state: tuple[str, object]) -> None:
        self.value = state[1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stateful) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


def rebuilt(value: object) -> Rebuilt:
    """Make a `Rebuilt`."""
    return Rebuilt(value)


@dataclass
class Rebuilt:
    """Pickled as a call of a function."""

    value: object

    def __reduce__(self) -> tuple[object, ...]:
        return rebuilt, (self.value,)


class Colour(enum.Enum):
    """An enum."""

    RED = 1
    BLUE = "b"


class Outer:
    """Holds a class."""

    @dataclass
    class Inner:
        """A class inside a class."""

        value: int = 3


class Node:
    """An object that points back."""

    def __init__(self) -> None:
        self.children: list[Node] = []
        self.parent: Node | None = None

    def add(self) -> Node:
        """Add a child."""
        child = Node()
        child.parent = self
        self.children.append(child)
        return child


class Ordered(OrderedDict[str, int]):
    """An `OrderedDict` of its own class."""


class Tagged(torch.Tensor):
    """A tensor of its own class."""
