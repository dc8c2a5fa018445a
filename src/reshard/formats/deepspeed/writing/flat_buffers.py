"""How the flat buffers of the target are laid out and cut, in integers.

Theory. A parameter group of a shard is one buffer under ZeRO-1 and 2: the shards of its parameters
end to end, in the configured order and with the configured alignment, cut into equal parts. Under
ZeRO-3 it is several, the sub-groups, and each shard is cut by itself. Shards of dense parameters
are those of a column; of experts each expert-parallel rank has its own, so their buffers stand side
by side.

Which elements of a parameter lie where is made of this by `flat_groups`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.writing.contents import Contents
from reshard.formats.deepspeed.writing.cuts import Cut
from reshard.formats.deepspeed.writing.expert_grid import ExpertGrid
from reshard.formats.deepspeed.writing.flat_rules import (
    alignment_paddings,
    deal_order,
    partition_length,
    split_sub_groups,
    tail_padding,
)
from reshard.formats.deepspeed.writing.options import NativeOptions
from reshard.layouts.flat import (
    FlatFragment,
    contiguous_partition,
    flat_offsets,
    per_parameter_length,
    per_parameter_partition,
)


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """A flat buffer of one shard of a parameter group, in integers."""

    shard: int
    """Number of the shard in the cuts of its parameters: the column, or the EP rank of experts."""
    param_group: int
    """Number of the parameter group."""
    shapes: Mapping[str, tuple[int, ...]]
    """Name -> shape of the shard, in the order of the buffer."""
    alignment: tuple[int, ...]
    """Elements of padding after each shard."""
    fragments: tuple[FlatFragment, ...]
    """What each partition holds."""
    lengths: tuple[int, ...]
    paddings: tuple[int, ...]
    """Of every partition: its elements, and how many at its end are no parameter's."""


def buffer_rows(
    contents: Contents,
    options: NativeOptions,
    cuts: Mapping[str, Cut],
    place: tuple[int, int],
    experts: ExpertGrid | None,
) -> Iterator[tuple[FlatBuffer, ...]]:
    """The buffers of one parameter group on one column; of experts, side by side by EP rank.

    Parameters
    ----------
    contents, options
        What is written, and for which topology.
    cuts
        How every trained parameter is cut.
    place
        Column and number of the parameter group.
    experts
        Where the experts are, None for a model without.

    Raises
    ------
    UnsupportedError
        When the column has no parameter of the group.
    """
    column, index = place
    if experts is None or not contents.groups[index].has_experts:
        for buffer in _buffers(contents, options, cuts, place, options.dp):
            yield (buffer,)
        return
    by_rank = [
        list(_buffers(contents, options, cuts, (experts.shard(rank, column), index), experts.edp))
        for rank in range(experts.ep)
    ]
    yield from zip(*by_rank, strict=True)


def _buffers(
    contents: Contents,
    options: NativeOptions,
    cuts: Mapping[str, Cut],
    place: tuple[int, int],
    partitions: int,
) -> Iterator[FlatBuffer]:
    """The buffers of one parameter group on one shard: several only under ZeRO-3."""
    shard, index = place
    shapes = {
        name: cuts[name].shapes[shard]
        for name in contents.groups[index].names
        if prod(cuts[name].shapes.get(shard, (0,)))
    }
    if not shapes:
        raise UnsupportedError(
            "an optimizer group would have no parameter on a model-parallel rank",
            rank=f"mp {shard}",
            found=f"group {index}",
            next_step="DeepSpeed cannot train such a group; choose another topology",
        )
    if options.stage == 3:
        yield from _per_parameter(contents, options, shapes, place, partitions)
    else:
        yield _contiguous(contents, options, shapes, place, partitions)


def _contiguous(
    contents: Contents,
    options: NativeOptions,
    shapes: Mapping[str, tuple[int, ...]],
    place: tuple[int, int],
    partitions: int,
) -> FlatBuffer:
    """ZeRO-1 and 2: end to end, in the configured order, and cut into equal parts."""
    config = contents.config
    names = list(shapes)
    plain = config.uses_bf16_optimizer(options.stage, contents.model_dtype)
    if config.round_robin and not plain:
        names = [names[position] for position in deal_order(len(names), partitions)]
    numels = [prod(shapes[name]) for name in names]
    aligned = config.parameter_alignment and not plain
    itemsize = contents.dtypes[names[0]].itemsize
    alignment = alignment_paddings(numels, itemsize) if aligned else (0,) * len(numels)
    _, end = flat_offsets(numels, alignment)
    length = partition_length(end, partitions)
    return FlatBuffer(
        *place,
        {name: shapes[name] for name in names},
        alignment,
        tuple(contiguous_partition(numels, length, alignment)),
        (length,) * partitions,
        tuple(tail_padding(end, length, rank) for rank in range(partitions)),
    )


def _per_parameter(
    contents: Contents,
    options: NativeOptions,
    shapes: Mapping[str, tuple[int, ...]],
    place: tuple[int, int],
    partitions: int,
) -> Iterator[FlatBuffer]:
    """ZeRO-3: each shard by itself, in as many sub-groups as the configured size makes."""
    names = list(shapes)
    numels = [prod(shapes[name]) for name in names]
    size = options.sub_group_size or contents.config.sub_group_size
    for positions in split_sub_groups(numels, partitions, size):
        owned = [numels[position] for position in positions]
        length = per_parameter_length(owned, partitions)
        yield FlatBuffer(
            *place,
            {names[position]: shapes[names[position]] for position in positions},
            (),
            tuple(per_parameter_partition(owned, partitions)),
            (length,) * partitions,
            (0,) * partitions,
        )
