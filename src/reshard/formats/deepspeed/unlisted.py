"""Checkpoints that do not list their parameters: mixtures of experts before DeepSpeed 0.19.

Theory. Until 0.18.9 the model-state file of a mixture of experts has no `param_shapes`, nor has any
file of `BF16_Optimizer` without ZeRO, so neither the order of the flat buffers nor the shapes are
stated. Both are recovered, and proved:

* the order of a buffer is that of its `param_slice_mappings`, by rank and by offset. Until 0.14.4
  those of *expert* groups are wrong (cut by the data-parallel degree instead of `edp`), which shows
  in their total. Then the order is that of the module: layers as numbered, local experts ascending,
  tensors as in the expert file, provided that the buffer is as long as exactly that;
* shapes are those of the weights, in the model-state file and the expert files;
* the proof are the weights themselves: a master, rounded to the model's dtype, *is* the weight. The
  first elements of every fragment are compared. One that differs, and the checkpoint is refused:
  the order is another one (`round_robin_gradients` reorders a buffer without a trace).

Source: `engine.py` (`_save_moe_checkpoint`), `stage_1_and_2.py`; commits 224a05c35 (mappings),
DeepSpeed 0.12 to 0.18.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path

from reshard.errors import CheckpointError, UnsupportedError, count_text
from reshard.formats.checkpoint import Problem
from reshard.formats.deepspeed.module import ModuleTensor
from reshard.formats.deepspeed.native_moe import NativeLayer
from reshard.formats.deepspeed.partitions import Fragment, Part, Partitions
from reshard.formats.deepspeed.records import Shapes
from reshard.formats.deepspeed.weight_copies import copy_of
from reshard.formats.rounded_copies import is_rounded
from reshard.formats.torch_archive import TensorRecord

Weights = Mapping[str, tuple[str, TensorRecord]]
"""Name -> file and tensor of a weight in the model's dtype."""


def weights_of(tensors: Iterable[ModuleTensor], column: int) -> Weights:
    """The weights that whole shards of a column hold, in the order of `tensors`."""
    return {
        tensor.name: (shard.stretches[0].region.file, shard.record)
        for tensor in tensors
        if (shard := tensor.shards.get(column)) is not None
    }


# --------------------------------------------------------------------------- the order


def dense_shapes(group: int, parts: Sequence[Part], weights: Weights) -> Shapes:
    """Names and shapes of a dense group in the order of its buffer.

    Raises
    ------
    CheckpointError
        When a file has no mapping, or a weight is of another size.
    """
    numels = mapped(group, parts)
    return {name: _shape(name, numel, weights, parts[0]) for name, numel in numels.items()}


def mapped(group: int, parts: Sequence[Part]) -> dict[str, int]:
    """Elements of every parameter that the mappings of all partitions name, in order."""
    numels: dict[str, int] = {}
    for part in parts:
        stated = part.states.mapping
        if stated is None:
            raise CheckpointError(
                f"neither param_shapes nor param_slice_mappings list what is in group {group}",
                file=part.file,
                next_step="the file is of a format that is not known",
            )
        for name, (_, numel) in sorted(stated.items(), key=lambda entry: entry[1]):
            numels[name] = numels.get(name, 0) + numel
    return numels


def _shape(name: str, numel: int, weights: Weights, part: Part) -> tuple[int, ...]:
    held = weights.get(name)
    if held is None or prod(held[1].shape) != numel:
        raise CheckpointError(
            "a parameter of the optimizer is not among the weights in its size",
            file=part.file if held is None else held[0],
            parameter=name,
            expected=count_text(numel, "element"),
            found="nothing" if held is None else f"shape {held[1].shape}",
            next_step="the files are of different runs",
        )
    return held[1].shape


