"""ZeRO-0 with experts: the optimizer of every EP rank, in a file of its own.

Theory. Without ZeRO each rank keeps the whole state of its own experts, so a mixture of experts
writes one optimizer file a EP rank, `expp_rank_{ep}_mp_rank_{mp}_optim_states.pt`. It is the state
dict of that rank's optimizer, dense parameters included (replicas of those in the model-state
file). States carry no names; those of the groups of experts are told as in `unsharded`, from the
experts of the rank in the order of the model, or read from `param_shapes` where reshard wrote it.

With several tensor ranks `mp` is the rank that wrote the file. Experts of AutoEP are spread over
all tensor ranks, and several ranks may have written those of one EP rank: the files are replicas.
Native experts are spread likewise, or every tensor rank has its part of each (`native_moe`).

Files may be absent: the weights are then delivered from the expert files, and the states of experts
are reported as absent. (With ZeRO these files exist too, and hold nothing.)

Source: `engine.py` (`_save_moe_checkpoint`, `_get_optimizer_ckpt_name`), DeepSpeed 0.12 to 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from reshard.errors import CheckpointError, MissingFileError, UnsupportedError, count_text
from reshard.formats.assembly import Assembler, Stretch, record_region, stored_order
from reshard.formats.checkpoint import Role, Scalar, StoredTensor, TensorKey
from reshard.formats.deepspeed.expert_files import tensors_of
from reshard.formats.deepspeed.expert_reading import Experts
from reshard.formats.deepspeed.grid import Inventory, require_one_value
from reshard.formats.deepspeed.module import ModuleTensor, whole_shard
from reshard.formats.deepspeed.names import FileKind, expert_optimizer_file_name
from reshard.formats.deepspeed.native_moe import global_name, split_name
from reshard.formats.deepspeed.numbered import Numbered, read_numbered
from reshard.formats.deepspeed.partitions import Partitions
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.deepspeed.unlisted import in_module_order
from reshard.formats.deepspeed.unsharded import assign_among
from reshard.formats.torch_archive import Archive, TensorRecord, read_archive
from reshard.layouts.experts import ExpertPlacement, expert_map

Shape = tuple[int, ...]
Writer = tuple[int, int]
"""EP rank and model-parallel rank of the rank that wrote a file."""


@dataclass(frozen=True, slots=True)
class _Held:
    """What one EP rank's optimizer keeps of one parameter."""

    archive: Archive
    entry: Numbered


@dataclass(slots=True)
class UnshardedExperts:
    """The optimizer states of experts."""

    ep: int
    """The expert-parallel degree."""
    fused: list[StoredTensor] = field(default_factory=list)
    """States of fused parameters."""
    native: dict[str, list[ModuleTensor]] = field(default_factory=dict)
    """States of native experts by name of the state, cut over columns."""
    scalars: dict[TensorKey, Scalar] = field(default_factory=dict)
    """States that are one number."""


def read_unsharded_experts(
    inventory: Inventory, columns: Sequence[ModelStates], experts: Experts, found: Partitions
) -> UnshardedExperts:
    """Read the optimizer states of experts of a ZeRO-0 checkpoint.

    Parameters
    ----------
    inventory
        The files.
    columns
        The model-state files by `mp`.
    experts
        What is known of the experts.
    found
        Where the names of the groups are noted.

    Raises
    ------
    MissingFileError
        When some of the EP ranks' files are there and others are not.
    UnsupportedError
        When layers have different expert-parallel degrees.
    CheckpointError
        When no assignment of states to names, or more than one, is possible.
    """
    found_files = inventory.of_kind(FileKind.EXPERT_OPTIMIZER)
    files = dict(sorted(((name.dp, name.mp), path) for name, path in found_files.items()))
    ep = _degree(experts, files, inventory.folder.path)
    result = UnshardedExperts(ep)
    if not files:
        # the model-state files have the optimizer of EP rank 0, so the names at least
        for column in columns[:: experts.tp]:
            own = _held_by(column.archive, (0, column.mp), ep, experts, columns)
            for name, one in own.items():
                found.name_group(one.entry.group, name)
        return result
    held: dict[str, dict[Writer, _Held]] = {}
    for writer, path in files.items():
        own = _held_by(read_archive(str(path)), writer, ep, experts, columns)
        for name, one in own.items():
            held.setdefault(name, {})[writer] = one
    for name, by_writer in held.items():
        found.name_group(next(iter(by_writer.values())).entry.group, name)
        _add_states(name, by_writer, experts, result)
    return result


