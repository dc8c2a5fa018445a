"""What maps and plans say, element by element.

Theory. A tensor of at most a hundred elements can be looked at whole. A *cut* is the truth: for
each rank an array with the offset in `F` of every element of its shard, -1 where there is none, and
the factor of every element of `F`. A *spelling* writes a cut down in pieces, as the seven fields
that the specification gives them. Here is what pieces mean, and which of them are a valid map, in
loops over elements. Nothing here comes from reshard.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Shape = tuple[int, ...]
Block = tuple[Shape, int, Shape, int, Shape]
"""Extents, then offset and strides on either side."""
Element = tuple[int, int]
"""A rank, and an offset in its shard."""


@dataclass(frozen=True)
class Spelled:
    """A piece as it is written."""

    block: Block
    locations: tuple[int, ...]
    scale: float

    def elements(self) -> Iterator[tuple[int, int]]:
        """Yield the offset in `F` and the offset in the shard of each element."""
        return elements(self.block)


@dataclass(frozen=True)
class Spelling:
    """A map as it is written."""

    shape: Shape
    shards: Mapping[int, Shape]
    pieces: Mapping[int, tuple[Spelled, ...]]

    @property
    def numel(self) -> int:
        """Number of elements of `F`."""
        return math.prod(self.shape)

    def count(self) -> int:
        """Number of pieces."""
        return sum(map(len, self.pieces.values()))


@dataclass(frozen=True)
class Cut:
    """The truth about one parameter."""

    shape: Shape
    shards: Mapping[int, Ints]
    factors: NDArray[np.float64]

    @property
    def numel(self) -> int:
        """Number of elements of `F`."""
        return math.prod(self.shape)

    def holders(self) -> list[tuple[int, ...]]:
        """Who holds each element of `F`."""
        held: list[set[int]] = [set() for _ in range(self.numel)]
        for rank, index in self.shards.items():
            for offset in index.reshape(-1).tolist():
                if offset >= 0:
                    held[offset].add(rank)
        return [tuple(sorted(ranks)) for ranks in held]

    def places(self) -> dict[int, list[Element]]:
        """Every place of each element of `F` that has one."""
        found: dict[int, list[Element]] = defaultdict(list)
        for rank, index in self.shards.items():
            for at, offset in enumerate(index.reshape(-1).tolist()):
                if offset >= 0:
                    found[offset].append((rank, at))
        return found

    def relation(self) -> Relation:
        """What a map of this cut must say."""
        held = self.holders()
        return {
            (rank, at): (offset, held[offset], float(self.factors[offset]))
            for offset, places in self.places().items()
            for rank, at in places
        }


Relation = dict[Element, tuple[int, tuple[int, ...], float]]
"""Element of a shard -> its offset in `F`, the ranks that hold that, and the factor."""


def elements(block: Block) -> Iterator[tuple[int, int]]:
    """Yield the two offsets of every element of a block."""
    shape, first, first_strides, second, second_strides = block
    for index in product(*map(range, shape)):
        yield (
            first + sum(i * s for i, s in zip(index, first_strides, strict=True)),
            second + sum(i * s for i, s in zip(index, second_strides, strict=True)),
        )


def relation(spelling: Spelling) -> Relation:
    """Say what the pieces of a spelling mean; of two that write one element, the last."""
    return {
        (rank, at): (offset, piece.locations, piece.scale)
        for rank, pieces in spelling.pieces.items()
        for piece in pieces
        for offset, at in piece.elements()
    }


def broken(spelling: Spelling, *, partial: bool) -> set[str]:
    """Name the properties that a spelling breaks: none when it is a valid map."""
    if _leaves_its_bounds(spelling):
        return {"bounds"}
    found = set()
    held: dict[int, set[int]] = defaultdict(set)
    scales: dict[int, set[float]] = defaultdict(set)
    for rank, pieces in spelling.pieces.items():
        written: Counter[int] = Counter()
        for piece in pieces:
            mine = [at for _, at in piece.elements()]
            if len(set(mine)) < len(mine):
                found.add("P3")
            written.update(mine)
            for offset, _ in piece.elements():
                held[offset].add(rank)
                scales[offset].add(piece.scale)
        size = math.prod(spelling.shards[rank])
        if any(times > 1 for times in written.values()) or (not partial and len(written) < size):
            found.add("write-once")
    if any(len(factors) > 1 for factors in scales.values()):
        found.add("P5")
    for pieces in spelling.pieces.values():
        for piece in pieces:
            if any(held[offset] != set(piece.locations) for offset, _ in piece.elements()):
                found.add("P5")
    if not partial and len(held) < spelling.numel:
        found.add("P1")
    return found


def _leaves_its_bounds(spelling: Spelling) -> bool:
    return any(
        offset >= spelling.numel or at >= math.prod(spelling.shards[rank])
        for rank, pieces in spelling.pieces.items()
        for piece in pieces
        for offset, at in piece.elements()
    )


Group = tuple[int, tuple[int, ...], float]
"""A rank, locations and a scale: only pieces of one group may be merged."""


def runs(said: Relation) -> Counter[Group]:
    """Count the stretches of neighbours, in `F` as in the shard, of each group."""
    found: Counter[Group] = Counter()
    for (rank, at), (offset, locations, scale) in said.items():
        if said.get((rank, at - 1)) != (offset - 1, locations, scale):
            found[rank, locations, scale] += 1
    return found


def ranges(offsets: Iterable[int]) -> list[range]:
    """Join offsets to maximal ranges."""
    found: list[range] = []
    for offset in sorted(offsets):
        if found and found[-1].stop == offset:
            found[-1] = range(found[-1].start, offset + 1)
        else:
            found.append(range(offset, offset + 1))
    return found


def narrowed(cut: Cut, dim: int, start: int, length: int, *, renumber: bool) -> Cut:
    """Leave out all of `F` but a range of one dim; renumber what is left, or let it stay."""
    taken = np.arange(cut.numel).reshape(cut.shape).take(range(start, start + length), dim)
    new = np.full(cut.numel + 1, -1)  # the last is where -1 leads
    new[taken.reshape(-1)] = np.arange(taken.size) if renumber else taken.reshape(-1)
    shards = {rank: new[index] for rank, index in cut.shards.items()}
    if not renumber:
        return Cut(cut.shape, shards, cut.factors)
    return Cut(taken.shape, shards, cut.factors[taken.reshape(-1)])


def nested(outer: Cut, inner: Mapping[int, Cut]) -> Cut:
    """Cut the shards of a cut once more."""
    shards = {}
    factors = np.ones(outer.numel)
    for rank, cut in inner.items():
        through = np.append(outer.shards[rank].reshape(-1), -1)
        for holder, index in cut.shards.items():
            shards[holder] = through[index]
            there = index[through[index] >= 0]
            factors[through[there]] = outer.factors[through[there]] * cut.factors[there]
    return Cut(outer.shape, shards, factors)


def busiest(demands: Mapping[tuple[int, ...], int]) -> int:
    """The least that the busiest must give, when so many elements are wanted of each set of givers.

    Some set of givers must serve alone what nobody else has: of all of them the fullest decides
    (Hall's theorem).
    """
    givers = sorted({rank for ranks in demands for rank in ranks})
    return max(
        (
            math.ceil(sum(n for who, n in demands.items() if set(who) <= set(some)) / len(some))
            for size in range(1, len(givers) + 1)
            for some in combinations(givers, size)
        ),
        default=0,
    )
