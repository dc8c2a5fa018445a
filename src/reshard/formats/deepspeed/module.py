"""What the model-state files hold besides trained parameters: frozen weights and buffers.

Theory. ZeRO's flat buffers hold what the optimizer trains. Everything else of the model lies in the
model-state files, in a different place for each stage:

* ZeRO-0, 1, 2: in `module`, once a model-parallel rank. ZeRO-2 repeats frozen parameters in
  `frozen_param_fragments`; the bytes of `module` are the same.
* ZeRO-3: `module` has empty placeholders for parameters and real values for buffers and for what
  layers add of their own, on every rank; a frozen parameter is in `frozen_param_fragments`, each
  rank's block of `ceil(n / W)` elements. Frozen experts are partitioned among the ranks with the
  same EP rank.
* pipelines: in the layer files (`pipeline_layers`); experts: in files of their own.

A name in `module` that is an alias of a trained or frozen parameter (tied weights) is neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from reshard.errors import CheckpointError, count_text
from reshard.formats.assembly import Stretch, record_region, require_flat
from reshard.formats.checkpoint import Region, Role
from reshard.formats.deepspeed.experts import AutoEP
from reshard.formats.deepspeed.grid import Degrees, require_one_value
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.torch_archive import TensorRecord
from reshard.layouts.flat import FlatFragment, ceil_div, per_parameter_partition


@dataclass(frozen=True, slots=True)
class ModuleShard:
    """One column's shard of a tensor that no optimizer trains."""

    shape: tuple[int, ...]
    """Shape of the shard."""
    record: TensorRecord
    """A tensor of its dtype; its strides matter when `stretches` holds it whole."""
    stretches: tuple[Stretch, ...]
    """Where its elements lie."""


@dataclass(frozen=True, slots=True)
class ModuleTensor:
    """A tensor that no optimizer trains, by column (`mp`)."""

    name: str
    role: Role
    shards: Mapping[int, ModuleShard]
    over_world: bool = False


def whole_shard(record: TensorRecord, files: Iterable[tuple[TensorRecord, str]]) -> ModuleShard:
    """A shard that each of several files holds whole."""
    numel = prod(record.shape)
    held_by = list(files)
    require_one_value(
        {file: (held.dtype.name, held.shape, held.strides) for held, file in held_by},
        "the dtype, shape and order of a tensor that each holds whole",
    )
    stretches = tuple(Stretch(record_region(held, file), 0, numel) for held, file in held_by)
    return ModuleShard(record.shape, record, stretches)


# --------------------------------------------------------------------------- ZeRO-0, 1, 2


def module_tensors(
    models: Iterable[ModelStates], trained: frozenset[str], aliases: Mapping[str, str]
) -> Iterator[ModuleTensor]:
    """Frozen parameters and buffers of ZeRO-0, 1 and 2; `models` are the columns by `mp`."""
    columns = list(models)
    names = dict.fromkeys(name for model in columns for name in model.module or {})
    for name in names:
        if name in trained or name in aliases:
            continue
        shards = {
            model.mp: whole_shard(model.module[name], [(model.module[name], model.file)])
            for model in columns
            if model.module and name in model.module
        }
        is_buffer = any(name in model.buffer_names for model in columns)
        yield ModuleTensor(name, Role.BUFFER if is_buffer else Role.FROZEN, shards)


# --------------------------------------------------------------------------- ZeRO-3


def zero3_tensors(
    models: Mapping[tuple[int, int], ModelStates],
    grid: Degrees,
    trained: frozenset[str],
    aliases: Mapping[str, str],
    untouched: frozenset[str],
    autoep: AutoEP | None,
) -> Iterator[ModuleTensor]:
    """Frozen parameters and buffers of ZeRO-3; `models` are by `(dp, mp)`."""
    dp, tp = grid.dp, grid.mp
    frozen = dict.fromkeys(name for model in models.values() for name in model.frozen_shapes)
    fused = autoep.by_name if autoep is not None else {}
    for name in frozen:
        if name in trained:
            continue  # a rank without experts lists its empty shard as frozen
        if name in fused and autoep is not None:
            yield _frozen_experts(name, models, autoep)
        else:
            yield _frozen_zero3(name, models, dp, tp, untouched)
    for name in dict.fromkeys(name for m in models.values() for name in m.module or {}):
        if name not in trained and name not in aliases and name not in frozen:
            shards = _buffers_zero3(name, models, dp, tp)
            if shards:
                yield ModuleTensor(name, Role.BUFFER, shards)


def _buffers_zero3(
    name: str, models: Mapping[tuple[int, int], ModelStates], dp: int, tp: int
) -> dict[int, ModuleShard]:
    """Shards of a buffer, listed or not; none of an empty entry that no list names."""
    listed = any(name in model.buffer_names for model in models.values())
    shards = {}
    for column in range(tp):
        holders = [
            (model.module[name], model.file)
            for model in (models[rank, column] for rank in range(dp))
            if model.module and name in model.module
        ]
        if holders and (listed or any(prod(record.shape) for record, _ in holders)):
            shards[column] = whole_shard(holders[0][0], holders)
    return shards


