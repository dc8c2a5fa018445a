"""Summing up what a checkpoint holds, bytes of tensors unread.

Theory. A summary counts each logical tensor once: replicas, padding and the number of ranks do
not change what a checkpoint *holds*. Values that are no tensors are searched for inert records,
the objects that only code could have built: they are carried as they are, and the user is told
that they are there. What the files say against each other is shown among the problems; what only
bytes tell is left to the other verbs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from reshard.api.locating import states_in_order
from reshard.api.opening import AnyPath, open_checkpoint
from reshard.api.selection import matches, require_match
from reshard.formats.checkpoint import Checkpoint, Role, StoredTensor
from reshard.formats.registry import ReadOptions
from reshard.formats.survey import problem_of
from reshard.formats.torch_archive import ObjectRecord


@dataclass(frozen=True, slots=True)
class StateSummary:
    """One state over all parameters: tensors, elements, dtypes and bytes."""

    state: str
    tensors: int
    numel: int
    dtypes: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileSummary:
    """Files of one kind: how many and how large together."""

    kind: str
    files: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class InertRecord:
    """An object that was read as data, not built: the way to it, and what would build it."""

    where: str
    what: str
    file: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """What `inspect` finds in a checkpoint."""

    checkpoint: Checkpoint
    """The open checkpoint."""
    states: tuple[StateSummary, ...]
    """Summary of every tensor state, in the order of the files."""
    files: tuple[FileSummary, ...]
    """Summary of every kind of file."""
    roles: Mapping[Role, int]
    """Number of parameters of each role."""
    numel: int
    """Elements of all parameters, each counted once however many states it has."""
    inert: tuple[InertRecord, ...] = ()
    """Objects among the extras that would have needed code to build."""
    listed: tuple[StoredTensor, ...] = ()
    """The tensors asked for by name."""


def inspect(
    path: AnyPath,
    *,
    tensors: str | None = None,
    also: Sequence[AnyPath] = (),
    layout: AnyPath | None = None,
    reading: ReadOptions | None = None,
) -> Inspection:
    """Open a checkpoint and sum up what it holds.

    Parameters
    ----------
    path, also, layout, reading
        As for :func:`open_checkpoint`.
    tensors
        Glob pattern of the parameters to list one by one.

    Raises
    ------
    ReshardError
        As :func:`open_checkpoint`; :class:`UsageError` when the pattern matches nothing.
    """
    opened = open_checkpoint(path, also=also, layout=layout, reading=reading)
    against = map(problem_of, opened.contradictions)
    checkpoint = replace(opened, problems=(*against, *opened.problems, *opened.unproved))
    if tensors is not None:
        require_match(tensors, checkpoint.names)
    listed = tuple(
        tensor
        for (name, _), tensor in checkpoint.tensors.items()
        if tensors is not None and matches(name, (tensors,))
    )
    firsts: dict[str, StoredTensor] = {}
    for (name, _), tensor in checkpoint.tensors.items():
        firsts.setdefault(name, tensor)
    roles = [tensor.role for tensor in firsts.values()]
    return Inspection(
        checkpoint,
        states=_state_summaries(checkpoint),
        files=_file_summaries(checkpoint),
        roles={role: roles.count(role) for role in Role if role in roles},
        numel=sum(tensor.numel for tensor in firsts.values()),
        inert=tuple(_inert_records(checkpoint)),
        listed=listed,
    )


def _state_summaries(checkpoint: Checkpoint) -> tuple[StateSummary, ...]:
    order = states_in_order(state for _, state in checkpoint.tensors)
    by_state: dict[str, list[StoredTensor]] = {state: [] for state in order}
    for (_, state), tensor in checkpoint.tensors.items():
        by_state[state].append(tensor)
    return tuple(
        StateSummary(
            state,
            tensors=len(group),
            numel=sum(tensor.numel for tensor in group),
            dtypes=tuple(sorted({str(tensor.dtype) for tensor in group})),
            nbytes=sum(tensor.nbytes for tensor in group),
        )
        for state, group in by_state.items()
    )


def _file_summaries(checkpoint: Checkpoint) -> tuple[FileSummary, ...]:
    by_kind: dict[str, list[int]] = {}
    for file in checkpoint.files:
        by_kind.setdefault(file.kind, []).append(file.nbytes)
    return tuple(FileSummary(kind, len(sizes), sum(sizes)) for kind, sizes in by_kind.items())


def _inert_records(checkpoint: Checkpoint) -> Iterator[InertRecord]:
    seen: set[int] = set()
    for key, extra in checkpoint.extras.items():
        for where, record in _records(extra.value, key, seen):
            yield InertRecord(where, record.type_name, extra.file)


def _records(value: object, where: str, seen: set[int]) -> Iterator[tuple[str, ObjectRecord]]:
    # Deep and cyclic trees are legal input: a stack instead of recursion, and every node once.
    stack = [(where, value)]
    while stack:
        path, node = stack.pop()
        if id(node) in seen:
            continue
        if isinstance(node, ObjectRecord):
            seen.add(id(node))
            if type(node) is ObjectRecord:
                yield path, node
        children = list(_children(path, node))
        if children:
            seen.add(id(node))
            stack.extend(reversed(children))


def _children(path: str, node: object) -> Iterator[tuple[str, object]]:
    if isinstance(node, Mapping):
        yield from ((f"{path}.{key}", child) for key, child in node.items())
    elif isinstance(node, list | tuple | set | frozenset):
        yield from ((f"{path}[{index}]", child) for index, child in enumerate(node))
    elif isinstance(node, ObjectRecord):
        yield from ((f"{path}({index})", child) for index, child in enumerate(node.args))
        yield from ((f"{path}.{name}", child) for name, child in node.fields.items())
        yield from ((f"{path}[{index}]", child) for index, child in enumerate(node.list_items))
        yield from ((f"{path}[{key!r}]", child) for key, child in node.dict_items)
