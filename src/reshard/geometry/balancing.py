"""Balancing: plans in which the busiest source rank gives as little as it can.

Theory. The target pieces are cut where the set of source holders changes; every part then belongs
to one class, the holders that may give it. How much each holder gives of each class is a flow
problem, solved exactly (:mod:`reshard.geometry.balance`), for one tensor or for the classes of many
together. To realise the shares, the parts of a class are laid one after
the other in canonical order and cut where one holder's share ends and the next one's begins; a
cut in the middle of a block leaves at most 2N−1 blocks. Each part is then matched with the pieces
of the holder that gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from reshard.geometry.affine_map import ParamAffineMap
from reshard.geometry.assembling import check_sizes, filled, layers_of, segments_of
from reshard.geometry.balance import Balance, Locations, Shares, share_out
from reshard.geometry.links import Link, LinkDim
from reshard.geometry.matching import matched
from reshard.geometry.ordering import Ints, classes_of, grouped_sums, places_of, starts_of
from reshard.geometry.piece_table import PieceTable
from reshard.geometry.plan import TransferPlan
from reshard.geometry.tables import LinkTable, concatenated

Eligible = Callable[[Locations, int], Locations]
"""``(locations, target_rank) -> the locations that may give``, ascending, at least one."""


def _all_of_them(locations: Locations, _target_rank: int) -> Locations:
    return locations


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What a target wants of a source, cut into parts by who may give them."""

    target: ParamAffineMap
    source: ParamAffineMap
    """The maps."""
    held: PieceTable
    """What the source ranks hold."""
    parts: PieceTable
    place: Ints
    """The parts of the target pieces, near ``F``, and the set of source holders of each, as an
    index into ``held.holders``."""
    givers: tuple[Locations, ...]
    choice: Ints
    """The distinct sets of ranks that may give, and the set of each part."""

    @classmethod
    def of(
        cls, target: ParamAffineMap, source: ParamAffineMap, eligible: Eligible = _all_of_them
    ) -> Wanted:
        """Return what a target wants of a source; of its holders, some may be eligible only.

        Raises
        ------
        CompositionError
            When the maps describe tensors of different sizes.
        """
        check_sizes(target, source)
        held = layers_of(source)[0]
        parts, place = _classed(target, held)
        order, label = classes_of([place, parts.rank])
        lead = order[starts_of(label)]
        sets: dict[Locations, int] = {}
        index = [
            sets.setdefault(eligible(held.holders[one], rank), len(sets))
            for one, rank in zip(place[lead].tolist(), parts.rank[lead].tolist(), strict=True)
        ]
        choice = np.empty(len(order), np.int64)
        choice[order] = np.array(index, np.int64)[label]
        return cls(target, source, held, parts, place, tuple(sets), choice)

    def demands(self) -> dict[Locations, int]:
        """Elements wanted of each set of ranks, those of one rank too."""
        sums = grouped_sums(self.choice, self.parts.link.numel())
        return {self.givers[one]: n for one, n in sums.items()}

    def plan(self, shares: Shares) -> TransferPlan:
        """Return the plan in which each set of several ranks gives by its shares."""
        rows, givers, links = _assigned(self, shares)
        cut, place = self.parts.take(rows), self.place[rows]
        parts = PieceTable(cut.rank, cut.index, links, cut.scale, cut.place, cut.holders)
        # A part is matched with the pieces of its class at its giver.
        many = len(self.held.holders)
        ranks, _ = places_of(np.concatenate([givers, self.held.rank]))
        key = ranks[: len(givers)] * many + place
        held_key = ranks[len(givers) :] * many + self.held.place
        found = matched(links, self.held.link, key, held_key)
        return filled(self.target, self.source, segments_of(parts, self.held, found))


def parted(demands: dict[Locations, int]) -> tuple[dict[Locations, int], dict[int, int]]:
    """Return the demands of sets of several ranks, and those of single ranks by rank."""
    fixed = {ranks[0]: n for ranks, n in demands.items() if len(ranks) == 1}
    return {ranks: n for ranks, n in demands.items() if len(ranks) > 1}, fixed


def compose_balanced(target: ParamAffineMap, source: ParamAffineMap) -> TransferPlan:
    """Return the plan whose busiest source rank gives least; see :func:`compose`."""
    wanted = Wanted.of(target, source)
    shares, _ = share_out(*parted(wanted.demands()))
    return wanted.plan(shares)


def balance_of(target: ParamAffineMap, source: ParamAffineMap, plan: TransferPlan) -> Balance:
    """Return what the source ranks of a plan give, and the least that the busiest could give.

    Parameters
    ----------
    target, source
        The maps that the plan was composed from.
    plan
        Any plan between them.

    Raises
    ------
    CompositionError
        When the maps describe tensors of different sizes.
    """
    _, bound = share_out(*parted(Wanted.of(target, source).demands()))
    loads = plan.table.numel_by_source()
    return Balance(tuple(sorted(loads.items())), bound)


