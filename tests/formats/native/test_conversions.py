"""Conversions between topologies keep every logical state, whatever the way."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.formats.checkpoint import COMPARED_EXTRAS, Extra
from reshard.formats.dtypes import DTYPES
from reshard.formats.registry import open_checkpoint
from reshard.formats.stated_layouts import read_stated_layouts
from tests.formats.native.sources import compared, content, converted, write
from tests.truth import case_named

WAYS: dict[str, list[dict[str, Any]]] = {
    "odd_z1_dp2_fp32": [{"stage": 3, "dp": 4}, {"stage": 2, "dp": 6}],
    "odd_z1_dp2_unused": [{"stage": 3, "dp": 5}, {"stage": 2, "dp": 1}],
    "odd_z1_dp2_sgdm": [{"stage": 3, "dp": 3}, {"stage": 2, "dp": 7}],
    "odd_z2_dp2_bf16": [{"stage": 3, "dp": 8}, {"stage": 1, "dp": 3}],
    "odd_z2_dp2_round_robin": [{"stage": 1, "dp": 3}, {"stage": 3, "dp": 2}, {"stage": 2, "dp": 4}],
    "odd_z3_dp2_sub_groups": [{"stage": 1, "dp": 1}, {"stage": 3, "dp": 4, "sub_group_size": 9}],
    "odd_z3_dp4_bf16": [{"stage": 2, "dp": 6}, {"stage": 3, "dp": 1}],
    "odd_z3_dp2_offload": [{"stage": 2, "dp": 3}],
    "odd_z1_dp2_bf16opt": [{"stage": 1, "dp": 4}, {"stage": 2, "dp": 1}],
    "llama_z1_tp2dp2_fp32": [
        {"stage": 3, "dp": 4},
        {"stage": 1, "dp": 1, "tp": 4, "kv_heads": 2},
        {"stage": 2, "dp": 3, "tp": 2},
    ],
    "llama_z1_tp2_uneven": [{"stage": 2, "dp": 2, "tp": 3}, {"stage": 3, "dp": 3}],
    "llama_z1_tp4_empty_shards": [{"stage": 2, "dp": 2, "tp": 2}, {"stage": 1, "dp": 1}],
    "llama_z1_tp2_tied_bias": [{"stage": 3, "dp": 2}, {"stage": 1, "dp": 1, "tp": 2}],
    "llama_z3_tp2dp2_frozen": [{"stage": 1, "dp": 3}, {"stage": 2, "dp": 2, "tp": 2}],
}
"""Where each checkpoint goes, one step after the other; the last step is back where it was."""


@pytest.mark.parametrize("name", WAYS)
def test_every_step_and_the_way_back_are_equal(name: str, tmp_path: Path) -> None:
    case = case_named(f"golden/{name}")
    source = case.path
    home = {"stage": case.stage, "dp": case.topology["world"] // case.tp, "tp": case.tp}
    for number, step in enumerate([*WAYS[name], home]):
        source = converted(source, tmp_path / str(number), **step)
        found = compared(case.path, source)
        assert found.differences == ()
        assert found.values == ()
        assert found.extras == shared_extras(case.path, source) >= 5
        degrees = open_checkpoint(source).topology
        assert (degrees.stage, degrees.dp, degrees.tp) == (
            step["stage"],
            step["dp"],
            step.get("tp", 1),
        )


def shared_extras(left: Path, right: Path) -> int:
    """How many extras that should be equal both checkpoints have."""
    sides = [open_checkpoint(path).extras for path in (left, right)]
    return sum(all(key in side for side in sides) for key in COMPARED_EXTRAS)


@pytest.mark.parametrize("name", ["odd_z1_dp2_fp32", "odd_z3_dp2_sub_groups", "odd_z1_dp2_sgdm"])
def test_without_zero_every_state_is_whole(name: str, tmp_path: Path) -> None:
    case = case_named(f"golden/{name}")
    out = converted(case.path, tmp_path, stage=0, dp=3)
    assert [path.name for path in (out / "step3").glob("*.pt")] == ["mp_rank_00_model_states.pt"]
    found = compared(case.path, out)
    assert (found.differences, found.values) == ((), ())


@pytest.mark.parametrize("name", ["odd_z1_dp2_fp32", "odd_z3_dp2_sub_groups", "odd_z2_dp2_bf16"])
def test_a_universal_folder_is_a_source_like_any_other(name: str, tmp_path: Path) -> None:
    case = case_named(f"golden/{name}")
    reshard.convert(case.path, tmp_path / "step3_universal")
    out = converted(tmp_path / "step3_universal", tmp_path / "native", stage=3, dp=3)
    assert compared(case.path, out).equal


OUTPUTS: dict[str, list[dict[str, Any]]] = {
    "golden/odd_z1_dp2_fp32": [{"stage": stage, "dp": stage + 1} for stage in range(4)],
    "golden/odd_z2_dp2_bf16": [{"stage": stage, "dp": 5 - stage} for stage in range(4)],
    "golden/odd_z1_dp2_bf16opt": [{"stage": stage, "dp": 3} for stage in range(4)],
    "golden/odd_z2_dp2_round_robin": [{"stage": stage, "dp": 3} for stage in range(4)],
    "golden/llama_z1_tp2dp2_fp32": [
        {"stage": stage, "dp": 4 // tp, "tp": tp, "kv_heads": 2}
        for stage, tp in ((0, 2), (1, 1), (2, 4), (3, 2))
    ],
    "0.19.8/plain_fp16forced_z1_dp2": [{"stage": stage, "dp": 3} for stage in range(4)],
    "0.19.8/plain_sched_z3_dp2": [{"stage": stage, "dp": 3} for stage in range(4)],
    "0.19.8/mixtral_ep2_z1_fp32": [
        {"stage": stage, "dp": 4, "ep": ep} for stage, ep in ((1, 4), (2, 1), (3, 2))
    ],
    "0.19.8/mixtral_ep2tp2_z1_fp32": [
        {"stage": stage, "dp": dp, "tp": tp, "ep": ep}
        for stage, dp, tp, ep in ((1, 2, 2, 4), (2, 1, 2, 2), (3, 2, 2, 2), (3, 4, 1, 4))
    ],
    "0.19.8/native_moe_ep2_z1_fp32": [
        {"stage": stage, "dp": 4, "ep": ep} for stage, ep in ((1, 4), (2, 1))
    ],
}
"""What is written of each checkpoint, beside a universal folder."""


@pytest.mark.parametrize("name", OUTPUTS)
def test_any_two_outputs_are_equal(name: str, tmp_path: Path) -> None:
    source = case_named(name).path
    outputs = [source, tmp_path / "step3_universal"]
    reshard.convert(source, outputs[1], fsync=False)
    for number, step in enumerate(OUTPUTS[name]):
        outputs.append(converted(source, tmp_path / str(number), **step))
    for left, right in itertools.combinations(outputs, 2):
        found = reshard.verify(left, right)
        assert (found.differences, found.values, found.equal) == ((), (), True), (left, right)


def test_the_element_type_is_in_the_files_where_the_configuration_is_not(tmp_path: Path) -> None:
    """`ds_config` may be the path that the user gave."""
    case = case_named("golden/odd_z2_dp2_bf16")
    source = open_checkpoint(case.path)
    unknown = replace(source, extras={**source.extras, "ds_config": Extra("ds.json")})
    write(unknown, tmp_path, stage=1, dp=3)
    mine, theirs = (
        content(folder / "mp_rank_00_model_states.pt")["module"]
        for folder in (tmp_path / "step3", case.tag_path)
    )
    dtypes = [[(name, dtype) for name, (dtype, *_) in file.items()] for file in (mine, theirs)]
    assert dtypes[0] == dtypes[1]
    assert ("embed.weight", "bfloat16") in dtypes[0]


def test_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    case = case_named("golden/llama_z1_tp2dp2_fp32")
    one, two = (
        converted(case.path, tmp_path / name, stage=3, dp=3, tp=2) / "step3" for name in "ab"
    )
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in two.iterdir())
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in names)


def test_weights_are_the_masters_rounded_as_the_optimizer_rounds_them(tmp_path: Path) -> None:
    """ZeRO-3 keeps no weights; those made from its masters equal those that ZeRO-2 saved."""
    case = case_named("golden/odd_z2_dp2_bf16")
    three = converted(case.path, tmp_path / "three", stage=3, dp=2)
    two = converted(three, tmp_path / "two", stage=2, dp=1)
    mine = content(two / "step3/mp_rank_00_model_states.pt")["module"]
    theirs = content(case.tag_path / "mp_rank_00_model_states.pt")["module"]
    assert mine == theirs
    assert mine["embed.weight"][0] == "bfloat16"
    assert mine["shift"][0] == "float32"


def test_what_speaks_of_the_topology_is_the_targets(tmp_path: Path) -> None:
    case = case_named("golden/llama_z1_tp2dp2_fp32")
    out = converted(case.path, tmp_path, stage=2, dp=3, tp=4, kv_heads=2)
    for rank in range(4):
        model = content(out / f"step3/mp_rank_{rank:02d}_model_states.pt")
        assert (model["dp_world_size"], model["mp_world_size"]) == (3, 4)
        assert model["checkpoint_parallel_dimensions"] == {"pp_degree": 1, "tp_degree": 4}
        assert model["ds_config"]["zero_optimization"]["stage"] == 2
        assert model["ds_config"]["tensor_parallel"]["autotp_size"] == 4
        info = model["universal_checkpoint_info"]
        assert all(len(entry["ranks"]) == 4 for entry in info["affine_map"]["params"].values())
        assert info["reshard_kv_heads"] == 2
        assert list(info["reshard_maps"]) == ["2"]
        assert model["iteration"] == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_another_element_type_changes_the_weights_and_no_state(dtype: str, tmp_path: Path) -> None:
    case = case_named("golden/odd_z1_dp2_fp32")
    out = converted(case.path, tmp_path, stage=2, dp=2, dtype=DTYPES[dtype])
    found = compared(case.path, out)
    kinds = {(difference.key, difference.what) for difference in found.differences}
    assert kinds <= {(("gate", "fp32"), "dtype")}
    model = content(out / "step3/mp_rank_00_model_states.pt")
    assert model["module"]["up.weight"][0] == dtype
    prefix = "bf16_" if dtype == "bfloat16" else ""
    assert (out / f"step3/{prefix}zero_pp_rank_1_mp_rank_00_optim_states.pt").is_file()
    assert model["ds_config"].get("bf16", {}).get("enabled", False) is (dtype == "bfloat16")


LAYOUT = """
[layouts]
'.*norm\\.weight' = "replicated"
'model\\.embed_tokens\\.weight' = "replicated"
'lm_head\\.weight' = "column_parallel"
'.*\\.(q|k|v|gate|up)_proj\\.weight' = "column_parallel"
'.*\\.(o|down)_proj\\.weight' = "row_parallel"
"""


def test_a_stated_layout_cuts_a_checkpoint_that_never_was_cut(tmp_path: Path) -> None:
    """The same file, word for word, describes a cut checkpoint; so it must give the same cut."""
    case = case_named("golden/llama_z1_tp2dp2_fp32")
    whole = converted(case.path, tmp_path / "whole", stage=1, dp=1)
    source = open_checkpoint(whole)
    bare = {key: extra for key, extra in source.extras.items() if "universal" not in key}
    (tmp_path / "layout.toml").write_text(LAYOUT)
    stated = read_stated_layouts(tmp_path / "layout.toml")
    options = {"stage": 1, "dp": 2, "tp": 2, "kv_heads": 2, "layouts": stated}
    write(replace(source, extras=bare), tmp_path / "cut", **options)
    assert compared(case.path, tmp_path / "cut").equal
    for rank in range(2):
        name = f"mp_rank_{rank:02d}_model_states.pt"
        mine, theirs = (content(root / name) for root in (tmp_path / "cut/step3", case.tag_path))
        assert mine["module"] == theirs["module"]
        maps = [file["universal_checkpoint_info"]["affine_map"] for file in (mine, theirs)]
        assert maps[0]["params"].keys() == maps[1]["params"].keys()
