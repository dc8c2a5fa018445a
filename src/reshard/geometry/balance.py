"""Balance: sharing replicated reads out so that the busiest source rank reads least.

Theory. Elements with the same holders form a class with a demand; elements with one holder are a
fixed load. Sharing the demands out so that no rank gives more than ``T`` is a flow problem: from
each class to its holders, through each rank at most ``T`` minus its fixed load. Where the largest
flow falls short, its minimum cut names a set of classes whose holders are all full: these
holders cannot give what is asked of them unless ``T`` is at least the mean of it, which becomes
the next ``T``. Every ``T`` tried is thus a lower bound, and the first that is enough is the
exact optimum in whole elements (Dinkelbach's method on the cuts; a handful of rounds).

The flow is found with Dinic's algorithm: breadth-first levels, then blocking paths along them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Locations = tuple[int, ...]
Shares = dict[Locations, dict[int, int]]
"""Elements that each holder of a class gives."""


@dataclass(frozen=True, slots=True)
class Balance:
    """What the source ranks of a plan give, and the least that the busiest could give."""

    loads: tuple[tuple[int, int], ...]
    """Elements that each source rank gives, ``(rank, elements)``, ranks ascending."""
    bound: int
    """No choice of replicas lets the busiest rank give fewer elements than this."""

    @property
    def busiest(self) -> int:
        """Elements that the busiest source rank gives."""
        return max([load for _, load in self.loads], default=0)

    def __str__(self) -> str:
        return (
            f"the busiest source rank gives {self.busiest} elements; no choice beats {self.bound}"
        )


def share_out(demands: Mapping[Locations, int], fixed: Mapping[int, int]) -> tuple[Shares, int]:
    """Share demands out among their holders with the least maximum load.

    Parameters
    ----------
    demands
        Elements wanted of each set of holders.
    fixed
        Elements that ranks give anyway.

    Returns
    -------
    tuple
        The shares, and the least maximum load, both exact.

    Examples
    --------
    >>> shares, most = share_out({(0, 1): 6, (1, 2): 6}, {0: 2})
    >>> most
    5
    >>> [sum(shares[one].get(1, 0) for one in shares)]
    [5]
    """
    flow = _Flow(demands, fixed)
    flow.fill()
    while flow.raised():
        flow.fill()
    return flow.shares(), flow.limit


@dataclass(frozen=True, slots=True)
class _Walk:
    """One round of Dinic's algorithm: levels, and how far each node's arcs have been tried."""

    levels: tuple[dict[int, int], dict[int, int]]
    holder: list[int]
    giver: dict[int, int]
    givers: dict[int, list[int]]


class _Flow:
    """Classes on one side, ranks on the other; what each class sends to each of its holders."""

    __slots__ = ("classes", "fixed", "holders", "left", "limit", "room", "sent")

    def __init__(self, demands: Mapping[Locations, int], fixed: Mapping[int, int]) -> None:
        self.classes = sorted(demands)
        self.left = [demands[one] for one in self.classes]
        self.sent: list[dict[int, int]] = [{} for _ in self.classes]
        ranks = sorted({rank for one in self.classes for rank in one} | set(fixed))
        self.fixed = {rank: fixed.get(rank, 0) for rank in ranks}
        self.holders: dict[int, set[int]] = {rank: set() for rank in ranks}
        self.limit = max(self.fixed.values(), default=0)
        self.room = {rank: self.limit - load for rank, load in self.fixed.items()}

    def shares(self) -> Shares:
        """Return what was found."""
        return {
            one: {rank: n for rank, n in sorted(sent.items()) if n}
            for one, sent in zip(self.classes, self.sent, strict=True)
        }

    def raised(self) -> bool:
        """Raise the limit to what the minimum cut asks for, unless all demands are met."""
        if not any(self.left):
            return False
        classes, ranks = self._reached()
        wanted = sum(self.left[c] + sum(self.sent[c].values()) for c in classes)
        wanted += sum(self.fixed[rank] for rank in ranks)
        # Classes outside the cut send nothing to its ranks, or they would be in it.
        limit = -(-wanted // len(ranks))
        for rank in self.room:
            self.room[rank] += limit - self.limit
        self.limit = limit
        return True

    def _reached(self) -> tuple[set[int], set[int]]:
        """Return the classes and ranks that an unmet demand can still reach."""
        classes = {c for c, left in enumerate(self.left) if left}
        ranks: set[int] = set()
        todo = list(classes)
        while todo:
            for rank in self.classes[todo.pop()]:
                if rank not in ranks:
                    ranks.add(rank)
                    fresh = self.holders[rank] - classes
                    classes |= fresh
                    todo += fresh
        return classes, ranks

    def fill(self) -> None:
        """Send as much as the limit allows."""
        while True:
            levels = self._levels()
            if levels is None:
                return
            walk = _Walk(
                levels,
                [0] * len(self.classes),
                dict.fromkeys(self.holders, 0),
                {rank: sorted(users) for rank, users in self.holders.items()},
            )
            for c in [c for c, left in enumerate(self.left) if left]:
                while self.left[c] and self._send(c, walk):
                    pass

    def _send(self, root: int, walk: _Walk) -> bool:
        """Send along one path of rising levels from a class to a rank with room, if one is left."""
        classes = [root]
        ranks: list[int] = []
        while classes:
            rank, giver = self._step(classes[-1], walk)
            if rank is None:
                # A dead end: no later path of this round comes here either.
                classes.pop()
                if ranks:
                    walk.giver[ranks.pop()] += 1
            elif giver is None:
                self._move(classes, [*ranks, rank])
                return True
            else:
                ranks.append(rank)
                classes.append(giver)
        return False

    def _step(self, c: int, walk: _Walk) -> tuple[int | None, int | None]:
        """Return the next rank, and the class that would give way there unless it has room."""
        of_class, of_rank = walk.levels
        holders = self.classes[c]
        while walk.holder[c] < len(holders):
            rank = holders[walk.holder[c]]
            if of_rank.get(rank) == of_class[c] + 1:
                if self.room[rank]:
                    return rank, None
                givers = walk.givers[rank]
                while walk.giver[rank] < len(givers):
                    other = givers[walk.giver[rank]]
                    if of_class.get(other) == of_rank[rank] + 1 and self.sent[other].get(rank):
                        return rank, other
                    walk.giver[rank] += 1
            walk.holder[c] += 1
        return None, None

    def _move(self, classes: list[int], ranks: list[int]) -> None:
        """Send as much as the path takes; every class after the first gives way by that much."""
        given = [self.sent[c][rank] for c, rank in zip(classes[1:], ranks, strict=False)]
        amount = min([self.left[classes[0]], self.room[ranks[-1]], *given])
        self.left[classes[0]] -= amount
        self.room[ranks[-1]] -= amount
        for c, rank in zip(classes, ranks, strict=True):
            self.sent[c][rank] = self.sent[c].get(rank, 0) + amount
            self.holders[rank].add(c)
        for c, rank in zip(classes[1:], ranks, strict=False):
            self.sent[c][rank] -= amount
            if not self.sent[c][rank]:
                self.holders[rank].discard(c)

    def _levels(self) -> tuple[dict[int, int], dict[int, int]] | None:
        """Return the distance of each class and rank from the unmet demands, if one has room."""
        of_class = {c: 0 for c, left in enumerate(self.left) if left}
        of_rank: dict[int, int] = {}
        front, depth, found = list(of_class), 0, False
        while front and not found:
            depth += 1
            fresh = {r for c in front for r in self.classes[c] if r not in of_rank}
            of_rank.update(dict.fromkeys(fresh, depth))
            found = any(self.room[rank] for rank in fresh)
            depth += 1
            front = sorted({c for r in fresh for c in self.holders[r] if c not in of_class})
            of_class.update(dict.fromkeys(front, depth))
        return (of_class, of_rank) if found else None
