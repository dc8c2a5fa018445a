"""The flat buffers of ZeRO-3, checked and resolved.

Theory. Every shard is cut by itself into equal blocks, one a rank; a sub-group's buffer on a rank
is its blocks end to end. Over *which* ranks is said by `ds_zero_partition_groups` where there is
one, else by the length of the buffer. Usually it is the data-parallel ranks of a column. With
`zero.Init` and tensor parallelism, parameters that AutoTP never touched are partitioned over the
*world* (`W = dp * tp`, rank `D * tp + T`). Fused experts are partitioned over the ranks with the
same EP rank; every file states its own place among them.

Sub-groups are numbered file by file. With an uneven expert placement the files of different EP
ranks may have another number of them, so experts are resolved EP rank by EP rank.

Source: `stage3.py` (`_get_zero_partition_group_metadata`), `engine.py` (`_save_moe_checkpoint`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from reshard.errors import CheckpointError, count_text
from reshard.formats.deepspeed.contiguous import require_groups, shapes_of
from reshard.formats.deepspeed.expert_buffers import (
    by_stated_place,
    expert_layers,
    require_local_shapes,
)
from reshard.formats.deepspeed.experts import AutoEP, ExpertPlace
from reshard.formats.deepspeed.grid import Degrees, require_one_value
from reshard.formats.deepspeed.optimizer_records import OptimizerStates
from reshard.formats.deepspeed.partitions import Buffer, Part, Partitions
from reshard.formats.deepspeed.records import ModelStates, Shapes
from reshard.layouts.flat import per_parameter_length, per_parameter_partition

Cell = tuple[int, int]
"""`(dp, mp)` of a rank."""


@dataclass(frozen=True, slots=True)
class _Listed:
    """The sub-groups that one rank's files list: dense ones, and those of experts."""

    dense: tuple[tuple[Part, Shapes], ...]
    experts: tuple[tuple[Part, Shapes], ...]


def add_zero3_columns(
    found: Partitions,
    models: Mapping[Cell, ModelStates],
    ranks: Mapping[Cell, OptimizerStates],
    degrees: Degrees,
    untouched: frozenset[str],
    autoep: AutoEP | None,
) -> None:
    """Resolve all columns of ZeRO-3; mappings are by `(dp, mp)`.

    Parameters
    ----------
    untouched
        Names whose stored map says that they were empty when AutoTP ran, the mark of `zero.Init`;
        asked only where nothing else tells over which ranks a group is cut.
    """
    listed = {cell: _listed(models[cell], ranks[cell], autoep) for cell in ranks}
    for column in range(degrees.mp):
        own = [listed[d, column] for d in range(degrees.dp)]
        require_one_value(
            {models[d, column].file: _names(listed[d, column].dense) for d in range(degrees.dp)},
            "param_shapes",
        )
        for position, (part, shapes) in enumerate(own[0].dense):
            parts = tuple(other.dense[position][0] for other in own)
            if not _is_over_world(shapes, parts, column, degrees, untouched):
                add_zero3(found, Buffer(part.group, shapes, parts, column))
            elif column == 0:
                world = [listed[d, t] for d in range(degrees.dp) for t in range(degrees.mp)]
                everyone = tuple(other.dense[position][0] for other in world)
                add_zero3(found, Buffer(part.group, shapes, everyone, 0))
                found.over_world.update(shapes)
    if autoep is not None:
        for buffer in _expert_buffers(listed, autoep):
            add_zero3(found, buffer)


def _listed(model: ModelStates, rank: OptimizerStates, autoep: AutoEP | None) -> _Listed:
    shapes = shapes_of(model)
    require_groups([rank], shapes)
    dense: list[tuple[Part, Shapes]] = []
    experts: list[tuple[Part, Shapes]] = []
    for group, names in enumerate(shapes):
        chosen = experts if expert_layers(names, autoep, model.file) else dense
        chosen.append((Part(rank, group), names))
    return _Listed(tuple(dense), tuple(experts))


def _names(groups: Iterable[tuple[Part, Shapes]]) -> list[dict[str, tuple[int, ...]]]:
    return [dict(shapes) for _, shapes in groups]


# --------------------------------------------------------------------------- dense groups


def _is_over_world(
    names: Shapes,
    own: Sequence[Part],
    column: int,
    degrees: Degrees,
    untouched: frozenset[str],
) -> bool:
    dp, tp = degrees.dp, degrees.mp
    numels = [prod(shape) for shape in names.values()]
    group = own[0].group
    lengths = {part.file: part.states.master.shape[0] for part in own}
    require_one_value(lengths, f"the length of flat group {group}")
    length = next(iter(lengths.values()))
    over_dp, over_world = (per_parameter_length(numels, count) for count in (dp, dp * tp))
    if length not in (over_dp, over_world):
        raise CheckpointError(
            f"flat group {group} does not hold the parameters that param_shapes lists",
            file=own[0].file,
            expected=f"{count_text(over_dp, 'element')} for {count_text(dp, 'rank')}"
            + (f" or {over_world} for {dp * tp}" if tp > 1 else ""),
            found=length,
            next_step="a rank file is from another run, or the shards are cut another way (MiCS)",
        )
    if own[0].states.partitions is not None:
        return _declared_over_world(own, column, degrees, length)
    if tp == 1 or over_dp != over_world:
        return length != over_dp
    return bool(names) and all(name in untouched for name in names)


