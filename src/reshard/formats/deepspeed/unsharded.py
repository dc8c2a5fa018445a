"""ZeRO-0: an ordinary optimizer, whose states carry no names.

Theory. Without ZeRO every model-parallel rank stores its optimizer as it is (`numbered`): states by
number, numbers by parameter group. Which parameter a number is, is written nowhere. Two facts
narrow it down: the shape of a state is the shape of its parameter, and a group lists its parameters
in the order of the model. If exactly one assignment of numbers to names keeps both, it is taken,
and said; if there are several the files do not tell, and the checkpoint is refused.

The stages of a pipeline follow each other in the model, and its layers have files of their own, so
their numbers are assigned together: one sequence for every tensor-parallel rank. A tied module is
on two stages under one name that nothing states; the same weights in two layer files betray it, and
the checkpoint is refused. With experts the weights of a stage are in its model-state file, and so
are the names; every stage is told by itself.

reshard itself adds `param_shapes`, as every file of ZeRO has it, and then names are read. Ties are
not stated either: two names whose tensors are the very same bytes are one parameter.

Groups of experts (`moe`) hold other experts on every rank; they are read from the files of the EP
ranks (`unsharded_experts`).

Source: `torch.optim.Optimizer.state_dict`, `engine.py` (`_save_checkpoint`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from reshard.errors import CheckpointError, UnsupportedError, count_text
from reshard.formats.checkpoint import Problem, Role, Scalar, TensorKey
from reshard.formats.deepspeed.grid import Degrees, require_one_value
from reshard.formats.deepspeed.module import ModuleShard, ModuleTensor, whole_shard
from reshard.formats.deepspeed.numbered import Numbered, Shape, read_numbered
from reshard.formats.deepspeed.partitions import Partitions
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.deepspeed.unlisted import Weights, weights_of
from reshard.formats.deepspeed.weight_copies import whole_copy
from reshard.formats.rounded_copies import is_rounded
from reshard.formats.torch_archive import TensorRecord

Candidate = tuple[str, Shape]


@dataclass(frozen=True, slots=True)
class Unsharded:
    """What the optimizers of all columns hold, by state: tensors cut over columns, and scalars.

    `columns` are those whose optimizer has a parameter, by its name.
    """

    tensors: dict[str, list[ModuleTensor]] = field(default_factory=dict)
    scalars: dict[TensorKey, Scalar] = field(default_factory=dict)
    columns: dict[str, tuple[int, ...]] = field(default_factory=dict)


def read_unsharded(
    columns: Sequence[ModelStates],
    layers: Sequence[ModuleTensor],
    degrees: Degrees,
    found: Partitions,
    aliases: Collection[str],
) -> Unsharded:
    """Read the optimizer states of a ZeRO-0 checkpoint, experts left out.

    Parameters
    ----------
    columns
        The model-state files by `mp`.
    layers
        The tensors of a pipeline's layer files, in the order of the layers.
    degrees
        The grid.
    found
        Where the names of the groups and what was found wrong are noted.
    aliases
        Names of the model that are other names of a parameter.

    Raises
    ------
    CheckpointError
        When no assignment of states to names, or more than one, is possible.
    UnsupportedError
        When the masters are flat buffers.
    """
    if layers and not _lists_names(columns):
        _require_untied(layers)
    held: dict[str, dict[int, tuple[ModelStates, Numbered]]] = {}
    for stages in _told_together(columns, degrees, of_layers=bool(layers)):
        entries = [
            (model, entry)
            for model in stages
            for entry in read_numbered(model.archive)
            if not entry.is_expert
        ]
        weights = _weights(stages[0], stages[0].mp % degrees.tp, layers, aliases)
        listed = [stated for model in stages for stated in _listed_dense(model)]
        names = _names(stages, weights, [entry for _, entry in entries], listed)
        for name, (model, entry) in zip(names, entries, strict=True):
            _require_weight(name, entry, model.file, weights[name])
            found.name_group(entry.group, name)
            held.setdefault(name, {})[model.mp] = (model, entry)
    if not _lists_names(columns):
        text = "ZeRO-0 states carry no names; they were told by shape and by the order of the model"
        found.problems.append(Problem(text, columns[0].file))
    result = Unsharded()
    for name, by_column in held.items():
        result.columns[name] = tuple(by_column)
        _add_parameter(name, by_column, result)
    return result


def _told_together(
    columns: Sequence[ModelStates], degrees: Degrees, *, of_layers: bool
) -> list[Sequence[ModelStates]]:
    """The columns whose numbers are assigned together: all stages, where layers have the files.

    The stages of a pipeline with experts have their weights in files of their own instead.
    """
    if of_layers:
        return [columns[rank :: degrees.tp] for rank in range(degrees.tp)]
    return [[column] for column in columns]


# --------------------------------------------------------------------------- names


def _weights(
    model: ModelStates, rank: int, layers: Sequence[ModuleTensor], aliases: Collection[str]
) -> Weights:
    """Parameters of the model that an optimizer may own, in the model's order."""
    if layers:
        return weights_of((t for t in layers if t.role is not Role.BUFFER), rank)
    return {
        name: (model.file, record)
        for name, record in (model.module or {}).items()
        if not (name in model.buffer_names or name in model.shared or name in aliases)
    }


