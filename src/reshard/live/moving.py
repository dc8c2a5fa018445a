"""Moving: the verbs. Agreement first, then bytes, then proof.

Theory. All ranks of a group call :func:`move` together. Each says what it holds and wants; the same
plan follows on all from what all have said; a digest of it is compared, with every rank's word that
it is ready. Only then bytes move, and every message is proved by its receiver. Until the exchange
begins nothing has been written anywhere, and a refusal of one rank is an error on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from reshard.errors import TransferError, UsageError
from reshard.geometry import Choose
from reshard.live.adapting import state_of
from reshard.live.agreement import together
from reshard.live.deciding import Cost, decide, own_rank_free
from reshard.live.exchange import Exchange
from reshard.live.memory import Memory, peak_bytes
from reshard.live.plan import DEFAULT_BUDGET, LivePlan, lay_out
from reshard.live.states import LiveState
from reshard.live.survey import survey
from reshard.live.transport import Transport, transport_of

DEFAULT_TIMEOUT = 300.0
"""Seconds that one wait may take, unless the user says otherwise."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What was done."""

    plan: LivePlan
    """What was planned."""
    peaks: tuple[int, ...]
    """Bytes of states and staging that each rank had at most at any moment."""
    sent_bytes: int
    """Bytes of messages that this rank really sent, without their digests."""

    def explain(self) -> str:
        """Return the plan and the peaks in words and figures."""
        return explained(self.plan, self.peaks)


class Transfer:
    """A transfer that all ranks have agreed on, before a byte has moved.

    It may be run again and again as the source goes on, say from a trainer to an engine: memory and
    layouts must stay, and nothing beside tensors may be part of it.
    """

    __slots__ = ("_done", "_exchange", "_made", "_release", "_transport")

    def __init__(self, transport: Transport, made: _Prepared, *, release: bool) -> None:
        self._transport, self._made, self._release = transport, made, release
        memory = Memory(made.source), Memory(made.target)
        self._exchange = Exchange(made.plan, transport, *memory)
        self._done = False

    @property
    def plan(self) -> LivePlan:
        """What is going to happen, the same on all ranks."""
        return self._made.plan

    @property
    def peaks(self) -> tuple[int, ...]:
        """Bytes of states and staging that each rank will have at most at any moment."""
        return self._made.peaks

    def explain(self) -> str:
        """Return the plan and the peaks in words and figures."""
        return explained(self.plan, self.peaks)

    def run(self) -> Moved:
        """Move everything; see :func:`move`.

        Raises
        ------
        UsageError
            When it has run and cannot again: its source was given up, or there are values beside
            tensors, which are of the time of the plan.
        """
        if self._done and (self._release or self._made.values):
            raise UsageError(
                "a transfer that cannot be run again",
                found="a source that was given up" if self._release else "values of the first time",
                next_step="plan it again",
            )
        before = self._exchange.sent_bytes
        self._exchange.run(release=self._release)
        together(self._transport, lambda: self._made.target.accept(self._made.values))
        self._done = True
        return Moved(self.plan, self.peaks, self._exchange.sent_bytes - before)


def explained(laid: LivePlan, peaks: tuple[int, ...]) -> str:
    """Return a plan and the peaks in words and figures."""
    told = ", ".join(f"{rank}: {peak}" for rank, peak in enumerate(peaks))
    return f"{laid.explain()}\npeak:     bytes a rank at most: {told}"


def plan(  # noqa: PLR0913 - keyword-only: each is one choice of the user
    source: object,
    target: object,
    *,
    group: object = None,
    budget: int = DEFAULT_BUDGET,
    cost: Cost = own_rank_free,
    choose: Choose | None = None,
    release: bool = False,
    rounding: bool = False,
    timeout: float = DEFAULT_TIMEOUT,
) -> Transfer:
    """Return what :func:`move` would do, without moving anything; its arguments are the same."""
    transport = transport_of(group, timeout)
    asked = _Asked(budget, cost, choose, release, rounding)
    made = _Prepared.of(transport, source, target, asked)
    return Transfer(transport, made, release=release)


