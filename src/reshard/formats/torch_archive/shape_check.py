"""Bounds the shape of a tree, so that whoever walks, compares or shows it may simply do so.

Theory. A few bytes a level make a tree as deep as a pickle is long, or one that holds itself, or
one that is small in the file and astronomically large when it is written out, because a part is
named twice on every level. Code that walks, compares and shows trees recurses and visits a part as
often as it is named, and should not have to think of that. So a tree is checked once, when it is
read: its height is bounded, no plain container holds itself, and what it has in all, counting a
shared part as often as it is named, is in proportion to the file. A cycle through a record is
allowed, since objects do point at each other; walkers stop at records.

The parts of a record, and what is wrapped around a tensor, start a tree of their own. A tree is
taken apart level by level first, which is quick and ends after as many levels as the tree is high.
Only if it is higher than trees may be, as a chain of records is, every container is visited once,
children before parents, which is slower and tells the two apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from reshard.errors import ArchiveError, HostileFileError
from reshard.formats.dtypes import DType
from reshard.formats.torch_archive.tensors import StorageRecord, TensorRecord
from reshard.formats.torch_archive.values import AttributeGetter, Global, ObjectRecord, Size

DEEPEST_TREE = 200
"""Most plain containers inside each other."""

_WEIGHT_FLOOR = 2_000_000
_WEIGHT_PER_BYTE = 2
"""How much a tree may weigh: so many items in any file, and so many for each byte of its pickle.
Without shared parts it has less than one for a byte."""

_TEXT_PER_ITEM = 16
"""So many characters or bytes weigh as much as an item."""

_MOST_CONTAINERS = 1_000_000
"""Most containers in a tree with long chains of records."""

_TEXTS = frozenset((str, bytes, bytearray))
_LEAVES = frozenset(
    (
        *(int, float, bool, type(None), complex, slice, range, *_TEXTS),
        *(DType, Global, Size, StorageRecord, TensorRecord),
    )
)
_CONTAINERS = (dict, list, tuple, set, frozenset)


def check_tree(root: object, file: str, size: int, tensors: Iterable[TensorRecord] = ()) -> None:
    """Raise :class:`ArchiveError` when a tree is too deep, too large or holds itself.

    Parameters
    ----------
    root
        The tree.
    file
        Where it comes from, for messages.
    size
        Length of its pickle in bytes.
    tensors
        The tensors in it.
    """
    roots = [root, *(part for tensor in tensors for part in _wrapped(tensor))]
    most = _WEIGHT_FLOOR + _WEIGHT_PER_BYTE * size
    if not _is_shallow(roots, file, most):
        _check_exactly(roots, file, most)


def _wrapped(tensor: TensorRecord) -> list[object]:
    """Return what is wrapped around a tensor, nothing as a rule."""
    found = [tensor.hooks, tensor.metadata]
    if tensor.parameter is not None:
        data = tensor.parameter.data
        found += [tensor.parameter.hooks, tensor.parameter.state, data.hooks, data.metadata]
    if tensor.subclass is not None:
        found.append(tensor.subclass.state)
    return [part for part in found if part is not None]


def _is_shallow(roots: list[object], file: str, most: int) -> bool:
    """Whether trees fall apart into leaves in few levels; refuse those that weigh too much."""
    records: set[int] = set()
    level = roots
    depth = 0
    while level:
        depth += 1
        if depth > DEEPEST_TREE:
            return False
        below: list[object] = []
        for node in level:
            if isinstance(node, _CONTAINERS):
                parts = _parts(node)
                most -= _own_weight(parts)
                if most < 0:
                    raise _wrong(file, _TOO_LARGE)
                below += [part for part in parts if type(part) not in _LEAVES]
            elif isinstance(node, AttributeGetter):
                raise _passed_around(file)
            elif isinstance(node, ObjectRecord) and id(node) not in records:
                records.add(id(node))
                below += _inside(node)
        level = below
    return True


def _own_weight(parts: Sequence[object]) -> int:
    """What a container weighs without the containers in it."""
    text = sum([len(part) for part in parts if isinstance(part, str | bytes | bytearray)])
    return 1 + len(parts) + text // _TEXT_PER_ITEM


def _inside(record: ObjectRecord) -> list[object]:
    """Return the trees that a record is made of."""
    made = [record.callable, record.args, record.kwargs]
    return made + [step.payload for step in record.steps]


def _parts(node: Iterable[object]) -> Sequence[object]:
    """Return the values in a container, with keys and attributes."""
    if type(node) is dict:
        return [*node.values(), *node]
    if isinstance(node, dict):
        return [*node.values(), *node, *getattr(node, "__dict__", {}).values()]
    return node if isinstance(node, (list, tuple)) else list(node)


def _check_exactly(roots: list[object], file: str, most: int) -> None:
    walk = _Walk(file, most)
    for root in roots:
        walk.visit(root)
    while walk.records:
        for part in _inside(walk.records.pop()):
            walk.visit(part)


class _Walk:
    """The containers of a tree that have been visited, and the records still to visit."""

    def __init__(self, file: str, most: int) -> None:
        self.file = file
        self.most = most
        self.sizes: dict[int, tuple[int, int]] = {}
        self.records: list[ObjectRecord] = []

    def visit(self, root: object) -> None:
        """Visit everything below a value, down to records."""
        sizes = self.sizes
        entered: set[int] = set()
        # A container waits below its children; it is popped a second time when they are done.
        pending = [root]
        while pending:
            node = pending[-1]
            if id(node) in sizes:
                pending.pop()
            elif id(node) in entered:
                pending.pop()
                entered.remove(id(node))
                sizes[id(node)] = self._size(node)
            else:
                children = self._children(node)
                for child in children:
                    if id(child) in entered or child is node:
                        raise _wrong(self.file, "a container that holds itself")
                waiting = [child for child in children if id(child) not in sizes]
                if waiting:
                    entered.add(id(node))
                    if len(entered) > DEEPEST_TREE:
                        raise _wrong(self.file, _TOO_DEEP)
                    pending.extend(waiting)
                else:
                    pending.pop()
                    sizes[id(node)] = self._size(node)
        self.most -= sizes[id(root)][1]
        if self.most < 0:
            raise _wrong(self.file, _TOO_LARGE)

    def _size(self, node: object) -> tuple[int, int]:
        """Return height and weight of a container whose children have been visited."""
        if not isinstance(node, _CONTAINERS):
            return 0, 0
        below = [self.sizes[id(child)] for child in self._children(node)]
        height = 1 + max((height for height, _ in below), default=0)
        weight = _own_weight(_parts(node)) + sum(weight for _, weight in below)
        if height > DEEPEST_TREE:
            raise _wrong(self.file, _TOO_DEEP)
        if weight > self.most or len(self.sizes) > _MOST_CONTAINERS:
            raise _wrong(self.file, _TOO_LARGE)
        return height, weight

    def _children(self, node: object) -> list[object]:
        """Return the containers directly inside a value; note the records."""
        if not isinstance(node, _CONTAINERS):
            self._note(node)
            return []
        inner = [part for part in _parts(node) if type(part) not in _LEAVES]
        return [part for part in inner if isinstance(part, _CONTAINERS) or self._note(part)]

    def _note(self, part: object) -> bool:
        """Keep a record for later, once; refuse what no tree may hold. Return False."""
        if isinstance(part, AttributeGetter):
            raise _passed_around(self.file)
        if isinstance(part, ObjectRecord) and id(part) not in self.sizes:
            self.sizes[id(part)] = 0, 0
            self.records.append(part)
        return False


_TOO_DEEP = f"more than {DEEPEST_TREE} containers inside each other"
_TOO_LARGE = "parts that are named so often that written out they are far larger than the file"


def _wrong(file: str, found: str) -> ArchiveError:
    return ArchiveError(
        "the content of the file is nested in a way that no checkpoint is",
        file=file,
        found=found,
        next_step="the file was made by hand or is damaged; copy it again, or save it anew",
    )


def _passed_around(file: str) -> HostileFileError:
    return HostileFileError(
        "the file passes builtins.getattr around, which never belongs in a checkpoint",
        file=file,
        next_step="do not open it with torch.load; get the file again from a source you trust",
    )
