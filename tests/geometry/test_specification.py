"""The tables of the specification, measured on the partition functions of DeepSpeed itself.

The sections are those of ``affine_ir_spec.md``: §2.1 (worked example), §5 (pieces of the layouts
that were called unsupported), §6.5 (size), §8.1 (padded vocabularies), §8.2 (composition).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from math import gcd
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from reshard.errors import ScaledStateError
from reshard.geometry import (
    SCALE_POWER,
    AffinePiece,
    ParamAffineMap,
    TransferPlan,
    compose,
    maps_to_document,
    trace_map,
)
from tests.layouts.real_layers import BLOCKS, block_named
from tests.properties import dense_oracle as dense

Cut = Callable[[torch.Tensor, int], torch.Tensor]


# ------------------------------------------------------------------ DeepSpeed's own functions


def traced(cut: Cut, shape: tuple[int, ...], tp: int) -> ParamAffineMap:
    """The map of a partition function that takes an explicit rank, proved and tried on noise."""

    def checked(full: object, rank: int) -> torch.Tensor:
        if not isinstance(full, torch.Tensor):
            raise TypeError("a torch tensor is needed")
        return cut(full, rank)

    found = trace_map(checked, shape, range(tp))
    found.validate()
    assert found.uncovered_offsets() == []
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    shards = {rank: cut(noise.clone(), rank).detach() for rank in range(tp)}
    for rank, shard in shards.items():
        assert torch.equal(found.extract(noise, rank), shard)
    assert torch.equal(found.rebuild(shards), noise)
    return found


@cache
def fused(kind: str, rows: int, tp: int, kv: int, hidden: int) -> ParamAffineMap:
    """How ``prepare_tp_fused_qkvw`` cuts a fused weight of 8 columns."""
    from deepspeed.module_inject.fusedqkv_utils import prepare_tp_fused_qkvw
    from deepspeed.module_inject.tp_shard import AutoTPMeta

    meta = AutoTPMeta(num_kv_heads=kv, num_attention_heads=kv, n_embd=hidden)

    def cut(full: torch.Tensor, rank: int) -> torch.Tensor:
        shard = prepare_tp_fused_qkvw(block_named(BLOCKS[kind]), full, tp, rank, meta)
        assert isinstance(shard, torch.Tensor)
        return shard

    return traced(cut, (rows, 8), tp)


@cache
def yuan(shape: tuple[int, int], tp: int, dim: int, heads: int = 8) -> ParamAffineMap:
    """How ``shard_value_with_share_qk`` cuts Yuan's value (dim 0) and output (dim 1)."""
    from deepspeed.module_inject.fusedqkv_utils import shard_value_with_share_qk
    from deepspeed.module_inject.tp_shard import AutoTPMeta

    def cut(full: torch.Tensor, rank: int) -> torch.Tensor:
        meta = AutoTPMeta(num_kv_heads=heads)
        weight, _ = shard_value_with_share_qk(full, None, rank, tp, dim == 0, meta)
        assert isinstance(weight, torch.Tensor)
        return weight.detach()

    return traced(cut, shape, tp)


def piece_counts(one: ParamAffineMap) -> list[int]:
    return [len(pieces) for pieces in one.pieces_by_rank.values()]


# ------------------------------------------------------------------ §5: pieces


@pytest.mark.deepspeed
@pytest.mark.parametrize("hidden", [8, 16, 32, 64, 128, 256])
def test_codegen_has_at_most_11_pieces_a_rank_at_every_size(hidden: int) -> None:
    counts = piece_counts(fused("codegen", 3 * hidden, 2, 8, hidden))
    assert max(counts) <= 11
    assert counts == piece_counts(fused("codegen", 24, 2, 8, 8))


@pytest.mark.deepspeed
def test_bigcode_has_2_pieces_a_rank_and_8_in_all_with_exact_locations() -> None:
    found = fused("bigcode", 48, 4, 4, 32)
    for rank, pieces in found.pieces_by_rank.items():
        assert pieces == (
            AffinePiece((64,), 64 * rank, (1,), 0, (1,), (rank,)),
            AffinePiece((128,), 256, (1,), 64, (1,), (0, 1, 2, 3)),
        )


@pytest.mark.deepspeed
def test_yuan_value_and_output_have_at_most_2_pieces_a_rank() -> None:
    assert max(piece_counts(yuan((32, 8), 2, 0))) <= 2
    assert max(piece_counts(yuan((8, 32), 2, 1))) <= 2