def move(  # noqa: PLR0913 - keyword-only: each is one choice of the user
    source: object,
    target: object,
    *,
    group: object = None,
    budget: int = DEFAULT_BUDGET,
    cost: Cost = own_rank_free,
    choose: Choose | None = None,
    release: bool = False,
    rounding: bool = False,
    timeout: float = DEFAULT_TIMEOUT,
) -> Moved:
    """Fill a target's tensors from a source's, between the processes of a group.

    Every rank of the group calls this, with what it holds of the source and wants as the target;
    either may be None.

    Parameters
    ----------
    source, target
        A :class:`~reshard.live.LiveState`, or what one is made from: see
        :func:`~reshard.live.state_of`.
    group
        A process group of ``torch.distributed`` with the ranks of both sides; None for all.
    budget
        Bytes of staging that a rank may use in all.
    cost
        Of a byte on each link, ``(source_rank, target_rank) -> float``; of several holders only
        the cheapest give.
    choose
        Your own choice of the sender instead, ``(locations, target_rank) -> source_rank``.
    release
        Give the source's memory back as its elements arrive. What is alive at any moment is told
        by :func:`plan` before it starts.
    rounding
        Accept that floating-point elements are rounded to the target's element type, to nearest,
        ties to even.
    timeout
        Seconds that one wait for another rank may take.

    Raises
    ------
    TransferError
        The same on all ranks where one refused, they contradict each other, or a message arrived
        damaged; where a rank was lost, on each of the others, within the timeout.

    Examples
    --------
    One process alone moves within its own memory:

    >>> import torch
    >>> from torch import distributed
    >>> store = distributed.HashStore()
    >>> distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> there = {"w": torch.zeros(2, 2)}
    >>> done = move({"w": torch.ones(2, 2)}, there)
    >>> there["w"].sum().item(), done.plan.sent_bytes
    (4.0, 0)
    >>> distributed.destroy_process_group()
    """
    planned = plan(
        source,
        target,
        group=group,
        budget=budget,
        cost=cost,
        choose=choose,
        release=release,
        rounding=rounding,
        timeout=timeout,
    )
    return planned.run()


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the caller wants of the plan."""

    budget: int
    cost: Cost
    choose: Choose | None
    release: bool
    rounding: bool


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Everything that is known when all ranks have agreed."""

    source: LiveState
    target: LiveState
    plan: LivePlan
    peaks: tuple[int, ...]
    values: Mapping[str, object]

    @classmethod
    def of(cls, transport: Transport, source: object, target: object, asked: _Asked) -> _Prepared:
        """Survey, decide, lay out, agree."""
        settings = {
            "budget": asked.budget,
            "release": asked.release,
            "rounding": asked.rounding,
            "device": transport.device.type,
        }

        def states() -> tuple[LiveState, LiveState]:
            both = state_of(source), state_of(target, target=True)
            _refuse_shared_memory(*both)
            return both

        mine, wanted, said = survey(transport, states, settings)

        def laid_out() -> LivePlan:
            decision = decide(said, cost=asked.cost, choose=asked.choose, rounding=asked.rounding)
            return lay_out(decision, transport.size, asked.budget, release=asked.release)

        def promised(laid: LivePlan) -> int:
            windows = [[laid.moves[number].key for number in one.moves] for one in laid.windows]
            staging = laid.staging_bytes(transport.rank)
            return peak_bytes(mine, wanted, windows, staging, release=asked.release)

        laid, peaks = _agreed(transport, laid_out, promised)
        return cls(mine, wanted, laid, peaks, said.values)


def _agreed(
    transport: Transport, laid_out: Callable[[], LivePlan], promised: Callable[[LivePlan], int]
) -> tuple[LivePlan, tuple[int, ...]]:
    """Make the plan, and compare it with those of the others; the plan and every rank's promise."""
    made: list[LivePlan] = []

    def say() -> dict[str, object]:
        made.append(laid_out())
        return {"digest": made[0].digest(), "peak": promised(made[0])}

    told = together(transport, say)
    _agree_on_plan([str(one["digest"]) for one in told])
    return made[0], tuple([one["peak"] for one in told])


def _agree_on_plan(digests: list[str]) -> None:
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise TransferError(
                "ranks made different plans",
                rank=rank,
                expected=f"{digests[0]}, as rank 0",
                found=digest,
                next_step="give the same cost and choice on all ranks, and run one version of"
                " reshard; nothing has been moved",
            )


def _refuse_shared_memory(source: LiveState, target: LiveState) -> None:
    """Refuse a target that would be written over a source that is still to be read."""
    stretches = []
    for side, state in (("source", source), ("target", target)):
        for shard in state.shards:
            start = shard.tensor.data_ptr() if shard.tensor.numel() else 0
            if start:
                flat = shard.memory()
                stretches.append((start, start + flat.numel() * flat.element_size(), side, shard))
    stretches.sort(key=lambda stretch: stretch[:2])
    end, last = 0, ""
    for start, stop, side, shard in stretches:
        if start < end and side != last:
            raise UsageError(
                "source and target share memory on a rank",
                parameter=shard.name,
                state=shard.state,
                next_step="give the target memory of its own",
            )
        if stop > end:
            end, last = stop, side