def _degree(experts: Experts, files: Mapping[Writer, Path], folder: Path) -> int:
    degrees = {layer.ep_size for layer in experts.fused.values()}
    degrees = degrees or {max((ep_rank for ep_rank, _ in files), default=0) + 1}
    if len(degrees) > 1:
        raise UnsupportedError(
            "ZeRO-0 experts of layers with different expert-parallel degrees",
            file=folder,
            found=sorted(degrees),
            next_step="save the run with ZeRO-1, which records names",
        )
    ep = degrees.pop()
    stages = [range(at * experts.tp, (at + 1) * experts.tp) for at in range(len(experts.native))]
    every = [[mp] for stage in stages for mp in stage] if experts.native_are_cut else stages
    missing = [
        (rank, mps[0])
        for rank in range(ep)
        for mps in every
        if not any((rank, mp) in files for mp in mps)
    ]
    if missing and (files or not experts.fused):
        rank, mp = missing[0]
        raise MissingFileError(
            "the optimizer file of an expert-parallel rank is missing",
            file=folder / expert_optimizer_file_name(rank, mp),
            rank=f"ep {rank}",
            expected=count_text(ep * len(every), "file"),
            found=len(files),
            next_step="copy it from the node that wrote it; without any of these files the weights "
            "of the experts are taken alone",
        )
    return ep


# --------------------------------------------------------------------------- names


