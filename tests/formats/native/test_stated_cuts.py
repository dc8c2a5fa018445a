"""What the user states about cuts, for a target: DeepSpeed's own cuts from a word and the heads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard import convert
from reshard.cli import main
from reshard.errors import LayoutError
from reshard.formats.deepspeed.writing import NativeOptions, lay_out_deepspeed
from reshard.formats.layout_source import literal_name
from reshard.formats.registry import open_checkpoint
from reshard.formats.stated_layouts import StatedLayouts, read_stated_layouts
from reshard.geometry import ParamAffineMap, maps_from_document
from reshard.layouts.autotp import HEADS_UNSTATED, ModelNumbers, Widths
from tests.formats.edited import nothing, with_info
from tests.formats.native.sources import compared, content, converted, made_up, values_of, write
from tests.truth import Case, case_named

Layout = Mapping[str, object]

LLAMA: Layout = {
    r"model\.embed_tokens\.weight": "replicated",
    r".*norm\.weight": "replicated",
    r".*\.(q|k|v|gate|up)_proj\.(weight|bias)": "column_parallel",
    r".*\.(o|down)_proj\.weight": "row_parallel",
    r"lm_head\.weight": "column_parallel",
}
BIASED: Layout = {**LLAMA, r".*\.(o|down)_proj\.bias": "replicated"}
BIGCODE: Layout = {
    r"transformer\.(wte|wpe)\.weight|lm_head\.weight": "replicated",
    r".*\.ln_\w+\.(weight|bias)": "replicated",
    r".*\.c_attn\.(weight|bias)": {"layout": "fused_qkv", "kind": "bigcode", "hidden": 32},
    r".*\.c_fc\.(weight|bias)": "column_parallel",
    r".*\.c_proj\.weight": "row_parallel",
    r".*\.c_proj\.bias": "replicated",
}

REAL: list[tuple[str, int, Layout]] = [
    ("golden/llama_z1_tp2dp2_fp32", 2, LLAMA),
    ("golden/llama_z1_tp4_empty_shards", 2, LLAMA),
    ("golden/llama_z1_tp2_uneven", 3, LLAMA),
    ("0.19.8/llama_tp2_bias_z1_fp32", 2, BIASED),
    ("0.19.8/bigcodefix_tp2_z1_fp32", 4, BIGCODE),
    ("0.19.8/bigcodefix_tp4_z1_fp32", 4, BIGCODE),
]


def stated(folder: Path, layout: Layout) -> StatedLayouts:
    file = folder / "layout.json"
    file.write_text(json.dumps({"layouts": layout}))
    return read_stated_layouts(file)


def stored_maps(case: Case) -> dict[str, ParamAffineMap]:
    """What AutoTP itself wrote, by name."""
    info = content(next(case.tag_path.glob("*mp_rank_00_model_states.pt")))
    document = info["universal_checkpoint_info"]["affine_map"]
    found = {literal_name(key): one for key, one in maps_from_document(document).items()}
    return {name: one for name, one in found.items() if name is not None}


@pytest.mark.parametrize(("name", "heads", "layout"), REAL, ids=[name for name, *_ in REAL])
def test_words_and_heads_are_the_cuts_that_deepspeed_stored(
    name: str, heads: int, layout: Layout, tmp_path: Path
) -> None:
    case, layouts = case_named(name), stated(tmp_path, layout)
    maps = stored_maps(case)
    assert maps
    for parameter, one in maps.items():
        widths = Widths.of_parameter(parameter, case.tp, ModelNumbers(kv_heads=heads))
        found = layouts.cut_of(parameter, one.logical_shape, widths)
        assert found.canonical() == one.canonical(), parameter


HEAD = "lm_head.weight"
SHAPES = {"attn.q.weight": (12, 4), "mlp.up.weight": (10, 4), "qkv.weight": (24, 4)}


def cut(folder: Path, layout: Layout, **options: Any) -> dict[str, list[tuple[int, ...]]]:
    """The shards of a made-up checkpoint's weights, by name."""
    (folder / "out").mkdir()
    source, values = made_up(folder / "source", [SHAPES])
    write(source, folder / "out", stage=1, dp=1, layouts=stated(folder, layout), **options)
    held = values_of(folder / "out")
    assert all(np.array_equal(held[key], value) for key, value in values.items())
    ranks = [content(path)["module"] for path in sorted((folder / "out/step3").glob("mp_rank*"))]
    return {name: [rank[name][1] for rank in ranks] for name in SHAPES}


