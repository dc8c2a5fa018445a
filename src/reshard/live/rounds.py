"""Rounds: in each, a rank sends to at most one other and receives from at most one.

Theory. What one rank sends to another is cut into messages. Ranks as senders on one side, as
receivers on the other, and a line for each message make a bipartite graph with repeated lines; a
round is a matching in it. As many rounds as the largest degree (the most messages that any rank
sends or receives) are needed, and by König's theorem they are enough. To find them, dummy lines are
added until every rank has the largest degree on both sides. Such a graph has a perfect matching,
which is taken as often as its thinnest line allows; what is left is regular again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Pair = tuple[int, int]
"""Sender and receiver."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Equal rounds that follow one another."""

    count: int
    """How many."""
    pairs: Mapping[int, int]
    """Who sends to whom in each of them, by sender."""


def largest_degree(messages: Mapping[Pair, int]) -> int:
    """Return the most messages that any rank sends or receives: fewer rounds cannot be.

    >>> largest_degree({(0, 1): 2, (2, 1): 1, (0, 2): 1})
    3
    """
    ends: dict[tuple[str, int], int] = {}
    for (sender, receiver), count in messages.items():
        for end in (("from", sender), ("to", receiver)):
            ends[end] = ends.get(end, 0) + count
    return max(ends.values(), default=0)


def rounds_of(messages: Mapping[Pair, int]) -> list[Rounds]:
    """Return as many rounds as the largest degree, in which all messages go.

    Parameters
    ----------
    messages
        Number of messages, at least 1, of each pair of different ranks.

    Examples
    --------
    >>> [(some.count, dict(some.pairs)) for some in rounds_of({(0, 1): 2, (1, 0): 1})]
    [(1, {0: 1, 1: 0}), (1, {0: 1})]
    """
    left = _Lines(messages)
    found = []
    while left.degree:
        found.append(left.take())
    return found


class _Lines:
    """What is left of the graph, regular with its dummy lines, and a matching that is kept."""

    __slots__ = ("degree", "dummy", "near", "partner", "real")

    def __init__(self, messages: Mapping[Pair, int]) -> None:
        self.degree = largest_degree(messages)
        self.real = dict(messages)
        self.dummy = _dummies(messages, self.degree)
        ranks = sorted({rank for pair in messages for rank in pair})
        self.near: dict[int, list[int]] = {rank: [] for rank in ranks}
        for sender, receiver in sorted({**self.real, **self.dummy}):
            self.near[sender].append(receiver)
        self.partner: dict[int, int] = {}  # receiver -> sender

    def take(self) -> Rounds:
        """Take a perfect matching out, as often as it lasts."""
        matched = set(self.partner.values())
        for sender in self.near:
            if sender not in matched:
                self._augment(sender)
        pairs = sorted((sender, receiver) for receiver, sender in self.partner.items())
        count = min(self.real.get(pair) or self.dummy[pair] for pair in pairs)
        going = {}
        for pair in pairs:
            lines = self.real if self.real.get(pair) else self.dummy
            if lines is self.real:
                going[pair[0]] = pair[1]
            lines[pair] -= count
            if not lines[pair]:
                del lines[pair]
            if pair not in self.real and pair not in self.dummy:
                self.near[pair[0]].remove(pair[1])
                del self.partner[pair[1]]
        self.degree -= count
        return Rounds(count, going)

    def _augment(self, root: int) -> None:
        """Find a partner for a sender by a path on which others change theirs."""
        came_by: dict[int, int] = {}
        todo = [root]
        for sender in todo:
            for receiver in self.near[sender]:
                if receiver in came_by:
                    continue
                came_by[receiver] = sender
                if receiver not in self.partner:
                    self._turn(receiver, came_by)
                    return
                todo.append(self.partner[receiver])

    def _turn(self, receiver: int, came_by: Mapping[int, int]) -> None:
        taken = {sender: other for other, sender in self.partner.items()}
        end: int | None = receiver
        while end is not None:
            sender = came_by[end]
            previous = taken.get(sender)
            self.partner[end] = sender
            end = previous


def _dummies(messages: Mapping[Pair, int], degree: int) -> dict[Pair, int]:
    """Return the lines that every rank lacks on either side, joined in any way."""
    ranks = sorted({rank for pair in messages for rank in pair})
    lacks = [dict.fromkeys(ranks, degree), dict.fromkeys(ranks, degree)]
    for pair, count in messages.items():
        for side in (0, 1):
            lacks[side][pair[side]] -= count
    dummy: dict[Pair, int] = {}
    receivers = [rank for rank in ranks if lacks[1][rank]]
    for sender in ranks:
        while lacks[0][sender]:
            receiver = receivers[-1]
            count = min(lacks[0][sender], lacks[1][receiver])
            dummy[sender, receiver] = dummy.get((sender, receiver), 0) + count
            lacks[0][sender] -= count
            lacks[1][receiver] -= count
            if not lacks[1][receiver]:
                receivers.pop()
    return dummy