def _frozen_zero3(
    name: str,
    models: Mapping[tuple[int, int], ModelStates],
    dp: int,
    tp: int,
    untouched: frozenset[str],
) -> ModuleTensor:
    shape = next(m.frozen_shapes[name] for m in models.values() if name in m.frozen_shapes)
    block = _fragment(models[0, 0], name).shape[0] if prod(shape) else 0
    over_dp, over_world = ceil_div(prod(shape), dp), ceil_div(prod(shape), dp * tp)
    if tp > 1 and block == over_world and (over_world != over_dp or name in untouched):
        world = [models[d, t] for d in range(dp) for t in range(tp)]
        return ModuleTensor(name, Role.FROZEN, {0: _blocks(name, shape, world)}, over_world=True)
    for column in range(tp):
        held = [models[rank, column] for rank in range(dp)]
        require_one_value(
            {model.file: model.frozen_shapes.get(name) for model in held}, f"the shape of {name}"
        )
    shards = {
        column: _blocks(
            name, models[0, column].frozen_shapes[name], [models[d, column] for d in range(dp)]
        )
        for column in range(tp)
        if name in models[0, column].frozen_shapes
    }
    return ModuleTensor(name, Role.FROZEN, shards)


def _frozen_experts(
    name: str, models: Mapping[tuple[int, int], ModelStates], autoep: AutoEP
) -> ModuleTensor:
    """Frozen experts, by EP rank: each rank's block of its own experts, in the stated order."""
    layer = autoep.by_name[name]
    held: dict[int, dict[int, list[ModelStates]]] = {}
    counts = set()
    for cell, model in models.items():
        place = autoep.places.get(cell)
        if place is None or place.edp_rank is None or place.edp is None:
            raise CheckpointError(
                "ds_autoep_layers does not state the place of its writer among the experts",
                file=model.file,
                parameter=name,
                expected="ep_rank, expert_data_parallel_rank, expert_data_parallel_world_size",
            )
        counts.add(place.edp)
        held.setdefault(place.ep_rank, {}).setdefault(place.edp_rank, []).append(model)
    shards = {}
    for ep_rank in range(layer.ep_size):
        ranks = held.get(ep_rank, {})
        if len(counts) != 1 or sorted(ranks) != list(range(min(counts))):
            raise _incomplete(name, ep_rank, counts, ranks, models[0, 0].file)
        if any(len(twice) > 1 for twice in ranks.values()):
            raise _incomplete(name, ep_rank, counts, ranks, models[0, 0].file)
        files = [ranks[rank][0] for rank in sorted(ranks)]
        shape = _frozen_shape(name, files[0])
        if shape != layer.local_shape(ep_rank, shape[1:]):
            raise CheckpointError(
                "a rank holds another number of experts than the placement says",
                file=files[0].file,
                parameter=name,
                expected=f"shape {layer.local_shape(ep_rank, shape[1:])}",
                found=f"shape {shape}",
            )
        shards[ep_rank] = _blocks(name, shape, files)
    return ModuleTensor(name, Role.FROZEN, shards)


def _frozen_shape(name: str, model: ModelStates) -> tuple[int, ...]:
    shape = model.frozen_shapes.get(name)
    if shape is None:
        raise CheckpointError(
            "a rank does not list a frozen parameter that another rank lists",
            file=model.file,
            parameter=name,
            next_step="the files are of different runs",
        )
    return shape


def _incomplete(
    name: str, ep_rank: int, counts: set[int], ranks: Mapping[int, object], file: str
) -> CheckpointError:
    return CheckpointError(
        f"the blocks of the experts of EP rank {ep_rank} are not there once each",
        file=file,
        parameter=name,
        expected=f"blocks of {sorted(counts)} ranks",
        found=f"of ranks {sorted(ranks)}",
        next_step="files of different runs lie in one folder",
    )


def _fragment(model: ModelStates, name: str) -> TensorRecord:
    found = model.frozen_fragments.get(name)
    if found is None:
        raise CheckpointError(
            "a frozen parameter has a shape and no values",
            file=model.file,
            parameter=name,
            next_step="the run left it out of the checkpoint (exclude_frozen_parameters)",
        )
    return found


def _blocks(name: str, shape: tuple[int, ...], models: list[ModelStates]) -> ModuleShard:
    records = [_fragment(model, name) for model in models]
    numel = prod(shape)
    expected = ceil_div(numel, len(models))
    for model, record in zip(models, records, strict=True):
        if numel and record.shape != (expected,):
            raise CheckpointError(
                "a block of a frozen parameter has another size than its shape says",
                file=model.file,
                parameter=name,
                expected=count_text(expected, "element"),
                found=f"shape {record.shape}",
            )
    require_one_value(
        {model.file: record.dtype for model, record in zip(models, records, strict=True)},
        f"the dtype of {name}",
    )
    stretches = [
        _block_stretch(part, records[part.partition], models[part.partition].file)
        for part in per_parameter_partition([numel], len(models))
    ]
    return ModuleShard(shape, records[0], tuple(stretches))


def _block_stretch(part: FlatFragment, record: TensorRecord, file: str) -> Stretch:
    require_flat(record, file, "a block of a frozen parameter")
    nbytes = part.numel * record.dtype.itemsize
    return Stretch(Region(file, record.offset, nbytes), part.shard_start, part.numel)