def test_each_word_cuts_for_a_target(tmp_path: Path) -> None:
    found = cut(
        tmp_path,
        {
            r"attn\.q\.weight": "column_parallel",
            r"mlp\.up\.weight": {"layout": "contiguous_split", "partition_dim": 0,
                                 "per_rank_sizes": [7, 2, 1]},
            r"qkv\.weight": {"layout": "segmented", "partition_dim": 0,
                             "segments": [[18, "split"], [6, "replicated"]]},
        },
        tp=3,
        kv_heads=2,
    )  # fmt: skip
    assert found == {
        "attn.q.weight": [(6, 4), (6, 4), (0, 4)],
        "mlp.up.weight": [(7, 4), (2, 4), (1, 4)],
        "qkv.weight": [(15, 4), (15, 4), (6, 4)],
    }


def test_sub_parameters_gathered_blocks_and_halves_are_cut_for_a_target(tmp_path: Path) -> None:
    found = cut(
        tmp_path,
        {
            r"attn\.q\.weight": {"layout": "block_gather", "partition_dim": 0, "block_size": 4,
                                 "block_ids_by_rank": [[2, 0], [1]]},
            r"mlp\.up\.weight": "gate_up",
            r"qkv\.weight": {"layout": "sub_param", "partition_dim": 0,
                             "sub_dim_sizes": [12, 6, 6]},
        },
        tp=2,
        kv_heads=3,
    )  # fmt: skip
    assert found == {
        "attn.q.weight": [(8, 4), (4, 4)],
        "mlp.up.weight": [(6, 4), (4, 4)],
        "qkv.weight": [(16, 4), (8, 4)],
    }


REST = {r"attn\.q\.weight": "replicated", r"mlp\.up\.weight": "column_parallel"}
WIDE = "the layout is stated for another number of ranks"


@pytest.mark.parametrize(
    ("word", "options", "said"),
    [
        ("column_parallel", {}, HEADS_UNSTATED),
        ({"layout": "fused_qkv", "kind": "bloom"}, {}, HEADS_UNSTATED),
        ({"layout": "replicated", "scale": 0.5}, {}, "ranks hold by a factor is not written"),
        (
            {"layout": "contiguous_split", "partition_dim": 0, "per_rank_sizes": [8, 8, 8]},
            {},
            f"{WIDE}: expected 2, found 3",
        ),
        (
            {"layout": "block_gather", "partition_dim": 0, "block_size": 8,
             "block_ids_by_rank": [[0, 1, 2]]},
            {},
            f"{WIDE}: expected 2, found 1",
        ),
        (
            {"layout": "sub_param", "partition_dim": 1, "view": [2, -1, 4]},
            {"kv_heads": 1},
            "a view of another shape is not written",
        ),
    ],
)  # fmt: skip
def test_what_a_word_does_not_tell_is_refused(
    word: object, options: dict[str, int], said: str, tmp_path: Path
) -> None:
    source, _ = made_up(tmp_path / "source", [SHAPES])
    layouts = stated(tmp_path, {**REST, r"qkv\.weight": word})
    with pytest.raises(LayoutError, match="how 1 parameter is cut") as refused:
        lay_out_deepspeed(
            source,
            tag="t",
            options=NativeOptions(stage=1, dp=1, tp=2, layouts=layouts, **options),  # type: ignore[arg-type]
        )
    assert said in str(refused.value)
    assert ("--kv-heads" in str(refused.value)) == (said == HEADS_UNSTATED)


def test_a_name_that_says_both_rules_is_refused_where_they_differ(tmp_path: Path) -> None:
    """Cut by heads or nearly evenly, by whether AutoTP saw the path."""
    source, _ = made_up(tmp_path / "source", [{"mlp.experts.0.fc.weight": (12, 4)}])
    layouts = stated(tmp_path, {r"mlp\.experts\.0\.fc\.weight": "column_parallel"})
    options = NativeOptions(stage=1, dp=1, tp=2, kv_heads=3, layouts=layouts)
    with pytest.raises(LayoutError, match=r"whether heads decide .* found \[\(6, 6\), \(8, 4\)\]"):
        lay_out_deepspeed(source, tag="t", options=options)