def _held_by(
    archive: Archive, writer: Writer, ep: int, experts: Experts, columns: Sequence[ModelStates]
) -> dict[str, _Held]:
    """What a rank keeps of its experts, by the names of the checkpoint."""
    ep_rank, mp = writer
    numbered = [entry for entry in read_numbered(archive) if entry.is_expert]
    listed = columns[mp].param_shapes if mp < len(columns) else None
    if listed is None:
        names = assign_among(_candidates(writer, ep, experts), numbered, archive.path)
    else:
        names = _listed_names(listed, numbered, archive.path)
    native = experts.native[mp // experts.tp]
    locals_ = {layer.prefix: layer.num_experts // ep for layer in native}
    held = {}
    for entry, name in zip(numbered, names, strict=True):
        known = name
        if name not in experts.fused:
            known = global_name(name, ep_rank, locals_[split_name(name)[0]])
        held[known] = _Held(archive, entry)
    return held


def _listed_names(
    listed: Sequence[Mapping[str, Shape]], numbered: Sequence[Numbered], file: str
) -> list[str]:
    """The names as `param_shapes` lists them: they are local, so they hold for every EP rank."""
    groups = list(dict.fromkeys(entry.group for entry in numbered))
    stated = [
        (group, name, shape)
        for group in groups
        if group < len(listed)
        for name, shape in listed[group].items()
    ]
    fits = len(stated) == len(numbered) and all(
        entry.group == group and entry.shape in (None, tuple(shape))
        for entry, (group, _, shape) in zip(numbered, stated, strict=True)
    )
    if not fits:
        raise CheckpointError(
            "param_shapes contradicts the states of the experts",
            file=file,
            expected=f"{count_text(len(stated), 'parameter')}, as param_shapes lists them",
            found=f"{len(numbered)}, or of other shapes",
            next_step="the file is damaged or edited",
        )
    return [name for _, name, _ in stated]


def _candidates(writer: Writer, ep: int, experts: Experts) -> list[tuple[str, Shape]]:
    """The parameters of a rank's experts, local names and shapes, in the model's order."""
    ep_rank, mp = writer
    stage = mp // experts.tp
    numbered: dict[int, list[tuple[str, Shape]]] = {}
    for layer in {layer.prefix: layer for layer in experts.fused.values()}.values():
        if experts.stage_of(layer) != stage:
            continue
        first = tensors_of(experts.files[stage][layer.number, 0][0].path)
        numbered[layer.number] = [
            (name, layer.local_shape(ep_rank, first[f"{name}.0"].shape))
            for name in layer.names
            if f"{name}.0" in first
        ]
    for native in experts.native[stage]:
        listed = in_module_order(ep_rank, ep, [native], mp)
        numbered[native.number] = [(name, record.shape) for name, record in listed.items()]
    return [entry for number in sorted(numbered) for entry in numbered[number]]


# --------------------------------------------------------------------------- states


def _add_states(
    name: str, by_writer: Mapping[Writer, _Held], experts: Experts, result: UnshardedExperts
) -> None:
    kept = {one.archive.path: sorted(one.entry.state_names()) for one in by_writer.values()}
    require_one_value(kept, f"the optimizer states of {name}")
    for state in next(iter(by_writer.values())).entry.state_names():
        values = {writer: one.entry.value(one.archive, state) for writer, one in by_writer.items()}
        files = {writer: one.archive.path for writer, one in by_writer.items()}
        read = {files[w]: value for w, value in values.items() if isinstance(value, Scalar)}
        records = {w: value for w, value in values.items() if isinstance(value, TensorRecord)}
        if read:
            require_one_value(
                {file: scalar.value for file, scalar in read.items()}, f"{state} of {name}"
            )
            result.scalars[name, state] = next(iter(read.values()))
        if records and name in experts.fused:
            result.fused.append(_fused(name, state, records, files, experts))
        elif records:
            tensor = _native(name, records, files, experts)
            result.native.setdefault(state, []).append(tensor)


def _native(
    name: str,
    records: Mapping[Writer, TensorRecord],
    files: Mapping[Writer, str],
    experts: Experts,
) -> ModuleTensor:
    """A state of a native expert: a shard for every column, or the whole on one of them."""
    if experts.native_are_cut:
        shards = {mp: whole_shard(r, [(r, files[w])]) for w, r in records.items() for mp in w[1:]}
        return ModuleTensor(name, Role.PARAMETER, shards)
    writer, record = next(iter(records.items()))
    whole = whole_shard(record, [(record, files[writer])])
    return ModuleTensor(name, Role.PARAMETER, {0: whole}, over_world=True)


def _fused(
    name: str,
    state: str,
    records: Mapping[Writer, TensorRecord],
    files: Mapping[Writer, str],
    experts: Experts,
) -> StoredTensor:
    """A state of a fused parameter; every file is a holder, replicas included."""
    shards: dict[int, Sequence[Stretch]] = {}
    for holder, (writer, record) in enumerate(records.items()):
        file = files[writer]
        if stored_order(record, name, file) is not None:
            raise UnsupportedError(
                "an optimizer state of an expert is not stored in row-major order",
                file=file,
                parameter=name,
                state=state,
            )
        shards[holder] = [Stretch(record_region(record, file), 0, prod(record.shape))]
    first, placement = next(iter(records.values())), experts.fused[name].placement
    by_holder = tuple(placement.experts_by_rank[ep_rank] for ep_rank, _ in records)
    outer = expert_map(
        ExpertPlacement(placement.num_experts, by_holder),
        (placement.num_experts, *first.shape[1:]),
    )
    located = Assembler().locate(name, outer.canonical(), shards)
    return StoredTensor(
        name,
        state,
        first.dtype,
        located.map,
        located.regions,
        Role.PARAMETER,
        "optimizer files of EP ranks",
    )
