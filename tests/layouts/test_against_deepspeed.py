"""Every builder equals the map traced from the layer of DeepSpeed that it describes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import pytest
import torch

from reshard.geometry import ParamAffineMap, trace_map
from reshard.layouts import autotp, fused
from reshard.layouts.autotp import ModelNumbers
from reshard.layouts.builders import contiguous_split_map, replicated_map, sub_param_map
from reshard.layouts.experts import ExpertPlacement, expert_map
from reshard.layouts.sub_parameters import View, sub_param_layer_map
from tests.layouts.real_layers import BLOCKS, Built, real_layer, shard_of

pytestmark = pytest.mark.deepspeed

Shape = tuple[int, ...]


def traced(build: Built, shape: Shape, tp: int, *, bias: bool = False) -> ParamAffineMap:
    """Watch what a real layer does with its weight or bias."""

    def partition(full: torch.Tensor, rank: int) -> torch.Tensor:
        if bias:
            return shard_of(build(torch.zeros(full.numel(), 4).double(), full, tp, rank), "bias")
        return shard_of(build(full, None, tp, rank))

    return trace_map(torch_only(partition), shape, range(tp))


def torch_only(
    partition: Callable[[torch.Tensor, int], torch.Tensor],
) -> Callable[[object, int], torch.Tensor]:
    """Make clear that a partition function does not take NumPy arrays."""

    def checked(full: object, rank: int) -> torch.Tensor:
        if not isinstance(full, torch.Tensor):
            raise TypeError("a torch tensor is needed")
        return partition(full, rank)

    return checked


def assert_same(ours: ParamAffineMap, theirs: ParamAffineMap, *, shapes: bool = True) -> None:
    """Compare pieces, and shapes of shards unless a view has another number of dims."""
    ours.validate()
    canonical = ours.canonical()
    assert dict(canonical.pieces_by_rank) == dict(theirs.pieces_by_rank)
    if shapes:
        assert dict(canonical.shard_shapes) == dict(theirs.shard_shapes)


# ------------------------------------------------------------------------------ widths


NAMES = (None, "lm_head", "embed_out", "model.mlp.fc1", "experts.w2", "self_attn.q_proj", "lm")


@pytest.mark.parametrize("grain", [1, 8])
@pytest.mark.parametrize("kv", [None, 1, 2, 3, 8])
def test_shard_sizes_are_those_of_autotp(kv: int | None, grain: int) -> None:
    from deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size_list

    meta = AutoTPMeta(num_kv_heads=kv, tp_grain_size=grain)
    for total, tp, name in product((1, 5, 24, 97, 144), (1, 2, 3, 4, 8), NAMES):
        expected = get_shard_size_list(total, tp, meta, name)
        found = autotp.shard_sizes(total, tp, kv_heads=kv, grain=grain, layer=name)
        assert list(found) == expected, (total, tp, name)


# ------------------------------------------------------------------------------ plain layers


@dataclass(frozen=True)
class Plain:
    """A layer, and our builder for its weight."""

    layer: str
    ours: Callable[[Shape, int, ModelNumbers, str | None], ParamAffineMap]
    name: str | None = None


PLAIN = (
    Plain("LinearLayer", autotp.column_parallel_map),
    Plain("LinearLayer", autotp.column_parallel_map, "model.layers.0.mlp.up_proj"),
    Plain("VocabParallelLinear", autotp.column_parallel_map, "lm_head"),
    Plain("VocabParallelEmbedding", autotp.column_parallel_map),
    Plain("LinearAllreduce", autotp.row_parallel_map),
    Plain("LinearAllreduceWithReplicatedInput", autotp.row_parallel_map, "lm_head"),
    Plain("HiddenParallelEmbedding", autotp.row_parallel_map),
    Plain("LmHeadLinearAllreduce", autotp.row_parallel_map, "lm_head"),
)


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: f"{case.layer}-{case.name}")
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_plain_layers(case: Plain, tp: int) -> None:
    for shape, kv in product(((24, 12), (7, 24), (13, 5)), (None, 2, 3)):
        numbers = ModelNumbers(kv_heads=kv)
        if min(autotp.shard_sizes(shape[0], tp, layer=case.name)) == 0:
            continue
        theirs = traced(real_layer(case.layer, numbers, name=case.name), shape, tp)
        assert_same(case.ours(shape, tp, numbers, case.name), theirs)


@pytest.mark.parametrize("tp", [2, 3])
def test_biases(tp: int) -> None:
    numbers = ModelNumbers(kv_heads=3)
    column = traced(real_layer("LinearLayer", numbers), (24,), tp, bias=True)
    assert_same(autotp.column_parallel_map((24,), tp, numbers), column)
    row = traced(real_layer("LinearAllreduce", numbers), (24,), tp, bias=True)
    assert_same(autotp.row_bias_map((24,), tp), row)


def test_a_divided_bias_is_a_scaled_piece() -> None:
    """What Megatron forks and DeepSpeed's inference layers do: each rank holds ``bias / tp``."""
    theirs = trace_map(lambda full, _: full / 4, (6,), range(4))
    assert_same(autotp.row_bias_map((6,), 4, divided=True), theirs)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_gate_and_up_packs(tp: int) -> None:
    for shape, kv in product(((12, 3), (26, 2)), (None, 2)):
        numbers = ModelNumbers(kv_heads=kv)
        theirs = traced(real_layer("GateUpPack_LinearLayer", numbers), shape, tp)
        assert_same(autotp.gate_up_map(shape, tp, numbers), theirs)


