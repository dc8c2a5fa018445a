"""ZeRO-0: an ordinary optimizer, whose states carry no names.

Theory. Without ZeRO the optimizer's own state dict is stored: states by number, numbers by
parameter group. Which parameter is number `k` is written nowhere. Two facts narrow it down: the
shape of a state is the shape of its parameter, and a group lists its parameters in the order of the
model. If exactly one assignment of numbers to names keeps both, it is taken, and said; if there are
several the files do not tell, and the checkpoint is refused.

Groups of experts (`moe`) hold other experts on every rank; they are read from the files of the EP
ranks (`unsharded_experts`).

Source: `torch.optim.Optimizer.state_dict`, `engine.py` (`_save_checkpoint`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from reshard.errors import CheckpointError, UnsupportedError
from reshard.formats.assembly import record_region, stored_order
from reshard.formats.checkpoint import Problem, Role, Scalar, StoredTensor, TensorKey
from reshard.formats.deepspeed.grid import Degrees
from reshard.formats.deepspeed.optimizer_records import uncuttable
from reshard.formats.deepspeed.partitions import MASTER, Partitions
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.parsing import Cursor
from reshard.formats.torch_archive import TensorRecord, read_scalar
from reshard.layouts.builders import replicated_map

_PROVENANCE = "one rank, whole"


@dataclass(frozen=True, slots=True)
class Numbered:
    """One parameter of the optimizer: its group, its number, and the shape of its states."""

    group: int
    number: int
    shape: tuple[int, ...]
    is_expert: bool = False


def add_unsharded(
    columns: Sequence[ModelStates],
    degrees: Degrees,
    tensors: dict[TensorKey, StoredTensor],
    scalars: dict[TensorKey, Scalar],
    found: Partitions,
    aliases: Collection[str],
) -> None:
    """Read weights and optimizer states of a ZeRO-0 checkpoint, experts left out.

    `aliases` are names of the model that are other names of a parameter.

    Raises
    ------
    UnsupportedError
        When there is more than one model-parallel rank.
    CheckpointError
        When no assignment of states to names, or more than one, is possible.
    """
    if degrees.mp > 1:
        raise UnsupportedError(
            "a ZeRO-0 checkpoint of several model-parallel ranks cannot be read",
            file=columns[0].file,
            next_step="save it with ZeRO-1, which records names",
        )
    model = columns[0]
    optimizer = Cursor(model.archive.root, model.file).at("optimizer")
    states = numbered_states(optimizer)
    numbered = [entry for entry in read_numbered(optimizer, states) if not entry.is_expert]
    names = assign_names(model, numbered, aliases)
    for entry, name in zip(numbered, names, strict=True):
        found.name_group(entry.group, name)
        _add_parameter(name, model, states[entry.number], tensors, scalars)
    found.problems.append(
        Problem(
            "ZeRO-0 states carry no names; they were told by shape and by the order of the model",
            model.file,
        )
    )


def numbered_states(optimizer: Cursor) -> dict[int, Cursor]:
    """The states of an optimizer by number."""
    state = optimizer.at("state")
    return {
        Cursor(number, state.file, state.path).integer(): state.at(_as_key(number))
        for number in state.mapping()
    }


def _as_key(number: object) -> int:
    return number if isinstance(number, int) else -1


def read_numbered(optimizer: Cursor, states: Mapping[int, Cursor]) -> list[Numbered]:
    """The parameters of an optimizer in the order of its groups."""
    numbered = []
    for position, group in enumerate(optimizer.at("param_groups").each()):
        moe = group.maybe("moe")
        is_expert = moe is not None and moe.value is True
        for number in group.at("params").shape():
            if number not in states:
                raise CheckpointError(
                    "a parameter of the optimizer has no state, so its name cannot be told",
                    file=optimizer.file,
                    found=f"number {number} of group {position}",
                )
            shapes = [
                value.value.shape
                for _, value in states[number].named()
                if isinstance(value.value, TensorRecord) and value.value.shape != ()
            ]
            if not shapes or any(shape != shapes[0] for shape in shapes):
                raise uncuttable(optimizer.file, f"number {number}", shapes)
            numbered.append(Numbered(position, number, shapes[0], is_expert))
    return numbered


def assign_names(
    model: ModelStates, numbered: Sequence[Numbered], aliases: Collection[str] = ()
) -> list[str]:
    """The one assignment of names that keeps shapes, and the model's order in every group."""
    candidates = [
        (name, record.shape)
        for name, record in (model.module or {}).items()
        if not (name in model.buffer_names or name in model.shared or name in aliases)
    ]
    return assign_among(_without_aliases(model, candidates), numbered, model.file)