def unstated_ties(model: ModelStates, stated: Mapping[str, str]) -> dict[str, str]:
    """Ties by shared bytes, alias -> owner, of names that no stated tie speaks of.

    Bytes do not say which of two names is the owner; where a file states it, that holds.
    """
    spoken = {*stated, *stated.values()}
    ties = storage_ties(model).items()
    return {alias: owner for alias, owner in ties if not {alias, owner} & spoken}


def storage_ties(model: ModelStates) -> dict[str, str]:
    """Names whose tensor is the very bytes of an earlier name of the file, alias -> owner."""
    seen: dict[tuple[int, Shape, Shape], str] = {}
    ties = {}
    for name, record in (model.module or {}).items():
        if name in model.buffer_names or not prod(record.shape):
            continue
        owner = seen.setdefault((record.offset, record.shape, record.strides), name)
        if owner != name:
            ties[name] = owner
    return ties


def _require_weight(
    name: str, entry: Numbered, file: str, weight: tuple[str, TensorRecord]
) -> None:
    """Prove the name by the values: a master, rounded to the model's dtype, is the weight."""
    copy = None if entry.master is None else whole_copy(name, (file, entry.master), weight)
    if copy is not None and not is_rounded(copy):
        raise _untold(file, f"the master that would be of {name} is not its weight")


def _lists_names(columns: Sequence[ModelStates]) -> bool:
    return all(model.param_shapes is not None for model in columns)


def _listed_dense(model: ModelStates) -> list[tuple[int, str, Shape]]:
    """Group, name and shape of all that `param_shapes` lists, groups of experts left out."""
    experts = {entry.group for entry in read_numbered(model.archive) if entry.is_expert}
    return [
        (group, name, shape)
        for group, shapes in enumerate(model.param_shapes or ())
        for name, shape in shapes.items()
        if group not in experts
    ]


def _names(
    stages: Sequence[ModelStates],
    weights: Weights,
    numbered: Sequence[Numbered],
    stated: Sequence[tuple[int, str, Shape]],
) -> list[str]:
    """The names of the numbered parameters: as `param_shapes` lists them, else as they fit."""
    if not _lists_names(stages):
        candidates = [(name, record.shape) for name, (_, record) in weights.items()]
        return assign_among(candidates, numbered, stages[0].file)
    fits = len(stated) == len(numbered) and all(
        entry.group == group and entry.shape in (None, shape) and name in weights
        for entry, (group, name, shape) in zip(numbered, stated, strict=True)
    )
    if not fits:
        raise CheckpointError(
            "param_shapes contradicts the states of the optimizer",
            file=stages[0].file,
            expected=f"{count_text(len(stated), 'parameter')}, as param_shapes lists them",
            found=f"{len(numbered)}, or of other shapes",
            next_step="the file is damaged or edited",
        )
    return [name for _, name, _ in stated]


