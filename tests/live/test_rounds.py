"""Rounds: nobody sends or receives twice, everything goes, and in as few as there can be."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from reshard.live.rounds import largest_degree, rounds_of
from scripts import rounds_picture


@pytest.mark.parametrize("seed", range(40))
def test_all_messages_go_in_as_many_rounds_as_the_largest_degree(seed: int) -> None:
    rnd = Random(seed)
    ranks = rnd.randint(2, 12)
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    some = rnd.sample(pairs, rnd.randint(1, len(pairs)))
    messages = {pair: rnd.choice([1, 2, 3, 40, 10_000]) for pair in some}
    gone: Counter[tuple[int, int]] = Counter()
    count = 0
    for same in rounds_of(messages):
        assert len(set(same.pairs.values())) == len(same.pairs)
        for pair in same.pairs.items():
            gone[pair] += same.count
        count += same.count
    assert gone == messages
    sends: Counter[int] = Counter()
    receives: Counter[int] = Counter()
    for (sender, receiver), each in messages.items():
        sends[sender] += each
        receives[receiver] += each
    assert count == largest_degree(messages) == max([*sends.values(), *receives.values()])


def test_the_picture_of_the_page_is_that_of_the_code() -> None:
    assert rounds_picture.FILE.read_text(encoding="utf-8") == rounds_picture.picture()
