"""ZeRO-0 with experts: the optimizer of every EP rank, in a file of its own.

Theory. Without ZeRO each rank keeps the whole state of its own experts, so a mixture of experts
writes one optimizer file a EP rank, `expp_rank_{ep}_mp_rank_{mp}_optim_states.pt`. It is the state
dict of that rank's optimizer, dense parameters included (replicas of those in the model-state
file). States carry no names; those of the groups of experts are told as in `unsharded`, from the
experts of the rank in the order of the model.

Files may be absent: the weights are then delivered from the expert files, and the states of experts
are reported as absent. (With ZeRO these files exist too, and hold nothing.)

Source: `engine.py` (`_save_moe_checkpoint`, `_get_optimizer_ckpt_name`), DeepSpeed 0.12 to 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from reshard.errors import MissingFileError, UnsupportedError, count_text
from reshard.formats.assembly import Assembler, Stretch, record_region, stored_order
from reshard.formats.checkpoint import Role, Scalar, StoredTensor, TensorKey
from reshard.formats.deepspeed.expert_files import tensors_of
from reshard.formats.deepspeed.expert_reading import Experts
from reshard.formats.deepspeed.grid import Inventory, require_one_value
from reshard.formats.deepspeed.names import FileKind
from reshard.formats.deepspeed.native_moe import global_name, split_name
from reshard.formats.deepspeed.numbered import Numbered, read_numbered
from reshard.formats.deepspeed.partitions import Partitions
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.deepspeed.unlisted import in_module_order
from reshard.formats.deepspeed.unsharded import assign_among
from reshard.formats.torch_archive import Archive, TensorRecord, read_archive
from reshard.layouts.builders import replicated_map

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Held:
    """What one EP rank's optimizer keeps of one parameter."""

    archive: Archive
    entry: Numbered


def add_unsharded_experts(
    inventory: Inventory,
    model: ModelStates,
    experts: Experts,
    tensors: dict[TensorKey, StoredTensor],
    scalars: dict[TensorKey, Scalar],
    found: Partitions,
) -> int:
    """Read the optimizer states of experts of a ZeRO-0 checkpoint; return the EP degree.

    Raises
    ------
    MissingFileError
        When some of the EP ranks' files are there and others are not.
    UnsupportedError
        When layers have different expert-parallel degrees.
    CheckpointError
        When no assignment of states to names, or more than one, is possible.
    """
    files = {name.dp: path for name, path in inventory.of_kind(FileKind.EXPERT_OPTIMIZER).items()}
    ep = _degree(experts, files, inventory.folder.path)
    if not files:
        # the model-state file has the optimizer of EP rank 0, so the names at least
        for name, one in _held_by(model.archive, 0, ep, experts).items():
            found.name_group(one.entry.group, name)
        return ep
    held: dict[str, dict[int, _Held]] = {}
    for ep_rank in range(ep):
        archive = read_archive(str(files[ep_rank]))
        for name, one in _held_by(archive, ep_rank, ep, experts).items():
            held.setdefault(name, {})[ep_rank] = one
    for name, by_rank in held.items():
        found.name_group(next(iter(by_rank.values())).entry.group, name)
        _add_states(name, by_rank, experts, tensors, scalars)
    return ep


def require_one_column(columns: Sequence[ModelStates]) -> None:
    """Refuse experts under tensor or pipeline parallelism: no file says who holds which."""
    if len(columns) > 1:
        raise UnsupportedError(
            "a ZeRO-0 mixture of experts of several model-parallel ranks cannot be read",
            file=columns[0].file,
            found=f"{len(columns)} model-parallel ranks",
            next_step="save it with ZeRO-1, which records names",
        )


def _degree(experts: Experts, files: Mapping[int, Path], folder: Path) -> int:
    degrees = {layer.ep_size for layer in experts.fused.values()} or {max(files, default=0) + 1}
    if len(degrees) > 1:
        raise UnsupportedError(
            "ZeRO-0 experts of layers with different expert-parallel degrees",
            file=folder,
            found=sorted(degrees),
            next_step="save the run with ZeRO-1, which records names",
        )
    ep = degrees.pop()
    missing = [rank for rank in range(ep) if rank not in files]
    if missing and (files or not experts.fused):
        raise MissingFileError(
            "the optimizer file of an expert-parallel rank is missing",
            file=folder / f"expp_rank_{missing[0]}_mp_rank_00_optim_states.pt",
            rank=f"ep {missing[0]}",
            expected=count_text(ep, "file"),
            found=len(files),
            next_step="copy it from the node that wrote it; without any of these files the weights "
            "of the experts are taken alone",
        )
    return ep


