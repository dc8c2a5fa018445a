"""The experts of one checkpoint: found, checked, and what is left of them beside the optimizer.

Theory. The reader asks three things of the experts. *What is there*: AutoEP metadata, native
layers, expert files (:func:`open_experts`, which refuses what is missing or does not fit). *Where
are trained experts*: that is for `contiguous_columns` and `zero3`. *What is left*: experts that are
in no optimizer file, because they are frozen or their optimizer shards are absent; their weights
are in the expert files.

The last is best effort, as DeepSpeed documents it: weights are always delivered, and what the
optimizer should have kept of them is reported as absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import CheckpointError, UnsupportedError
from reshard.formats.checkpoint import Problem, Role, StoredTensor, TensorKey
from reshard.formats.deepspeed.expert_files import (
    ExpertFiles,
    list_expert_files,
    numbers_of_native_layers,
    require_expert_files,
    weights_from_files,
)
from reshard.formats.deepspeed.experts import AutoEP, ExpertLayer, read_autoep
from reshard.formats.deepspeed.grid import Degrees, Inventory
from reshard.formats.deepspeed.module import ModuleTensor, whole_shard
from reshard.formats.deepspeed.names import FileKind
from reshard.formats.deepspeed.native_moe import (
    NativeLayer,
    is_native,
    read_native_layers,
    split_name,
)
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.parsing import Cursor

Cell = tuple[int, int]
"""`(dp, mp)` of a rank."""

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Experts:
    """What is known of the experts of a checkpoint."""

    tp: int
    """The tensor-parallel degree."""
    autoep: AutoEP | None
    """The AutoEP metadata, None when there is none."""
    files: Sequence[ExpertFiles]
    """The expert files of every pipeline stage."""
    native: Sequence[tuple[NativeLayer, ...]]
    """The native layers of every pipeline stage."""

    @property
    def present(self) -> bool:
        """Whether there are experts at all."""
        return self.autoep is not None or any(self.native)

    @property
    def fused(self) -> dict[str, ExpertLayer]:
        """The layer of every fused parameter."""
        return {} if self.autoep is None else self.autoep.by_name

    def names(self) -> Iterator[str]:
        """All tensors of experts, native ones by their global names."""
        yield from self.fused
        for layer in (layer for stage in self.native for layer in stage):
            for by_rank in layer.experts.values():
                yield from next(iter(by_rank.values()))[1]

    @property
    def native_are_cut(self) -> bool:
        """Whether tensor ranks have parts of every native expert."""
        return self.tp > 1 and any(not one.is_spread for stage in self.native for one in stage)

    @property
    def native_are_spread(self) -> bool:
        """Whether native experts are whole, and spread over several tensor ranks."""
        return any(one.is_spread for stage in self.native for one in stage)

    def stage_of(self, layer: ExpertLayer) -> int:
        """The pipeline stage that has an AutoEP layer."""
        columns = self.autoep.columns[layer.prefix] if self.autoep else frozenset((0,))
        return min(columns) // self.tp


# --------------------------------------------------------------------------- what is there


def open_experts(
    inventory: Inventory, models: Mapping[Cell, ModelStates], grid: Degrees
) -> Experts:
    """Find the experts of a checkpoint, and demand their files.

    Raises
    ------
    CheckpointError, MissingFileError, LayoutError
        When metadata and files do not fit together.
    UnsupportedError
        When experts are kept in a way that cannot be read exactly.
    """
    autoep = read_autoep(models.values())
    files = list_expert_files(inventory, grid.pp, grid.tp)
    folder = inventory.folder.path
    native = [
        _native_layers(stage, files[stage], models, grid, autoep, folder)
        for stage in range(grid.pp)
    ]
    experts = Experts(grid.tp, autoep, files, native)
    if inventory.of_kind(FileKind.ZERO3_MODEL):
        _require_partitioned(experts)
    elif autoep is not None:
        _require_files(experts, autoep, folder)
    return experts


def _native_layers(
    stage: int,
    files: ExpertFiles,
    models: Mapping[Cell, ModelStates],
    grid: Degrees,
    autoep: AutoEP | None,
    folder: Path,
) -> tuple[NativeLayer, ...]:
    fused = _fused_numbers(stage, autoep, grid)
    counts = _expert_counts(models[0, stage * grid.tp])
    numbers: dict[int, int | None] = dict.fromkeys(numbers_of_native_layers(files, fused))
    if counts is not None:
        numbers |= {n: count for n, count in enumerate(counts) if n not in fused}
        extra = sorted(set(numbers) - set(range(len(counts))))
        if extra:
            raise CheckpointError(
                "expert files of a layer that the model does not have",
                file=next(held[0].path for (n, _), held in files.items() if n == extra[0]),
                expected=f"layers 0 to {len(counts) - 1}",
                found=extra,
                next_step="they are left over from another run; move them away",
            )
    ranks = range(stage * grid.tp, (stage + 1) * grid.tp)
    return read_native_layers(files, dict(sorted(numbers.items())), ranks, folder)


def _fused_numbers(stage: int, autoep: AutoEP | None, grid: Degrees) -> set[int]:
    """Numbers of the AutoEP layers of a stage."""
    if autoep is None:
        return set()
    return {
        layer.number
        for layer in autoep.layers.values()
        if min(autoep.columns[layer.prefix]) // grid.tp == stage
    }


def _expert_counts(model: ModelStates) -> list[int] | None:
    """`num_experts`: experts of every layer of a stage; None where the file states none."""
    found = Cursor(model.archive.root, model.file).maybe("num_experts")
    if found is None or not isinstance(found.value, (list, tuple)):
        return None
    return [count.integer(1) for count in found.each()]


def _require_files(experts: Experts, autoep: AutoEP, folder: Path) -> None:
    if autoep.partitioned:
        raise CheckpointError(
            "the metadata is of ZeRO-3 experts, the model-state files are of another stage",
            file=next(layer.file for layer in autoep.layers.values() if layer.partitioned),
            next_step="one set of files is left over from another run; move it away",
        )
    for layer in autoep.layers.values():
        stages = {column // experts.tp for column in autoep.columns[layer.prefix]}
        if len(stages) > 1:
            raise CheckpointError(
                "one layer of experts is on several pipeline stages",
                file=layer.file,
                parameter=layer.prefix,
                found=f"stages {sorted(stages)}",
            )
        _require_lister(layer, autoep)
        require_expert_files(experts.files[stages.pop()], [layer], folder)


def _require_lister(layer: ExpertLayer, autoep: AutoEP) -> None:
    """Only data-parallel rank 0 lists shapes and order; it must hold experts itself."""
    column = min(autoep.columns[layer.prefix])
    place = autoep.places.get((0, column))
    ep_rank = 0 if place is None else place.ep_rank
    if not layer.placement.experts_by_rank[ep_rank]:
        raise UnsupportedError(
            "the rank that lists the parameters holds no expert of a layer, so the order of the "
            "experts in the flat buffers of the other ranks is written nowhere",
            file=layer.file,
            rank=f"ep {ep_rank}",
            parameter=layer.prefix,
            next_step="save the run with ZeRO-3, where every rank lists its own",
        )


def _require_partitioned(experts: Experts) -> None:
    """Under ZeRO-3 experts are in the rank files, and only there."""
    for layer in experts.fused.values():
        if not layer.partitioned:
            raise UnsupportedError(
                "ZeRO-3 experts that are not partitioned among the rank files",
                file=layer.file,
                parameter=layer.prefix,
                expected="checkpoint_format zero3_partitioned",
                next_step="load the checkpoint with DeepSpeed 0.19 or newer, and save it again",
            )
    for files in experts.files:
        for held in files.values():
            raise CheckpointError(
                "an expert file lies beside the files of ZeRO-3, which keeps experts elsewhere",
                file=held[0].path,
                next_step="it is left over from another run; move it away",
            )


# --------------------------------------------------------------------------- what is left


def leftover_fused(
    experts: Experts, found: Iterable[str], trained: Iterable[str]
) -> list[StoredTensor]:
    """Fused parameters that are in no optimizer file, from the expert files.

    Parameters
    ----------
    experts
        The experts.
    found
        Names that were found in optimizer files.
    trained
        Names that the trainer trains, whatever the optimizer files have of them.
    """
    if experts.autoep is None or experts.autoep.partitioned:
        return []
    known, meant = set(found), set(trained)
    tensors = []
    for layer in experts.autoep.layers.values():
        roles = {
            name: Role.PARAMETER if name in meant else Role.FROZEN
            for name in layer.names
            if name not in known
        }
        if roles:
            tensors += weights_from_files(layer, experts.files[experts.stage_of(layer)], roles)
    return tensors


def leftover_native(
    experts: Experts, trained: frozenset[str], buffers: frozenset[str]
) -> Iterator[ModuleTensor]:
    """Tensors of native experts that no optimizer trains, under their global names.

    `buffers` are names as the model-state files list them, so with the experts' local numbers; a
    tensor is a buffer when the same tensor of any expert is.
    """
    marks = {_kind(name) for name in buffers if is_native(name)}
    for layer in (layer for stage in experts.native for layer in stage):
        for by_rank in layer.experts.values():
            first = next(iter(by_rank.values()))[1]
            for name in first:
                if name in trained:
                    continue
                if layer.is_spread:
                    path, tensors = next(iter(by_rank.values()))
                    shards = {0: whole_shard(tensors[name], [(tensors[name], path)])}
                else:
                    shards = {
                        mp: whole_shard(tensors[name], [(tensors[name], path)])
                        for mp, (path, tensors) in by_rank.items()
                        if name in tensors
                    }
                role = Role.BUFFER if _kind(name) in marks else Role.FROZEN
                yield ModuleTensor(name, role, shards, over_world=layer.is_spread)


def _kind(name: str) -> tuple[str, str]:
    """What tensors of the same layer have in common, whatever the number of their expert."""
    prefix, _, suffix = split_name(name)
    return prefix, suffix


def report_absent_states(
    tensors: Mapping[TensorKey, StoredTensor], names: Iterable[str], scalars: Iterable[TensorKey]
) -> Iterator[Problem]:
    """Say which states some trained parameters lack that others of their kind have.

    A parameter lacks what another one keeps besides all that it keeps itself. (One optimizer may
    keep different states for different parameters; Muon does.)

    Parameters
    ----------
    tensors, scalars
        What was found.
    names
        The trained parameters.
    """
    kept: dict[str, set[str]] = {name: set() for name in names}
    for name, state in (*tensors, *scalars):
        if name in kept:
            kept[name].add(state)
    kinds = {frozenset(states) for states in kept.values()}
    lacking: dict[tuple[str, ...], list[str]] = {}
    for name, states in kept.items():
        fuller = [kind for kind in kinds if states < kind]
        if fuller:
            missing = tuple(sorted(max(fuller, key=len) - states))
            lacking.setdefault(missing, []).append(name)
    for absent, owners in lacking.items():
        more = f" and {len(owners) - _SHOWN} more" if len(owners) > _SHOWN else ""
        yield Problem(
            f"optimizer states are absent ({', '.join(absent)}); the weights are there",
            parameter=", ".join(owners[:_SHOWN]) + more,
            next_step="a run that resumes must start these states anew",
        )