@pytest.mark.deepspeed
def test_the_two_pieces_of_yuan_output_with_strides_32_and_1_merge_into_one() -> None:
    """§5 counts two head groups of rows 32 apart; §6.3 asks for maximally merged pieces.

    The groups are 16 apart in F and 8 in the shard, half as far as the rows: (8, 2, 8) by
    (32, 16, 1) is (16, 8) by (16, 1). The elements are exactly those of the table's two pieces.
    """
    first = [AffinePiece((8, 8), 8 * r, (32, 1), 0, (16, 1), (r,)) for r in (0, 1)]
    second = [AffinePiece((8, 8), 8 * r + 16, (32, 1), 8, (16, 1), (r,)) for r in (0, 1)]
    table = ParamAffineMap(
        (8, 32), dict.fromkeys((0, 1), (8, 16)), {r: [first[r], second[r]] for r in (0, 1)}
    )
    ours = yuan((8, 32), 2, 1)
    assert dense.relation(ours) == dense.relation(table)
    assert table.canonical() == ours
    assert [ours.pieces_by_rank[r] for r in (0, 1)] == [
        (AffinePiece((16, 8), 8 * r, (16, 1), 0, (8, 1), (r,)),) for r in (0, 1)
    ]


@pytest.mark.deepspeed
def test_deepspeed_reads_the_maps_that_are_written_here() -> None:
    from deepspeed.checkpoint import affine

    ours = fused("codegen", 96, 2, 8, 32)
    theirs = affine.ParamAffineMap.from_dict(ours.to_dict())
    full = torch.randn(96, 8)
    for rank in ours.ranks:
        assert torch.equal(theirs.extract(full, rank), ours.extract(full, rank))


# ------------------------------------------------------------------ §6.5: size


@pytest.mark.deepspeed
def test_a_piece_takes_about_as_many_bytes_as_the_specification_says() -> None:
    one = fused("codegen", 96, 8, 32, 32)
    text = json.dumps(maps_to_document({"^w$": one}), separators=(",", ":"))
    assert len(text) <= 6836
    assert sum(piece_counts(one)) <= 96


# ------------------------------------------------------------------ §8.2: composition


SWEEP = (32, 64, 128, 256)
"""An 8x sweep of the hidden size."""


def shards_of(one: ParamAffineMap, full: NDArray[Any]) -> dict[int, NDArray[Any]]:
    return {rank: one.extract(full, rank) for rank in one.ranks}


def composed(target: ParamAffineMap, source: ParamAffineMap) -> TransferPlan:
    """A plan that is proved, and tried on numbers that are all different."""
    plan = compose(target, source)
    plan.verify()
    full = np.arange(source.numel).reshape(source.logical_shape)
    moved = plan.apply(shards_of(source, full))
    for rank, shard in shards_of(target, full).items():
        assert np.array_equal(moved[rank], shard)
    return plan


@pytest.mark.deepspeed
def test_codegen_4_to_8_needs_at_most_40_segments_at_every_size() -> None:
    counts = {
        len(composed(fused("codegen", 3 * h, 8, 32, h), fused("codegen", 3 * h, 4, 32, h)))
        for h in SWEEP
    }
    assert len(counts) == 1
    assert max(counts) <= 40