@pytest.mark.parametrize("tp", [2, 4])
def test_conv1d_layers_as_they_really_cut(tp: int) -> None:
    numbers = ModelNumbers()
    column = traced(real_layer("conv_LinearLayer", numbers), (8, 8), tp)
    assert_same(autotp.conv1d_column_map((8, 8), tp, numbers), column)
    row = traced(real_layer("Conv_LinearALlreduce", numbers), (8, 8), tp)
    assert_same(autotp.conv1d_row_map((8, 8), tp, numbers), row)


# ------------------------------------------------------------------------------ fused weights


def fused_cases() -> Iterator[tuple[str, Shape, int, ModelNumbers]]:
    for tp in (2, 3, 4):
        for heads in (4, 8):
            hidden = 8 * heads
            yield "bloom", (3 * hidden, 5), tp, ModelNumbers(heads, heads, hidden)
            yield "glm", (3 * hidden, 5), tp, ModelNumbers(heads, heads, hidden)
            yield "glm", (hidden + 16, 5), tp, ModelNumbers(2, heads, hidden)
            yield "qwen", (3 * hidden, 5), tp, ModelNumbers(heads, heads, hidden)
            yield "phi3", (hidden + 32, hidden), tp, ModelNumbers(2, heads, hidden)
            yield "bigcode", (hidden + 16, 5), tp, ModelNumbers(heads, heads, hidden)
            yield "bigcode", (hidden + 16, 5), tp, ModelNumbers(1, heads, hidden)
    for tp, heads, hidden in ((2, 8, 8), (2, 8, 64), (2, 16, 32), (4, 16, 32)):
        yield "codegen", (3 * hidden, hidden), tp, ModelNumbers(heads, heads, hidden)


@pytest.mark.parametrize(
    ("kind", "shape", "tp", "numbers"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1]}-tp{case[2]}-kv{case[3].kv_heads}")
        for case in fused_cases()
    ],
)
def test_fused_weights(kind: str, shape: Shape, tp: int, numbers: ModelNumbers) -> None:
    build = real_layer("fused_LinearLayer", numbers, fused_module=BLOCKS[kind])
    assert_same(fused.FUSED_KINDS[kind](shape, tp, numbers), traced(build, shape, tp))


@pytest.mark.parametrize("kind", ["bloom", "glm", "qwen", "phi3", "bigcode"])
def test_fused_biases(kind: str) -> None:
    numbers = ModelNumbers(4, 4, 4)
    build = real_layer("fused_LinearLayer", numbers, fused_module=BLOCKS[kind])
    theirs = traced(build, (12,), 2, bias=True)
    assert_same(fused.FUSED_KINDS[kind]((12,), 2, numbers), theirs)


@pytest.mark.parametrize("kind", ["bloom", "glm", "phi3", "bigcode", "codegen"])
def test_fused_weights_as_the_oldest_function_cuts_them(kind: str) -> None:
    """``prepare_tp_fused_qkvw`` is what inference and older versions use."""
    from deepspeed.module_inject.fusedqkv_utils import prepare_tp_fused_qkvw
    from deepspeed.module_inject.tp_shard import AutoTPMeta

    from tests.layouts.real_layers import block_named

    numbers = ModelNumbers(8, 8, 8)
    meta = AutoTPMeta(num_kv_heads=8, num_attention_heads=8, n_embd=8)

    def cut(full: torch.Tensor, rank: int) -> torch.Tensor:
        shard = prepare_tp_fused_qkvw(block_named(BLOCKS[kind]), full, 2, rank, meta)
        assert isinstance(shard, torch.Tensor)
        return shard

    ours = fused.FUSED_KINDS[kind]((24, 8), 2, numbers)
    assert_same(ours, trace_map(torch_only(cut), (24, 8), range(2)))


