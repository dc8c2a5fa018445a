"""Layouts that the user states: the file, the words, and old checkpoints that need them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from reshard.api.selection import select
from reshard.errors import (
    CheckpointError,
    DocumentError,
    LayoutError,
    MissingFileError,
    ReplicaMismatchError,
    ReshardError,
    ScaledStateError,
    UsageError,
)
from reshard.formats.layout_source import Layouts
from reshard.formats.layout_words import WORDS
from reshard.formats.stated_layouts import StatedLayouts, read_stated_layouts
from reshard.geometry import ParamAffineMap, maps_to_document
from reshard.layouts.builders import contiguous_split_map, replicated_map
from reshard.layouts.fused import FUSED_KINDS
from tests.formats.edited import (
    LLAMA,
    converted,
    nothing,
    opened,
    own,
    stated,
    with_info,
    wrong_states,
)
from tests.truth import Case, by_name, case_named, cases, with_undescribed_cuts

needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is of Python 3.11")


def written(folder: Path, content: object, name: str = "layouts.json") -> StatedLayouts:
    file = folder / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_stated_layouts(file)


def map_by(
    folder: Path, rule: object, shards: dict[int, tuple[int, ...]], degree: int = 2
) -> ParamAffineMap:
    found = written(folder, {"layouts": {"w": rule}}).map_of("w", shards, degree)
    assert found is not None
    return found.map


# ------------------------------------------------------------------------------ old checkpoints


OLD_HEAD = """'lm_head\\.weight' = "replicated"\n"""
NEW_HEAD = """'lm_head\\.weight' = "column_parallel"\n"""


@needs_toml
@pytest.mark.parametrize("case", by_name(with_undescribed_cuts()))
def test_checkpoints_without_metadata_convert_by_a_file(case: Case, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"21 parameters .* not known.*--layout"):
        opened(case.tag_path)
    checkpoint = opened(case.tag_path, stated(tmp_path, LLAMA + OLD_HEAD))
    assert wrong_states(case, converted(checkpoint, tmp_path / "out")) == []
    assert {tensor.provenance.split(" for ")[0] for tensor in checkpoint.tensors.values()} == {
        "stated: replicated",
        "stated: column_parallel",
        "stated: row_parallel",
    }


GOLDEN_LLAMAS = [
    case for case in cases() if case.name.startswith("golden/llama") and "frozen" not in case.name
]


@needs_toml
@pytest.mark.parametrize("case", by_name(GOLDEN_LLAMAS))
def test_a_checkpoint_that_lost_its_metadata_converts_by_a_file(case: Case, tmp_path: Path) -> None:
    """Uneven heads, empty shards, tied heads, biases, ZeRO-1 to 3."""
    text = LLAMA + ("" if "tied" in case.name else NEW_HEAD)
    if "tied" in case.name:
        text = text.replace(
            'embed_tokens\\.weight\' = "replicated"', 'embed_tokens\\.weight\' = "column_parallel"'
        )
        text += "'.*\\.(o|down)_proj\\.bias' = \"replicated\"\n"
    text = (
        text
        if case.topology.get("bias") or "bias" in case.name
        else text.replace("(weight|bias)", "weight")
    )
    tag = with_info(case, tmp_path, nothing)
    out = converted(opened(tag, stated(tmp_path, text)), tmp_path / "out")
    assert wrong_states(case, out) == []


@needs_toml
def test_a_wrong_replica_is_caught_by_comparing(tmp_path: Path) -> None:
    case = case_named("golden/llama_z1_tp2dp2_fp32")
    text = LLAMA.replace("(weight|bias)", "weight") + NEW_HEAD
    text = text.replace("(o|down)_proj", "down_proj") + "'.*o_proj\\.weight' = \"replicated\"\n"
    tag = with_info(case, tmp_path, nothing)
    with pytest.raises(ReplicaMismatchError, match="o_proj"):
        converted(opened(tag, stated(tmp_path, text)), tmp_path / "out")


@needs_toml
def test_what_is_stated_counts_before_what_is_stored(tmp_path: Path) -> None:
    case = case_named("golden/llama_z1_tp2dp2_fp32")
    one = stated(tmp_path, "[layouts]\n'.*\\.q_proj\\.weight' = \"column_parallel\"\n")
    checkpoint = opened(case.tag_path, one)
    told = {tensor.provenance.split(" for ")[0] for tensor in checkpoint.tensors.values()}
    assert told == {"stored map", "stated: column_parallel"}
    assert wrong_states(case, converted(checkpoint, tmp_path / "out")) == []


BIGCODE = """
[layouts]
'.*c_attn\\.(weight|bias)' = { layout = "fused_qkv", kind = "bigcode", kv_heads = 4, hidden = 16 }
"""

YUAN = """
[layouts]
'.*v_proj\\.(weight|bias)' = { layout = "shared_qk", num_heads = 6, partition_dim = 0 }
'.*o_proj\\.weight' = { layout = "shared_qk", num_heads = 6, partition_dim = 1 }
"""


@needs_toml
def test_what_autotp_could_not_describe_converts_when_stated(tmp_path: Path) -> None:
    """Yuan with three heads a rank: two value heads are on both ranks, and DeepSpeed stops."""
    case = own("yuan_tp2_odd")
    with pytest.raises(LayoutError, match=r"could not describe it: Yuan shared-QK.*--layout"):
        opened(case.tag_path)
    checkpoint = opened(case.tag_path, stated(tmp_path, YUAN))
    weight = checkpoint.tensors["model.layers.0.self_attn.v_proj.weight", "fp32"]
    assert len(weight.map.holders(0)) == 1
    assert len(weight.map.holders(weight.numel // 6)) == 2
    assert wrong_states(case, converted(checkpoint, tmp_path / "out")) == []


@pytest.mark.parametrize("policy", ["first", "mean"])
@pytest.mark.parametrize(
    "source", ["stored map", pytest.param("stated: fused_qkv", marks=needs_toml)]
)
def test_drifting_replicas_convert_by_the_users_choice_alone(
    source: str, policy: str, tmp_path: Path
) -> None:
    """GPTBigCode: the shared key and value rows get partial gradients and drift."""
    case = own("bigcode_tp2")
    layouts = stated(tmp_path, BIGCODE) if source != "stored map" else None
    checkpoint = opened(case.tag_path, layouts)
    name = "transformer.h.0.attn.c_attn.weight"
    assert checkpoint.tensors[name, "fp32"].provenance.startswith(source)
    with pytest.raises(ReplicaMismatchError, match=r"c_attn.*elements.*--replicas first"):
        converted(checkpoint, tmp_path / "refused")
    out = converted(checkpoint, tmp_path / "out", replicas=policy)
    found = torch.load(out / f"zero/{name}/fp32.pt", weights_only=False)["param"]
    full = case.truth().full[name]["fp32"]
    assert torch.equal(found[:16], full[:16])
    assert torch.equal(found[16:], full[16:]) == (policy == "first")


SCALED = """
[layouts]
'attn\\.dense\\.bias' = { layout = "replicated", scale = %s }
"""


@needs_toml
@pytest.mark.parametrize("scale", [0.25, 0.5, 1 / 3, 1 / 6, 1 / 12])
def test_a_scaled_parameter_converts_and_its_moments_do_not(scale: float, tmp_path: Path) -> None:
    """Exact for powers of two; else the last bit may be another."""
    case = own("megatron_tp2dp2")
    checkpoint = opened(case.tag_path, stated(tmp_path, SCALED % scale))
    with pytest.raises(ScaledStateError, match=r"optimizer state.*attn\.dense\.bias.*exp_avg"):
        converted(checkpoint, tmp_path / "refused")
    out = converted(select(checkpoint, states=["fp32"]), tmp_path / "out")
    found = torch.load(out / "zero/attn.dense.bias/fp32.pt", weights_only=False)["param"]
    held = case.truth().full["attn.dense.bias"]["fp32"]
    if scale in (0.25, 0.5):
        assert torch.equal(found, held / scale)
        assert torch.equal(found * scale, held)
    else:
        assert torch.allclose(found, held / scale, rtol=2**-23, atol=0)
        assert torch.allclose(found * scale, held, rtol=2**-22, atol=0)


# ------------------------------------------------------------------------------ words


def test_every_word_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text()
    assert [word for word in WORDS if f"`{word}`" not in text] == []
    assert [kind for kind in FUSED_KINDS if f"`{kind}`" not in text] == []


@pytest.mark.parametrize(
    ("rule", "shards", "rows"),
    [
        ("replicated", {0: (4, 1), 1: (4, 1)}, [(0, 4)]),
        ("column_parallel", {0: (4, 1), 1: (2, 1)}, [(4, 2)]),
        ({"layout": "contiguous_split", "partition_dim": 0}, {0: (4, 1), 1: (2, 1)}, [(4, 2)]),
        (
            {"layout": "contiguous_split", "partition_dim": 0, "per_rank_sizes": [4, 2]},
            {0: (4, 1), 1: (2, 1)},
            [(4, 2)],
        ),
        ("gate_up", {0: (4, 1), 1: (2, 1)}, [(2, 1), (5, 1)]),
        (
            {"layout": "sub_param", "partition_dim": 0, "sub_params": 3},
            {0: (3, 1), 1: (3, 1)},
            [(1, 1), (3, 1), (5, 1)],
        ),
        (
            {"layout": "sub_param", "partition_dim": 0, "sub_dim_sizes": [4, 2]},
            {0: (3, 1), 1: (3, 1)},
            [(2, 2), (5, 1)],
        ),
        (
            {
                "layout": "sub_param",
                "partition_dim": 0,
                "sub_dim_sizes": [4, 2],
                "shard_widths": [[1, 3], [1, 1]],
            },
            {0: (2, 1), 1: (4, 1)},
            [(1, 3), (5, 1)],
        ),
        (
            {"layout": "sub_param", "partition_dim": 1, "view": [2, -1, 1]},
            {0: (4, 1), 1: (4, 1)},
            [(2, 4)],
        ),
        (
            {
                "layout": "segmented",
                "partition_dim": 0,
                "segments": [[4, "split"], [2, "replicated"]],
            },
            {0: (5, 1), 1: (3, 1)},
            [(3, 1), (4, 2)],
        ),
        (
            {
                "layout": "block_gather",
                "partition_dim": 0,
                "block_size": 2,
                "block_ids_by_rank": [[0, 3], [2, 1]],
            },
            {0: (4, 1), 1: (4, 1)},
            [(4, 2), (2, 2)],
        ),
        (
            {"layout": "fused_qkv", "kind": "bigcode", "kv_heads": 4, "hidden": 4},
            {0: (4, 1), 1: (4, 1)},
            [(2, 2), (4, 2)],
        ),
        (
            {"layout": "fused_qkv", "kind": "glm", "kv_heads": 4},
            {0: (6, 1), 1: (6, 1)},
            [(2, 2), (6, 2), (10, 2)],
        ),
        (
            {"layout": "shared_qk", "num_heads": 6, "partition_dim": 0},
            {0: (4, 1), 1: (4, 1)},
            [(1, 1), (2, 1), (4, 1), (5, 1)],
        ),
        (
            {"layout": "map", **contiguous_split_map((6, 1), [4, 2], 0).to_dict()},
            {0: (4, 1), 1: (2, 1)},
            [(4, 2)],
        ),
    ],
)
def test_words(
    rule: object, shards: dict[int, tuple[int, ...]], rows: list[tuple[int, int]], tmp_path: Path
) -> None:
    """What rank 1 holds, as first row and number of rows; columns are one wide."""
    found = map_by(tmp_path, rule, shards)
    found.validate()
    assert [(p.source_offset, p.numel) for p in found.pieces_by_rank[1]] == rows


def test_row_parallel_and_fewer_shards_than_ranks(tmp_path: Path) -> None:
    found = map_by(tmp_path, "row_parallel", {0: (2, 3), 1: (2, 3)}, 4)
    assert dict(found.shard_shapes) == {0: (2, 3), 1: (2, 3), 2: (2, 0), 3: (2, 0)}


def test_the_worked_example_of_scale(tmp_path: Path) -> None:
    """Specification §2.1: a row-parallel bias at world size 4, number by number."""
    rule = {"layout": "replicated", "scale": 0.25}
    found = map_by(tmp_path, rule, dict.fromkeys(range(4), (1,)), 4)
    assert found.pieces_by_rank[2][0].scale == 1 / 4
    assert found.pieces_by_rank[2][0].locations == (0, 1, 2, 3)
    for state, holds, logical in (
        ("fp32", 2.0, 8.0),
        ("exp_avg", 8.0, 2.0),
        ("exp_avg_sq", 32.0, 2.0),
    ):
        power = {"fp32": 1, "exp_avg": -1, "exp_avg_sq": -2}[state]
        assert logical * 0.25**power == holds
        shards = {rank: torch.tensor([holds]) for rank in range(4)}
        if state == "fp32":
            assert found.rebuild(shards, power).tolist() == [logical]
            assert found.extract(torch.tensor([logical]), 3, power).tolist() == [holds]
        else:
            with pytest.raises(ReshardError, match="lr and eps"):
                found.rebuild(shards, power)


@pytest.mark.parametrize("scale", [0, 0.0, float("nan"), float("inf")])
def test_a_factor_that_no_rank_can_hold_names_file_and_pattern(
    scale: float, tmp_path: Path
) -> None:
    rule = {"layout": "replicated", "scale": scale}
    with pytest.raises(LayoutError, match="expected a finite number other than 0") as caught:
        written(tmp_path, {"layouts": {r"some\.bias": rule}})
    assert str(tmp_path) in str(caught.value)
    assert r"layouts.some\.bias.scale" in str(caught.value)


def test_padding_of_a_vocabulary(tmp_path: Path) -> None:
    rule = {"layout": "column_parallel", "original_vocab_size": 5}
    one = written(tmp_path, {"layouts": {"w": rule}}).map_of("w", {0: (4, 2), 1: (4, 2)}, 2)
    assert one is not None
    assert one.map.logical_shape == (5, 2)
    assert one.whole.logical_shape == (8, 2)
    assert one.restore_keys == {"vocab_tensor": True}
    assert "rows from 5 on are padding" in one.provenance


# ------------------------------------------------------------------------------ strictness


def test_a_pattern_must_match_a_whole_name(tmp_path: Path) -> None:
    one = written(tmp_path, {"layouts": {"norm": "replicated"}})
    assert not one.covers("norm.weight")
    assert not one.covers("a.norm")
    assert one.covers("norm")


def test_unused_and_ambiguous_patterns_are_refused(tmp_path: Path) -> None:
    rules = {"a.*": "replicated", ".*b": "row_parallel", "c": "replicated"}
    layouts = Layouts((written(tmp_path, {"layouts": rules}),), 2)
    with pytest.raises(LayoutError, match="no parameter matches 'c'"):
        layouts.require_used({"ab"})
    with pytest.raises(LayoutError, match=r"ab is matched by 'a\.\*' and '\.\*b'"):
        layouts.require_clear({"ab": {0: (2, 2)}})


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("diagonal", "no layout is called 'diagonal'"),
        ({"layout": "row_parallel", "dim": 1}, "has other fields"),
        ({"layout": "contiguous_split"}, "has other fields"),
        ({"partition_dim": 0}, "a key is missing: layouts.w.layout"),
        ({"layout": "contiguous_split", "partition_dim": "0"}, "expected an integer"),
        ({"layout": "contiguous_split", "partition_dim": True}, "expected an integer"),
        ({"layout": "replicated", "scale": "half"}, "expected a number"),
        ({"layout": "sub_param", "partition_dim": 0}, "needs either"),
        ({"layout": "fused_qkv", "kind": "gpt"}, "no fused layout is called 'gpt'"),
        ({"layout": "segmented", "partition_dim": 0, "segments": [[4, "both"]]}, "replicated"),
        ({"layout": "map", "logical_shape": [2], "ranks": {"0": {}}}, "no 'shard_shape'"),
        (7, "expected a mapping"),
    ],
)
def test_rules_that_say_nothing_known_are_refused(rule: object, says: str, tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match=says):
        written(tmp_path, {"layouts": {"w": rule}})


@pytest.mark.parametrize(
    ("rule", "shards", "says"),
    [
        ("replicated", {0: (4,), 1: (3,)}, "not one shape"),
        ("replicated", {0: (4,)}, "not one shape"),
        ("row_parallel", {0: (4,), 1: (4,)}, "no such dim"),
        ("column_parallel", {0: (4, 2), 1: (4, 3)}, "another dim"),
        ("gate_up", {0: (3, 2), 1: (3, 2)}, "does not divide"),
        ({"layout": "fused_qkv", "kind": "phi3"}, {0: (4, 4), 1: (4, 4)}, "needs heads"),
        (
            {"layout": "contiguous_split", "partition_dim": 0, "per_rank_sizes": [5, 3]},
            {0: (4, 2), 1: (4, 2)},
            "does not fit the shard",
        ),
        (
            {"layout": "map", **replicated_map((4,), 3).to_dict()},
            {0: (4,), 1: (4,)},
            "does not fit the shard",
        ),
        (
            {
                "layout": "block_gather",
                "partition_dim": 0,
                "block_size": 2,
                "block_ids_by_rank": [[0], [2]],
            },
            {0: (2,), 1: (2,)},
            "held by no rank",
        ),
    ],
)
def test_rules_that_do_not_fit_the_shards_are_refused(
    rule: object, shards: dict[int, tuple[int, ...]], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ReshardError, match=says) as caught:
        map_by(tmp_path, rule, shards)
    assert "w" in str(caught.value)


# ------------------------------------------------------------------------------ the file


def test_a_map_document_may_be_the_file_or_a_part_of_it(tmp_path: Path) -> None:
    document = maps_to_document({r"^w\.(a|b)$": contiguous_split_map((4, 2), [3, 1], 0)})
    for content in (document, {"affine_map": document}):
        found = written(tmp_path, content).map_of("w.a", {0: (3, 2), 1: (1, 2)}, 2)
        assert found is not None
        assert found.provenance.startswith("stated: map")


@needs_toml
def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    text = """
    waive = ["x"]
    [layouts]
    w = "row_parallel"
    """
    one = written(tmp_path, text, "layouts.toml")
    other = written(tmp_path, {"waive": ["x"], "layouts": {"w": "row_parallel"}})
    shards = {0: (2, 3), 1: (2, 1)}
    assert one.map_of("w", shards, 2) == other.map_of("w", shards, 2)
    assert one.waived == other.waived == {"x"}


@pytest.mark.parametrize(
    ("text", "name", "error"),
    [
        ("{", "a.json", DocumentError),
        ('{"layouts": {"w": "replicated", "w": "row_parallel"}}', "a.json", DocumentError),
        ('{"layout": {}}', "a.json", DocumentError),
        ("[]", "a.json", CheckpointError),
        ('{"layouts": {"(": "replicated"}}', "a.json", LayoutError),
        ('{"version": 2, "params": {}}', "a.json", DocumentError),
        ("[" * 100_000, "a.json", DocumentError),
        ("\ufeff{}", "a.json", DocumentError),
    ],
)
def test_files_that_cannot_be_read_are_refused(
    text: str, name: str, error: type[ReshardError], tmp_path: Path
) -> None:
    with pytest.raises(error):
        written(tmp_path, text, name)


@needs_toml
def test_toml_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="no valid TOML"):
        written(tmp_path, "[layouts", "a.toml")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"no\.toml"):
        read_stated_layouts(tmp_path / "no.toml")


def test_a_pipe_is_told_from_a_missing_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(UsageError, match="a pipe or a folder is no file of layouts") as refused:
            read_stated_layouts(path)
        assert refused.value.file == str(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DocumentError, match="no valid JSON"):
        read_stated_layouts(file)
