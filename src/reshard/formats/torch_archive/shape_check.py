"""Bounds the shape of a tree, so that whoever walks it may recurse.

Theory. A few bytes a level make a tree as deep as a pickle is long, or one that holds itself. Code
that walks trees recurses, and should not have to think of that. So a tree of plain containers is
checked once, when it is read: its height is bounded and no plain container holds itself. A cycle
through a record is allowed, since objects do point at each other; walkers stop at records.

The parts of a record start a tree of their own. A tree is taken apart level by level first, which
is quick and ends after as many levels as the tree is high. Only if that takes too long, because
parts are shared many times or a container holds itself, every container is visited once, children
before parents, which is slower and always ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from reshard.errors import ArchiveError, HostileFileError
from reshard.formats.dtypes import DType
from reshard.formats.torch_archive.tensors import StorageRecord, TensorRecord
from reshard.formats.torch_archive.values import AttributeGetter, Global, ObjectRecord, Size

DEEPEST_TREE = 200
"""Most plain containers inside each other."""

_LEAVES = frozenset(
    (
        *(int, str, float, bool, type(None), bytes, bytearray, complex, slice, range),
        *(DType, Global, Size, StorageRecord, TensorRecord),
    )
)
_CONTAINERS = (dict, list, tuple, set, frozenset)


def check_tree(root: object, file: str, size: int) -> None:
    """Raise :class:`ArchiveError` when a tree is too deep or holds itself.

    Parameters
    ----------
    root
        The tree.
    file
        Where it comes from, for messages.
    size
        Length of its pickle in bytes: a tree without shared parts has no more containers and items.
    """
    if not _is_plainly_shallow(root, size):
        _check_exactly(root, file)


def _is_plainly_shallow(root: object, most: int) -> bool:
    """Whether a tree falls apart into leaves in few levels, and in at most ``most`` steps."""
    records: set[int] = set()
    level: list[object] = [root]
    depth = 0
    while level:
        depth += 1
        if depth > DEEPEST_TREE:
            return False
        below: list[object] = []
        for node in level:
            if isinstance(node, _CONTAINERS):
                most -= 1 + len(node)
                if most < 0:
                    return False
                below += [part for part in _parts(node) if type(part) not in _LEAVES]
            elif isinstance(node, AttributeGetter):
                return False
            elif isinstance(node, ObjectRecord) and id(node) not in records:
                records.add(id(node))
                below += [node.callable, node.args, node.kwargs]
                below += [step.payload for step in node.steps]
        level = below
    return True


def _parts(node: Iterable[object]) -> Iterable[object]:
    """Return the values in a container, with keys and attributes."""
    if type(node) is dict:
        return [*node.values(), *node]
    if isinstance(node, dict):
        return [*node.values(), *node, *getattr(node, "__dict__", {}).values()]
    return node


def _check_exactly(root: object, file: str) -> None:
    walk = _Walk(file)
    walk.visit(root)
    while walk.records:
        record = walk.records.pop()
        for part in (record.callable, record.args, record.kwargs):
            walk.visit(part)
        for step in record.steps:
            walk.visit(step.payload)


class _Walk:
    """The containers of a tree that have been visited, and the records still to visit."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.heights: dict[int, int] = {}
        self.records: list[ObjectRecord] = []

    def visit(self, root: object) -> None:
        """Visit everything below a value, down to records."""
        heights = self.heights
        entered: set[int] = set()
        # A container waits below its children; it is popped a second time when they are done.
        pending = [root]
        while pending:
            node = pending[-1]
            if id(node) in heights:
                pending.pop()
            elif id(node) in entered:
                pending.pop()
                entered.remove(id(node))
                heights[id(node)] = self._height(node)
            else:
                children = self._children(node)
                for child in children:
                    if id(child) in entered or child is node:
                        raise self._wrong("a container that holds itself")
                waiting = [child for child in children if id(child) not in heights]
                if waiting:
                    entered.add(id(node))
                    pending.extend(waiting)
                else:
                    pending.pop()
                    heights[id(node)] = self._height(node, children)

    def _height(self, node: object, children: list[object] | None = None) -> int:
        below = self._children(node) if children is None else children
        height = 1 + max((self.heights[id(child)] for child in below), default=0)
        if height > DEEPEST_TREE:
            raise self._wrong(f"more than {DEEPEST_TREE} containers inside each other")
        return height

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
            raise HostileFileError(
                "the file passes builtins.getattr around, which never belongs in a checkpoint",
                file=self.file,
            )
        if isinstance(part, ObjectRecord) and id(part) not in self.heights:
            self.heights[id(part)] = 0
            self.records.append(part)
        return False

    def _wrong(self, found: str) -> ArchiveError:
        return ArchiveError(
            "the content of the file is nested in a way that no checkpoint is",
            file=self.file,
            found=found,
            next_step="the file was made by hand; get it again from a source you trust",
        )
