"""A conversion to the topology that a checkpoint already has gives back DeepSpeed's own files.

Compared is everything that is in the files: every key, every tensor to the last bit, paddings,
places, records. The differences that are meant: ZeRO-3 leaves whatever was in memory in the padding
behind each parameter, where reshard writes zeros; the parallel dimensions are always stated;
gradient clipping is kept under ZeRO-3 too, where DeepSpeed's loader ignores it; places are right
under `round_robin_gradients`, where DeepSpeed's are wrong; a router's second name is listed
among the tied ones; and of experts folded with tensor parallelism, DeepSpeed's `affine_map` calls
the experts of one rank replicated, and which of several ranks wrote an expert's file last is luck.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.formats.native.sources import content, converted
from tests.truth import Case, by_name, case_named, cases

NAMES = [
    "odd_z1_dp2_fp32",
    "odd_z1_dp2_unused",
    "odd_z1_dp2_sgdm",
    "odd_z2_dp2_bf16",
    "odd_z2_dp2_round_robin",
    "odd_z3_dp2_one_group",
    "odd_z3_dp2_sub_groups",
    "odd_z3_dp2_offload",
    "odd_z3_dp4_bf16",
    "odd_z3_dp2_sgdm",
    "llama_z1_tp2dp2_fp32",
    "llama_z2_tp2dp2_bf16",
    "llama_z3_tp2dp2_fp32",
    "llama_z1_tp2_uneven",
    "llama_z1_tp4_empty_shards",
    "llama_z1_tp2_tied_bias",
    "llama_z1_tp2_frozen",
    "llama_z3_tp2dp2_frozen",
]
WITH_EXPERTS = [
    "mixtral_ep2_z1_fp32",
    "mixtral_ep2_z2_fp32",
    "mixtral_ep2dp4_z1_fp32",
    "mixtral_ep2_z3_fp32",
    "mixtral_1group_sub_ep2_z3",
    "qwen3moe_ep2_z3_fp32",
    "native_moe_ep2_z1_fp32",
    "mixtral_ep2tp2_z1_fp32",
    "mixtral_ep2tp2_z3_fp32",
]
"""Beside the golden ones; their model is transformers' own."""

CASES = by_name(
    [
        *(case_named(f"golden/{name}") for name in NAMES),
        *(case for case in cases() if case.name.removeprefix("0.19.8/") in WITH_EXPERTS),
    ]
)


INFO = "universal_checkpoint_info"


@pytest.mark.parametrize("case", CASES)
def test_the_files_are_deepspeeds_own(case: Case, tmp_path: Path) -> None:
    dp = case.topology["world"] // case.tp
    arguments = case.topology.get("model_args", {})
    ep = max(case.topology.get("ep") or 1, arguments.get("ep", 1))
    home = {"stage": case.stage, "dp": dp, "tp": case.tp, "ep": ep}
    out = converted(case.path, tmp_path, **home) / "step3"
    names = sorted(path.name for path in case.tag_path.glob("*.pt"))
    assert sorted(path.name for path in out.glob("*.pt")) == names
    assert (out.parent / "latest").read_text() == "step3"
    for name in names:
        theirs, mine = (comparable(folder, name, dp) for folder in (case.tag_path, out))
        if "round_robin" in case.name and "optimizer_state_dict" in mine:
            places = [
                file["optimizer_state_dict"].pop("param_slice_mappings") for file in (mine, theirs)
            ]
            assert places[0] != places[1]
        assert mine == theirs, name


