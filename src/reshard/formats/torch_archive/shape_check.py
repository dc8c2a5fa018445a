"""Bounds the shape of a tree, so that whoever walks it may recurse.

Theory. A few bytes a level make a tree as deep as a pickle is long, or one that holds itself. Code
that walks trees recurses, and should not have to think of that. So a tree of plain containers is
checked once, when it is read: its height is bounded and no plain container holds itself. A cycle
through a record is allowed, since objects do point at each other; walkers stop at records.
"""

from __future__ import annotations

from collections.abc import Iterable

from reshard.errors import ArchiveError, HostileFileError
from reshard.formats.torch_archive.values import AttributeGetter, ObjectRecord

DEEPEST_TREE = 200
"""Most plain containers inside each other."""

_CONTAINERS = (dict, list, tuple, set, frozenset)
_VISITED = (*_CONTAINERS, ObjectRecord, AttributeGetter)


def check_tree(root: object, file: str) -> None:
    """Raise :class:`ArchiveError` when a tree is too deep or holds itself.

    Visits every container once, children before parents.
    """
    heights: dict[int, int] = {}
    open_now: set[int] = set()
    # An entry is a container, or a container with its children once these are done.
    pending: list[tuple[object, list[object] | None]] = [(root, None)]
    records: list[ObjectRecord] = []
    while pending:
        node, children = pending.pop()
        if children is not None:
            open_now.discard(id(node))
            height = 1 + max((heights.get(id(child), 0) for child in children), default=0)
            heights[id(node)] = height
            if height > DEEPEST_TREE:
                raise _wrong(file, f"more than {DEEPEST_TREE} containers inside each other")
        elif isinstance(node, AttributeGetter):
            raise HostileFileError(
                "the file passes builtins.getattr around, which never belongs in a checkpoint",
                file=file,
            )
        elif isinstance(node, ObjectRecord):
            if id(node) not in heights:
                heights[id(node)] = 0
                records.append(node)
        elif isinstance(node, _CONTAINERS) and id(node) not in heights:
            if id(node) in open_now:
                raise _wrong(file, "a container that holds itself")
            open_now.add(id(node))
            inner = list(_children(node))
            pending.append((node, inner))
            pending.extend((child, None) for child in inner)
        if not pending and records:
            # Parts of a record start at height zero: nobody walks into records unawares.
            record = records.pop()
            parts = (record.callable, record.args, record.kwargs)
            pending.extend((part, None) for part in parts)
            pending.extend((step.payload, None) for step in record.steps)


def _children(node: object) -> Iterable[object]:
    """Return the values inside a container that are containers or records themselves."""
    if isinstance(node, dict):
        values = [value for value in node.values() if isinstance(value, _VISITED)]
        attributes = getattr(node, "__dict__", None)
        if attributes:
            values += [value for value in attributes.values() if isinstance(value, _VISITED)]
        return values + [key for key in node if isinstance(key, _VISITED)]
    if isinstance(node, (list, tuple, set, frozenset)):
        return [value for value in node if isinstance(value, _VISITED)]
    return []


def _wrong(file: str, found: str) -> ArchiveError:
    return ArchiveError(
        "the content of the file is nested in a way that no checkpoint is",
        file=file,
        found=found,
        next_step="the file was made by hand; get it again from a source you trust",
    )