def assign_among(
    candidates: Sequence[tuple[str, tuple[int, ...]]], numbered: Sequence[Numbered], file: str
) -> list[str]:
    """The one assignment of candidates (name and shape, in the model's order) to numbers."""
    groups: dict[int, list[Numbered]] = {}
    for entry in numbered:
        groups.setdefault(entry.group, []).append(entry)
    names: list[str] = []
    for group in groups.values():
        names += _only_assignment(file, candidates, [entry.shape for entry in group])
    if len(set(names)) != len(names):
        raise _untold(file, "two groups would own one parameter")
    return names


def _without_aliases(
    model: ModelStates, candidates: Sequence[tuple[str, tuple[int, ...]]]
) -> list[tuple[str, tuple[int, ...]]]:
    """Leave out names whose tensor is the very bytes of an earlier name (tied weights)."""
    module = model.module or {}
    seen: dict[tuple[int, tuple[int, ...]], str] = {}
    kept = []
    for name, shape in candidates:
        record = module[name]
        if prod(shape) and seen.setdefault((record.offset, shape), name) != name:
            continue
        kept.append((name, shape))
    return kept


def _only_assignment(
    file: str, candidates: Sequence[tuple[str, tuple[int, ...]]], shapes: Sequence[tuple[int, ...]]
) -> list[str]:
    """Match `shapes` to a subsequence of the candidates; refuse unless exactly one matches.

    The earliest match from the front and the latest from the back bound every other one, so the
    assignment is unique exactly when they are the same.
    """
    front = _greedy(list(candidates), list(shapes))
    back = _greedy(list(candidates)[::-1], list(shapes)[::-1])
    if front is None or back is None:
        raise _untold(file, "no assignment of states to parameters fits their shapes")
    if front != back[::-1]:
        raise _untold(file, "more than one assignment of states to parameters fits their shapes")
    return front


def _greedy(
    candidates: list[tuple[str, tuple[int, ...]]], shapes: list[tuple[int, ...]]
) -> list[str] | None:
    names = []
    at = 0
    for shape in shapes:
        while at < len(candidates) and candidates[at][1] != shape:
            at += 1
        if at == len(candidates):
            return None
        names.append(candidates[at][0])
        at += 1
    return names


def _untold(file: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"which parameter an optimizer state belongs to cannot be told: {why}",
        file=file,
        next_step="save the run with ZeRO-1, which records names",
    )


def _add_parameter(
    name: str,
    model: ModelStates,
    state: Cursor,
    tensors: dict[TensorKey, StoredTensor],
    scalars: dict[TensorKey, Scalar],
) -> None:
    weights = (model.module or {})[name]
    _add_tensor(name, MASTER, weights, model.file, tensors)
    for key, value in state.named():
        found = value.value
        is_scalar = key == "step" or weights.shape != ()
        if isinstance(found, TensorRecord) and not (found.shape == () and is_scalar):
            _add_tensor(name, key, found, model.file, tensors)
        elif isinstance(found, TensorRecord):
            number = read_scalar(model.archive, found)
            scalars[name, key] = Scalar(number, found.dtype, value.path)
        elif isinstance(found, (int, float)):
            scalars[name, key] = Scalar(found, None, value.path)
        else:
            raise uncuttable(model.file, key, found)


def _add_tensor(
    name: str, state: str, record: TensorRecord, file: str, tensors: dict[TensorKey, StoredTensor]
) -> None:
    order = stored_order(record, name, file)
    tensors[name, state] = StoredTensor(
        name,
        state,
        record.dtype,
        replicated_map(record.shape, 1) if order is None else order,
        {0: record_region(record, file)},
        Role.PARAMETER,
        _PROVENANCE,
    )