def assign_among(
    candidates: Sequence[Candidate], numbered: Sequence[Numbered], file: str
) -> list[str]:
    """The one assignment of candidates (name and shape, in the model's order) to numbers.

    Returns
    -------
    list of str
        A name for each of `numbered`, in their order.
    """
    groups: dict[int, list[int]] = {}
    for position, entry in enumerate(numbered):
        groups.setdefault(entry.group, []).append(position)
    names: dict[int, str] = {}
    for group in groups.values():
        shapes = [numbered[position].shape for position in group]
        names |= zip(group, _only_assignment(file, candidates, shapes), strict=True)
    if len(set(names.values())) != len(names):
        raise _untold(file, "two groups would own one parameter")
    return [names[position] for position in range(len(numbered))]


def _only_assignment(
    file: str, candidates: Sequence[Candidate], shapes: Sequence[Shape | None]
) -> list[str]:
    """Match `shapes` to a subsequence of the candidates; refuse unless exactly one matches.

    The earliest match from the front and the latest from the back bound every other one, so the
    assignment is unique exactly when they are the same. A shape that is not known matches any.
    """
    front = _greedy(list(candidates), list(shapes))
    back = _greedy(list(candidates)[::-1], list(shapes)[::-1])
    if front is None or back is None:
        raise _untold(file, "no assignment of states to parameters fits their shapes")
    if front != back[::-1]:
        raise _untold(file, "more than one assignment of states to parameters fits their shapes")
    return front


def _greedy(candidates: list[Candidate], shapes: list[Shape | None]) -> list[str] | None:
    names = []
    at = 0
    for shape in shapes:
        while at < len(candidates) and shape not in (None, candidates[at][1]):
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


def _require_untied(layers: Sequence[ModuleTensor]) -> None:
    """Refuse layer files that hold one matrix twice: the layers are tied, under a name not stated.

    Storage checksums of the archives would do, but not all files have them; the bytes always do.
    """
    seen: dict[tuple[str, Shape, bytes], str] = {}
    for tensor in layers:
        shard = next(iter(tensor.shards.values()))
        if len(shard.shape) < 2 or not prod(shard.shape):
            continue
        local = tensor.name.partition(".")[2]
        first = seen.setdefault((local, shard.shape, _sample(shard)), tensor.name)
        if first != tensor.name:
            raise UnsupportedError(
                "two layers of a ZeRO-0 pipeline hold the same weights: they are tied, and the "
                "name under which the optimizer keeps them is not stated",
                file=shard.stretches[0].region.file,
                parameter=tensor.name,
                found=f"the values of {first}",
                next_step="save the run with ZeRO-1, which records names",
            )


def _sample(shard: ModuleShard) -> bytes:
    region = shard.stretches[0].region
    with open(region.file, "rb") as file:  # noqa: PTH123 - a path as the reader knows it
        file.seek(region.offset)
        return file.read(min(region.nbytes, 4096))


# --------------------------------------------------------------------------- states


def _add_parameter(
    name: str, by_column: Mapping[int, tuple[ModelStates, Numbered]], result: Unsharded
) -> None:
    kept = {model.file: entry.state_names() for model, entry in by_column.values()}
    require_one_value(kept, f"the optimizer states of {name}")
    for state in next(iter(kept.values())):
        shards: dict[int, ModuleShard] = {}
        scalars: dict[str, Scalar] = {}
        for column, (model, entry) in by_column.items():
            value = entry.value(model.archive, state)
            if isinstance(value, Scalar):
                scalars[model.file] = value
            else:
                shards[column] = whole_shard(value, [(value, model.file)])
        if scalars:
            require_one_value({f: s.value for f, s in scalars.items()}, f"{state} of {name}")
            result.scalars[name, state] = next(iter(scalars.values()))
        if shards:
            tensor = ModuleTensor(name, Role.PARAMETER, shards)
            result.tensors.setdefault(state, []).append(tensor)
