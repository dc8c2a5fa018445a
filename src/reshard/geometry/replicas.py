"""Replica choice: which holder of an element a plan reads.

Theory. The map says who holds an element; who is asked is a decision, so it is an argument. A
policy is a function ``(locations, target_rank) -> source rank``; it sees one set of locations and
the rank that wants the elements, and returns one of the locations. :func:`balanced` alone looks
at the whole plan.
"""

from __future__ import annotations

from collections.abc import Callable

Choose = Callable[[tuple[int, ...], int], int]
"""A replica policy: ``(locations, target_rank) -> source_rank``."""


def lowest_rank(locations: tuple[int, ...], _target_rank: int) -> int:
    """Read from the lowest rank that holds the element; the default.

    >>> lowest_rank((2, 5, 7), 5)
    2
    """
    return locations[0]


def same_rank_first(locations: tuple[int, ...], target_rank: int) -> int:
    """Read from the rank that wants the element when it holds it, else from the lowest.

    >>> same_rank_first((2, 5, 7), 5), same_rank_first((2, 5, 7), 6)
    (5, 2)
    """
    return target_rank if target_rank in locations else locations[0]


def balanced(locations: tuple[int, ...], _target_rank: int) -> int:
    """Share reads out among holders so that the busiest source rank gives as little as it can.

    :func:`~reshard.geometry.compose` knows this policy by name and solves it for the whole plan,
    cutting pieces where that is needed; asked about one set of holders, it has nothing to
    balance and answers the lowest.

    >>> balanced((2, 5, 7), 6)
    2
    """
    return locations[0]