def expert_shapes(
    group: int,
    holders: Sequence[tuple[Part, ...]],
    layers: Sequence[NativeLayer],
    mp: int,
    *,
    only: bool,
) -> tuple[list[Shapes], list[Problem]]:
    """For every EP rank, local names and shapes of an expert group in the order of its buffer.

    Parameters
    ----------
    group
        Number of the group.
    holders
        For every EP rank, who holds its buffer.
    layers
        The native layers of the stage.
    mp
        Model-parallel rank whose expert files tell the shapes.
    only
        Whether it is the only group of experts; the order of the module says nothing otherwise.
    """
    shapes: list[Shapes] = []
    problems: list[Problem] = []
    for ep_rank, parts in enumerate(holders):
        listed = in_module_order(ep_rank, len(holders), layers, mp)
        numels = mapped(group, parts)
        if _fits(parts, sum(numels.values())):
            weights = {name: ("", record) for name, record in listed.items()}
            shapes.append(
                {name: _shape(name, numel, weights, parts[0]) for name, numel in numels.items()}
            )
            continue
        if not only or not _fits(parts, sum(prod(r.shape) for r in listed.values())):
            raise _untold(group, parts)
        shapes.append({name: record.shape for name, record in listed.items()})
        problems.append(
            Problem(
                "param_slice_mappings of expert groups are wrong before DeepSpeed 0.14.5; the "
                "order of the experts' modules was used, and compared with their weights",
                parts[0].file,
            )
        )
    return shapes, problems


def in_module_order(
    ep_rank: int, ep: int, layers: Sequence[NativeLayer], mp: int
) -> dict[str, TensorRecord]:
    """Local names of an EP rank's native experts, in the order of the module."""
    listed = {}
    for layer in sorted(layers, key=lambda layer: layer.number):
        local = layer.num_experts // ep
        for number in range(local):
            _, tensors = layer.file_of(ep_rank * local + number, mp)
            for suffix, record in zip(layer.suffixes(mp), tensors.values(), strict=True):
                listed[f"{layer.prefix}{number}.{suffix}"] = record
    return listed


def _fits(parts: Sequence[Part], numel: int) -> bool:
    """Whether partitions are as long as so many elements and the usual padding."""
    length = sum(
        part.states.master.shape[0]
        + (0 if part.rank.flavour == "BF16_Optimizer" else part.states.padding)
        for part in parts
    )
    return 0 <= length - numel < 2 * len(parts)


def _untold(group: int, parts: Sequence[Part]) -> UnsupportedError:
    return UnsupportedError(
        f"the order of the experts in group {group} cannot be told: its mappings do not cover it "
        "(DeepSpeed before 0.14.5 wrote wrong ones), and the order of the module does not fit",
        file=parts[0].file,
        next_step="load the checkpoint with DeepSpeed 0.14.5 or newer, and save it again",
    )


# --------------------------------------------------------------------------- the proof


def require_same_weights(found: Partitions, columns: Mapping[str, int], weights: Weights) -> None:
    """Prove recovered places by the weights of the model, at the start of every fragment.

    Parameters
    ----------
    found
        What was resolved.
    columns
        Names whose shards in this column are to be proved.
    weights
        The weights, by the names of the checkpoint.

    Raises
    ------
    CheckpointError
        When a master is not the weight.
    """
    for name, column in columns.items():
        for fragment in found.shards[name][column].fragments:
            path, record = weights[name]
            if not is_weight_of(fragment, path, record):
                raise CheckpointError(
                    "the optimizer's master weights are not the weights of the model, so the "
                    "recovered order of the flat buffer is wrong",
                    file=fragment.file,
                    parameter=name,
                    expected=f"the values in {Path(path).name}",
                    next_step="with round_robin_gradients, load it with the DeepSpeed that wrote "
                    "it, switch that off, and save again; else the files are of different runs",
                )


def is_weight_of(fragment: Fragment, path: str, record: TensorRecord, skip: int = 0) -> bool:
    """Whether the first elements of a fragment, rounded to the weight's dtype, are the weight's.

    Parameters
    ----------
    fragment
        A range of a shard in an optimizer file.
    path, record
        The weight: the same shard, or a part of it.
    skip
        Elements of the shard before the weight.
    """
    copy = copy_of("", fragment, path, record, skip)
    return copy is None or is_rounded(copy)
