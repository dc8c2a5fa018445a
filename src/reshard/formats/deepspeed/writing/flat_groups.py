"""The flat buffers of the target: which elements of which parameter every rank holds, and where.

Theory. Reading composes ``F → shard → fragment`` from what files say; writing makes the same
composition from what a run of the target topology would have done. The result is the same kind of
map, with the ranks of the target as its holders, so a fill of an output file is one holder of one
map (:class:`Window`), and the planner does the rest.

A :class:`FlatGroup` is one buffer of one model-parallel rank (a *column* of the grid): under ZeRO-1
and 2 a parameter group, under ZeRO-3 a sub-group. Its :class:`FlatPartition` values are what the
data-parallel ranks hold of it. States are flat tensors as long as the partition, but for one: Muon
under ZeRO-1 and 2 keeps the momentum of every matrix that touches a partition whole, one after the
other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from reshard.errors import UnsupportedError
from reshard.formats.assembly import Assembler, Stretch
from reshard.formats.checkpoint import Region
from reshard.formats.deepspeed.writing.contents import Contents, Group, HeldStates
from reshard.formats.deepspeed.writing.flat_rules import (
    alignment_paddings,
    deal_order,
    partition_length,
    split_sub_groups,
    tail_padding,
)
from reshard.formats.deepspeed.writing.options import NativeOptions
from reshard.geometry import ParamAffineMap
from reshard.layouts.flat import (
    FlatFragment,
    contiguous_partition,
    flat_offsets,
    per_parameter_length,
    per_parameter_partition,
)

MUON_STATE = "momentum_buffer"
"""The state that Muon keeps whole."""


@dataclass(frozen=True, slots=True)
class Window:
    """Elements of a parameter in a flat tensor of one rank.

    Parameters
    ----------
    name
        The parameter.
    map, rank
        Target map, and the holder of it that lies here.
    start, numel
        Where in the flat tensor, in elements.
    """

    name: str
    map: ParamAffineMap
    rank: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class FlatPartition:
    """What one data-parallel rank holds of a flat buffer.

    Parameters
    ----------
    windows
        The parameters in it, ascending.
    length
        Elements, with padding.
    padding
        Elements at its end that are no parameter's.
    whole
        The same parameters, each whole, one after the other: the form of Muon's momentum.
    """

    windows: tuple[Window, ...]
    length: int
    padding: int
    whole: tuple[Window, ...]


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """One flat buffer of one column.

    Parameters
    ----------
    param_group
        Number of the parameter group that owns it.
    shapes
        Name -> shape of the column's shard, in the order of the buffer.
    alignment
        Elements of padding after each shard.
    held
        What the optimizer keeps.
    whole_states
        States that are kept whole instead of cut.
    partitions
        What each data-parallel rank holds.
    """

    param_group: int
    shapes: Mapping[str, tuple[int, ...]]
    alignment: tuple[int, ...]
    held: HeldStates
    whole_states: frozenset[str]
    partitions: tuple[FlatPartition, ...]


# --------------------------------------------------------------------------- first pass: the cut


@dataclass(frozen=True, slots=True)
class _Cut:
    """A flat buffer of one column, in integers."""

    column: int
    param_group: int
    shapes: Mapping[str, tuple[int, ...]]
    alignment: tuple[int, ...]
    fragments: tuple[FlatFragment, ...]
    lengths: tuple[int, ...]
    paddings: tuple[int, ...]


def flat_groups(
    contents: Contents,
    options: NativeOptions,
    maps: Mapping[str, ParamAffineMap],
) -> tuple[tuple[FlatGroup, ...], ...]:
    """The flat buffers of every column, for ZeRO-1, 2 and 3.

    Parameters
    ----------
    contents, options
        What is written, and for which topology.
    maps
        For every trained parameter the map over columns.

    Returns
    -------
    tuple of tuple of FlatGroup
        By column, in the order of the buffers.
    """
    cuts = [
        cut
        for column in range(options.mp)
        for index, group in enumerate(contents.groups)
        for cut in _cut_group(contents, options, maps, column, index, group)
    ]
    windows = _windows(cuts, maps)
    columns: list[list[FlatGroup]] = [[] for _ in range(options.mp)]
    for number, cut in enumerate(cuts):
        columns[cut.column].append(
            _flat_group(contents, options, maps, cut, [windows[number, r] for r in range(options.dp)])
        )
    return tuple(tuple(groups) for groups in columns)


def _cut_group(
    contents: Contents,
    options: NativeOptions,
    maps: Mapping[str, ParamAffineMap],
    column: int,
    index: int,
    group: Group,
) -> Iterator[_Cut]:
    """The buffers of one parameter group on one column."""
    shards = {
        name: maps[name].shard_shapes[column]
        for name in group.names
        if column in maps[name].shard_shapes and prod(maps[name].shard_shapes[column])
    }
    if not shards:
        raise UnsupportedError(
            "an optimizer group would have no parameter on a model-parallel rank",
            rank=f"mp {column}",
            found=f"group {index}",
            next_step="DeepSpeed cannot train such a group; choose another topology",
        )
    if options.stage == 3:
        yield from _cut_per_parameter(contents, options, shards, column, index)
    else:
        yield _cut_contiguous(contents, options, shards, column, index)


def _cut_contiguous(
    contents: Contents,
    options: NativeOptions,
    shards: Mapping[str, tuple[int, ...]],
    column: int,
    index: int,
) -> _Cut:
    """ZeRO-1 and 2: end to end, in the configured order, and cut into equal parts."""
    config = contents.config
    names = list(shards)
    plain = config.uses_bf16_optimizer(options.stage, contents.model_dtype)
    if config.round_robin and not plain:
        names = [names[position] for position in deal_order(len(names), options.dp)]
    numels = [prod(shards[name]) for name in names]
    aligned = config.parameter_alignment and not plain
    itemsize = contents.dtypes[names[0]].itemsize
    alignment = alignment_paddings(numels, itemsize) if aligned else (0,) * len(numels)
    _, end = flat_offsets(numels, alignment)
    length = partition_length(end, options.dp)
    return _Cut(
        column,
        index,
        {name: shards[name] for name in names},
        alignment,
        tuple(contiguous_partition(numels, length, alignment)),
        (length,) * options.dp,
        tuple(tail_padding(end, length, rank) for rank in range(options.dp)),
    )


def _cut_per_parameter(
    contents: Contents,
    options: NativeOptions,
    shards: Mapping[str, tuple[int, ...]],
    column: int,
    index: int,
) -> Iterator[_Cut]:
    """ZeRO-3: each shard by itself, in as many sub-groups as the configured size makes."""
    names = list(shards)
    numels = [prod(shards[name]) for name in names]
    size = options.sub_group_size or contents.config.sub_group_size
    for positions in split_sub_groups(numels, options.dp, size):
        owned = [numels[position] for position in positions]
        length = per_parameter_length(owned, options.dp)
        yield _Cut(
            column,
            index,
            {names[position]: shards[names[position]] for position in positions},
            (),
            tuple(per_parameter_partition(owned, options.dp)),
            (length,) * options.dp,
            (0,) * options.dp,
        )


# --------------------------------------------------------------------------- second pass: the maps


def _windows(
    cuts: Sequence[_Cut], maps: Mapping[str, ParamAffineMap]
) -> dict[tuple[int, int], list[Window]]:
    """What every partition of every cut holds, by `(number of the cut, partition)`."""
    by_name: dict[str, list[tuple[int, FlatFragment]]] = {}
    for number, cut in enumerate(cuts):
        names = list(cut.shapes)
        for fragment in cut.fragments:
            by_name.setdefault(names[fragment.index], []).append((number, fragment))
    assembler = Assembler()
    found: dict[tuple[int, int], list[Window]] = {
        (number, rank): [] for number, cut in enumerate(cuts) for rank in range(len(cut.lengths))
    }
    for name, fragments in by_name.items():
        composed = compose_fragments(
            assembler, name, maps[name], [(cuts[number].column, part) for number, part in fragments]
        )
        for holder, (number, part) in enumerate(fragments):
            found[number, part.partition].append(
                Window(name, composed, holder, part.partition_start, part.numel)
            )
    for windows in found.values():
        windows.sort(key=lambda window: window.start)
    return found


def compose_fragments(
    assembler: Assembler,
    name: str,
    outer: ParamAffineMap,
    fragments: Sequence[tuple[int, FlatFragment]],
) -> ParamAffineMap:
    """The map from a parameter to the fragments of its shards.

    Parameters
    ----------
    assembler
        Keeps compositions by geometry.
    name
        The parameter, for messages.
    outer
        Its map over columns.
    fragments
        `(column, fragment)`, columns ascending; they are the holders of the result, in this order.
    """
    nowhere = Region("", 0, 0)
    stretches: dict[int, list[Stretch]] = {}
    for column, part in fragments:
        stretches.setdefault(column, []).append(Stretch(nowhere, part.shard_start, part.numel))
    return assembler.locate(name, outer, stretches).map


def _flat_group(
    contents: Contents,
    options: NativeOptions,
    maps: Mapping[str, ParamAffineMap],
    cut: _Cut,
    windows: Sequence[Sequence[Window]],
) -> FlatGroup:
    partitions = tuple(
        FlatPartition(
            tuple(held), length, padding, tuple(_whole(held, maps, cut.shapes, cut.column))
        )
        for held, length, padding in zip(windows, cut.lengths, cut.paddings, strict=True)
    )
    return FlatGroup(
        cut.param_group,
        cut.shapes,
        cut.alignment,
        contents.held_by_all(list(cut.shapes)),
        _whole_states(contents, options, cut.param_group),
        partitions,
    )


def _whole(
    windows: Sequence[Window],
    maps: Mapping[str, ParamAffineMap],
    shapes: Mapping[str, tuple[int, ...]],
    column: int,
) -> Iterator[Window]:
    start = 0
    for window in windows:
        numel = prod(shapes[window.name])
        yield Window(window.name, maps[window.name], column, start, numel)
        start += numel


def _whole_states(contents: Contents, options: NativeOptions, index: int) -> frozenset[str]:
    config = contents.config
    cut_like_masters = (
        options.stage == 3
        or config.offloads_optimizer
        or config.uses_bf16_optimizer(options.stage, contents.model_dtype)
    )
    if contents.groups[index].uses_muon and not cut_like_masters:
        return frozenset((MUON_STATE,))
    return frozenset()