@pytest.mark.parametrize(("heads", "tp"), [(4, 2), (8, 2), (8, 4), (6, 2), (10, 2), (6, 3)])
@pytest.mark.parametrize("dim", [0, 1])
def test_shared_qk_heads_even_and_odd(heads: int, tp: int, dim: int) -> None:
    from deepspeed.module_inject.fusedqkv_utils import shard_value_with_share_qk
    from deepspeed.module_inject.tp_shard import AutoTPMeta

    shape = (heads * 2, 3) if dim == 0 else (3, heads * 2)

    def cut(full: torch.Tensor, rank: int) -> torch.Tensor:
        meta = AutoTPMeta(num_kv_heads=heads)
        weight, _ = shard_value_with_share_qk(full, None, rank, tp, dim == 0, meta)
        assert isinstance(weight, torch.Tensor)
        return weight.detach()

    ours = fused.shared_qk_map(shape, heads, tp, dim)
    assert_same(ours, trace_map(torch_only(cut), shape, range(tp)))


# ------------------------------------------------------------------------------ sub-parameters


SUB_PARAMETERS: tuple[tuple[str, Shape, Sequence[object], int], ...] = (
    ("SubParamLinearLayer", (24, 5), (3, -1), 0),
    ("SubParamLinearLayer", (24, 5), ((12, 6, 6), -1), 0),
    ("SubParamLinearLayer", (24, 8), (2, 12, 8), 1),
    ("SubParamLinearLayer", (24, 8), (-1, -1), 0),
    ("SubParamLinearLayer", (24, 8), (4, (4, 2), 8), 1),
    ("SubParamLinearAllreduce", (6, 24), (-1, 2), 1),
    ("SubParamLinearAllreduce", (6, 24), (2, 3, (16, 8)), 2),
)


@pytest.mark.parametrize(("layer", "shape", "view", "dim"), SUB_PARAMETERS)
@pytest.mark.parametrize("tp", [2, 3])
def test_sub_parameters_with_a_logical_view(
    layer: str, shape: Shape, view: Sequence[int], dim: int, tp: int
) -> None:
    for kv in (None, 2):
        numbers = ModelNumbers(kv_heads=kv)
        build = real_layer(layer, numbers, shape=tuple(view), partition_dim=dim)
        ours = sub_param_layer_map(shape, View.of(view, dim), tp, numbers)
        assert_same(ours, traced(build, shape, tp), shapes=False)


@pytest.mark.parametrize("view", [(3, -1), ((12, 6, 6), -1)])
def test_biases_of_sub_parameters(view: Sequence[int]) -> None:
    numbers = ModelNumbers()
    build = real_layer("SubParamLinearLayer", numbers, shape=(*view[:-1], 4), partition_dim=0)
    ours = sub_param_layer_map((24, 4), View.of(view, 0), 2, numbers, bias=True)
    assert_same(ours, traced(build, (24,), 2, bias=True))


# ------------------------------------------------------------------------------ its own maps


def test_the_basic_builders_say_what_deepspeeds_say() -> None:
    from deepspeed.checkpoint import affine

    split = affine.contiguous_split_map((7, 4), [4, 0, 3], 0)
    pairs = (
        (replicated_map((3, 4), 3), affine.replicated_map((3, 4), 3)),
        (contiguous_split_map((7, 4), [4, 0, 3], 0), split),
        (
            sub_param_map((3, 12), [8, 4], [[4, 4], [1, 3]], 1),
            affine.sub_param_map((3, 12), [8, 4], [[4, 4], [1, 3]], 1),
        ),
    )
    for ours, theirs in pairs:
        again = ParamAffineMap.from_dict(theirs.to_dict())
        assert ours.canonical() == again.canonical()


PLACEMENTS = (
    ((0, 1), (2, 3)),
    ((3, 0), (1, 2)),
    ((0, 1, 2, 3), (), (3, 1)),
    ((2,), (0, 1, 2), (3, 2)),
)


@pytest.mark.parametrize("ranks", PLACEMENTS)
def test_expert_maps_are_deepspeeds_to_the_field(ranks: tuple[tuple[int, ...], ...]) -> None:
    """Field by field, because DeepSpeed compares stored maps so."""
    from deepspeed.checkpoint import autoep_affine

    placement = ExpertPlacement(4, ranks)
    descriptor = autoep_affine.make_autoep_placement_descriptor(4, ranks)
    assert placement.to_descriptor() == descriptor
    theirs = autoep_affine.autoep_placement_to_affine_map(descriptor, (4, 3, 2))
    ours = expert_map(descriptor, (4, 3, 2))
    ours.validate()
    assert ours.to_dict() == theirs.to_dict()
