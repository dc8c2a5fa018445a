"""The map of one degree follows from the map of another, or is refused; never guessed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reshard.formats.deepspeed.writing.rescaling import (
    AMBIGUOUS,
    UNEXPLAINED,
    Known,
    Rescaling,
    blocks_of,
    ranges_along,
)
from reshard.geometry import ParamAffineMap
from reshard.layouts.autotp import (
    ModelNumbers,
    column_parallel_map,
    gate_up_map,
    row_parallel_map,
    shard_sizes,
)
from reshard.layouts.builders import replicated_map, segmented_map, sub_param_map
from reshard.layouts.fused import codegen_map, shared_qk_map

Builder = Callable[[int], ParamAffineMap]
HEADS = 8
NUMBERS = ModelNumbers(kv_heads=HEADS)


def _sub_params(degree: int) -> ParamAffineMap:
    widths = [shard_sizes(size, degree, kv_heads=HEADS) for size in (64, 16, 16)]
    return sub_param_map((96, 8), (64, 16, 16), widths, 0)


def _multi_query(degree: int) -> ParamAffineMap:
    widths = [shard_sizes(64, degree, kv_heads=HEADS)]
    return segmented_map((80, 8), [(64, False), (16, True)], 0, degree, widths)


LAYOUTS: dict[str, Builder] = {
    "norm.weight": lambda degree: replicated_map((64,), degree),
    "attn.q_proj.weight": lambda degree: column_parallel_map((64, 40), degree, NUMBERS),
    "attn.out.weight": lambda degree: row_parallel_map((40, 64), degree, NUMBERS),
    "mlp.up_proj.weight": lambda degree: column_parallel_map((50, 64), degree, NUMBERS, "mlp"),
    "lm_head.weight": lambda degree: column_parallel_map((97, 64), degree, NUMBERS, "lm_head"),
    "mlp.gate_up_proj.weight": lambda degree: gate_up_map((44, 64), degree, NUMBERS),
    "attn.qkv.weight": _sub_params,
    "attn.c_attn.weight": _multi_query,
    "attn.v_proj.weight": lambda degree: shared_qk_map((64, 40), HEADS, degree, 0),
    "attn.o_proj.weight": lambda degree: shared_qk_map((40, 64), HEADS, degree, 1),
}


def known_at(degree: int) -> dict[str, Known]:
    maps = {name: build(degree) for name, build in LAYOUTS.items()}
    return {name: Known.of(name, one.logical_shape, {degree: one}) for name, one in maps.items()}


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_with_the_heads_every_layout_follows(name: str, before: int, after: int) -> None:
    maps, reasons = Rescaling(after, HEADS).maps(known_at(before))
    assert reasons == {}
    assert maps[name] == LAYOUTS[name](after).canonical()


def test_without_the_heads_fewer_ranks_follow() -> None:
    maps, reasons = Rescaling(2, None).maps(known_at(4))
    assert reasons == {}
    assert maps == {name: build(2).canonical() for name, build in LAYOUTS.items()}


def test_without_the_heads_more_ranks_are_refused_where_heads_decide() -> None:
    maps, reasons = Rescaling(4, None).maps(known_at(2))
    assert set(maps) == {
        "norm.weight",
        "mlp.up_proj.weight",
        "lm_head.weight",
        "mlp.gate_up_proj.weight",
    }
    assert set(reasons.values()) == {AMBIGUOUS}


def test_a_second_degree_settles_what_one_leaves_open() -> None:
    maps = {degree: column_parallel_map((64, 4), degree, NUMBERS) for degree in (2, 3)}
    known = {"q": Known.of("attn.q.weight", (64, 4), maps)}
    assert Rescaling(5, None).maps(known)[0] == {
        "q": column_parallel_map((64, 4), 5, NUMBERS).canonical()
    }


def test_codegen_needs_its_number_of_heads() -> None:
    numbers = ModelNumbers(kv_heads=16)
    one = codegen_map((48, 8), 4, numbers)
    known = {"qkv": Known.of("attn.qkv_proj.weight", (48, 8), {4: one})}
    two = Rescaling(2, 16).maps(known)[0]
    assert two == {"qkv": codegen_map((48, 8), 2, numbers).canonical()}
    assert Rescaling(8, 16).maps(known)[1] == {"qkv": UNEXPLAINED}


def test_what_no_rule_makes_is_refused() -> None:
    odd = segmented_map((12, 2), [(6, False), (6, False)], 0, 2, [[1, 5], [4, 2]])
    known = {"w": Known.of("w.weight", (12, 2), {2: odd})}
    assert Rescaling(3, 4).maps(known) == ({}, {"w": UNEXPLAINED})


def test_a_scaled_map_is_refused() -> None:
    known = {"b": Known.of("out.bias", (8,), {2: replicated_map((8,), 2, 0.5)})}
    assert Rescaling(4, 2).maps(known) == ({}, {"b": UNEXPLAINED})


@given(
    blocks=st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=4),
    degree=st.integers(2, 4),
    dim=st.integers(0, 1),
)
@example(blocks=[(1, False), (1, False), (2, False)], degree=2, dim=0)
def test_blocks_are_read_off_any_map_of_blocks(
    blocks: list[tuple[int, bool]], degree: int, dim: int
) -> None:
    sizes = [(size * degree, shared) for size, shared in blocks]
    extent = sum(size for size, _ in sizes)
    shape = (extent, 3) if dim == 0 else (3, extent)
    widths = [[size // degree] * degree for size, shared in sizes if not shared]
    one = segmented_map(shape, sizes, dim, degree, widths)
    ranges = ranges_along(one, dim)
    assert ranges is not None
    assert _merged(blocks_of(ranges)) == _merged(sizes)


def _merged(blocks: list[tuple[int, bool]]) -> list[tuple[int, bool]]:
    """Replicated blocks that follow each other are one."""
    merged: list[tuple[int, bool]] = []
    for size, shared in blocks:
        if shared and merged and merged[-1][1]:
            merged[-1] = (merged[-1][0] + size, True)
        else:
            merged.append((size, shared))
    return merged
