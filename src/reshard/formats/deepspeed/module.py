"""What the model-state files hold besides trained parameters: frozen weights and buffers.

Theory. ZeRO's flat buffers hold what the optimizer trains. Everything else of the model lies in the
model-state files, in a different place for each stage:

* ZeRO-0, 1, 2: in `module`, once a model-parallel rank. ZeRO-2 repeats frozen parameters in
  `frozen_param_fragments`; the bytes of `module` are the same.
* ZeRO-3: `module` has empty placeholders for parameters and real values for buffers, on every rank;
a
  frozen parameter is in `frozen_param_fragments`, each rank's block of `ceil(n / W)` elements.
* pipelines: in the layer files, under names local to the layer.

A name in `module` that is an alias of a trained or frozen parameter (tied weights) is neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from reshard.errors import CheckpointError
from reshard.formats.assembly import Stretch, record_region
from reshard.formats.checkpoint import Region, Role
from reshard.formats.deepspeed.names import FileName
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.parsing import Cursor
from reshard.formats.torch_archive import TensorRecord, read_archive
from reshard.layouts.flat import FlatFragment, ceil_div, per_parameter_partition


@dataclass(frozen=True, slots=True)
class ModuleShard:
    """One column's shard of a tensor that no optimizer trains.

    Parameters
    ----------
    shape
        Shape of the shard.
    record
        A tensor of its dtype; its strides matter when `stretches` holds it whole.
    stretches
        Where its elements lie.
    """

    shape: tuple[int, ...]
    record: TensorRecord
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class ModuleTensor:
    """A tensor that no optimizer trains, by column (`mp`)."""

    name: str
    role: Role
    shards: Mapping[int, ModuleShard]
    over_world: bool = False


def _whole(record: TensorRecord, files: Iterable[tuple[TensorRecord, str]]) -> ModuleShard:
    """A shard that each of several files holds whole."""
    numel = prod(record.shape)
    stretches = tuple(Stretch(record_region(held, file), 0, numel) for held, file in files)
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
            model.mp: _whole(model.module[name], [(model.module[name], model.file)])
            for model in columns
            if model.module and name in model.module
        }
        is_buffer = any(name in model.buffer_names for model in columns)
        yield ModuleTensor(name, Role.BUFFER if is_buffer else Role.FROZEN, shards)


# --------------------------------------------------------------------------- ZeRO-3


def zero3_tensors(
    models: Mapping[tuple[int, int], ModelStates],
    dp: int,
    tp: int,
    trained: frozenset[str],
    aliases: Mapping[str, str],
    untouched: frozenset[str],
) -> Iterator[ModuleTensor]:
    """Frozen parameters and buffers of ZeRO-3; `models` are by `(dp, mp)`."""
    first = models[0, 0]
    frozen = dict.fromkeys(name for model in models.values() for name in model.frozen_shapes)
    for name in frozen:
        if name not in trained:
            yield _frozen_zero3(name, models, dp, tp, untouched)
    for name in dict.fromkeys(name for m in models.values() for name in m.module or {}):
        if name in trained or name in aliases or name in frozen:
            continue
        if not any(name in model.buffer_names for model in models.values()):
            raise CheckpointError(
                "a parameter is listed in the model, and nowhere are its values",
                file=first.file,
                parameter=name,
                next_step="the run left it out of the checkpoint (exclude_frozen_parameters)",
            )
        yield ModuleTensor(name, Role.BUFFER, _buffers_zero3(name, models, dp, tp))


def _buffers_zero3(
    name: str, models: Mapping[tuple[int, int], ModelStates], dp: int, tp: int
) -> dict[int, ModuleShard]:
    shards = {}
    for column in range(tp):
        holders = [
            (model.module[name], model.file)
            for model in (models[rank, column] for rank in range(dp))
            if model.module and name in model.module
        ]
        if holders:
            shards[column] = _whole(holders[0][0], holders)
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
    shards = {
        column: _blocks(
            name, models[0, column].frozen_shapes[name], [models[d, column] for d in range(dp)]
        )
        for column in range(tp)
        if name in models[0, column].frozen_shapes
    }
    return ModuleTensor(name, Role.FROZEN, shards)


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
                expected=f"{expected} elements",
                found=f"shape {record.shape}",
            )
    stretches = [
        _block_stretch(part, records[part.partition], models[part.partition].file)
        for part in per_parameter_partition([numel], len(models))
    ]
    return ModuleShard(shape, records[0], tuple(stretches))


def _block_stretch(part: FlatFragment, record: TensorRecord, file: str) -> Stretch:
    nbytes = part.numel * record.dtype.itemsize
    return Stretch(Region(file, record.offset, nbytes), part.shard_start, part.numel)


# --------------------------------------------------------------------------- pipelines


def layer_tensors(
    files: Mapping[FileName, Path], trained: frozenset[str]
) -> Iterator[ModuleTensor]:
    """Tensors of pipeline layer files that no optimizer trains.

    A layer `L` is the module `L` of the pipeline, so its tensor `w` is the parameter `L.w`; of a
    tied layer it is `tied_modules.KEY.w`, and already known under that name.
    """
    found: dict[str, dict[int, ModuleShard]] = {}
    tied = {name.split(".", 2)[2] for name in trained if name.startswith("tied_modules.")}
    for parsed, path in files.items():
        archive = read_archive(str(path))
        for local, value in Cursor(archive.root, str(path)).named():
            name = f"{parsed.layer}.{local}"
            record = value.value
            if name in trained or local in tied or not isinstance(record, TensorRecord):
                continue
            shard = _whole(record, [(record, str(path))])
            found.setdefault(name, {})[parsed.mp] = shard
    for name, shards in found.items():
        yield ModuleTensor(name, Role.FROZEN, shards)
