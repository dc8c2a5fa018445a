"""Builders cost what their ranks are: ten times the ranks, about ten times the work."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from reshard.geometry import ParamAffineMap
from reshard.layouts.builders import (
    block_gather_map,
    contiguous_split_map,
    replicated_map,
    sub_param_map,
)

BUILDERS: dict[str, Callable[[int], ParamAffineMap]] = {
    "contiguous": lambda n: contiguous_split_map((n, 8), [1] * n, 0),
    "replicated": lambda n: replicated_map((8, 8), n),
    "gather": lambda n: block_gather_map((n, 8), {rank: [rank] for rank in range(n)}, 1, 0),
    "sub": lambda n: sub_param_map((2 * n, 8), [n, n], [[1] * n, [1] * n], 0),
}


def steps(build: Callable[[], object]) -> int:
    """Count lines of Python that run: the same on any machine, however busy."""
    count = 0

    def trace(frame: object, event: str, _: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        build()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", BUILDERS)
def test_work_grows_with_the_ranks(name: str) -> None:
    small, large = (steps(lambda n=n: BUILDERS[name](n)) for n in (2000, 20_000))  # type: ignore[misc]
    assert large < 11 * small


@pytest.mark.parametrize("name", ["contiguous", "replicated", "gather"])
def test_a_hundred_thousand_ranks(name: str) -> None:
    one = BUILDERS[name](100_000)
    assert len(one.ranks) == 100_000
    assert one.pieces_by_rank[99_999]