def _declared_over_world(own: Sequence[Part], column: int, degrees: Degrees, length: int) -> bool:
    """Follow `ds_zero_partition_groups`, which must fit the rank that wrote it."""
    dp, tp = degrees.dp, degrees.mp
    count = own[0].states.partitions
    world = count == dp * tp and tp > 1
    for dp_rank, part in enumerate(own):
        place = dp_rank * tp + column if world else dp_rank
        if (part.states.partitions, part.states.partition) != (dp * tp if world else dp, place):
            raise CheckpointError(
                f"ds_zero_partition_groups of flat group {part.group} does not fit the rank",
                file=part.file,
                expected=f"partition {place} of {dp * tp if world else dp}",
                found=f"partition {part.states.partition} of {part.states.partitions}, "
                f"{length} elements",
                next_step="a file is from another run",
            )
    return world


# --------------------------------------------------------------------------- groups of experts


def _expert_buffers(listed: Mapping[Cell, _Listed], autoep: AutoEP) -> Iterable[Buffer]:
    """One buffer for every sub-group of experts of every EP rank."""
    ranks: dict[int, list[tuple[ExpertPlace, _Listed]]] = {}
    for cell, groups in listed.items():
        if groups.experts:
            place = _place_of(cell, groups, autoep)
            ranks.setdefault(place.ep_rank, []).append((place, groups))
    for ep_rank, held in sorted(ranks.items()):
        stated = {groups.experts[0][0].file: _names(groups.experts) for _, groups in held}
        require_one_value(stated, f"param_shapes of the experts of EP rank {ep_rank}")
        for position, (part, shapes) in enumerate(held[0][1].experts):
            places: dict[ExpertPlace, list[Part]] = {}
            for place, groups in held:
                shifted = ExpertPlace(0, place.edp_rank, place.edp)
                places.setdefault(shifted, []).append(groups.experts[position][0])
            first = next(iter(shapes))
            (parts,) = by_stated_place(places, 1, held[0][0].edp or 1, first)
            require_local_shapes(shapes, autoep, ep_rank, part.file)
            _require_length(shapes, parts)
            yield Buffer(part.group, shapes, parts, ep_rank)


def _place_of(cell: Cell, groups: _Listed, autoep: AutoEP) -> ExpertPlace:
    """The place that both files of a rank state."""
    stated = autoep.places.get(cell)
    file = groups.experts[0][0].file
    if stated is None:
        raise CheckpointError(
            "ds_autoep_layers does not state the EP rank of its writer",
            file=file,
            expected="ep_rank, expert_data_parallel_rank, expert_data_parallel_world_size",
        )
    states = groups.experts[0][0].states
    place = ExpertPlace(
        stated.ep_rank,
        states.partition if stated.edp_rank is None else stated.edp_rank,
        states.partitions if stated.edp is None else stated.edp,
    )
    for part, _ in groups.experts:
        declared = (part.states.partition, part.states.partitions)
        if place.edp is None or declared not in ((None, None), (place.edp_rank, place.edp)):
            raise CheckpointError(
                f"ds_zero_partition_groups of flat group {part.group} contradicts ds_autoep_layers",
                file=file,
                rank=f"dp {cell[0]}, mp {cell[1]}",
                expected=f"partition {place.edp_rank} of {place.edp}",
                found=f"partition {declared[0]} of {declared[1]}",
                next_step="the two files of the rank are of different runs",
            )
    return place


def _require_length(shapes: Shapes, parts: Sequence[Part]) -> None:
    expected = per_parameter_length([prod(shape) for shape in shapes.values()], len(parts))
    for part in parts:
        if part.states.master.shape[0] != expected:
            raise CheckpointError(
                f"flat group {part.group} does not hold the experts that param_shapes lists",
                file=part.file,
                expected=f"{count_text(expected, 'element')} for {count_text(len(parts), 'rank')}",
                found=part.states.master.shape[0],
                next_step="a rank file is from another run",
            )


def add_zero3(found: Partitions, buffer: Buffer) -> None:
    """Resolve one buffer, whose length is known to be right."""
    numels = [prod(shape) for shape in buffer.shapes.values()]
    found.add(buffer, list(per_parameter_partition(numels, len(buffer.parts))))
