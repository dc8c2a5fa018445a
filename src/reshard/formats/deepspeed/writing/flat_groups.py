"""The flat buffers of the target: which elements of which parameter every rank holds, and where.

Theory. Reading composes ``F → shard → fragment`` from what files say; writing makes the same
composition from what a run of the target topology would have done. The result is the same kind of
map, with the ranks of the target as its holders, so a fill of an output file is one holder of one
map (:class:`Window`), and the planner does the rest.

A :class:`FlatGroup` is one buffer of one model-parallel rank (a *column* of the grid): under ZeRO-1
and 2 a parameter group, under ZeRO-3 a sub-group. Its :class:`FlatPartition` values are what the
data-parallel ranks hold of it. Of experts a column has one buffer for each EP rank, side by side in
a :class:`Bank`, and each data-parallel rank takes part in one of them. States are flat tensors as
long as the partition, but for one: Muon under ZeRO-1 and 2 keeps the momentum of every matrix that
touches a partition whole, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod

from reshard.formats.assembly import Assembler, Stretch
from reshard.formats.checkpoint import Region
from reshard.formats.deepspeed.writing.contents import Contents, HeldStates
from reshard.formats.deepspeed.writing.cuts import Cut
from reshard.formats.deepspeed.writing.expert_grid import ExpertGrid
from reshard.formats.deepspeed.writing.flat_buffers import FlatBuffer, buffer_rows
from reshard.formats.deepspeed.writing.options import NativeOptions
from reshard.geometry import ParamAffineMap
from reshard.layouts.flat import FlatFragment

Place = tuple[int, int]
"""`(column, optimizer group)`."""

MUON_STATE = "momentum_buffer"
"""The state that Muon keeps whole."""


@dataclass(frozen=True, slots=True)
class Window:
    """Elements of a parameter in a flat tensor of one rank."""

    name: str
    """The parameter."""
    map: ParamAffineMap | None
    rank: int
    """Target map, and the holder of it that lies here; None where all of it is padding."""
    start: int
    numel: int
    """Where in the flat tensor, in elements, padding of the shard included."""


@dataclass(frozen=True, slots=True)
class FlatPartition:
    """What one data-parallel rank holds of a flat buffer."""

    windows: tuple[Window, ...]
    """The parameters in it, ascending."""
    length: int
    """Elements, with padding."""
    padding: int
    """Elements at its end that are no parameter's."""
    whole: tuple[Window, ...]
    """The same parameters, each whole, one after the other: the form of Muon's momentum."""


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """One flat buffer of one column."""

    param_group: int
    """Number of the parameter group that owns it."""
    shapes: Mapping[str, tuple[int, ...]]
    """Name -> shape of the column's shard, in the order of the buffer."""
    alignment: tuple[int, ...]
    """Elements of padding after each shard."""
    held: HeldStates
    """What the optimizer keeps."""
    whole_states: frozenset[str]
    """States that are kept whole instead of cut."""
    partitions: tuple[FlatPartition, ...]
    """What each data-parallel rank holds."""


@dataclass(frozen=True, slots=True)
class Bank:
    """A flat buffer as the ranks of one column see it."""

    shards: tuple[FlatGroup, ...]
    """The buffer; of experts one for each EP rank."""
    experts: ExpertGrid | None = None
    """Where ranks stand among the experts; None for a dense buffer."""

    @property
    def first(self) -> FlatGroup:
        """The buffer of the first rank; all have the same shapes."""
        return self.shards[0]

    def held_by(self, dp_rank: int, tp_rank: int) -> tuple[FlatGroup, int]:
        """The buffer that a rank shares, and which partition of it is its own."""
        if self.experts is None:
            return self.shards[0], dp_rank
        ep_rank, partition = self.experts.place(dp_rank, tp_rank)
        return self.shards[ep_rank], partition


# --------------------------------------------------------------------------- banks


def flat_banks(
    contents: Contents,
    options: NativeOptions,
    cuts: Mapping[str, Cut],
    experts: ExpertGrid | None,
) -> tuple[tuple[Bank, ...], ...]:
    """The flat buffers of every column of a pipeline stage, for ZeRO-1, 2 and 3.

    Parameters
    ----------
    contents, options
        What is written, and for which topology.
    cuts
        How every trained parameter is cut over columns, experts over EP ranks.
    experts
        Where the experts are, None for a model without.

    Returns
    -------
    tuple of tuple of Bank
        By column, in the order of the buffers.
    """
    # where experts are not cut over columns, all share the buffers of the first
    shared = experts is not None and not experts.is_cut
    columns_of = [1 if group.has_experts and shared else options.tp for group in contents.groups]
    rows = [
        (place, row)
        for place in _places(columns_of)
        for row in buffer_rows(contents, options, cuts, place, experts)
    ]
    banks = _banks(contents, options, cuts, rows, experts)
    return tuple(
        tuple(
            bank
            for index, columns in enumerate(columns_of)
            for bank in banks.get((min(column, columns - 1), index), ())
        )
        for column in range(options.tp)
    )


