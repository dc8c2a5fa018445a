"""Real pipelines: every state is exact, and what is gone or left over is refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.errors import (
    CheckpointError,
    MissingFileError,
    ReplicaMismatchError,
    ReshardError,
)
from reshard.formats.checkpoint import Role
from tests.formats.deepspeed.reading import (
    doubled,
    exchange,
    nameless,
    opened,
    rewrite,
    wrong_states,
)
from tests.truth import Case, by_name, case_named, with_pipeline


@pytest.mark.parametrize("case", by_name(with_pipeline()))
def test_every_state_is_bit_equal(case: Case) -> None:
    checkpoint = opened(case.tag_path)
    assert wrong_states(checkpoint, case.truth().full) == []
    assert {name for name, _ in checkpoint.tensors} == set(case.truth().full)
    assert (checkpoint.topology.pp, checkpoint.topology.tp) == (2, 1)


def copy_of(name: str, tmp_path: Path) -> Path:
    shutil.copytree(case_named(name).tag_path, tmp_path / "step3")
    return tmp_path / "step3"


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    return copy_of("0.19.8/pipe_pp2dp2_z1_fp32", tmp_path)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return copy_of("0.19.8/pipe_pp2dp1_tied_z1_fp32", tmp_path)


LAYER = "layer_03-model_00-model_states.pt"
STAGE = "mp_rank_01_model_states.pt"
RANK = "zero_pp_rank_1_mp_rank_01_optim_states.pt"


@pytest.mark.parametrize("file", [LAYER, "layer_00-model_00-model_states.pt", STAGE, RANK])
def test_a_file_that_is_gone_is_named(pipeline: Path, file: str) -> None:
    (pipeline / file).unlink()
    with pytest.raises(MissingFileError, match=file):
        opened(pipeline)


def test_all_layer_files_gone(pipeline: Path) -> None:
    for file in pipeline.glob("layer_*"):
        file.unlink()
    with pytest.raises(MissingFileError, match="no pipeline layer file"):
        opened(pipeline)


def test_a_layer_file_gone_in_a_checkpoint_that_states_no_degrees(tmp_path: Path) -> None:
    """The degrees are then inferred from the layer files, and one that lacks must not mislead."""
    folder = copy_of("0.14.5/pipe_pp2dp2_z1_fp32", tmp_path)
    (folder / "layer_00-model_00-model_states.pt").unlink()
    with pytest.raises(MissingFileError, match="layer_00-model_00"):
        opened(folder)


def test_a_layer_file_of_another_tensor_rank_is_left_over(pipeline: Path) -> None:
    shutil.copy(pipeline / LAYER, pipeline / "layer_03-model_01-model_states.pt")
    with pytest.raises(CheckpointError, match=r"layer_03-model_01.*left over"):
        opened(pipeline)


def test_a_layer_file_of_another_shape_is_refused(pipeline: Path) -> None:
    rewrite(pipeline, LAYER, lambda layer: layer.update({"a.bias": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"layer_03.*parameter 3\.a\.bias.*shape \(3,\)"):
        opened(pipeline)


def test_a_layer_file_without_a_parameter_is_refused(pipeline: Path) -> None:
    rewrite(pipeline, LAYER, lambda layer: layer.pop("n.weight"))
    with pytest.raises(CheckpointError, match=r"layer_03.*parameter 3\.n\.weight.*found nothing"):
        opened(pipeline)


def test_layer_files_beside_a_model_with_weights_are_left_over(pipeline: Path) -> None:
    rewrite(pipeline, "mp_rank_*", lambda model: model.update(module={"w": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match="weights of its own"):
        opened(pipeline)


def test_what_is_in_layer_files_only_is_kept(pipeline: Path) -> None:
    """Frozen weights, which only ZeRO-2 lists, and buffers, which the stage lists."""

    def add(layer: dict[str, Any]) -> None:
        layer["frozen"] = torch.tensor([1.0, 2.0])
        layer["steps"] = torch.tensor([7])

    rewrite(pipeline, LAYER, add)
    rewrite(pipeline, STAGE, lambda model: model.update(buffer_names=["3.steps"]))
    checkpoint = opened(pipeline)
    assert checkpoint.tensors["3.frozen", "fp32"].role is Role.FROZEN
    assert checkpoint.tensors["3.steps", "fp32"].role is Role.BUFFER


def test_a_listed_buffer_that_no_file_has_is_refused(pipeline: Path) -> None:
    rewrite(pipeline, STAGE, lambda model: model.update(buffer_names=["3.steps"]))
    with pytest.raises(CheckpointError, match=r"layer_03.*parameter 3\.steps"):
        opened(pipeline)


# ---------------------------------------------------------------------- another layer, another run

PIPELINES = [
    "0.12.6/pipe_pp2dp2_z1_fp32",
    "0.14.5/pipe_pp2dp2_z1_bf16",
    "0.19.8/pipe_pp2dp2_z1_bf16",
]
MIXED = ["layer_03*", "layer_*", "*_optim_states.pt", "*mp_rank_01_optim_states.pt"]
SAME_SHAPES = ("layer_02-model_00-model_states.pt", LAYER)


def refused(folder: Path, tmp_path: Path) -> str:
    with pytest.raises(ReshardError) as caught:
        reshard.convert(folder, tmp_path / "universal", fsync=False)
    assert not (tmp_path / "universal").exists()
    return str(caught.value)


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("pattern", MIXED)
def test_files_of_another_run_are_refused(name: str, pattern: str, tmp_path: Path) -> None:
    folder = copy_of(name, tmp_path)
    doubled(folder, pattern)
    assert "not its master weights rounded" in refused(folder, tmp_path)


def test_all_files_of_another_run_are_a_run(pipeline: Path, tmp_path: Path) -> None:
    doubled(pipeline, "*.pt")
    reshard.convert(pipeline, tmp_path / "universal", fsync=False)


def test_layer_files_that_changed_names_are_refused_by_them(pipeline: Path, tmp_path: Path) -> None:
    exchange(*(pipeline / name for name in SAME_SHAPES))
    assert "carries the name of another layer" in refused(pipeline, tmp_path)


def test_layer_files_that_changed_names_are_refused_by_their_values(
    pipeline: Path, tmp_path: Path
) -> None:
    for name in SAME_SHAPES:
        nameless(pipeline / name)
    exchange(*(pipeline / name for name in SAME_SHAPES))
    assert "not its master weights rounded" in refused(pipeline, tmp_path)


# ------------------------------------------------------------------------------------------- ties


def test_a_tied_layer_gone_is_named(tied: Path) -> None:
    (tied / "layer_00-model_00-model_states.pt").unlink()
    with pytest.raises(MissingFileError, match=r"tied_modules\.embed\.e\.weight"):
        opened(tied)


def test_a_tied_buffer_is_kept_under_the_name_of_the_tie(tied: Path) -> None:
    def add(layer: dict[str, Any]) -> None:
        layer["scale"] = torch.tensor([2.0])

    rewrite(tied, "layer_00-*", add)
    checkpoint = opened(tied)
    assert checkpoint.tensors["tied_modules.embed.scale", "fp32"].role is Role.FROZEN
    assert "0.scale" not in checkpoint.names


def test_a_tie_that_differs_is_refused_with_its_stages(tied: Path, tmp_path: Path) -> None:
    """The tied embedding lies on both stages; its first moment is changed on the last."""

    def change(kept: dict[str, Any]) -> None:
        kept["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"][0] += 1

    rewrite(tied, "zero_pp_rank_0_mp_rank_01_*", change)
    with pytest.raises(ReplicaMismatchError, match=r"tied_modules\.embed\.e\.weight") as caught:
        reshard.convert(tied, tmp_path / "universal", fsync=False)
    assert "mp_rank_01" in str(caught.value)
    assert caught.value.state == "exp_avg"
    assert not (tmp_path / "universal").exists()


def test_a_tie_of_another_shape_is_refused(tied: Path) -> None:
    def shorter(model: dict[str, Any]) -> None:
        shapes = model["param_shapes"][0]
        shapes["tied_modules.embed.e.weight"] = torch.Size((96, 12))

    rewrite(tied, STAGE, shorter)
    with pytest.raises(CheckpointError):
        opened(tied)


def test_the_tie_comes_out_once(tied: Path) -> None:
    stored = opened(tied).tensors["tied_modules.embed.e.weight", "exp_avg_sq"]
    assert stored.shape == (97, 12)
    files = {Path(region.file).name for region in stored.regions.values()}
    assert files == {f"zero_pp_rank_0_mp_rank_0{stage}_optim_states.pt" for stage in (0, 1)}
