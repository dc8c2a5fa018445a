"""The map path, the key path and DeepSpeed's converter give the same tensor, byte for byte.

The shards are cut by real layers, and the info is what DeepSpeed collects from them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reshard.errors import LayoutError
from reshard.formats.deepspeed.info import read_conversion_keys
from reshard.formats.deepspeed.restore_meta import map_from_restore_meta
from reshard.formats.deepspeed.tensor_parallel import GovernedMap, read_stored_maps
from reshard.formats.parsing import Cursor
from reshard.formats.torch_archive import SubparamShape
from reshard.layouts.autotp import ModelNumbers
from tests.layouts.deepspeed_merge import merged_by_deepspeed
from tests.layouts.real_layers import BLOCKS, collected, real_layer, shard_of

pytestmark = pytest.mark.deepspeed

NAME = "model.embed.weight"


@dataclass(frozen=True)
class Case:
    """One parameter of one real layer."""

    layer: str
    shape: tuple[int, ...]
    numbers: ModelNumbers = field(default_factory=ModelNumbers)
    options: Mapping[str, Any] = field(default_factory=dict)
    bias: bool = False
    keys_suffice: bool = True
    """Whether the old keys describe it; else only its map does."""

    def __str__(self) -> str:
        what = "bias" if self.bias else "weight"
        return f"{self.layer}-{self.options.get('fused_module', '')}-{what}-{self.shape}"

    def layers(self, tp: int, full: torch.Tensor) -> list[nn.Module]:
        build = real_layer(self.layer, self.numbers, **self.options)
        if self.bias:
            weight = torch.zeros(full.numel(), self.numbers.hidden or 4)
            return [build(weight, full.clone(), tp, rank) for rank in range(tp)]
        return [build(full.clone(), None, tp, rank) for rank in range(tp)]

    @property
    def part(self) -> str:
        return "bias" if self.bias else "weight"


def fused(kind: str, shape: tuple[int, ...], numbers: ModelNumbers, **more: Any) -> Case:
    return Case("fused_LinearLayer", shape, numbers, {"fused_module": BLOCKS[kind]}, **more)


HEADS = ModelNumbers(kv_heads=8, heads=8, hidden=16)
CASES = (
    Case("LinearLayer", (24, 6)),
    Case("LinearLayer", (7, 3)),
    Case("LinearLayer", (24, 6), ModelNumbers(kv_heads=3)),
    Case("LinearLayer", (24,), bias=True),
    Case("VocabParallelLinear", (97, 4), options={"name": "lm_head"}),
    Case("VocabParallelEmbedding", (97, 4)),
    Case("HiddenParallelEmbedding", (97, 6)),
    Case("LinearAllreduce", (6, 24), ModelNumbers(kv_heads=3)),
    Case("LinearAllreduce", (5, 7)),
    Case("LinearAllreduce", (6,), bias=True),
    Case("LmHeadLinearAllreduce", (9, 10)),
    Case("GateUpPack_LinearLayer", (12, 4)),
    Case("GateUpPack_LinearLayer", (12,), bias=True),
    Case("SubParamLinearLayer", (24, 4), options={"shape": (3, -1), "partition_dim": 0}),
    Case("SubParamLinearLayer", (24, 4), options={"shape": ((16, 4, 4), -1), "partition_dim": 0}),
    Case("SubParamLinearLayer", (24, 8), options={"shape": (2, 12, 8), "partition_dim": 1}),
    Case("SubParamLinearLayer", (24,), options={"shape": (3, 4), "partition_dim": 0}, bias=True),
    Case("SubParamLinearAllreduce", (6, 24), options={"shape": (-1, 2), "partition_dim": 1}),
    fused("bloom", (48, 6), HEADS),
    fused("glm", (48, 6), HEADS),
    fused("glm", (24, 6), ModelNumbers(kv_heads=2, heads=8, hidden=16)),
    fused("phi3", (24, 16), ModelNumbers(kv_heads=2, heads=8, hidden=16)),
    fused("qwen", (48, 6), HEADS),
    fused("qwen", (48,), HEADS, bias=True),
    fused("bigcode", (24, 6), HEADS, keys_suffice=False),
    fused("bigcode", (24,), HEADS, bias=True, keys_suffice=False),
    fused("codegen", (96, 8), ModelNumbers(16, 16, 32), keys_suffice=False),
    Case("Yuan_LinearLayer", (16, 4), HEADS, keys_suffice=False),
    Case("Yuan_LinearLayer", (16,), HEADS, bias=True, keys_suffice=False),
    Case("Yuan_LinearAllreduce", (4, 16), HEADS, keys_suffice=False),
)


def full_tensor(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def governed_by_map(info: Mapping[str, Any], shards: Sequence[torch.Tensor]) -> GovernedMap:
    cursor = Cursor(info, "info")
    degree = len(shards)
    stored = read_stored_maps(cursor, read_conversion_keys(cursor, degree))
    assert stored is not None
    found = stored.map_of(NAME, shapes_of(shards), degree)
    assert found is not None
    return found


def governed_by_keys(info: Mapping[str, Any], shards: Sequence[torch.Tensor]) -> GovernedMap:
    degree = len(shards)
    found = read_conversion_keys(Cursor(info, "info"), degree).map_of(
        NAME, shapes_of(shards), degree
    )
    assert found is not None
    return found


def shapes_of(shards: Sequence[torch.Tensor]) -> dict[int, tuple[int, ...]]:
    """Shapes as the files have them: a rank without elements is not listed."""
    return {rank: tuple(shard.shape) for rank, shard in enumerate(shards) if shard.numel()}


def rebuilt(governed: GovernedMap, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    held = {rank: shard for rank, shard in enumerate(shards) if shard.numel()}
    found = governed.map.rebuild(held)
    assert isinstance(found, torch.Tensor)
    return found


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.contiguous().numpy().tobytes() == (
        other.contiguous().numpy().tobytes()
    )


def renamed(info: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Let the collected patterns be about :data:`NAME`."""
    text = {f"^m\\.{part}$": "^model\\.embed\\.weight$"}

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return text.get(value, value)
        if isinstance(value, dict):
            return {walk(key): walk(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(walk(item) for item in value)
        return value

    made = walk(dict(info))
    assert isinstance(made, dict)
    return made


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_ways_give_one_tensor(case: Case, tp: int, tmp_path: Path) -> None:
    full = full_tensor(case.shape)
    layers = case.layers(tp, full)
    shards = [shard_of(layer, case.part) for layer in layers]
    info = renamed(collected(layers[0], "m"), case.part)
    theirs = merged_by_deepspeed(info, NAME, shards, tmp_path / "map")["param"]
    assert same_bytes(rebuilt(governed_by_map(info, shards), shards), theirs)
    assert same_bytes(theirs.reshape(case.shape), full)
    old = {key: value for key, value in info.items() if key != "affine_map"}
    if case.keys_suffice:
        merged = merged_by_deepspeed(old, NAME, shards, tmp_path / "keys")
        governed = governed_by_keys(old, shards)
        assert same_bytes(rebuilt(governed, shards), merged.pop("param"))
        assert same_keys(governed.restore_keys, merged)


def same_keys(ours: Mapping[str, object], theirs: Mapping[str, Any]) -> bool:
    """Whether we would write what DeepSpeed writes beside the tensor."""
    if list(ours) != list(theirs):
        return False
    return all(
        value == theirs[key]
        if not isinstance(value, SubparamShape)
        else (list(value.patterns), value.shape, value.partition_dim)
        == (list(theirs[key].patterns), theirs[key].shape, theirs[key].partition_dim)
        for key, value in ours.items()
    )


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_restore_keys_give_the_shards_of_the_layer(case: Case, tp: int) -> None:
    full = full_tensor(case.shape)
    for rank, layer in enumerate(case.layers(tp, full)):
        meta = dict(getattr(layer, case.part).ds_autotp_universal_checkpoint_meta)
        expected = shard_of(layer, case.part)
        with_map = map_from_restore_meta(meta, tp)
        assert same_bytes(with_map.extract(full, rank).reshape(expected.shape), expected)
        if not case.keys_suffice:
            continue
        meta["conversion"] = {}
        from_keys = map_from_restore_meta(meta, tp)
        assert same_bytes(from_keys.extract(full, rank).reshape(expected.shape), expected)


def test_fewer_heads_than_ranks(tmp_path: Path) -> None:
    """Two key/value heads over four ranks: two ranks hold nothing, and no file lists them."""
    case = Case("LinearLayer", (16, 4), ModelNumbers(kv_heads=2))
    full = full_tensor(case.shape)
    layers = case.layers(4, full)
    shards = [shard_of(layer) for layer in layers]
    assert [shard.shape[0] for shard in shards] == [8, 8, 0, 0]
    info = renamed(collected(layers[0], "m"), "weight")
    theirs = merged_by_deepspeed(info, NAME, shards, tmp_path)["param"]
    assert same_bytes(rebuilt(governed_by_map(info, shards), shards), theirs)
    old = {key: value for key, value in info.items() if key != "affine_map"}
    assert same_bytes(rebuilt(governed_by_keys(old, shards), shards), theirs)


# ------------------------------------------------------------------------------ false maps


def test_a_false_map_of_a_convolution_is_refused_with_the_cut_that_fits() -> None:
    case = Case("conv_LinearLayer", (8, 8))
    layers = case.layers(2, full_tensor(case.shape))
    shards = [shard_of(layer) for layer in layers]
    info = renamed(collected(layers[0], "m"), "weight")
    with pytest.raises(LayoutError, match=r"does not fit the shard.*split of dim 1"):
        governed_by_map(info, shards)


def test_a_layout_that_autotp_could_not_describe_is_refused_with_its_reason() -> None:
    """Yuan with an odd number of heads a rank."""
    case = Case("Yuan_LinearLayer", (12, 4), ModelNumbers(kv_heads=6))
    layers = case.layers(2, full_tensor(case.shape))
    info = renamed(collected(layers[0], "m"), "weight")
    keys = read_conversion_keys(Cursor(info, "info"), 2)
    assert keys.map_of(NAME, shapes_of([shard_of(layer) for layer in layers]), 2) is None
    assert "noncontiguous head groups" in (keys.why_not(NAME) or "")


# ------------------------------------------------------------------------------ client infos


def megatron_info(**more: Any) -> dict[str, Any]:
    return {"universal_checkpoint_version": 0.2, **more}


def halves(full: torch.Tensor, tp: int) -> list[torch.Tensor]:
    """What Megatron's SwiGLU layer holds: a part of gate, then a part of up."""
    gate, up = full.chunk(2)
    return [torch.cat((gate.chunk(tp)[r], up.chunk(tp)[r])) for r in range(tp)]


def thirds(full: torch.Tensor, tp: int) -> list[torch.Tensor]:
    parts = full.chunk(3)
    return [torch.cat([part.chunk(tp)[r] for part in parts]) for r in range(tp)]


def subparam_class(patterns: list[str], shape: tuple[Any, ...], dim: int) -> dict[str, Any]:
    return {"patterns": patterns, "shape": shape, "partition_dim": dim}


CLIENT_CASES = (
    ("tp_replicated_parameter_patterns", [NAME], lambda full, tp: [full.clone()] * tp),
    ("parameter_with_row_parallelism_patterns", [NAME], lambda full, tp: list(full.chunk(tp, 1))),
    ("parameter_with_2_sub_params_cat_dim_0", [NAME], halves),
    ("vocabulary_parameter_patterns", [NAME], lambda full, tp: list(full.chunk(tp))),
    ("parameter_with_sub_params", [subparam_class([NAME], (3, -1), 0)], thirds),
    ("parameter_with_sub_params", [subparam_class([NAME], (3, 8), 0)], thirds),
    ("parameter_with_sub_params", [subparam_class([NAME], ((8, 8, 8), 8), 0)], thirds),
    ("parameter_with_sub_params", [subparam_class(["x", NAME], ((8, 8, 8), -1), 0)], thirds),
    ("parameter_to_average_patterns", [NAME], lambda full, tp: [full.clone()] * tp),
    ("some_key_of_the_client", [NAME], lambda full, tp: list(full.chunk(tp))),
)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("key", "value", "cut"), CLIENT_CASES)
def test_client_keys_join_as_deepspeed_joins(
    key: str, value: list[Any], cut: Any, tp: int, tmp_path: Path
) -> None:
    full = full_tensor((24, 8))
    shards = cut(full, tp)
    info = megatron_info(original_vocab_size=21, **{key: value})
    merged = merged_by_deepspeed(info, NAME, shards, tmp_path)
    keys = read_conversion_keys(Cursor(info, "info"), tp, frozenset({NAME}))
    governed = keys.map_of(NAME, shapes_of(shards), tp)
    if governed is None:
        assert tp == 1
        return
    assert same_bytes(rebuilt(governed, shards), merged.pop("param"))
    assert same_keys(governed.restore_keys, merged)


def test_padding_rows_are_not_read() -> None:
    full = full_tensor((12, 8))
    shards = list(full.chunk(2))
    info = megatron_info(original_vocab_size=9, vocabulary_parameter_patterns=[NAME])
    governed = governed_by_keys(info, shards)
    assert governed.map.logical_shape == (9, 8)
    poisoned = [shards[0], torch.cat((shards[1][:3], torch.full((3, 8), torch.nan)))]
    assert same_bytes(rebuilt(governed, poisoned), full[:9])
    assert governed.whole.logical_shape == (12, 8)


def test_sub_param_shapes_may_be_pickled_objects(tmp_path: Path) -> None:
    made = importlib.import_module("deepspeed.checkpoint.universal_checkpoint").SubparamShape(
        patterns=[NAME], shape=((4, 4, 4), 8), partition_dim=0
    )
    file = tmp_path / "info.pt"
    torch.save({"info": megatron_info(parameter_with_sub_params=[made])}, file)
    from reshard.formats.torch_archive import read_archive

    info = Cursor(read_archive(file).root, str(file)).at("info")
    full = full_tensor((12, 8))
    shards = thirds(full, 2)
    governed = read_conversion_keys(info, 2).map_of(NAME, shapes_of(shards), 2)
    assert governed is not None
    assert same_bytes(rebuilt(governed, shards), full)
