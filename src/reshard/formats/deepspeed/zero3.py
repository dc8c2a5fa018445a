"""The flat buffers of ZeRO-3, checked and resolved.

Theory. Every shard is cut by itself into equal blocks, one a rank; a sub-group's buffer on a rank is
its blocks end to end. Over *which* ranks is said by the length of the buffer, and by
`ds_zero_partition_groups` where there is one. Usually it is the data-parallel ranks of a column.
With `zero.Init` and tensor parallelism, parameters that AutoTP never touched are partitioned over
the *world* (`W = dp * tp`, rank `D * tp + T`).

Source: `stage3.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from reshard.errors import CheckpointError
from reshard.formats.deepspeed.contiguous import require_groups, shapes_of
from reshard.formats.deepspeed.grid import require_one_value
from reshard.formats.deepspeed.partitions import Buffer, Part, Partitions
from reshard.formats.deepspeed.records import ModelStates, OptimizerStates, Shapes
from reshard.layouts.flat import per_parameter_length, per_parameter_partition


def add_zero3_columns(
    found: Partitions,
    models: Mapping[tuple[int, int], ModelStates],
    ranks: Mapping[tuple[int, int], OptimizerStates],
    dp: int,
    tp: int,
    untouched: frozenset[str],
) -> None:
    """Resolve all columns of ZeRO-3; mappings are by `(dp, mp)`.

    Parameters
    ----------
    untouched
        Names whose stored map says that they were empty when AutoTP ran, the mark of `zero.Init`;
        asked only where the lengths leave it open over which ranks a group is cut.
    """
    for column in range(tp):
        stated = {models[d, column].file: models[d, column].param_shapes for d in range(dp)}
        require_one_value(stated, "param_shapes")
        own = [ranks[d, column] for d in range(dp)]
        shapes = shapes_of(models[0, column])
        require_groups(own, shapes)
        for group, names in enumerate(shapes):
            parts = tuple(Part(rank, group) for rank in own)
            if not _is_over_world(names, parts, dp, tp, untouched):
                add_zero3(found, Buffer(group, names, parts, column))
            elif column == 0:
                world = tuple(Part(ranks[d, t], group) for d in range(dp) for t in range(tp))
                add_zero3(found, Buffer(group, names, world, 0))
                found.over_world.update(names)


def _is_over_world(
    names: Shapes, own: Sequence[Part], dp: int, tp: int, untouched: frozenset[str]
) -> bool:
    numels = [prod(shape) for shape in names.values()]
    group = own[0].group
    lengths = {part.file: part.states.master.shape[0] for part in own}
    require_one_value(lengths, f"the length of flat group {group}")
    length = next(iter(lengths.values()))
    over_dp, over_world = (per_parameter_length(numels, count) for count in (dp, dp * tp))
    if length == over_dp != over_world or (length == over_dp and tp == 1):
        return False
    if length == over_world != over_dp:
        return True
    if length == over_dp:
        return bool(names) and all(name in untouched for name in names)
    raise CheckpointError(
        f"flat group {group} does not hold the parameters that param_shapes lists",
        file=own[0].file,
        expected=f"{over_dp} elements for {dp} ranks"
        + (f" or {over_world} for {dp * tp}" if tp > 1 else ""),
        found=length,
        next_step="a rank file is from another run, or the shards are cut another way (MiCS)",
    )


def add_zero3(found: Partitions, buffer: Buffer) -> None:
    """Resolve one buffer, whose length is known to be right."""
    numels = [prod(shape) for shape in buffer.shapes.values()]
    found.add(buffer, list(per_parameter_partition(numels, len(buffer.parts))))
