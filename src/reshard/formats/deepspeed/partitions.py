"""Where each shard lies in the optimizer files: ZeRO's flat buffers, as fragments.

Theory. ZeRO lays the shards of a group end to end in a flat *buffer* and cuts the buffer over the
ranks of a process group. A :class:`Buffer` says what is in it (shapes, in order) and who holds its
partitions; the rule of the cut (`reshard.layouts.flat`, applied by `contiguous` and `zero3`) turns
it into :class:`Fragment` values: which elements of which shard lie where in which file.

Shards are filed under a *column*: the model-parallel rank (`mp`) that holds them. Two kinds of
parameters have columns of their own. Under ZeRO-3 with tensor parallelism and `zero.Init`,
parameters that AutoTP never touched are partitioned over the *world*: their one shard is the whole
parameter. Fused experts are held by expert-parallel ranks: a column is an EP rank, and the expert
placement is the map over columns.

Muon keeps the momentum of every parameter that touches a partition *whole*, one after the other, so
a parameter cut by a partition boundary is there twice.

Sources: `stage_1_and_2.py` (`get_data_parallel_partitions`, `_muon_momentum_buffer`,
`_get_flat_partition_unpadded`), `stage3.py`, `bf16_optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from reshard.errors import CheckpointError
from reshard.formats.assembly import Stretch
from reshard.formats.checkpoint import Problem, Region
from reshard.formats.deepspeed.optimizer_records import GroupStates, OptimizerStates, uncuttable
from reshard.formats.deepspeed.records import Shapes
from reshard.formats.torch_archive import TensorRecord
from reshard.layouts.flat import FlatFragment

MASTER = "fp32"
"""The state under which a parameter's master weights go, whatever their dtype."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of a buffer: a group of its optimizer file."""

    rank: OptimizerStates
    group: int

    @property
    def file(self) -> str:
        """Path of the file."""
        return self.rank.file

    @property
    def states(self) -> GroupStates:
        """Master and states of the group."""
        return self.rank.groups[self.group]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A flat buffer: shards end to end, cut over ranks."""

    group: int
    """Number of the group, for messages and for the names of parameter groups."""
    shapes: Shapes
    """Name -> shape of every shard, in the order of the buffer, as the ranks name them."""
    parts: tuple[Part, ...]
    """Who holds partition 0, 1, …"""
    column: int
    """Where the shards are filed."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names that are local to the ranks -> the names in the checkpoint; the others are both."""
    mapped: bool = True
    """Whether the files' own mappings are to be believed, and so compared."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A flat range of one shard inside one part of a buffer; numbers in elements."""

    part: Part
    """The file and its group."""
    shard_start: int
    """First element, in row-major order of the shard."""
    start: int
    """Where that element lies in the partition."""
    numel: int
    """Length."""
    shard_numel: int
    """Elements of the whole shard."""
    whole_start: int
    whole_end: int
    """Where the whole shard starts, and where all end, in a buffer that holds every shard that
    touches the partition whole."""

    @property
    def file(self) -> str:
        """Path of the file."""
        return self.part.file

    @property
    def states(self) -> GroupStates:
        """What the rank holds of the group."""
        return self.part.states

    def record(self, state: str) -> TensorRecord:
        """The flat tensor that holds a state of the group."""
        return self.states.master if state == MASTER else self.states.states[state]

    def stretch(self, state: str) -> Stretch:
        """Which elements of the shard the rank holds of a state, and where.

        It is the fragment's own range, or the whole shard for states that are kept whole (Muon).

        Raises
        ------
        UnsupportedError
            When the state's tensor is neither as long as the partition nor as the whole shards.
        """
        record, states = self.record(state), self.states
        master = states.master.shape[0]
        size = record.dtype.itemsize
        if record.shape[0] in (master, master + states.padding):
            start, base, numel = self.shard_start, self.start, self.numel
        elif record.shape[0] == self.whole_end:
            start, base, numel = 0, self.whole_start, self.shard_numel
        else:
            expected = f"a flat tensor of {master} or {master + states.padding} elements"
            raise uncuttable(self.file, state, record, expected)
        region = Region(self.file, record.offset + base * size, numel * size)
        return Stretch(region, start, numel)


@dataclass(frozen=True, slots=True)
class Shard:
    """One column's shard of a parameter: its shape, and its fragments in row-major order."""

    shape: tuple[int, ...]
    fragments: tuple[Fragment, ...]


@dataclass(slots=True)
class Partitions:
    """Every shard of every column."""

    shards: dict[str, dict[int, Shard]] = field(default_factory=dict)
    """Name -> column -> shard."""
    groups: list[dict[str, None]] = field(default_factory=list)
    """Names of each group, in flat-buffer order (of column 0 first, further columns' names
    added)."""
    over_world: set[str] = field(default_factory=set)
    """Names that are partitioned over all ranks, whatever their tensor-parallel rank: their one
    shard is the whole parameter, filed under column 0."""
    problems: list[Problem] = field(default_factory=list)
    """What was found wrong and could be put right."""

    def name_group(self, group: int, name: str) -> None:
        """Note that a parameter belongs to a group."""
        while len(self.groups) <= group:
            self.groups.append({})
        self.groups[group].setdefault(name)

    def add(self, buffer: Buffer, flat: Sequence[FlatFragment]) -> None:
        """File every shard of a buffer that is cut into `flat` fragments."""
        numels = [prod(shape) for shape in buffer.shapes.values()]
        parts = _fragments(flat, numels, buffer.parts)
        for (local, shape), fragments in zip(buffer.shapes.items(), parts, strict=True):
            name = buffer.names.get(local, local)
            self.name_group(buffer.group, name)
            columns = self.shards.setdefault(name, {})
            if buffer.column in columns:
                raise CheckpointError(
                    "a parameter is in two groups of one rank",
                    file=buffer.parts[0].file,
                    parameter=name,
                    rank=f"column {buffer.column}",
                )
            columns[buffer.column] = Shard(shape, tuple(fragments))


def _fragments(
    flat: Sequence[FlatFragment], numels: Sequence[int], parts: Sequence[Part]
) -> list[list[Fragment]]:
    """Fragments of each shard; partition `k` is `parts[k]`."""
    whole = [0] * len(parts)
    for piece in flat:
        whole[piece.partition] += numels[piece.index]
    by_shard: list[list[Fragment]] = [[] for _ in numels]
    reached = [0] * len(parts)
    for piece in flat:
        by_shard[piece.index].append(
            Fragment(
                part=parts[piece.partition],
                shard_start=piece.shard_start,
                start=piece.partition_start,
                numel=piece.numel,
                shard_numel=numels[piece.index],
                whole_start=reached[piece.partition],
                whole_end=whole[piece.partition],
            )
        )
        reached[piece.partition] += numels[piece.index]
    return by_shard
