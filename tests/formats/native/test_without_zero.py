"""Without ZeRO: optimizers that keep no names, masters beside half-precision weights, ties."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.errors import CheckpointError, ReshardError, UnsupportedError
from reshard.formats.checkpoint import Extra
from reshard.formats.deepspeed.writing import NativeOptions, lay_out_deepspeed
from reshard.formats.dtypes import DTYPES
from reshard.formats.registry import open_checkpoint
from tests.formats.native.sources import compared, content, converted, made_up
from tests.truth import case_named

FILE = "step3/mp_rank_00_model_states.pt"

WAYS: dict[str, list[dict[str, Any]]] = {
    "golden/odd_z1_dp2_fp32": [{"dp": 3}],
    "golden/odd_z2_dp2_bf16": [{"dp": 2}],
    "golden/odd_z1_dp2_sgdm": [{"dp": 1}],
    "golden/odd_z3_dp2_sub_groups": [{"dp": 2}],
    "golden/odd_z1_dp2_bf16opt": [{"dp": 2}],
    "golden/llama_z1_tp2dp2_fp32": [{"dp": 1, "tp": 2}, {"dp": 1, "tp": 4, "kv_heads": 2}],
    "golden/llama_z2_tp2dp2_bf16": [{"dp": 2, "tp": 2}],
    "golden/llama_z1_tp2_tied_bias": [{"dp": 1, "tp": 2}],
    "golden/llama_z3_tp2dp2_frozen": [{"dp": 1, "tp": 2}],
    "0.19.8/plain_fp16forced_z1_dp2": [{"dp": 2}],
    "0.19.8/plain_z0_dp2_fp32": [{"dp": 2}],
}


@pytest.mark.parametrize("name", WAYS)
def test_every_step_and_the_way_back_are_equal(name: str, tmp_path: Path) -> None:
    case, source = case_named(name), case_named(name).path
    steps = [{"stage": 0, **step} for step in WAYS[name]]
    for number, step in enumerate([*steps, {"stage": 3, "dp": 3}, {"stage": 1, "dp": 2}]):
        source = converted(source, tmp_path / str(number), **step)
        assert compared(case.path, source).equal
        assert open_checkpoint(source).topology.stage == step["stage"]


def test_a_source_of_deepspeed_tells_its_groups_and_ties() -> None:
    case = case_named("0.19.8/plain_z0_dp2_fp32")
    source = open_checkpoint(case.path)
    assert source.aliases == {"head.weight": "emb.weight"}
    kept = torch.load(case.tag_path / "mp_rank_00_model_states.pt", weights_only=False)
    groups = kept["optimizer"]["param_groups"]
    expected = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    assert source.extras["param_groups"].value == expected
    assert "head.weight" not in source.names


def edited(source: Path, folder: Path, **changes: Any) -> Path:
    """The checkpoint without ZeRO that a case becomes, its model-state file changed."""
    out = converted(source, folder, stage=0, dp=1)
    root = torch.load(out / FILE, weights_only=False)
    torch.save({**root, **changes}, out / FILE)
    return out


def test_a_stated_tie_is_not_turned_round(tmp_path: Path) -> None:
    """Bytes that two names share say nothing of which is the owner, and a file may state it."""
    source = case_named("golden/odd_z1_dp2_fp32").path
    out = converted(source, tmp_path, stage=0, dp=1)
    root = torch.load(out / FILE, weights_only=False)
    owner = {"embed.weight": "head.weight"}
    shapes = [
        {owner.get(name, name): shape for name, shape in group.items()}
        for group in root["param_shapes"]
    ]
    torch.save({**root, "param_shapes": shapes, "shared_params": owner}, out / FILE)
    found = open_checkpoint(out)
    assert found.aliases == owner
    assert "embed.weight" not in found.names
    assert ("head.weight", "exp_avg") in found.tensors


def unsharded_pipeline(source: Path, folder: Path) -> Path:
    """The pipeline as DeepSpeed writes it without ZeRO: numbered states, no names."""
    out = converted(source, folder, stage=1, dp=1, pp=2) / "step3"
    for stage in range(2):
        model = out / f"mp_rank_{stage:02d}_model_states.pt"
        path = out / f"zero_pp_rank_0_mp_rank_{stage:02d}_optim_states.pt"
        root = torch.load(model, weights_only=False)
        base = torch.load(path, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]
        states: dict[int, Any] = {}
        for number, shapes in enumerate(root["param_shapes"]):
            flat, at = base["state"][number], 0
            first = len(states)
            for shape in shapes.values():
                part = slice(at, at + shape.numel())
                at += shape.numel()
                moments = {k: flat[k][part].view(shape).clone() for k in ("exp_avg", "exp_avg_sq")}
                states[len(states)] = {"step": flat["step"], **moments}
            base["param_groups"][number]["params"] = list(range(first, len(states)))
        optimizer = {"state": states, "param_groups": base["param_groups"]}
        torch.save({**root, "optimizer": optimizer, "param_shapes": None}, model)
        path.unlink()
    return out.parent


def test_a_pipeline_without_zero_goes_to_other_stages(tmp_path: Path) -> None:
    case = case_named("0.19.8/pipe_pp2dp2_z1_fp32")
    source = unsharded_pipeline(case.path, tmp_path / "0")
    assert open_checkpoint(source).topology.stage == 0
    starts = (0, 2, 4)
    there = converted(source, tmp_path / "3", stage=1, dp=2, pp=3, stage_starts=starts)
    back = converted(there, tmp_path / "2", stage=1, dp=2, pp=2, stage_starts=(0, 3))
    for out in (source, there, back):
        assert compared(case.path, out).differences == ()
    for file in case.tag_path.glob("*optim_states.pt"):
        mine, theirs = (content(folder / file.name) for folder in (back / "step3", file.parent))
        kept = [body["optimizer_state_dict"] for body in (mine, theirs)]
        assert kept[0].pop("clip_grad", 0.0) == kept[1].pop("clip_grad")
        assert kept[0] == kept[1]


def test_names_that_contradict_the_states_are_refused(tmp_path: Path) -> None:
    source = case_named("golden/odd_z1_dp2_fp32").path
    out = converted(source, tmp_path / "o", stage=0, dp=1)
    shapes = torch.load(out / FILE, weights_only=False)["param_shapes"]
    out = edited(source, tmp_path / "e", param_shapes=shapes[::-1])
    with pytest.raises(CheckpointError, match="param_shapes contradicts the states"):
        open_checkpoint(out)


def test_flat_groups_of_fused_optimizers_are_refused(tmp_path: Path) -> None:
    source = case_named("golden/odd_z1_dp2_fp32").path
    held = {"fp32_groups_flat": [torch.zeros(4)], "optimizer_state_dict": {"state": {}}}
    out = edited(source, tmp_path, optimizer=held, param_shapes=None)
    with pytest.raises(UnsupportedError, match="masters of a ZeRO-0 run with a fused optimizer"):
        open_checkpoint(out)


def refusal(source: Any, **options: Any) -> ReshardError:
    with pytest.raises(ReshardError) as caught:
        lay_out_deepspeed(source, tag="step3", options=NativeOptions(stage=0, dp=1, **options))
    return caught.value


def test_fused_optimizers_are_not_written_in_half_precision(tmp_path: Path) -> None:
    source, _ = made_up(tmp_path, [{"a": (2,)}])
    fused = [{"lr": 0.1, "bias_correction": True}]
    source = replace(source, extras={**source.extras, "param_groups": Extra(fused)})
    assert "bias_correction" in str(refusal(source, dtype=DTYPES["bfloat16"]))
    lay_out_deepspeed(source, tag="step3", options=NativeOptions(stage=0, dp=1))


def test_fp16_needs_a_loss_scale(tmp_path: Path) -> None:
    source, _ = made_up(tmp_path, [{"a": (2,)}])
    assert "none for fp16" in str(refusal(source, dtype=DTYPES["float16"]))


def test_a_loss_scaler_that_does_something_is_no_equal_of_none(tmp_path: Path) -> None:
    """An engine without ZeRO keeps too little of it to make ZeRO's again: verify says so."""
    case = case_named("0.19.8/plain_fp16forced_z1_dp2")
    without = converted(case.path, tmp_path / "0", stage=0, dp=2)
    root = torch.load(without / FILE, weights_only=False)
    scaler = root["optimizer"].pop("loss_scaler")
    assert root["optimizer"]["cur_scale"] == scaler.cur_scale
    torch.save(root, without / FILE)  # as DeepSpeed itself would save it
    target = lay_out_deepspeed(
        open_checkpoint(without), tag="step3", options=NativeOptions(stage=1, dp=2)
    )
    assert any("begins with a new one" in note for note in target.notes)
    back = converted(without, tmp_path / "1", stage=1, dp=2)
    found = reshard.verify(without, back)
    assert [value.what for value in found.values] == ["optimizer_settings"]
    assert found.differences == ()