@pytest.mark.deepspeed
def test_bigcode_2_to_4_needs_at_most_7_segments_at_every_size() -> None:
    counts = {
        len(composed(fused("bigcode", 3 * h // 2, 4, 4, h), fused("bigcode", 3 * h // 2, 2, 4, h)))
        for h in SWEEP
    }
    assert len(counts) == 1
    assert max(counts) <= 7


@pytest.mark.deepspeed
@pytest.mark.parametrize("rows", [4, 32, 128])
def test_yuan_output_4_to_2_needs_4_segments_at_every_size(rows: int) -> None:
    for hidden in SWEEP:
        plan = composed(yuan((rows, hidden), 2, 1), yuan((rows, hidden), 4, 1))
        assert len(plan) == 4


# ------------------------------------------------------------------ plain splits


def split(shape: tuple[int, int], tp: int) -> ParamAffineMap:
    """Rows in equal parts."""
    return trace_map(lambda full, rank: np.split(full, tp)[rank], shape, range(tp))


@pytest.mark.parametrize(("a", "b"), [(1, 1), (2, 4), (4, 6), (3, 7), (8, 12), (12, 8), (5, 1)])
def test_even_splits_need_a_plus_b_minus_gcd_segments(a: int, b: int) -> None:
    rows = a * b
    assert len(composed(split((rows, 3), b), split((rows, 3), a))) == a + b - gcd(a, b)


@pytest.mark.parametrize("heads", [64, 256, 512])
def test_cyclic_heads_4_to_2_need_8_segments_at_every_number_of_heads(heads: int) -> None:
    def piece(rank: int) -> AffinePiece:
        return AffinePiece((heads // 4, 16), 16 * rank, (64, 1), 0, (16, 1), (rank,))

    cyclic = ParamAffineMap(
        (heads * 4, 4),
        dict.fromkeys(range(4), (heads, 4)),
        {rank: [piece(rank)] for rank in range(4)},
    )
    cyclic.validate()
    assert len(composed(split((heads * 4, 4), 2), cyclic)) == 8
    assert len(composed(cyclic, split((heads * 4, 4), 2))) == 8


# ------------------------------------------------------------------ §8.1: padded vocabularies

TP = (1, 2, 4, 8)
HIDDEN = 3


def padded(vocabulary: int, tp: int) -> ParamAffineMap:
    """A vocabulary padded so that ``tp`` ranks hold equally many rows of it."""
    height = -(-vocabulary // tp)
    size = height * HIDDEN
    pieces = {
        rank: [AffinePiece((height, HIDDEN), rank * size, (HIDDEN, 1), 0, (HIDDEN, 1), (rank,))]
        for rank in range(tp)
    }
    return ParamAffineMap((height * tp, HIDDEN), dict.fromkeys(range(tp), (height, HIDDEN)), pieces)


@pytest.mark.parametrize("vocabulary", [13, 32, 100, 50257])
@pytest.mark.parametrize("tgt_tp", TP)
@pytest.mark.parametrize("src_tp", TP)
def test_padded_vocabularies_compose_without_reading_padding(
    src_tp: int, tgt_tp: int, vocabulary: int
) -> None:
    source, target = padded(vocabulary, src_tp), padded(vocabulary, tgt_tp)
    plan = compose(target.narrow(0, 0, vocabulary), source.narrow(0, 0, vocabulary), partial=True)
    plan.verify()
    assert len(plan) <= src_tp + tgt_tp
    full = np.full(source.logical_shape, np.nan)
    full[:vocabulary] = np.arange(vocabulary * HIDDEN).reshape(vocabulary, HIDDEN) + 1
    moved = plan.apply(shards_of(source, full))
    whole = np.concatenate([moved[rank] for rank in range(tgt_tp)])
    assert np.array_equal(whole[:vocabulary], full[:vocabulary])
    assert not whole[vocabulary:].any()
    rows = target.shard_shapes[0][0]
    unfilled = {
        rank: (range(first * HIDDEN, rows * HIDDEN),)
        for rank in range(tgt_tp)
        if (first := min(rows, max(0, vocabulary - rank * rows))) < rows
    }
    assert dict(plan.unfilled) == unfilled


# ------------------------------------------------------------------ §2.1: the worked example


def quarter_bias() -> ParamAffineMap:
    """The bias of a row-parallel layer at world size 4, stored divided by 4."""
    piece = AffinePiece((3,), 0, (1,), 0, (1,), range(4), 1 / 4)  # type: ignore[arg-type]
    return ParamAffineMap((3,), dict.fromkeys(range(4), (3,)), {r: [piece] for r in range(4)})


def test_the_worked_example_number_by_number() -> None:
    one = quarter_bias()
    one.validate()
    assert [(1 / 4) ** SCALE_POWER[state] for state in ("fp32", "exp_avg", "exp_avg_sq")] == [
        1 / 4,
        4.0,
        16.0,
    ]
    held = {rank: np.full(3, 2.0, np.float32) for rank in range(4)}
    assert one.rebuild(held, SCALE_POWER["fp32"]).tolist() == [8.0, 8.0, 8.0]
    assert one.extract(np.full(3, 8.0, np.float32), 2).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("state", ["exp_avg", "exp_avg_sq"])
def test_scaled_optimizer_states_are_refused(state: str) -> None:
    one, power = quarter_bias(), SCALE_POWER[state]
    plan = compose(split_bias(), one)
    shards = {rank: np.full(3, 8.0, np.float32) for rank in range(4)}
    for refused in (
        lambda: one.rebuild(shards, power),
        lambda: one.extract(shards[0], 0, power),
        lambda: plan.apply(shards, power),
    ):
        with pytest.raises(ScaledStateError, match="lr and eps"):
            refused()


def split_bias() -> ParamAffineMap:
    pieces = {r: [AffinePiece((1,), r, (1,), 0, (1,), (r,), 0.5)] for r in range(3)}
    return ParamAffineMap((3,), dict.fromkeys(range(3), (1,)), pieces)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bias_comes_back_bit_equal_through_scales_of_any_power_of_two(dtype: torch.dtype) -> None:
    full = torch.tensor([1.5, -3.25, 0.125], dtype=dtype)
    one = quarter_bias()
    shards = {rank: one.extract(full, rank) for rank in one.ranks}
    assert torch.equal(one.rebuild(shards), full)
    moved = compose(split_bias(), one).apply(shards)
    assert torch.equal(split_bias().rebuild(moved), full)
