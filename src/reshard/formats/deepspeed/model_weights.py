"""Every weight that a file of the model holds of a trained parameter: what its master must be.

Theory. Beside their masters, weights lie in three kinds of files: model-state files, the layer
files of a pipeline, the files of experts. The names of the last two state what is inside, and
nothing else may; so a file under the name of another one is found here, as are files of another run
or step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from reshard.formats.checkpoint import RoundedCopy
from reshard.formats.deepspeed.expert_files import tensors_of
from reshard.formats.deepspeed.expert_reading import Experts
from reshard.formats.deepspeed.experts import ExpertLayer
from reshard.formats.deepspeed.native_moe import NativeLayer
from reshard.formats.deepspeed.partitions import Shard
from reshard.formats.deepspeed.pipeline_layers import LayerWeight
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.deepspeed.weight_copies import copy_of
from reshard.formats.torch_archive import TensorRecord

Shards = Mapping[str, Mapping[int, Shard]]
"""Trained parameter -> column -> where its shard lies in the optimizer files."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight in a file of the model: the shard that a column holds, or a part of it."""

    name: str
    column: int
    """The parameter, and whose shard."""
    file: str
    record: TensorRecord
    """Where the weight is."""
    skip: int = 0
    """Elements of the shard before the weight."""


def weight_copies(
    columns: Sequence[ModelStates],
    layers: Iterable[LayerWeight],
    experts: Experts,
    shards: Shards,
    aliases: Mapping[str, str],
) -> Iterator[RoundedCopy]:
    """What all weights say about the masters that are there.

    Parameters
    ----------
    columns
        Model-state files by model-parallel rank.
    layers
        What the layer files of a pipeline hold.
    experts
        What is known of the experts, and their files.
    shards
        What there are masters of.
    aliases
        Tied names; such a parameter has several weights, and all must be its master's.
    """
    for weight in (
        *_module_weights(columns, shards, aliases, experts),
        *_layer_weights(layers, shards, experts.tp),
        *_expert_weights(experts, shards),
    ):
        shard = shards.get(weight.name, {}).get(weight.column)
        for part in () if shard is None else shard.fragments:
            copy = copy_of(weight.name, part, weight.file, weight.record, weight.skip)
            if copy is not None:
                yield copy


def _module_weights(
    columns: Sequence[ModelStates], shards: Shards, aliases: Mapping[str, str], experts: Experts
) -> Iterator[Weight]:
    """The weights of model-state files; those of fused experts are elsewhere."""
    for column in columns:
        for held, record in (column.module or {}).items():
            name = aliases.get(held, held)
            shard = shards.get(name, {}).get(column.mp)
            if shard is None or name in experts.fused:
                continue
            if held == name or record.shape == shard.shape:
                yield Weight(name, column.mp, column.file, record)


def _layer_weights(layers: Iterable[LayerWeight], shards: Shards, tp: int) -> Iterator[Weight]:
    """The weights of a pipeline's layer files; a tied layer is on several stages."""
    for layer in layers:
        for column in shards.get(layer.name, {}):
            if column % tp == layer.tp:
                yield Weight(layer.name, column, layer.file, layer.record)


def _expert_weights(experts: Experts, shards: Shards) -> Iterator[Weight]:
    """The weights of expert files, of AutoEP and of DeepSpeed's own layers."""
    for layer in (layer for stage in experts.native for layer in stage):
        yield from _native_weights(layer, shards)
    for fused in () if experts.autoep is None else experts.autoep.layers.values():
        if any(name in shards for name in fused.names):
            yield from _fused_weights(fused, experts, shards)


def _native_weights(layer: NativeLayer, shards: Shards) -> Iterator[Weight]:
    for by_rank in layer.experts.values():
        for mp, (file, tensors) in by_rank.items():
            for name, record in tensors.items():
                columns = shards.get(name, {})
                yield from (
                    Weight(name, column, file, record)
                    for column in columns
                    if layer.is_spread or column == mp
                )


def _fused_weights(layer: ExpertLayer, experts: Experts, shards: Shards) -> Iterator[Weight]:
    """Every expert's weight; an EP rank's shard has its experts one after the other."""
    files = experts.files[experts.stage_of(layer)]
    held = layer.placement.experts_by_rank
    for (number, expert), file in ((key, file) for key, copies in files.items() for file in copies):
        tensors = tensors_of(file.path) if number == layer.number else {}
        for name in layer.names:
            record = tensors.get(f"{name}.{expert}")
            if record is None:
                continue
            for column in (c for c in shards.get(name, {}) if expert in held[c]):
                skip = held[column].index(expert) * prod(record.shape)
                yield Weight(name, column, str(file.path), record, skip)