WAYS: dict[str, tuple[list[dict[str, int]], dict[str, int]]] = {
    "odd_z1_dp2_fp32": ([{"stage": 3, "dp": 6}, {"stage": 2, "dp": 8}], {}),
    "odd_z2_dp2_bf16": ([{"stage": 1, "dp": 3}, {"stage": 3, "dp": 5}], {}),
    "odd_z3_dp2_sub_groups": (
        [{"stage": 1, "dp": 1}, {"stage": 3, "dp": 7, "sub_group_size": 9}],
        {"sub_group_size": 200},
    ),
    "llama_z1_tp2dp2_fp32": ([{"stage": 3, "dp": 5}, {"stage": 2, "dp": 3, "tp": 2}], {}),
    "llama_z3_tp2dp2_frozen": ([{"stage": 1, "dp": 3}, {"stage": 2, "dp": 1, "tp": 2}], {}),
}
"""Where each goes, and what the way home must be told besides the topology."""


@pytest.mark.parametrize("name", WAYS)
def test_the_way_back_gives_deepspeeds_own_files(name: str, tmp_path: Path) -> None:
    """A to B to C to A: not only equal states, but the files that DeepSpeed wrote at A."""
    case = case_named(f"golden/{name}")
    between, more = WAYS[name]
    dp = case.topology["world"] // case.tp
    home = {"stage": case.stage, "dp": dp, "tp": case.tp, **more}
    source = case.path
    for number, step in enumerate([*between, home]):
        source = converted(source, tmp_path / str(number), **step)
    names = sorted(path.name for path in case.tag_path.glob("*.pt"))
    assert sorted(path.name for path in (source / "step3").glob("*.pt")) == names
    for file in names:
        theirs = comparable(case.tag_path, file, dp)
        mine = comparable(source / "step3", file, dp)
        for key in [key for key in mine.get(INFO, {}) if key.startswith("reshard_")]:
            del mine[INFO][key]
        assert mine == theirs, file


def comparable(folder: Path, name: str, dp: int) -> dict[str, Any]:
    """One file, without the differences that are meant."""
    file: dict[str, Any] = content(folder / name)
    file.pop("checkpoint_parallel_dimensions", None)
    if file.get("num_experts"):
        file.pop("shared_params")
    if "folding" in file:
        maps = file.get("universal_checkpoint_info", {}).get("affine_map", {"params": {}})["params"]
        for key in [key for key in maps if ".experts" in key]:
            del maps[key]
        if "expert" in name:
            del file["folding"]["zero_partition_rank"]
    if "zero_pp_rank" not in name:
        return file
    rank = int(name.partition("zero_pp_rank_")[2].partition("_")[0])
    body = file.get("optimizer_state_dict", {})
    if "fp32_flat_groups" in body:
        body.pop("clip_grad", None)
        model = name.replace("bf16_", "").replace("optim_states", "model_states")
        shapes = content(folder / model)["param_shapes"]
        whole = [{"partition_rank": rank, "partition_count": dp}] * len(shapes)
        groups = [
            (list(group.values()), share["partition_rank"], share["partition_count"])
            for group, share in zip(
                shapes, body.get("ds_zero_partition_groups", whole), strict=True
            )
        ]
        flats = zip(body["fp32_flat_groups"], groups, strict=True)
        body["fp32_flat_groups"] = [unpadded(flat, *group) for flat, group in flats]
        for number, states in body["optimizer_state_dict"]["state"].items():
            for key, value in states.items():
                if key != "step":
                    states[key] = unpadded(value, *groups[number])
    fragments = file.get("frozen_param_fragments") or {}
    for key, flat in fragments.items():
        fragments[key] = unpadded(flat, [file["frozen_param_shapes"][key]], rank, dp)
    return file


def unpadded(flat: Any, shapes: list[list[int]], rank: int, dp: int) -> list[bytes]:
    """The elements of one rank's blocks that are parameters'."""
    dtype, _, raw = flat
    size = {"float32": 4, "bfloat16": 2}[dtype]
    values = np.frombuffer(raw, f"u{size}")
    parts, at = [], 0
    for shape in shapes:
        numel = math.prod(shape)
        block = -(-numel // dp)
        valid = max(0, min(block, numel - rank * block))
        parts.append(values[at : at + valid].tobytes())
        at += block
    return parts
