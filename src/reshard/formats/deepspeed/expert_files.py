"""The files of single experts: which there must be, and the weights they hold.

Theory. Under ZeRO-0, 1 and 2 the model-state file has no experts. Each expert's weights, in the
model's dtype, are in a file of their own,
`layer_{moe layer}_expert_{global expert}_mp_rank_{mp}_model_states.pt`. AutoEP and native DeepSpeed
MoE share the name; the tensors inside tell them apart: `<prefix>.w1.<expert>` is AutoEP's,
`<module>.deepspeed_moe.experts.deepspeed_experts.<expert>.…` native.

Masters and moments of trained experts are in the optimizer files; the expert files are then only
demanded to be there. They are the weights of frozen experts, and of experts whose optimizer shards
are absent.

Source: `engine.py` (`_save_moe_checkpoint`, `_get_expert_ckpt_name`), `checkpoint/
autoep_universal.py` (`consolidate_autoep_expert_files`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from reshard.errors import CheckpointError, MissingFileError, UnsupportedError
from reshard.formats.assembly import record_region
from reshard.formats.checkpoint import Role, StoredTensor
from reshard.formats.deepspeed.experts import ExpertLayer
from reshard.formats.deepspeed.folding import read_folding
from reshard.formats.deepspeed.grid import Inventory, require_one_value
from reshard.formats.deepspeed.names import FileKind, expert_file_name
from reshard.formats.deepspeed.partitions import MASTER
from reshard.formats.parsing import Cursor
from reshard.formats.torch_archive import TensorRecord, read_archive
from reshard.geometry import ParamAffineMap
from reshard.layouts.builders import row_major_strides
from reshard.layouts.experts import ExpertPlacement, expert_map

Pair = tuple[int, int]
"""Number of the mixture-of-experts layer, and global number of the expert."""

NATIVE_MARK = ".deepspeed_moe.experts.deepspeed_experts."
"""In the name of every parameter of a native expert, before its number."""


@dataclass(frozen=True, slots=True)
class ExpertFile:
    """One expert file: the model-parallel rank that wrote it, and its path."""

    mp: int
    path: Path


ExpertFiles = Mapping[Pair, tuple[ExpertFile, ...]]
"""Expert files of a stage by layer and expert; several model-parallel ranks may write one each."""


def list_expert_files(inventory: Inventory, pp: int, tp: int) -> list[ExpertFiles]:
    """The expert files of every pipeline stage; layers are counted anew on each.

    Files of model-parallel ranks that there are not are listed with the last stage, where they are
    found to be one too many.
    """
    for path in inventory.of_kind(FileKind.LEGACY_EXPERT).values():
        raise UnsupportedError(
            "expert files without the number of their layer (written by DeepSpeed before 0.5)",
            file=path,
            next_step="load them with the DeepSpeed that wrote them, and save again",
        )
    stages: list[dict[Pair, tuple[ExpertFile, ...]]] = [{} for _ in range(pp)]
    for name, path in inventory.of_kind(FileKind.EXPERT).items():
        files = stages[min(name.mp // tp, pp - 1)]
        pair = (name.layer, name.expert)
        files[pair] = (*files.get(pair, ()), ExpertFile(name.mp, path))
    return list(stages)


def tensors_of(path: Path) -> dict[str, TensorRecord]:
    """The tensors of an expert file, in its order."""
    root = Cursor(read_archive(str(path)).root, str(path))
    return {
        name: value.value for name, value in root.named() if isinstance(value.value, TensorRecord)
    }


def numbers_of_native_layers(files: ExpertFiles, autoep: Iterable[int]) -> list[int]:
    """Numbers of the layers of a stage that are native DeepSpeed MoE, ascending.

    Raises
    ------
    CheckpointError
        When a layer is neither described by metadata nor native.
    """
    known = set(autoep)
    native = []
    for number in sorted({layer for layer, _ in files} - known):
        path = next(held[0].path for (layer, _), held in files.items() if layer == number)
        if not any(NATIVE_MARK in name for name in tensors_of(path)):
            raise CheckpointError(
                "expert files without AutoEP metadata: which rank held which expert is not known",
                file=path,
                expected="ds_autoep_layers (or autoep_layers) in the model-state files, "
                f"with an entry for layer {number}",
                found=f"entries for layers {sorted(known)}" if known else "none",
                next_step="the model-state file is of another run, or the expert files are",
            )
        native.append(number)
    return native


# --------------------------------------------------------------------------- AutoEP


def require_expert_files(files: ExpertFiles, layers: Iterable[ExpertLayer], folder: Path) -> None:
    """Demand one file for every expert of every AutoEP layer.

    Raises
    ------
    MissingFileError
        When an expert has no file.
    CheckpointError
        When there is a file of an expert that the layer does not have.
    UnsupportedError
        When several model-parallel ranks wrote one expert, and nothing says that they are replicas.
    """
    for layer in layers:
        experts = layer.placement.num_experts
        for expert in range(experts):
            held = files.get((layer.number, expert), ())
            if not held:
                raise MissingFileError(
                    "the file of an expert is missing",
                    file=folder / expert_file_name(layer.number, expert, 0),
                    parameter=layer.prefix,
                    expected=f"files of experts 0 to {experts - 1} of layer {layer.number}",
                    next_step="copy it from the node that wrote it, or name its folder with --also",
                )
            if len(held) > 1:
                _require_replicas(layer, expert, held)
        for (number, expert), held in files.items():
            if number == layer.number and expert >= experts:
                raise CheckpointError(
                    "a file of an expert that the layer does not have",
                    file=held[0].path,
                    parameter=layer.prefix,
                    expected=f"experts 0 to {experts - 1}",
                    next_step="it is left over from another run; move it away",
                )


def _require_replicas(layer: ExpertLayer, expert: int, held: tuple[ExpertFile, ...]) -> None:
    """Only folding says that the files of several tensor-parallel ranks are the same expert."""
    for file in held:
        archive = read_archive(str(file.path))
        if read_folding(Cursor(archive.root, archive.path)) is None:
            raise UnsupportedError(
                "more than one model-parallel rank wrote one expert, and no folding metadata says "
                "whether the files are replicas or parts",
                file=file.path,
                parameter=f"{layer.prefix} {expert}",
                expected="one mp_rank",
                found=f"mp_rank {', '.join(str(other.mp) for other in held)}",
                next_step="move the files of all but one rank away if they are replicas",
            )


def weights_from_files(
    layer: ExpertLayer, files: ExpertFiles, roles: Mapping[str, Role]
) -> list[StoredTensor]:
    """Fused parameters of a layer (those in `roles`) from the files of its experts.

    Every file is a holder, replicas of one expert included.
    """
    held = [
        (expert, str(file.path), tensors_of(file.path))
        for expert in range(layer.placement.num_experts)
        for file in files[layer.number, expert]
    ]
    placement = ExpertPlacement(
        layer.placement.num_experts, tuple((expert,) for expert, _, _ in held)
    )
    return [_fused(name, role, layer, placement, held) for name, role in roles.items()]


def _fused(
    name: str,
    role: Role,
    layer: ExpertLayer,
    placement: ExpertPlacement,
    held: list[tuple[int, str, dict[str, TensorRecord]]],
) -> StoredTensor:
    records = {path: _weight(f"{name}.{expert}", path, found) for expert, path, found in held}
    require_one_value({path: one.shape for path, one in records.items()}, f"the shape of {name}")
    require_one_value({path: one.dtype for path, one in records.items()}, f"the dtype of {name}")
    first = next(iter(records.values()))
    regions = {
        holder: record_region(records[path], path) for holder, (_, path, _) in enumerate(held)
    }
    stacked = expert_map(placement, (layer.placement.num_experts, *first.shape))
    return StoredTensor(
        name, MASTER, first.dtype, _flattened(stacked), regions, role, "expert files"
    )


def _weight(key: str, path: str, found: Mapping[str, TensorRecord]) -> TensorRecord:
    record = found.get(key)
    if record is None:
        raise CheckpointError(
            "an expert file does not hold its expert",
            file=path,
            expected=key,
            found=", ".join(found) or "no tensor",
            next_step="the file is of another run or another layer",
        )
    if prod(record.shape) and record.strides != row_major_strides(record.shape):
        raise UnsupportedError(
            "an expert's weight is not stored in row-major order", file=path, parameter=key
        )
    return record


def _flattened(stacked: ParamAffineMap) -> ParamAffineMap:
    """The same map with shards as flat buffers, which is what regions are."""
    shapes = {rank: (prod(shape),) for rank, shape in stacked.shard_shapes.items()}
    return ParamAffineMap(stacked.logical_shape, shapes, stacked.pieces_by_rank)