def _classed(target: ParamAffineMap, held: PieceTable) -> tuple[PieceTable, Ints]:
    """Cut the target pieces by their sets of source holders: the parts, and the set of each."""
    table = target.table
    first = np.array([ranks[0] for ranks in held.holders], np.int64)
    lowest = held.take(np.flatnonzero(held.rank == first[held.place]))
    link = lowest.link
    # Matched with F itself in place of the source shard, so that the parts keep their place in F.
    itself = LinkTable(link.near, link.near, link.extent, link.near_stride, link.near_stride)
    found = matched(table.link, itself)
    cut = table.take(found.first)
    order = np.lexsort((found.link.near, cut.rank))
    parts = found.link.turned().normalised().take(order)
    cut = cut.take(order)
    return (
        PieceTable(cut.rank, cut.index, parts, cut.scale, cut.place, cut.holders),
        lowest.place[found.second[order]],
    )


def _assigned(wanted: Wanted, shares: Shares) -> tuple[Ints, Ints, LinkTable]:
    """Give every part to a rank, cutting those that two ranks share: rows, ranks, blocks.

    The parts of a set are laid one after the other, and so are the shares; nearly every part lies
    in one share, and is given as it is.
    """
    first = np.array([ranks[0] for ranks in wanted.givers], np.int64)
    giver = first[wanted.choice]
    numel = wanted.parts.link.numel()
    cut: list[tuple[int, int, Link]] = []
    whole = np.ones(len(giver), bool)
    for one, ranks in enumerate(wanted.givers):
        if len(ranks) == 1:
            continue
        mine = np.flatnonzero(wanted.choice == one)
        quota = list(shares[ranks].items())
        owners = np.array([rank for rank, _ in quota], np.int64)
        bounds = np.cumsum([count for _, count in quota])
        stop = np.cumsum(numel[mine])
        start = stop - numel[mine]
        slot = np.searchsorted(bounds, start, "right")
        giver[mine] = owners[slot]
        crossing = np.flatnonzero(stop > bounds[slot])
        whole[mine[crossing]] = False
        links = wanted.parts.link.take(mine[crossing]).links()
        for at, link in zip(crossing.tolist(), links, strict=True):
            edges = np.clip(bounds, start[at], stop[at])
            amounts = np.diff(np.append(start[at], edges)).tolist()
            dealt = [(rank, n) for (rank, _), n in zip(quota, amounts, strict=True) if n]
            cut += _dealt([int(mine[at])], [link], dealt)
    kept = np.flatnonzero(whole)
    rows = np.array([row for row, _, _ in cut], np.int64)
    givers = np.array([rank for _, rank, _ in cut], np.int64)
    parts = LinkTable.of([link for _, _, link in cut])
    return (
        np.append(kept, rows),
        np.append(giver[kept], givers),
        concatenated([wanted.parts.link.take(kept), parts]),
    )


def _dealt(
    rows: list[int], links: list[Link], quota: list[tuple[int, int]]
) -> Iterator[tuple[int, int, Link]]:
    """Deal links out in order, to each holder as many elements as its quota."""
    holders = iter(quota)
    giver, left = next(holders)
    for row, link in zip(rows, links, strict=True):
        rest = [link]
        while rest:
            block = rest.pop()
            size = _size(block.dims)
            if not left:
                giver, left = next(holders)
            if size <= left:
                left -= size
                yield row, giver, block
            else:
                before, after = split_link(block, left)
                rest += [*reversed(after), *reversed(before)]


def _size(dims: tuple[LinkDim, ...]) -> int:
    size = 1
    for n, _, _ in dims:
        size *= n
    return size


def split_link(link: Link, count: int) -> tuple[list[Link], list[Link]]:
    """Cut a link after its first ``count`` elements, in the order of its index.

    >>> before, after = split_link(Link(0, 0, ((3, 10, 4), (4, 1, 1))), 6)
    >>> [(part.near, part.dims) for part in before]
    [(0, ((4, 1, 1),)), (10, ((2, 1, 1),))]
    >>> [(part.near, part.dims) for part in after]
    [(12, ((2, 1, 1),)), (20, ((4, 1, 1),))]
    """
    if not count:
        return [], [link]
    if not link.dims:
        return [link], []
    near, far, ((n, s, f), *inner) = link
    rows, rest = divmod(count, _size(tuple(inner)))
    before = _rows(link, 0, rows)
    after = _rows(link, rows + (rest > 0), n)
    if rest:
        row = Link(near + rows * s, far + rows * f, tuple(inner))
        inner_before, inner_after = split_link(row, rest)
        return before + inner_before, inner_after + after
    return before, after


def _rows(link: Link, first: int, stop: int) -> list[Link]:
    """Return some steps of the outermost dimension of a link."""
    near, far, ((_, s, f), *inner) = link
    if first >= stop:
        return []
    dims = ((stop - first, s, f), *inner) if stop - first > 1 else tuple(inner)
    return [Link(near + first * s, far + first * f, dims)]
