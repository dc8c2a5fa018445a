"""The pattern keys: what each means, and what is refused before a byte is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard.errors import CheckpointError, LayoutError
from reshard.formats.deepspeed.conversion_keys import ConversionKeys
from reshard.formats.deepspeed.info import read_conversion_keys
from reshard.formats.layout_source import Layouts, OneShard
from reshard.formats.parsing import Cursor
from tests.formats.edited import converted, opened, own, with_info, without_map, wrong_states
from tests.truth import Case, by_name, cases

Shapes = Mapping[str, Mapping[int, tuple[int, ...]]]


def keys_of(info: dict[str, Any], degree: int = 2, *waived: str) -> ConversionKeys:
    return read_conversion_keys(Cursor(info, "mp_rank_00.pt"), degree, frozenset(waived))


def same(shape: tuple[int, ...], degree: int = 2) -> dict[int, tuple[int, ...]]:
    return dict.fromkeys(range(degree), shape)


# ------------------------------------------------------------------------------ real checkpoints


def cut_cases() -> list[Case]:
    """Cases that the old keys describe: no fused layouts, which only a map can say."""
    return [
        case
        for case in (own("megatron_tp2dp2"), *cases())
        if case.tp > 1
        and case.model in ("llama", "megatron")
        and case.tp_is_described
        and case.is_zero
        and not case.drifts
    ]


@pytest.mark.parametrize("case", by_name(cut_cases()))
def test_the_key_path_gives_the_truth(case: Case, tmp_path: Path) -> None:
    """As DeepSpeed 0.18.9 to 0.19.6 leave a checkpoint: keys, and no map."""
    tag = with_info(case, tmp_path, without_map)
    checkpoint = opened(tag)
    assert not any("stored map" in tensor.provenance for tensor in checkpoint.tensors.values())
    assert wrong_states(case, converted(checkpoint, tmp_path / "out")) == []


@pytest.mark.parametrize("case", by_name(case for case in cut_cases() if case.model == "megatron"))
def test_a_universal_folder_has_what_a_megatron_loader_needs(case: Case, tmp_path: Path) -> None:
    out = converted(opened(case.tag_path), tmp_path / "out")
    width = case.truth().full["attn.dense.bias"]["fp32"].numel()
    expected = {
        "embedding.word_embeddings.weight": {"cat_dim": 0, "vocab_tensor": True},
        "attn.query_key_value.weight": {"sub_param_shape": ((width,) * 3, width)},
        "attn.query_key_value.bias": {"sub_param_shape": ((width,) * 3,)},
        "attn.dense.weight": {"cat_dim": 1},
        "attn.dense.bias": {},
        "mlp.dense_h_to_4h.weight": {"cat_dim": 0, "param_n_sub_params": 2},
        "mlp.dense_4h_to_h.weight": {"cat_dim": 1},
        "input_layernorm.weight": {},
    }
    for name, keys in expected.items():
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            written = torch.load(out / "zero" / name / f"{state}.pt", weights_only=False)
            assert written.pop("param").dtype == torch.float32
            shape = written.get("sub_param_shape")
            if shape is not None:
                written["sub_param_shape"] = shape.shape
                assert shape.partition_dim == 0
            assert written == keys, name


# ------------------------------------------------------------------------------ strictness


def objections(keys: ConversionKeys, shapes: Shapes) -> str:
    """Return everything that is objected to, as the user reads it."""
    layouts = Layouts((keys,), keys.degree, "mp_rank_00.pt")
    try:
        layouts.require_used(frozenset(shapes))
        layouts.require_clear(shapes)
    except LayoutError as error:
        return str(error)
    return ""


MEGATRON: Shapes = {
    "0.qkv.weight": same((12, 4)),
    "0.qkv.bias": same((12,)),
    "0.dense.weight": same((4, 2)),
    "0.dense.bias": same((4,)),
    "0.norm.weight": same((4,)),
}


def megatron_info(**more: Any) -> dict[str, Any]:
    return {
        "universal_checkpoint_version": 0.2,
        "tp_replicated_parameter_patterns": [r".*norm\.weight", r".*dense\.bias"],
        "parameter_with_row_parallelism_patterns": [r".*dense\.weight"],
        **more,
    }


def test_column_parallel_parameters_need_no_pattern() -> None:
    """Megatron names what is replicated or cut on dim 1, and leaves the rest out."""
    keys = keys_of(megatron_info())
    assert objections(keys, MEGATRON) == ""
    found = keys.map_of("0.qkv.bias", same((12,)), 2)
    assert found is not None
    assert found.map.logical_shape == (24,)
    assert found.provenance == "no pattern, so one after the other on dim 0"
    assert list(keys.notes(MEGATRON)) == [
        "2 parameters have no pattern, so one after the other on dim 0: 0.qkv.weight, 0.qkv.bias"
    ]


def test_a_vector_that_the_lists_forget_is_refused() -> None:
    shapes = {**MEGATRON, "0.other_norm.scale": same((4,))}
    assert "no pattern covers 0.other_norm.scale" in objections(keys_of(megatron_info()), shapes)
    assert objections(keys_of(megatron_info(), 2, "0.other_norm.scale"), shapes) == ""


def test_the_bias_of_a_matrix_with_a_pattern_does_not_follow_it_silently() -> None:
    info = megatron_info(parameter_with_2_sub_params_cat_dim_0=[r".*qkv\.weight"])
    assert "no pattern covers 0.qkv.bias" in objections(keys_of(info), MEGATRON)


def test_patterns_that_match_nothing_are_refused_all_at_once() -> None:
    info = megatron_info(
        parameter_with_row_parallelism_patterns=[r".*dense\.weight", r".*dence\.weight"],
        vocabulary_parameter_patterns=["word_embeddings"],
    )
    text = objections(keys_of(info), MEGATRON)
    assert "parameter_with_row_parallelism_patterns '.*dence" in text
    assert "vocabulary_parameter_patterns 'word_embeddings'" in text
    assert "waive" in text
    assert objections(keys_of(info, 2, r".*dence\.weight", "word_embeddings"), MEGATRON) == ""


def test_one_waiver_does_not_waive_the_next() -> None:
    info = megatron_info(vocabulary_parameter_patterns=["one", "two"])
    text = objections(keys_of(info, 2, "one"), MEGATRON)
    assert "'two'" in text
    assert "'one'" not in text


def test_a_waiver_of_nothing_is_refused() -> None:
    text = objections(keys_of(megatron_info(), 2, "0.nrom.weight"), MEGATRON)
    assert "neither a pattern nor a parameter: '0.nrom.weight'" in text


def test_two_patterns_for_one_parameter_are_refused() -> None:
    info = megatron_info(parameter_with_row_parallelism_patterns=[r".*dense\..*"])
    text = objections(keys_of(info), MEGATRON)
    assert "0.dense.bias is matched by tp_replicated_parameter_patterns" in text
    assert objections(keys_of(info, 2, "0.dense.bias"), MEGATRON) == ""


def test_a_row_parallel_weight_of_sub_parameters_is_in_two_lists_by_right() -> None:
    entry = {"patterns": [r".*dense\.weight"], "shape": (-1, 2), "partition_dim": 1}
    keys = keys_of(megatron_info(parameter_with_sub_params=[entry]))
    assert objections(keys, MEGATRON) == ""
    found = keys.map_of("0.dense.weight", same((4, 2)), 2)
    assert found is not None
    assert "parameter_with_sub_params" in found.provenance
    assert len(found.map.pieces_by_rank[0]) == 2


def test_an_empty_info_says_nothing() -> None:
    """What DeepSpeed injects, and then concatenates everything."""
    keys = keys_of({"universal_checkpoint_version": 0.4})
    assert keys.map_of("w", same((4, 4)), 2) is None
    assert objections(keys, {"w": same((4, 4))}) == ""


def test_an_average_is_a_replica_that_must_not_differ() -> None:
    keys = keys_of(megatron_info(parameter_to_average_patterns=["router"]))
    found = keys.map_of("router", same((4, 4)), 2)
    assert found is not None
    assert found.map.pieces_by_rank[0][0].locations == (0, 1)
    assert "parameter_to_average_patterns" in found.provenance


def test_unsupported_parameters_are_refused_with_their_reasons() -> None:
    info = {"autotp_unsupported_parameter_patterns": {r"^v\.weight$": "it interleaves heads"}}
    keys = keys_of(info)
    assert keys.map_of("v.weight", same((4, 4)), 2) is None
    text = str(Layouts((keys,), 2, "f.pt").unknown({"v.weight": same((4, 4))}))
    assert "AutoTP could not describe it: it interleaves heads" in text
    assert "--layout" in text


def test_experts_are_not_described_by_tensor_parallel_keys() -> None:
    info = {
        "expert_parameter_patterns": [r".*\.experts\.w[123]$"],
        "tp_replicated_parameter_patterns": [r"^l\.experts\.w1$"],
    }
    keys = keys_of(info)
    assert keys.map_of("l.experts.w1", same((2, 4, 4)), 2) is None
    assert "expert-parallel" in (keys.why_not("l.experts.w1") or "")


# ------------------------------------------------------------------------------ versions, shapes


def sub_params(version: float, shape: object, **more: Any) -> dict[str, Any]:
    entry = {"patterns": ["qkv"], "shape": shape, "partition_dim": 0}
    return {
        "universal_checkpoint_version": version,
        "parameter_with_sub_params": [entry],
        **more,
    }


@pytest.mark.parametrize(
    "shape", [(3, -1), [3, -1], ((4, 4, 4), -1), [[4, 4, 4], 5], ((4, 4, 4), 5)]
)
def test_spellings_of_sub_parameters_mean_the_same(shape: object) -> None:
    found = keys_of(sub_params(0.3, shape)).map_of("qkv", same((6, 5)), 2)
    assert found is not None
    rows = [piece.source_offset // 5 for piece in found.map.pieces_by_rank[1]]
    assert (found.map.logical_shape, rows) == ((12, 5), [2, 6, 10])


def test_widths_say_uneven_splits() -> None:
    widths = {"qkv": [[3, 1], [2, 0], [1, 1]]}
    info = sub_params(0.4, [(4, 2, 2), -1], sub_param_shard_widths=widths)
    found = keys_of(info).map_of("qkv", {0: (6, 5), 1: (2, 5)}, 2)
    assert found is not None
    # The second part of rank 0 is whole, so it and the third follow each other.
    assert [piece.shape[0] for piece in found.map.pieces_by_rank[0]] == [3, 3]
    assert [piece.source_offset // 5 for piece in found.map.pieces_by_rank[1]] == [3, 7]


@pytest.mark.parametrize(
    ("info", "shards", "says"),
    [
        (sub_params(0.4, ((4, 4), 5)), same((4, 5)), "widths are not stated"),
        (sub_params(0.3, ((5, 3), 5)), same((4, 5)), "do not divide by the ranks"),
        (sub_params(0.3, (5, -1)), same((6, 5)), "do not add up"),
        (sub_params(0.3, (-1, 4, -1)), same((6, 5)), "does not fit"),
        ({"parameter_with_2_sub_params_cat_dim_0": ["qkv"]}, same((3, 2)), "does not divide"),
        ({"tp_replicated_parameter_patterns": ["qkv"]}, {0: (4,), 1: (3,)}, "not one shape"),
        ({"parameter_with_row_parallelism_patterns": ["qkv"]}, same((4,)), "no such dim"),
        ({"vocabulary_parameter_patterns": ["qkv"]}, same((4, 2)), "original_vocab_size"),
    ],
)
def test_keys_that_contradict_the_shards_are_refused(
    info: dict[str, Any], shards: dict[int, tuple[int, ...]], says: str
) -> None:
    with pytest.raises(LayoutError, match=says) as caught:
        keys_of(info).map_of("qkv", shards, 2)
    assert caught.value.parameter == "qkv"
    assert "mp_rank_00.pt" in str(caught.value)


@pytest.mark.parametrize(
    "info",
    [
        {"tp_replicated_parameter_patterns": "not a list"},
        {"tp_replicated_parameter_patterns": [1]},
        {"tp_replicated_parameter_patterns": ["("]},
        {"parameter_with_sub_params": [{"patterns": ["x"], "shape": (2, -1)}]},
        {"parameter_with_sub_params": [{"patterns": ["x"], "shape": (2, -2), "partition_dim": 0}]},
        {"original_vocab_size": 0, "vocabulary_parameter_patterns": ["x"]},
    ],
)
def test_malformed_infos_are_refused_with_the_path(info: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"mp_rank_00\.pt"):
        keys_of(info)


def test_autotp_never_pads() -> None:
    """``original_vocab_size`` is the extent of whichever table came first; others may be longer."""
    info = {
        "autotp_unsupported_parameter_patterns": {},
        "vocabulary_parameter_patterns": ["^embed_positions$", "^lm_head$"],
        "original_vocab_size": 10,
    }
    found = keys_of(info).map_of("lm_head", same((20, 4)), 2)
    assert found is not None
    assert found.map.logical_shape == (40, 4)
    assert found.restore_keys == {"cat_dim": 0, "vocab_tensor": True}


def test_one_tensor_rank_still_pads_and_still_tells_the_loader() -> None:
    info = {
        "parameter_with_row_parallelism_patterns": ["dense"],
        "vocabulary_parameter_patterns": ["embed"],
        "original_vocab_size": 5,
    }
    layouts = Layouts((keys_of(info, 1), OneShard()), 1, "f.pt")
    embed, dense, norm = (layouts.map_of(name, {0: (8, 4)}) for name in ("embed", "dense", "norm"))
    assert embed is not None
    assert dense is not None
    assert norm is not None
    assert embed.map.logical_shape == (5, 4)
    assert dense.restore_keys == {"cat_dim": 1}
    assert norm.provenance == "one tensor-parallel rank"
