"""ZeRO-0: an ordinary optimizer, whose states carry no names.

Theory. Without ZeRO the optimizer's own state dict is stored in the model-state file: states by
number, numbers by parameter group. In half precision it is inside that of a class that keeps the
masters (`fp32_groups`, one tensor a parameter). Which parameter is number `k` is written nowhere by
DeepSpeed. Two facts narrow it down: the shape of a state is the shape of its parameter, and a group
lists its parameters in the order of the model. If exactly one assignment of numbers to names keeps
both, it is taken, and said; if there are several the files do not tell, and the checkpoint is
refused. reshard itself adds `param_shapes`, as every file of ZeRO has it, and then names are read.

Every model-parallel rank has such a file of its own shards, so what is found here are shards by
column, which `governing` puts together like any other tensor. Ties are not stated either: two names
whose tensors are the very same bytes are one parameter.

Groups of experts (`moe`) hold other experts on every rank; they are read from the files of the EP
ranks (`unsharded_experts`).

Source: `torch.optim.Optimizer.state_dict`, `engine.py` (`_save_checkpoint`),
`fp16/unfused_optimizer.py` (`state_dict`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from reshard.errors import CheckpointError, UnsupportedError
from reshard.formats.checkpoint import Problem, Role, Scalar, TensorKey
from reshard.formats.deepspeed.grid import require_one_value
from reshard.formats.deepspeed.module import ModuleShard, ModuleTensor, whole_shard
from reshard.formats.deepspeed.optimizer_records import uncuttable
from reshard.formats.deepspeed.partitions import MASTER, Partitions
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.loss_scale import effective_settings
from reshard.formats.parsing import Cursor
from reshard.formats.torch_archive import Archive, TensorRecord, read_scalar

WRAPPED = "optimizer_state_dict"
"""Key of the optimizer inside the classes that train in half precision."""

MASTERS, FLAT_MASTERS = "fp32_groups", "fp32_groups_flat"
"""Keys of the masters: a tensor a parameter, or one flat tensor a group (FusedAdam)."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """One parameter of the optimizer: its group, its number, and the shape of its states."""

    group: int
    number: int
    shape: tuple[int, ...]
    is_expert: bool = False


@dataclass(slots=True)
class Unsharded:
    """What the optimizers of all columns hold.

    Parameters
    ----------
    shards
        Tensor state -> column -> its shard.
    scalars
        States that are one number.
    """

    shards: dict[TensorKey, dict[int, ModuleShard]] = field(default_factory=dict)
    scalars: dict[TensorKey, Scalar] = field(default_factory=dict)

    def tensors(self) -> dict[TensorKey, ModuleTensor]:
        """The tensor states by column."""
        return {
            (name, state): ModuleTensor(name, Role.PARAMETER, columns)
            for (name, state), columns in self.shards.items()
        }


def has_plain_optimizer(model: ModelStates) -> bool:
    """Whether a model-state file holds an optimizer, so there is no ZeRO."""
    return Cursor(model.archive.root, model.file).maybe("optimizer") is not None


def storage_ties(model: ModelStates) -> dict[str, str]:
    """Names whose tensor is the very bytes of an earlier name, alias -> owner."""
    seen: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    ties = {}
    for name, record in (model.module or {}).items():
        if name in model.buffer_names or not prod(record.shape):
            continue
        owner = seen.setdefault((record.offset, record.shape, record.strides), name)
        if owner != name:
            ties[name] = owner
    return ties


def read_unsharded(
    columns: Sequence[ModelStates], found: Partitions, aliases: Collection[str]
) -> Unsharded:
    """Read weights and optimizer states of a ZeRO-0 checkpoint, experts left out.

    Parameters
    ----------
    columns
        The model-state files by `mp`.
    found
        Receives the groups, and what is to be said.
    aliases
        Names of the model that are other names of a parameter.

    Raises
    ------
    CheckpointError
        When no assignment of states to names, or more than one, is possible, or columns differ in
        it.
    UnsupportedError
        When a state is not one element a parameter element, or masters lie in flat groups.
    """
    result = Unsharded()
    owned: dict[str, list[tuple[int, str]]] = {}
    for model in columns:
        plain = _open(model)
        numbered = [entry for entry in plain.numbered() if not entry.is_expert]
        names = _names(model, numbered, aliases)
        owned[model.file] = [
            (entry.group, name) for entry, name in zip(numbered, names, strict=True)
        ]
        for entry, name in zip(numbered, names, strict=True):
            found.name_group(entry.group, name)
            _add_parameter(name, model, plain, entry, result)
    require_one_value(owned, "the parameters of the optimizer")
    if not all(model.param_shapes for model in columns):
        text = "ZeRO-0 states carry no names; they were told by shape and by the order of the model"
        found.problems.append(Problem(text, columns[0].file))
    return result


# --------------------------------------------------------------------------- one optimizer


@dataclass(frozen=True, slots=True)
class _Plain:
    """The optimizer of one model-state file.

    Parameters
    ----------
    inner
        The state dict of the optimizer itself.
    states
        States by number.
    masters
        Masters by number; empty where the weights themselves are trained.
    """

    inner: Cursor
    states: Mapping[int, Cursor]
    masters: Mapping[int, TensorRecord]

    def numbered(self) -> list[Numbered]:
        """The parameters in the order of the groups."""
        return read_numbered(self.inner, self.states, self.masters)


def _open(model: ModelStates) -> _Plain:
    optimizer = Cursor(model.archive.root, model.file).at("optimizer")
    wrapped = optimizer.maybe(WRAPPED)
    inner = optimizer if wrapped is None else wrapped
    if optimizer.maybe(FLAT_MASTERS) is not None:
        raise UnsupportedError(
            "without ZeRO, FusedAdam in half precision keeps its states in flat groups, whose "
            "parameters are written nowhere",
            file=model.file,
            found=FLAT_MASTERS,
            next_step="save the run with ZeRO-1, which records names",
        )
    held = optimizer.maybe(MASTERS)
    masters = {} if held is None else dict(_masters(inner, held))
    states = {} if masters and not inner.at("state").value else numbered_states(inner)
    return _Plain(inner, states, masters)


def _masters(inner: Cursor, held: Cursor) -> Iterable[tuple[int, TensorRecord]]:
    """Masters lie group by group, in the order of the numbers."""
    for group, tensors in zip(inner.at("param_groups").each(), held.each(), strict=True):
        for number, tensor in zip(group.at("params").shape(), tensors.each(), strict=True):
            if not isinstance(tensor.value, TensorRecord):
                raise tensor.unexpected("a tensor")
            yield number, tensor.value


def plain_param_groups(model: ModelStates) -> list[dict[str, object]]:
    """Hyperparameters of the optimizer's groups, `params` left out."""
    optimizer = Cursor(model.archive.root, model.file).at("optimizer")
    inner = optimizer.maybe(WRAPPED) or optimizer
    return [
        {str(key): value for key, value in group.mapping().items() if key != "params"}
        for group in inner.at("param_groups").each()
    ]


