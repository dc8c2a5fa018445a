"""The dense oracle of whole maps and plans: index arrays, element by element.

It adds to :mod:`tests.properties.dense_oracle`, which expands single pieces, what is in each place
of each shard and whether a plan is sound. Nothing here shares code with ``reshard.geometry``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from reshard.geometry import ParamAffineMap, TransferPlan
from tests.properties.dense_oracle import (
    broken,
    copies,
    elements,
    holders,
    offsets,
    ranges,
    relation,
    size,
)

__all__ = [
    "broken",
    "copies",
    "elements",
    "holders",
    "offsets",
    "places",
    "plan_is_sound",
    "ranges",
    "relation",
    "repeats",
    "size",
]

Item = TypeVar("Item")


def places(one: ParamAffineMap) -> dict[tuple[int, int], tuple[int, float]]:
    """What is in each element of each shard: its offset in F and its scale."""
    return {(rank, d): (s, scale) for rank, d, s, _, scale in relation(one)}


def repeats(items: Iterable[Item]) -> bool:
    """Whether an item occurs twice."""
    listed = list(items)
    return len(set(listed)) < len(listed)


def plan_is_sound(plan: TransferPlan) -> bool:
    """Whether a plan writes each target element once or names it, inside both sets of shards."""
    made = copies(plan)
    room = {r: size(shape) for r, shape in plan.target_shapes.items()}
    held = {r: size(shape) for r, shape in plan.source_shapes.items()}
    inside = all(0 <= t < room.get(tr, 0) and 0 <= o < held.get(sr, 0) for tr, t, sr, o, _ in made)
    named = [(r, t) for r, holes in plan.unfilled.items() for hole in holes for t in hole]
    said = [(tr, t) for tr, t, *_ in made] + named
    wanted = sorted((r, t) for r, n in room.items() for t in range(n))
    return inside and sorted(said) == wanted
