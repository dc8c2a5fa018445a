"""Which holder is read: the policies, and how close to the best the balanced one comes."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from reshard.geometry import (
    AffinePiece,
    Choose,
    ParamAffineMap,
    TransferPlan,
    balance_of,
    balanced,
    compose,
    lowest_rank,
    same_rank_first,
)


def replicated(size: int, *ranks: int) -> ParamAffineMap:
    pieces = {r: [AffinePiece((size,), 0, (1,), 0, (1,), ranks)] for r in ranks}
    return ParamAffineMap((size,), dict.fromkeys(ranks, (size,)), pieces)


def loads(plan: TransferPlan) -> dict[int, int]:
    given: Counter[int] = Counter()
    for segment in plan.segments:
        given[segment.source_rank] += segment.numel
    return dict(given)


def pairs(plan: TransferPlan) -> set[tuple[int, int]]:
    return {(segment.target_rank, segment.source_rank) for segment in plan.segments}


def test_the_lowest_holder_is_read_unless_asked_otherwise() -> None:
    target, source = replicated(12, 0, 5, 9), replicated(12, 3, 5, 7)
    assert pairs(compose(target, source)) == {(0, 3), (5, 3), (9, 3)}
    assert compose(target, source) == compose(target, source, choose=lowest_rank)


def test_same_rank_first_reads_at_home_where_it_can() -> None:
    plan = compose(replicated(12, 0, 5, 9), replicated(12, 3, 5, 7), choose=same_rank_first)
    assert pairs(plan) == {(0, 3), (5, 5), (9, 3)}


def test_a_policy_may_be_any_function() -> None:
    def highest(locations: tuple[int, ...], target_rank: int) -> int:
        return locations[-1]

    plan = compose(replicated(12, 0, 1), replicated(12, 3, 5, 7), choose=highest)
    assert pairs(plan) == {(0, 7), (1, 7)}


def test_balanced_shares_a_replica_out_evenly() -> None:
    plan = compose(replicated(12, 0), replicated(12, 3, 5, 7), choose=balanced)
    plan.verify()
    assert loads(plan) == {3: 4, 5: 4, 7: 4}


def test_balanced_takes_into_account_what_ranks_must_give_anyway() -> None:
    shared = AffinePiece((6,), 0, (1,), 0, (1,), (0, 1))
    own = AffinePiece((4,), 6, (1,), 6, (1,), (1,))
    source = ParamAffineMap((10,), {0: (6,), 1: (10,)}, {0: [shared], 1: [shared, own]})
    source.validate()
    plan = compose(replicated(10, 0), source, choose=balanced)
    assert loads(plan) == {0: 5, 1: 5}


@pytest.mark.parametrize(
    ("choose", "busiest"), [(lowest_rank, 20), (same_rank_first, 10), (balanced, 7)]
)
def test_the_bound_is_printed_beside_what_was_reached(choose: Choose, busiest: int) -> None:
    target, source = replicated(10, 0, 1), replicated(10, 0, 1, 2)
    balance = balance_of(target, source, compose(target, source, choose=choose))
    assert balance.bound == 7
    assert balance.busiest == busiest
    assert f"{balance.busiest} elements" in str(balance)
    assert f"beats {balance.bound}" in str(balance)


def test_the_bound_is_the_best_of_all_ways_to_share_out() -> None:
    """Against brute force: three vectors of 3 elements, each on two of three ranks."""
    holders = ((0, 1), (0, 2), (0, 1))
    pieces: dict[int, list[AffinePiece]] = {0: [], 1: [], 2: []}
    sizes = dict.fromkeys(pieces, 0)
    for index, ranks in enumerate(holders):
        for rank in ranks:
            place = sizes[rank]
            pieces[rank].append(AffinePiece((3,), 3 * index, (1,), place, (1,), ranks))
            sizes[rank] += 3
    source = ParamAffineMap((9,), {r: (n,) for r, n in sizes.items()}, pieces)
    source.validate()
    best = min(
        max(Counter(ranks[pick] for ranks, pick in zip(wanted, picks, strict=True)).values())
        for wanted in [[ranks for ranks in holders for _ in range(3)]]
        for picks in product((0, 1), repeat=9)
    )
    target = replicated(9, 0)
    balance = balance_of(target, source, compose(target, source, choose=balanced))
    assert balance.busiest == balance.bound == best