def test_a_cut_that_was_stated_for_the_source_holds_for_the_target(tmp_path: Path) -> None:
    """Three heads over two ranks: without a word about heads, 2 + 1 as in the source."""
    case = case_named("golden/llama_z1_tp2_uneven")
    bare = with_info(case, tmp_path / "bare", nothing)
    layout = stated(tmp_path, LLAMA)
    source = open_checkpoint(bare, layout=tmp_path / "layout.json")
    write(source, tmp_path / "out", stage=3, dp=2, tp=2, layouts=layout)
    assert compared(case.path, tmp_path / "out").equal
    q = "model.layers.0.self_attn.k_proj.weight"
    shapes = [
        content(path)["param_shapes"][0][q]
        for path in sorted((tmp_path / "out/step3").glob("zero_pp_rank_0_*_model_states.pt"))
    ]
    assert [tuple(shape) for shape in shapes] == [(8, 24), (4, 24)]


@pytest.fixture(scope="module")
def never_cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one tensor rank, whose files say nothing of cuts."""
    folder = tmp_path_factory.mktemp("never_cut")
    converted(case_named("golden/llama_z1_tp2dp2_fp32").path, folder / "ckpt", stage=1, dp=1)
    (folder / "ckpt/latest").write_text("step3")
    return with_info(Case("whole", folder), folder / "bare", nothing)


@pytest.mark.parametrize("to", ["universal", "dcp"])
def test_whole_tensors_of_another_format_are_cut_as_stated(
    to: str, never_cut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(never_cut, tmp_path / "whole", to=to, fsync=False)
    stated(tmp_path, LLAMA)
    words = ["convert", str(tmp_path / "whole"), str(tmp_path / "out/step3"), "--no-fsync"]
    words += ["--to", "deepspeed", "--stage", "1", "--dp", "2", "--tp", "2", "--kv-heads", "2"]
    assert main([*words, "--layout", str(tmp_path / "layout.json"), "--verify"]) == 0
    theirs = case_named("golden/llama_z1_tp2dp2_fp32").tag_path
    for rank in range(2):
        name = f"mp_rank_{rank:02d}_model_states.pt"
        mine = content(tmp_path / "out/step3" / name)["module"]
        assert mine == content(theirs / name)["module"]
    capsys.readouterr()
    stated(tmp_path, {**LLAMA, r"model\.norm\.weight": "replicated", "no_such": "replicated"})
    assert main([*words, "--layout", str(tmp_path / "layout.json"), "--overwrite"]) == 2
    said = capsys.readouterr().err
    assert f"no parameter matches 'no_such' of {tmp_path}/layout.json" in said
    assert r"model.norm.weight is matched by '.*norm\.weight' and 'model\.norm\.weight'" in said
    assert "next: correct the patterns" in said


def test_a_layout_for_more_ranks_says_nothing_of_a_source_of_one(
    never_cut: Path, tmp_path: Path
) -> None:
    sizes = {"layout": "contiguous_split", "partition_dim": 0, "per_rank_sizes": [60, 37]}
    stated(tmp_path, {**LLAMA, r"lm_head\.weight": sizes})
    source = open_checkpoint(never_cut, layout=tmp_path / "layout.json")
    layouts = read_stated_layouts(tmp_path / "layout.json")
    write(source, tmp_path / "out", stage=1, dp=1, tp=2, kv_heads=2, layouts=layouts)
    assert compared(never_cut, tmp_path / "out").equal
    files = sorted((tmp_path / "out/step3").glob("mp_rank*"))
    assert [content(file)["module"]["lm_head.weight"][1][0] for file in files] == [60, 37]


def test_a_stated_vocabulary_is_padded_to_the_stated_multiple(
    never_cut: Path, tmp_path: Path
) -> None:
    table = {"layout": "column_parallel", "original_vocab_size": 97}
    layouts = stated(tmp_path, {**LLAMA, r"lm_head\.weight": table})
    options = {"stage": 1, "dp": 1, "tp": 2, "kv_heads": 2, "layouts": layouts}
    source = open_checkpoint(never_cut, layout=tmp_path / "layout.json")
    write(source, tmp_path / "out", vocab_multiple=8, **options)
    held, values = values_of(tmp_path / "out"), values_of(never_cut)
    assert np.array_equal(held[HEAD, "exp_avg"][:97], values[HEAD, "exp_avg"])
    files = sorted((tmp_path / "out/step3").glob("mp_rank*"))
    assert [content(file)["module"]["lm_head.weight"][1][0] for file in files] == [56, 56]
    with pytest.raises(LayoutError, match=r"how far the target pads .* 97 rows .*--vocab-multiple"):
        write(source, tmp_path / "other", **options)
