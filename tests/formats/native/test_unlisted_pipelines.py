"""Pipelines in bf16 without ZeRO: `BF16_Optimizer`, whose files have no `param_shapes`.

The source is a pipeline that DeepSpeed trained under ZeRO-1, in the form that DeepSpeed writes
without ZeRO; on the way back its optimizer files must be those that DeepSpeed wrote.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from reshard.formats.pipelines import PIPELINE, Pipeline
from reshard.formats.registry import open_checkpoint
from tests.formats.native.sources import compared, content, converted
from tests.truth import Case, case_named

NAME = "0.19.8/pipe_pp2dp2_z1_bf16"
SCALER = ("loss_scaler", "dynamic_loss_scale", "overflow")
OF_ZERO = (*SCALER, "zero_stage", "param_alignment_paddings")
"""Keys that `BF16_Optimizer` has not."""


@pytest.fixture
def case() -> Case:
    return case_named(NAME)


@pytest.fixture
def unlisted(case: Case, tmp_path: Path) -> Path:
    """The run as DeepSpeed saves it with ``zero_optimization: {stage: 0}``."""
    out = tmp_path / "source"
    shutil.copytree(case.path, out)
    for file in out.glob("step3/mp_rank_*"):
        root = torch.load(file, weights_only=False)
        config = {**root["ds_config"], "zero_optimization": {"stage": 0}}
        root |= {"param_shapes": None, "frozen_param_shapes": None, "shared_params": None}
        torch.save({**root, "ds_config": config}, file)
    for file in out.glob("step3/*optim_states.pt"):
        root = torch.load(file, weights_only=False)
        body = root["optimizer_state_dict"]
        assert not any(body["group_paddings"])  # else `BF16_Optimizer` would keep the padding
        for key in OF_ZERO:
            del body[key]
        torch.save(root, file)
    return out


def test_the_mappings_tell_what_each_stage_trains(case: Case, unlisted: Path) -> None:
    pipeline = open_checkpoint(unlisted).extras[PIPELINE].value
    assert isinstance(pipeline, Pipeline)
    for number, stage in enumerate(pipeline.stages):
        file = case.tag_path / f"mp_rank_{number:02d}_model_states.pt"
        listed = torch.load(file, weights_only=False)["param_shapes"]
        assert stage.groups == tuple(tuple(shapes) for shapes in listed)


def test_the_way_to_zero_gives_the_files_of_deepspeed(
    case: Case, unlisted: Path, tmp_path: Path
) -> None:
    there = converted(unlisted, tmp_path / "there", stage=1, dp=3, pp=1)
    back = converted(there, tmp_path / "back", stage=1, dp=2, pp=2, stage_starts=(0, 3))
    at_once = converted(unlisted, tmp_path / "at_once", stage=1, dp=2, pp=2)
    files = sorted(path.name for path in case.tag_path.glob("*optim_states.pt"))
    assert len(files) == 4
    for out in (back, at_once):
        assert compared(case.path, out).equal
        for name in files:
            mine, theirs = (content(folder / name) for folder in (out / "step3", case.tag_path))
            bodies = [file["optimizer_state_dict"] for file in (mine, theirs)]
            assert bodies[0] == bodies[1]