# --------------------------------------------------------------------------- names


def _held_by(archive: Archive, ep_rank: int, ep: int, experts: Experts) -> dict[str, _Held]:
    """What an EP rank keeps of its experts, by the names of the checkpoint."""
    numbered = [entry for entry in read_numbered(archive) if entry.is_expert]
    names = assign_among(_candidates(ep_rank, ep, experts), numbered, archive.path)
    locals_ = {layer.prefix: layer.num_experts // ep for layer in experts.native[0]}
    held = {}
    for entry, name in zip(numbered, names, strict=True):
        known = name
        if name not in experts.fused:
            known = global_name(name, ep_rank, locals_[split_name(name)[0]])
        held[known] = _Held(archive, entry)
    return held


def _candidates(ep_rank: int, ep: int, experts: Experts) -> list[tuple[str, Shape]]:
    """The parameters of an EP rank's experts, local names and shapes, in the model's order."""
    numbered: dict[int, list[tuple[str, Shape]]] = {}
    for layer in {layer.prefix: layer for layer in experts.fused.values()}.values():
        first = tensors_of(experts.files[0][layer.number, 0][0].path)
        numbered[layer.number] = [
            (name, layer.local_shape(ep_rank, first[f"{name}.0"].shape))
            for name in layer.names
            if f"{name}.0" in first
        ]
    for native in experts.native[0]:
        listed = in_module_order(ep_rank, ep, [native], 0)
        numbered[native.number] = [(name, record.shape) for name, record in listed.items()]
    return [entry for number in sorted(numbered) for entry in numbered[number]]


# --------------------------------------------------------------------------- states


def _add_states(
    name: str,
    by_rank: Mapping[int, _Held],
    experts: Experts,
    tensors: dict[TensorKey, StoredTensor],
    scalars: dict[TensorKey, Scalar],
) -> None:
    kept = {one.archive.path: sorted(one.entry.state_names()) for one in by_rank.values()}
    require_one_value(kept, f"the optimizer states of {name}")
    for state in next(iter(by_rank.values())).entry.state_names():
        values = {rank: one.entry.value(one.archive, state) for rank, one in by_rank.items()}
        files = {rank: one.archive.path for rank, one in by_rank.items()}
        read = {files[rank]: v for rank, v in values.items() if isinstance(v, Scalar)}
        records = {rank: v for rank, v in values.items() if isinstance(v, TensorRecord)}
        if read:
            require_one_value(
                {file: scalar.value for file, scalar in read.items()}, f"{state} of {name}"
            )
            scalars[name, state] = next(iter(read.values()))
        if records:
            tensors[name, state] = _tensor(name, state, records, files, experts)


def _tensor(
    name: str,
    state: str,
    records: Mapping[int, TensorRecord],
    files: Mapping[int, str],
    experts: Experts,
) -> StoredTensor:
    shards: dict[int, Sequence[Stretch]] = {}
    first = next(iter(records.values()))
    for rank, record in records.items():
        file = files[rank]
        if stored_order(record, name, file) is not None:
            raise UnsupportedError(
                "an optimizer state of an expert is not stored in row-major order",
                file=file,
                parameter=name,
                state=state,
            )
        shards[rank] = [Stretch(record_region(record, file), 0, prod(record.shape))]
    fused = experts.fused.get(name)
    if fused is None:
        outer = replicated_map(first.shape, 1)
        shards = {0: next(iter(shards.values()))}
    else:
        outer = fused.map_of(first.shape[1:])
    located = Assembler().locate(name, outer, shards)
    return StoredTensor(
        name,
        state,
        first.dtype,
        located.map,
        located.regions,
        Role.PARAMETER,
        "optimizer files of EP ranks",
    )
