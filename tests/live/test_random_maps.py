"""Random states between random maps, in real processes: bit-equal to the plan applied in one.

The oracle is ``TransferPlan.apply`` of one process, which moves nothing over a wire, chooses the
lowest holder and knows no budget.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from reshard import compose
from tests.live.jobs import Drawn, bits
from tests.live.ranks import Crews

CASES = int(os.environ.get("RESHARD_LIVE_CASES", "48"))
"""Pairs of maps in all; ``make test-live`` runs 1,000."""
BATCH = 12
"""Cases of one job."""
WORLDS = ((2, 1 << 20), (3, 1 << 10), (5, 64), (8, 1 << 20))
"""Number of ranks, and the budget, the smallest that there is among them."""


@pytest.mark.parametrize(("world", "budget"), WORLDS)
def test_what_arrives_is_what_the_composition_says(crews: Crews, world: int, budget: int) -> None:
    seeds = range(world * 10_000, world * 10_000 + CASES // len(WORLDS))
    answers: list[list[dict[str, Any]]] = [[] for _ in range(world)]
    for first in range(0, len(seeds), BATCH):
        batch = list(seeds[first : first + BATCH])
        for rank, one in enumerate(crews.done("move_drawn", batch, budget, world=world)):
            answers[rank] += one
    for number, seed in enumerate(seeds):
        drawn = Drawn(seed, world)
        mine = [answer[number] for answer in answers]
        for key, (_, source, target) in drawn.maps().items():
            shards = drawn.shards(key)
            expected = compose(target, source, partial=True).apply(shards)
            for rank, tensor in expected.items():
                assert mine[rank]["shards"][key] == bits(tensor), (seed, key, rank)
        # to the byte what was said, which is the least that there is
        assert [one["sent"] for one in mine] == [one["plan"] for one in mine], seed
        assert sum(one["sent"] for one in mine) == mine[0]["least"], seed
        busiest, bound = mine[0]["busiest"]
        # less than an element of a tensor cannot be shared out
        assert bound <= busiest <= bound * 1.01 + 8 * len(drawn.maps()), seed
        assert mine[0]["rounds"][0] == mine[0]["rounds"][1], seed
        assert len({one["digest"] for one in mine}) == 1
