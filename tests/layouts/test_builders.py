"""The builders against dense index arrays, and what they refuse. Needs no DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import LayoutError
from reshard.geometry import ParamAffineMap, trace_map
from reshard.layouts import autotp, fused
from reshard.layouts.autotp import ModelNumbers
from reshard.layouts.builders import (
    block_gather_map,
    contiguous_split_map,
    replicated_map,
    segmented_map,
    sub_param_map,
)
from reshard.layouts.experts import ExpertPlacement, expert_map
from reshard.layouts.from_shards import concatenated, equal_parts, replicated
from reshard.layouts.ranges import Range, ranges_map
from reshard.layouts.sub_parameters import View, sub_param_layer_map, sub_param_view_map


def offsets(shape: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)


def taken(full: Any, ranges: Sequence[Range], dim: int) -> Any:
    """What a rank holds, by slicing."""
    parts = [np.take(full, range(start, start + length), axis=dim) for start, length in ranges]
    return np.concatenate(parts, axis=dim) if parts else np.take(full, [], axis=dim)


# ------------------------------------------------------------------------------ the kernel


@st.composite
def ranged(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[int, list[Range]], int]:
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    extent = shape[dim]
    one = st.integers(0, extent).flatmap(
        lambda start: st.tuples(st.just(start), st.integers(0, extent - start))
    )
    ranges = draw(
        st.dictionaries(st.integers(0, 5), st.lists(one, max_size=4), min_size=1, max_size=4)
    )
    return shape, ranges, dim


@given(ranged())
def test_a_rank_holds_its_ranges_one_after_the_other(
    case: tuple[tuple[int, ...], dict[int, list[Range]], int],
) -> None:
    shape, ranges, dim = case
    found = ranges_map(shape, ranges, dim)
    full = offsets(shape)
    for rank, listed in ranges.items():
        expected = taken(full, listed, dim)
        assert found.shard_shapes[rank] == expected.shape
        assert np.array_equal(found.extract(full, rank), expected)


@given(ranged(), st.sampled_from([None, 1, 2]))
def test_holders_are_exact_and_every_element_is_written_once(
    case: tuple[tuple[int, ...], dict[int, list[Range]], int], replica_length: int | None
) -> None:
    shape, ranges, dim = case
    ranges_map(shape, ranges, dim, replica_length=replica_length).validate(partial=True)


@given(ranged())
def test_pieces_are_as_few_as_ranges_allow(
    case: tuple[tuple[int, ...], dict[int, list[Range]], int],
) -> None:
    """No piece goes on where the one before it ends, unless other ranks hold it."""
    shape, ranges, dim = case
    step = int(np.prod(shape[dim + 1 :]))
    for owned in ranges_map(shape, ranges, dim).pieces_by_rank.values():
        for one, next_one in pairwise(owned):
            follows = one.source_offset + one.shape[dim] * step == next_one.source_offset
            assert not (follows and one.locations == next_one.locations)


# ------------------------------------------------------------------------------ by formula


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(0, 1))
def test_splits_join_to_the_whole(sizes: list[int], dim: int) -> None:
    shape = (sum(sizes), 3) if dim == 0 else (3, sum(sizes))
    found = contiguous_split_map(shape, sizes, dim)
    found.validate()
    full = offsets(shape)
    shards = {rank: found.extract(full, rank) for rank in range(len(sizes))}
    assert np.array_equal(np.concatenate(list(shards.values()), axis=dim), full)
    assert np.array_equal(found.rebuild(shards), full)


@given(
    st.integers(1, 4).flatmap(
        lambda tp: st.lists(
            st.lists(st.integers(0, 3), min_size=tp, max_size=tp), min_size=1, max_size=4
        )
    )
)
def test_sub_parameters_are_each_split(widths: list[list[int]]) -> None:
    sizes = [sum(row) for row in widths]
    shape = (2, sum(sizes))
    found = sub_param_map(shape, sizes, widths, 1)
    found.validate()
    parts = np.split(offsets(shape), np.cumsum(sizes)[:-1], axis=1)
    for rank in range(len(widths[0])):
        cuts = [
            np.split(part, np.cumsum(row)[:-1], axis=1)[rank]
            for part, row in zip(parts, widths, strict=True)
        ]
        assert np.array_equal(found.extract(offsets(shape), rank), np.concatenate(cuts, axis=1))


PIECES = [(8, 24, 12), (16, 48, 24), (64, 192, 96), (256, 768, 384)]


@pytest.mark.parametrize(("hidden", "rows", "per_rank"), PIECES)
def test_codegen_has_eleven_pieces_a_rank_whatever_its_size(
    hidden: int, rows: int, per_rank: int
) -> None:
    """The table of specification §5."""
    found = fused.codegen_map((rows, hidden), 2, ModelNumbers(kv_heads=8))
    assert found.shard_shapes[0] == (per_rank, hidden)
    assert [len(pieces) for pieces in found.pieces_by_rank.values()] == [11, 11]
    found.validate()


def test_the_other_layouts_of_the_specification() -> None:
    bigcode = fused.bigcode_map((48, 8), 4, ModelNumbers(kv_heads=4, hidden=32))
    assert {len(pieces) for pieces in bigcode.pieces_by_rank.values()} == {2}
    assert bigcode.pieces_by_rank[3][1].locations == (0, 1, 2, 3)
    value, output = fused.shared_qk_map((32, 8), 8, 2, 0), fused.shared_qk_map((8, 32), 8, 2, 1)
    assert {len(pieces) for pieces in value.pieces_by_rank.values()} == {2}
    assert {piece.source_strides for _, piece in output.pieces()} == {(32, 1)}


def test_rows_of_a_last_rank_stop_where_sharing_begins() -> None:
    """Its query rows end where the shared rows begin; one piece would have two sets of holders."""
    last = fused.bigcode_map((6, 1), 2, ModelNumbers(kv_heads=2, hidden=4)).pieces_by_rank[1]
    assert [(piece.source_offset, piece.numel) for piece in last] == [(2, 2), (4, 2)]


@pytest.mark.parametrize("kind", [kind for kind in fused.FUSED_KINDS if kind != "codegen"])
@pytest.mark.parametrize("tp", [1, 2, 3, 5])
def test_fused_kinds_are_whole_for_any_number_of_ranks(kind: str, tp: int) -> None:
    numbers = ModelNumbers(kv_heads=4, heads=4, hidden=16)
    fused.FUSED_KINDS[kind]((48, 16), tp, numbers).validate()


def test_shapes_of_shards_give_the_same_maps() -> None:
    split = contiguous_split_map((7, 2), [4, 0, 3], 0)
    assert concatenated(split.shard_shapes, 0, 3) == split
    listed = {rank: shape for rank, shape in split.shard_shapes.items() if shape[0]}
    assert concatenated(listed, 0, 3) == split
    assert replicated({0: (2, 3), 1: (2, 3)}, 2) == replicated_map((2, 3), 2)
    assert equal_parts({0: (4,), 1: (4,)}, 2, 0, 2) == sub_param_map((8,), [4, 4], [[2, 2]] * 2, 0)


def test_a_view_cuts_the_middle_of_a_matrix() -> None:
    view = View.of((2, -1, 4), 1)
    found = sub_param_view_map(view, None, 2, 48, ())
    expected = trace_map(lambda full, rank: np.split(full, 2, axis=1)[rank], (2, 6, 4), range(2))
    assert found.canonical() == expected


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: replicated_map((2,), 0), "needs a rank"),
        (lambda: contiguous_split_map((4,), [2, 1], 0), "do not add up.*expected 4"),
        (lambda: contiguous_split_map((4,), [5, -1], 0), "do not add up"),
        (lambda: contiguous_split_map((4,), [4], 1), "no such dim"),
        (lambda: contiguous_split_map((4,), [4], -1), "no such dim"),
        (lambda: sub_param_map((4,), [2, 2], [[1, 1]], 0), "widths are not given"),
        (lambda: sub_param_map((4,), [2, 2], [[1, 1], [2]], 0), "another number of ranks"),
        (lambda: sub_param_map((4,), [2, 2], [[1, 1], [2, 1]], 0), "widths of a block"),
        (lambda: segmented_map((4,), [(3, True)], 0, 2, []), "blocks do not add up"),
        (lambda: block_gather_map((4,), {0: [2]}, 2, 0), "leaves the dim"),
        (lambda: fused.glm_map((8,), 2, ModelNumbers(kv_heads=4)), "three parts"),
        (lambda: fused.glm_map((8,), 2, ModelNumbers(kv_heads=2)), "needs hidden"),
        (lambda: fused.phi3_map((8,), 2, ModelNumbers(kv_heads=2, heads=2, hidden=8)), "share"),
        (lambda: fused.bigcode_map((8,), 2, ModelNumbers(hidden=8)), "no rows are left"),
        (lambda: fused.codegen_map((24,), 2, ModelNumbers(kv_heads=4)), "multiple of four heads"),
        (lambda: fused.codegen_map((20,), 2, ModelNumbers(kv_heads=8)), "do not divide"),
        (lambda: fused.shared_qk_map((6,), 3, 3, 0), "shared-QK"),
        (lambda: fused.shared_qk_map((6,), 0, 2, 0), "shared-QK"),
        (lambda: autotp.shard_sizes(4, 2, kv_heads=0), "at least one"),
        (lambda: autotp.gate_up_map((3,), 2, ModelNumbers()), "even extent"),
        (lambda: autotp.conv1d_row_map((4, 6), 2, ModelNumbers()), "only when it is square"),
        (lambda: View.of((0, 4), 0), "not one"),
        (lambda: View.of(((2, 2), (1, 1)), 0), "stand at the partition dim"),
        (lambda: View.of((), 0), "no such dim"),
        (lambda: sub_param_view_map(View.of((3, 3), 0), None, 2, 8), "does not fit"),
        (lambda: sub_param_layer_map((8, 3), View.of((3, -1), 0), 2, ModelNumbers()), "add up"),
        (lambda: expert_map(ExpertPlacement(2, ((0, 1),)), (3, 4)), "count its experts"),
        (lambda: ExpertPlacement.uniform(3, 2), "do not divide"),
        (lambda: ExpertPlacement(2, ((0, 0, 1),)), "twice"),
        (lambda: ExpertPlacement(2, ((0, 2),)), "does not exist"),
        (lambda: ExpertPlacement(0, ((),)), "needs an expert"),
    ],
)
def test_words_that_contradict_themselves_are_refused(build: Any, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        build()


GOOD = {"version": 1, "num_experts": 2, "ep_size": 1, "ranks": [{"rank": 0, "experts": [1, 0]}]}


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": True},
        {"num_experts": 2.0},
        {"ep_size": 2},
        {"ranks": {}},
        {"ranks": [{"rank": 1, "experts": [0, 1]}]},
        {"ranks": [{"rank": 0, "experts": (0, 1)}]},
        {"ranks": [{"rank": 0, "experts": [0, True]}]},
        {"ranks": [{"rank": 0}]},
        {"more": 1},
    ],
)
def test_placements_are_read_strictly(change: dict[str, object]) -> None:
    assert isinstance(expert_map(GOOD, (2, 3)), ParamAffineMap)
    with pytest.raises(LayoutError):
        expert_map({**GOOD, **change}, (2, 3))


def test_a_placement_survives_being_written() -> None:
    placement = ExpertPlacement(4, ((3, 1), (), (0, 2, 1)))
    assert ExpertPlacement.from_descriptor(placement.to_descriptor()) == placement
