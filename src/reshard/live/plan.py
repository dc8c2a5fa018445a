"""The plan of a live transfer: pure data, the same on all ranks, told before a byte moves.

Theory. Moves are done in *windows*. Without ``release`` there is one. With it, each has as many
tensors as half of the budget takes on the rank that receives most, and when it has arrived
everywhere the source's memory of its tensors is given back; so what is alive at a time is little
more than the larger side. Within a window, what a pair of ranks exchanges is a stream of bytes, its
largest elements first so that all lie aligned, cut into messages of a quarter of the staging
budget: two are on their way out of a rank and two into it, so that packing, the wire and unpacking
overlap. The messages of all pairs go in rounds (:mod:`reshard.live.rounds`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from reshard.errors import UsageError
from reshard.geometry.balancing import split_link
from reshard.geometry.index_math import numel
from reshard.geometry.links import Link
from reshard.live.deciding import Decision, Move, senders
from reshard.live.elements import ALIGNMENT
from reshard.live.rounds import Pair, Rounds, largest_degree, rounds_of

DEFAULT_BUDGET = 64 << 20
"""Bytes of staging that a rank may use in all, unless the user says otherwise."""
IN_FLIGHT = 2
"""Messages that are on their way out of a rank, and as many into it."""
LEAST_BUDGET = 2 * IN_FLIGHT * ALIGNMENT
MOST_MESSAGE = 4 << 20
"""Bytes of the largest message: what is packed should still be in the cache when it is sent."""

Block = tuple[int, Link, float]
"""Number of a move, a strided block of it (near the target's memory, far the source's), scale."""


@dataclass(frozen=True, slots=True)
class Window:
    """Tensors that move together."""

    moves: tuple[int, ...]
    """Their numbers."""
    message_bytes: int
    """The largest message."""
    pair_bytes: Mapping[Pair, int]
    """Bytes that each pair of different ranks exchanges."""
    rounds: tuple[Rounds, ...]
    """Who sends to whom, and how often."""

    @property
    def messages(self) -> dict[Pair, int]:
        """Number of messages of each pair."""
        return {pair: -(-count // self.message_bytes) for pair, count in self.pair_bytes.items()}


@dataclass(frozen=True, slots=True, eq=False)
class LivePlan:
    """What is going to happen, on all ranks."""

    size: int
    """Number of ranks of the group."""
    decision: Decision
    """The moves, with the bounds on what is sent."""
    windows: tuple[Window, ...]
    """In order."""
    budget: int
    """Bytes of staging that a rank may use."""

    @property
    def moves(self) -> tuple[Move, ...]:
        """One for each tensor of the target."""
        return self.decision.moves

    @property
    def sent_by_rank(self) -> dict[int, int]:
        """Bytes that each rank sends to others, of ranks that send."""
        return self._by_rank(0)

    @property
    def received_by_rank(self) -> dict[int, int]:
        """Bytes that each rank receives from others, of ranks that receive."""
        return self._by_rank(1)

    def _by_rank(self, side: int) -> dict[int, int]:
        total: dict[int, int] = {}
        for window in self.windows:
            for pair, count in window.pair_bytes.items():
                total[pair[side]] = total.get(pair[side], 0) + count
        return dict(sorted(total.items()))

    @property
    def sent_bytes(self) -> int:
        """Bytes that are sent between different ranks."""
        return sum(self.sent_by_rank.values())

    @property
    def rounds(self) -> int:
        """Number of rounds of all windows."""
        return sum(some.count for window in self.windows for some in window.rounds)

    @property
    def largest_degree(self) -> int:
        """Fewest rounds that the messages could go in."""
        return sum(largest_degree(window.messages) for window in self.windows)

    def staging_bytes(self, rank: int) -> int:
        """Bytes of staging that a rank needs at most; never more than the budget."""
        most = 0
        for window in self.windows:
            sides = {side for pair in window.pair_bytes for side in (0, 1) if pair[side] == rank}
            most = max(most, IN_FLIGHT * window.message_bytes * len(sides))
        return most

    def digest(self) -> str:
        """Return 128 bits of everything that ranks must agree on, as hexadecimal digits."""
        hasher = xxhash.xxh3_128()
        known: dict[int, str] = {}
        for move in self.moves:
            if id(move.plan) not in known:
                known[id(move.plan)] = _digest_of(move)
            hasher.update(json.dumps([*move.key, move.source_dtype, move.dtype]).encode())
            hasher.update(known[id(move.plan)].encode())
        for window in self.windows:
            rounds = [[some.count, sorted(some.pairs.items())] for some in window.rounds]
            hasher.update(json.dumps([window.moves, window.message_bytes, rounds]).encode())
        return hasher.hexdigest()

    def explain(self) -> str:
        """Return what is going to happen in words and figures, bounds beside what is reached."""
        sent, decision = self.sent_by_rank, self.decision
        busiest = max(sent.values(), default=0)
        staging = max([self.staging_bytes(rank) for rank in range(self.size)], default=0)
        tensors, windows = len(self.moves), len(self.windows)
        lines = [
            f"moves:    {tensors} tensors over {self.size} ranks, in {windows} windows",
            f"unwanted: {decision.left_behind} tensors of the source",
            f"sent:     {self.sent_bytes} bytes; no choice sends less than {decision.least_bytes}",
            f"busiest:  {busiest} bytes from one rank; no choice beats {decision.least_busiest}",
            f"rounds:   {self.rounds}; the largest degree is {self.largest_degree}",
            f"staging:  at most {staging} bytes a rank, of {self.budget}",
        ]
        number = 0
        for window in self.windows:
            for some in window.rounds:
                pairs = ", ".join(f"{sender}→{to}" for sender, to in some.pairs.items())
                last = number + some.count - 1
                span = f"{number}" if some.count == 1 else f"{number}…{last}"
                lines.append(f"  round {span}: {pairs}")
                number = last + 1
        return "\n".join(lines)


def _digest_of(move: Move) -> str:
    hasher = xxhash.xxh3_128()
    table = move.plan.table
    for shapes in (move.plan.source_shapes, move.plan.target_shapes):
        hasher.update(repr(sorted(shapes.items())).encode())
    link = table.link
    for column in (
        *(table.source_rank, table.target_rank, table.scale, link.near, link.far),
        *(link.extent, link.near_stride, link.far_stride),
    ):
        hasher.update(repr(column.shape).encode())
        hasher.update(column.tobytes())
    return hasher.hexdigest()


def lay_out(decision: Decision, size: int, budget: int, *, release: bool) -> LivePlan:
    """Return the plan of a decision.

    Raises
    ------
    UsageError
        When the budget is less than a few elements.
    """
    if budget < LEAST_BUDGET:
        raise UsageError(
            "the staging budget is too small",
            expected=f"at least {LEAST_BUDGET} bytes",
            found=budget,
        )
    staging = budget // 2 if release else budget
    most = min(staging // (2 * IN_FLIGHT), MOST_MESSAGE) // ALIGNMENT * ALIGNMENT
    groups = (
        _windows(decision.moves, budget - staging)
        if release
        else [tuple(range(len(decision.moves)))]
    )
    windows = [_window(decision.moves, group, max(most, ALIGNMENT)) for group in groups]
    return LivePlan(size, decision, tuple(windows), budget)


def _windows(moves: Sequence[Move], most: int) -> list[tuple[int, ...]]:
    """Return the moves in groups whose targets have at most so many bytes on every rank."""
    groups: list[list[int]] = []
    used: dict[int, int] = {}
    for number, move in enumerate(moves):
        adds = {r: numel(shape) * move.itemsize for r, shape in move.plan.target_shapes.items()}
        if not groups or any(used.get(rank, 0) + more > most for rank, more in adds.items()):
            groups.append([])
            used = {}
        groups[-1].append(number)
        for rank, more in adds.items():
            used[rank] = used.get(rank, 0) + more
    return [tuple(group) for group in groups]


def _window(moves: Sequence[Move], group: tuple[int, ...], most: int) -> Window:
    pairs = senders([moves[number] for number in group])
    longest = -(-max(pairs.values(), default=0) // ALIGNMENT) * ALIGNMENT
    message = max(min(most, longest), ALIGNMENT)
    messages = {pair: -(-count // message) for pair, count in pairs.items()}
    return Window(group, message, pairs, tuple(rounds_of(messages)))


def blocks_between(plan: LivePlan, window: Window, sender: int, receiver: int) -> Iterator[Block]:
    """Yield the blocks of a pair's stream: the largest elements first, then in order of moves."""
    order = sorted(window.moves, key=lambda number: -plan.moves[number].itemsize)
    known: dict[int, list[tuple[Link, float]]] = {}  # tensors that are cut alike share their plan
    for number in order:
        copies = plan.moves[number].plan
        if id(copies) not in known:
            table = copies.table
            rows = (table.source_rank == sender) & (table.target_rank == receiver)
            links = table.link.take(rows).links()
            known[id(copies)] = list(zip(links, table.scale[rows].tolist(), strict=True))
        for link, scale in known[id(copies)]:
            yield number, link, scale


def messages_of(
    plan: LivePlan, window: Window, sender: int, receiver: int
) -> Iterator[list[Block]]:
    """Yield a pair's messages; any block is cut, along any dimension, to fill one."""
    message: list[Block] = []
    room = window.message_bytes
    for number, link, scale in blocks_between(plan, window, sender, receiver):
        item = plan.moves[number].itemsize
        rest = [link]
        while rest:
            block = rest.pop()
            size = numel(n for n, _, _ in block.dims) * item
            if size <= room:
                message.append((number, block, scale))
                room -= size
            else:
                before, after = split_link(block, room // item)
                message += [(number, part, scale) for part in before]
                rest += reversed(after)
                room = 0
            if not room:
                yield message
                message, room = [], window.message_bytes
    if message:
        yield message


def own_rounds(window: Window, rank: int) -> Iterator[tuple[int | None, int | None]]:
    """Yield, round by round, whom a rank sends to and whom it receives from, where it does."""
    for some in window.rounds:
        to = some.pairs.get(rank)
        of = next((sender for sender, receiver in some.pairs.items() if receiver == rank), None)
        if to is not None or of is not None:
            for _ in range(some.count):
                yield to, of