def _places(columns_of: Sequence[int]) -> Iterator[Place]:
    """Every group of every column that has buffers of its own."""
    for index, columns in enumerate(columns_of):
        yield from ((column, index) for column in range(columns))


def _banks(
    contents: Contents,
    options: NativeOptions,
    cuts: Mapping[str, Cut],
    rows: Sequence[tuple[Place, Sequence[FlatBuffer]]],
    experts: ExpertGrid | None,
) -> dict[Place, list[Bank]]:
    """The banks of every place, with what each partition holds."""
    buffers = [buffer for _, row in rows for buffer in row]
    windows = _windows(buffers, cuts)
    held = ([windows[at, r] for r in range(len(one.lengths))] for at, one in enumerate(buffers))
    groups = (
        _flat_group(contents, options, cuts, buffer, of_ranks)
        for buffer, of_ranks in zip(buffers, held, strict=True)
    )
    banks: dict[Place, list[Bank]] = {}
    for place, row in rows:
        shards = tuple(islice(groups, len(row)))
        has_experts = contents.groups[place[1]].has_experts
        banks.setdefault(place, []).append(Bank(shards, experts if has_experts else None))
    return banks


# --------------------------------------------------------------------------- maps


def _windows(
    buffers: Sequence[FlatBuffer], cuts: Mapping[str, Cut]
) -> dict[tuple[int, int], list[Window]]:
    """What every partition of every buffer holds, by `(number of the buffer, partition)`."""
    by_name: dict[str, list[tuple[int, FlatFragment]]] = {}
    for number, buffer in enumerate(buffers):
        names = list(buffer.shapes)
        for fragment in buffer.fragments:
            by_name.setdefault(names[fragment.index], []).append((number, fragment))
    assembler = Assembler()
    found: dict[tuple[int, int], list[Window]] = {
        (number, rank): []
        for number, buffer in enumerate(buffers)
        for rank in range(len(buffer.lengths))
    }
    for name, parts in by_name.items():
        fragments = [(buffers[number].shard, part) for number, part in parts]
        composed, holders = compose_fragments(assembler, name, cuts[name], fragments)
        for (number, part), holder in zip(parts, holders, strict=True):
            target = composed if holder is not None else None
            found[number, part.partition].append(
                Window(name, target, holder or 0, part.partition_start, part.numel)
            )
    for windows in found.values():
        windows.sort(key=lambda window: window.start)
    return found


def compose_fragments(
    assembler: Assembler,
    name: str,
    cut: Cut,
    fragments: Sequence[tuple[int, FlatFragment]],
) -> tuple[ParamAffineMap, list[int | None]]:
    """The map from a parameter to the fragments of its shards.

    Parameters
    ----------
    assembler
        Keeps compositions by geometry.
    name
        The parameter, for messages.
    cut
        How it is cut over columns.
    fragments
        `(column, fragment)`, columns ascending.

    Returns
    -------
    map, holders
        The map, and for each fragment its holder of the map; None where it is padding only.
    """
    nowhere = Region("", 0, 0)
    stretches: dict[int, list[Stretch]] = {}
    holders: list[int | None] = []
    count = 0
    for column, part in fragments:
        numel = min(part.numel, cut.real_numel(column) - part.shard_start)
        holders.append(count if numel > 0 else None)
        if numel > 0:
            stretches.setdefault(column, []).append(Stretch(nowhere, part.shard_start, numel))
            count += 1
    return assembler.locate(name, cut.map, stretches).map, holders


def _flat_group(
    contents: Contents,
    options: NativeOptions,
    cuts: Mapping[str, Cut],
    buffer: FlatBuffer,
    windows: Sequence[Sequence[Window]],
) -> FlatGroup:
    partitions = tuple(
        FlatPartition(tuple(held), length, padding, tuple(_whole(held, cuts, buffer)))
        for held, length, padding in zip(windows, buffer.lengths, buffer.paddings, strict=True)
    )
    return FlatGroup(
        buffer.param_group,
        buffer.shapes,
        buffer.alignment,
        contents.held_by_all(list(buffer.shapes)),
        _whole_states(contents, options, buffer.param_group),
        partitions,
    )


def _whole(
    windows: Sequence[Window], cuts: Mapping[str, Cut], buffer: FlatBuffer
) -> Iterator[Window]:
    start = 0
    for window in windows:
        numel = prod(buffer.shapes[window.name])
        yield Window(window.name, cuts[window.name].map, buffer.shard, start, numel)
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
