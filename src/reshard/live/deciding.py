"""The decision: who sends what, with the bound beside what was reached.

Theory. The maps say who holds an element; who sends it is a choice. A cost for each link narrows
it: of the holders, those that are cheapest for the rank that wants an element may give it. By
default a rank's own memory costs nothing and every other rank the same, so what a rank already
holds is never sent, and the bytes that are sent are the least that can be: each of them is one
that its receiver has not got. Among the ranks that may give, bytes are shared out by a flow over
all tensors at once (:mod:`reshard.geometry.balance`), so that the busiest sends as little as any
choice lets
it; the flow is exact to an element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reshard.errors import ScaledStateError, TransferError, UsageError
from reshard.geometry import Choose, ParamAffineMap, TransferPlan, Wanted
from reshard.geometry.balance import Locations, Shares, share_out
from reshard.geometry.balancing import Eligible, parted
from reshard.live.elements import itemsize_of, rounds_to
from reshard.live.states import TensorKey
from reshard.live.survey import Spread, Survey

WEIGHTS = "fp32"
"""The state that is the weights, whatever their element type."""

Cost = Callable[[int, int], float]
"""``(source_rank, target_rank) -> the cost of a byte``; only comparisons matter."""


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """What is to be done for one state of one parameter."""

    key: TensorKey
    """Name and state."""
    source_dtype: str
    dtype: str
    """Element type of the source, and of the target, which is that on the wire."""
    plan: TransferPlan
    """The copies between the ranks' memories."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element on the wire."""
        return itemsize_of(self.dtype)

    def pair_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes that go from each rank to each, within a rank too."""
        table = self.plan.table
        found: dict[tuple[int, int], int] = {}
        for source, target, count in zip(
            table.source_rank.tolist(),
            table.target_rank.tolist(),
            table.link.numel().tolist(),
            strict=True,
        ):
            pair = (source, target)
            found[pair] = found.get(pair, 0) + count * self.itemsize
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """All moves, and the bounds that no other choice beats."""

    moves: tuple[Move, ...]
    """One for each tensor of the target."""
    least_bytes: int
    """Bytes that must be sent whatever is chosen: what ranks want and have not got."""
    least_busiest: int
    """Bytes that the busiest rank must send, of all choices that send no more than that."""
    left_behind: int
    """Tensors of the source that nobody wants."""


def own_rank_free(source: int, target: int) -> float:
    """Return the default cost: nothing within a rank, the same between any two."""
    return 0.0 if source == target else 1.0


def decide(
    said: Survey, *, cost: Cost = own_rank_free, choose: Choose | None = None, rounding: bool
) -> Decision:
    """Return who sends what.

    Parameters
    ----------
    said
        What the ranks hold and want.
    cost
        The cost of a byte on each link.
    choose
        The user's own choice instead, ``(locations, target_rank) -> source rank``.
    rounding
        Whether elements may be rounded to the target's element type.

    Raises
    ------
    TransferError
        When a target has no source, or of another shape or element type.
    """
    _refuse_lost_states(said)
    wanted = _Wants(said, rounding=rounding)
    eligible = _cheapest(cost) if choose is None else _chosen(choose)
    demands = _remote_bytes(wanted, eligible)
    shares, busiest = share_out(*parted(demands))
    pool = {ranks: dict(given) for ranks, given in shares.items()}
    plans: dict[tuple[int, int], TransferPlan] = {}
    moves = []
    for key, (source, target) in wanted.tensors.items():
        want = wanted.of(key, eligible)
        dealt = _dealt(want, pool, itemsize_of(target.dtype))
        pair = (id(source.map), id(target.map))
        plan = plans.get(pair) if not dealt else None
        if plan is None:
            plan = plans[pair] = want.plan(dealt)
        _check_filled(key, plan, target.map)
        _refuse_scaled_state(key, plan)
        moves.append(Move(key, source.dtype, target.dtype, plan))
    if choose is not None or cost is not own_rank_free:
        demands = _remote_bytes(wanted, _cheapest(own_rank_free))
        _, busiest = share_out(*parted(demands))
    left = len(said.source.keys() - said.target.keys())
    return Decision(tuple(moves), sum(demands.values()), busiest, left)


class _Wants:
    """The tensors of a transfer, and what each wants; equal pairs of maps are looked at once."""

    __slots__ = ("_known", "tensors")

    def __init__(self, said: Survey, *, rounding: bool) -> None:
        self.tensors: dict[TensorKey, tuple[Spread, Spread]] = {}
        self._known: dict[tuple[int, int, Eligible], Wanted] = {}
        for key, target in said.target.items():
            self.tensors[key] = (_source_of(key, target, said, rounding=rounding), target)

    def of(self, key: TensorKey, eligible: Eligible) -> Wanted:
        """Return what one tensor wants of the ranks that may give."""
        source, target = self.tensors[key]
        pair = (id(source.map), id(target.map), eligible)
        if pair not in self._known:
            self._known[pair] = Wanted.of(target.map, source.map, eligible)
        return self._known[pair]


def _refuse_lost_states(said: Survey) -> None:
    """Refuse an optimizer that would go on with some of its states only; weights alone are fine."""
    trained = {name for name, state in said.target if state != WEIGHTS}
    for name, state in sorted(said.source.keys() - said.target.keys()):
        if name in trained and state != WEIGHTS:
            raise TransferError(
                "the target does not keep a state of a parameter that the source keeps",
                parameter=name,
                state=state,
                next_step="give the target the same optimizer, or leave the state out of the"
                " source (LiveState.only)",
            )


def _source_of(key: TensorKey, target: Spread, said: Survey, *, rounding: bool) -> Spread:
    name, state = key
    source = said.source.get(key)
    if source is None:
        near = sorted({other for other in said.source if name in other or state in other})[:3]
        raise TransferError(
            "no rank holds a tensor that is wanted",
            parameter=name,
            state=state,
            found=f"{len(said.source)} tensors, such as {near or sorted(said.source)[:3]}",
            next_step="leave it out of the target, or give it in the source",
        )
    if source.map.logical_shape != target.map.logical_shape:
        raise TransferError(
            "source and target disagree on the shape of a tensor",
            parameter=name,
            state=state,
            expected=source.map.logical_shape,
            found=target.map.logical_shape,
            next_step="where one is padded, narrow it to what they share (LiveState.narrowed)",
        )
    if source.dtype != target.dtype and not (rounding and rounds_to(source.dtype, target.dtype)):
        raise TransferError(
            "source and target disagree on the element type of a tensor",
            parameter=name,
            state=state,
            expected=source.dtype,
            found=target.dtype,
            next_step="rounding=True rounds one floating-point type to another",
        )
    return source


def _cheapest(cost: Cost) -> Eligible:
    def eligible(locations: Locations, target: int) -> Locations:
        costs = [cost(source, target) for source in locations]
        least = min(costs)
        return tuple([rank for rank, each in zip(locations, costs, strict=True) if each == least])

    return eligible


def _chosen(choose: Choose) -> Eligible:
    def eligible(locations: Locations, target: int) -> Locations:
        rank = choose(locations, target)
        if rank not in locations:
            raise UsageError(
                "the choice of a sender names a rank that does not hold the element",
                rank=rank,
                expected=list(locations),
            )
        return (rank,)

    return eligible


def _remote_bytes(wanted: _Wants, eligible: Eligible) -> dict[Locations, int]:
    """Return the bytes that each set of ranks must send, by the set; what stays at home is out."""
    total: dict[Locations, int] = {}
    for key, (_, target) in wanted.tensors.items():
        for ranks, count in _remote(wanted.of(key, eligible)).items():
            total[ranks] = total.get(ranks, 0) + count * itemsize_of(target.dtype)
    return total


def _remote(want: Wanted) -> dict[Locations, int]:
    home = np.array([ranks[0] if len(ranks) == 1 else -1 for ranks in want.givers], np.int64)
    away = home[want.choice] != want.parts.rank
    sums = np.bincount(
        want.choice[away], weights=want.parts.link.numel()[away], minlength=len(want.givers)
    )
    return {ranks: int(n) for ranks, n in zip(want.givers, sums.tolist(), strict=True) if n}


def _dealt(want: Wanted, pool: Mapping[Locations, dict[int, int]], itemsize: int) -> Shares:
    """Take the shares of one tensor out of what the ranks still have to give, in order."""
    dealt: Shares = {}
    for ranks, count in want.demands().items():
        if len(ranks) == 1:
            continue
        given, left = dealt.setdefault(ranks, {}), count
        for rank, has in pool[ranks].items():
            # What is less than an element is not carried over: the last rank takes it.
            takes = min(left, has // itemsize)
            if takes:
                given[rank] = takes
                pool[ranks][rank] -= takes * itemsize
                left -= takes
        if left:
            last = list(given or pool[ranks])[-1]
            given[last] = given.get(last, 0) + left
    return dealt


def _check_filled(key: TensorKey, plan: TransferPlan, target: ParamAffineMap) -> None:
    written = plan.table.numel_by_target()
    for rank, count in target.table.numel_by_rank().items():
        if written.get(rank, 0) != count:
            raise TransferError(
                "a target rank wants elements that no source rank holds",
                rank=rank,
                parameter=key[0],
                state=key[1],
                expected=f"{count} elements",
                found=written.get(rank, 0),
                next_step="let every rank that holds part of the source take part",
            )


def _refuse_scaled_state(key: TensorKey, plan: TransferPlan) -> None:
    """Only weights may be rescaled: what an optimizer keeps has its lr and eps beside it (§2.1)."""
    if key[1] != WEIGHTS and bool((plan.table.scale != 1.0).any()):
        raise ScaledStateError(
            "a scaled optimizer state cannot be moved alone: Adam's lr and eps live in the"
            " scaled coordinate too",
            parameter=key[0],
            state=key[1],
            next_step="move the weights only, or start the optimizer state of this one anew",
        )


def senders(moves: Sequence[Move]) -> dict[tuple[int, int], int]:
    """Return the bytes that go between each pair of different ranks."""
    total: dict[tuple[int, int], int] = {}
    for move in moves:
        for pair, count in move.pair_bytes().items():
            if pair[0] != pair[1]:
                total[pair] = total.get(pair, 0) + count
    return dict(sorted(total.items()))