def plain_settings(model: ModelStates) -> dict[str, object]:
    """What lies beside states and groups: clipping, the loss scale of half precision."""
    optimizer = Cursor(model.archive.root, model.file).at("optimizer")
    bulk = (WRAPPED, MASTERS, FLAT_MASTERS, "state", "param_groups")
    return effective_settings(
        {str(key): value for key, value in optimizer.mapping().items() if key not in bulk}
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


def read_numbered(
    optimizer: Cursor,
    states: Mapping[int, Cursor],
    masters: Mapping[int, TensorRecord] | None = None,
) -> list[Numbered]:
    """The parameters of an optimizer in the order of its groups."""
    held = masters or {}
    numbered = []
    for position, group in enumerate(optimizer.at("param_groups").each()):
        moe = group.maybe("moe")
        is_expert = moe is not None and moe.value is True
        for number in group.at("params").shape():
            shape = _shape_of(number, position, optimizer.file, states, held)
            numbered.append(Numbered(position, number, shape, is_expert))
    return numbered


def _shape_of(
    number: int,
    group: int,
    file: str,
    states: Mapping[int, Cursor],
    masters: Mapping[int, TensorRecord],
) -> tuple[int, ...]:
    """The shape of a parameter: of its master, else that which all its states have."""
    if number not in states and number not in masters:
        raise CheckpointError(
            "a parameter of the optimizer has no state, so its name cannot be told",
            file=file,
            found=f"number {number} of group {group}",
        )
    shapes = [
        value.value.shape
        for _, value in (states[number].named() if number in states else ())
        if isinstance(value.value, TensorRecord) and value.value.shape != ()
    ]
    if number in masters:
        shapes.insert(0, masters[number].shape)
    if not shapes or any(shape != shapes[0] for shape in shapes):
        raise uncuttable(file, f"number {number}", shapes)
    return shapes[0]


def _names(model: ModelStates, numbered: Sequence[Numbered], aliases: Collection[str]) -> list[str]:
    """The names of the numbered parameters: as `param_shapes` lists them, else as they fit."""
    if model.param_shapes is None:
        return assign_names(model, numbered, aliases)
    stated = [
        (group, name, shape)
        for group, shapes in enumerate(model.param_shapes)
        for name, shape in shapes.items()
    ]
    held = [(entry.group, entry.shape) for entry in numbered]
    if held != [(group, shape) for group, _, shape in stated]:
        raise CheckpointError(
            "param_shapes contradicts the states of the optimizer",
            file=model.file,
            expected=f"{len(stated)} parameters, as param_shapes lists them",
            found=f"{len(held)}, or of other shapes",
            next_step="the file is damaged or edited",
        )
    return [name for _, name, _ in stated]


def assign_names(
    model: ModelStates, numbered: Sequence[Numbered], aliases: Collection[str] = ()
) -> list[str]:
    """The one assignment of names that keeps shapes, and the model's order in every group."""
    ties = storage_ties(model)
    candidates = [
        (name, record.shape)
        for name, record in (model.module or {}).items()
        if not (
            name in model.buffer_names or name in model.shared or name in aliases or name in ties
        )
    ]
    return assign_among(candidates, numbered, model.file)


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


# --------------------------------------------------------------------------- states


def _add_parameter(
    name: str, model: ModelStates, plain: _Plain, entry: Numbered, result: Unsharded
) -> None:
    weights = (model.module or {})[name]
    master = plain.masters.get(entry.number, weights)
    _add_shard(name, MASTER, master, model, result)
    state = plain.states.get(entry.number)
    for key, value in state.named() if state is not None else ():
        found = value.value
        is_scalar = key == "step" or weights.shape != ()
        if isinstance(found, TensorRecord) and not (found.shape == () and is_scalar):
            _add_shard(name, key, found, model, result)
        else:
            _add_scalar(name, key, _scalar(value, model.archive), model, result)


def _add_shard(
    name: str, state: str, record: TensorRecord, model: ModelStates, result: Unsharded
) -> None:
    shard = whole_shard(record, [(record, model.file)])
    result.shards.setdefault((name, state), {})[model.mp] = shard


def _add_scalar(
    name: str, state: str, scalar: Scalar, model: ModelStates, result: Unsharded
) -> None:
    known = result.scalars.setdefault((name, state), scalar)
    require_one_value(
        {known.source: known.value, f"{model.file}: {scalar.source}": scalar.value},
        f"{state} of {name}",
    )


def _scalar(value: Cursor, archive: Archive) -> Scalar:
    found = value.value
    if isinstance(found, TensorRecord):
        return Scalar(read_scalar(archive, found), found.dtype, value.path)
    if isinstance(found, (int, float)):
        return Scalar(found, None, value.path)
    raise uncuttable(value.file, value.path, found)
