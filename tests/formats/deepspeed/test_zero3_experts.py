"""Experts under ZeRO-3: every file states its own place, and all places must be taken once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard.errors import CheckpointError, MissingFileError, UnsupportedError
from reshard.formats.checkpoint import Role
from tests.formats.deepspeed.mixture_files import Mixture, expert_file, write
from tests.formats.deepspeed.reading import opened, rewrite, values_of, wrong_states

MIXTURE = Mixture(((0, 1), (2, 3)), edp=2, stage=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(MIXTURE, tmp_path / "step3")


def model_of(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def optimizer_of(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def stating(**values: object) -> Any:
    return lambda model: [entry.update(values) for entry in model["ds_autoep_layers"]]


def test_a_place_taken_twice_is_refused(folder: Path) -> None:
    rewrite(folder, model_of(1), stating(ep_rank=0))
    with pytest.raises(
        CheckpointError, match=r"partition 0 of the experts of EP rank \d is held by 2 ranks"
    ):
        opened(folder)


def test_a_place_that_the_optimizer_file_contradicts_is_refused(folder: Path) -> None:
    rewrite(folder, model_of(2), stating(expert_data_parallel_rank=0))
    with pytest.raises(CheckpointError, match=r"ds_zero_partition_groups.*partition 1 of 2"):
        opened(folder)


def test_a_missing_rank_is_a_missing_file(folder: Path) -> None:
    (folder / optimizer_of(3)).unlink()
    with pytest.raises(MissingFileError, match=optimizer_of(3)):
        opened(folder)


def test_a_writer_without_a_place_is_refused(folder: Path) -> None:
    rewrite(
        folder, model_of(1), lambda model: [e.pop("ep_rank") for e in model["ds_autoep_layers"]]
    )
    with pytest.raises(CheckpointError, match="does not state the EP rank"):
        opened(folder)


def test_experts_that_are_not_partitioned_are_not_implemented(folder: Path) -> None:
    rewrite(folder, "*_model_states.pt", stating(checkpoint_format="per_expert_files"))
    with pytest.raises(NotImplementedError, match="not partitioned among the rank files"):
        opened(folder)


def test_an_unknown_version_is_refused(folder: Path) -> None:
    rewrite(folder, "*_model_states.pt", stating(checkpoint_format_version=2))
    with pytest.raises(UnsupportedError, match="unknown version of partitioned experts"):
        opened(folder)


def test_files_that_disagree_on_the_placement_are_refused(folder: Path) -> None:
    def swapped(model: dict[str, Any]) -> None:
        model["ds_autoep_layers"][0]["expert_placement"]["ranks"][0]["experts"].reverse()

    rewrite(folder, model_of(3), swapped)
    with pytest.raises(CheckpointError, match="disagree on the experts of a layer"):
        opened(folder)


def test_an_expert_file_beside_zero3_is_left_over(folder: Path, tmp_path: Path) -> None:
    other = write(Mixture(MIXTURE.placement), tmp_path / "other")
    shutil.copy(other / expert_file(0, 0), folder)
    with pytest.raises(CheckpointError, match=r"layer_0_expert_0.*left over"):
        opened(folder)


def test_a_buffer_of_another_length_is_refused(folder: Path) -> None:
    def shorter(kept: dict[str, Any]) -> None:
        groups = kept["optimizer_state_dict"]["fp32_flat_groups"]
        groups[1] = groups[1][:-1].clone()

    rewrite(folder, optimizer_of(0), shorter)
    with pytest.raises(CheckpointError, match="does not hold the experts"):
        opened(folder)


def freeze(folder: Path) -> None:
    """Turn all experts into frozen ones: DeepSpeed keeps their blocks in the model-state files."""
    for rank in range(MIXTURE.dp):
        kept = torch.load(folder / optimizer_of(rank), weights_only=False)
        body = kept["optimizer_state_dict"]
        flat = body["fp32_flat_groups"].pop()
        body["ds_zero_partition_groups"].pop()
        body["optimizer_state_dict"]["state"].pop(1)
        body["optimizer_state_dict"]["param_groups"].pop()
        torch.save(kept, folder / optimizer_of(rank))
        model = torch.load(folder / model_of(rank), weights_only=False)
        shapes = model["param_shapes"].pop()
        model["frozen_param_shapes"] = shapes
        sizes = [-(-shape.numel() // MIXTURE.edp) for shape in shapes.values()]
        model["frozen_param_fragments"] = dict(zip(shapes, flat.split(sizes), strict=True))
        torch.save(model, folder / model_of(rank))


def test_frozen_experts_are_exact(folder: Path) -> None:
    freeze(folder)
    checkpoint = opened(folder)
    full = MIXTURE.full()
    frozen = {name: {"fp32": full[name]["fp32"]} for name in MIXTURE.names()}
    assert wrong_states(checkpoint, {**frozen, "dense.weight": full["dense.weight"]}) == []
    assert {checkpoint.tensors[name, "fp32"].role for name in frozen} == {Role.FROZEN}


def test_a_frozen_block_taken_twice_is_refused(folder: Path) -> None:
    freeze(folder)
    rewrite(folder, model_of(2), stating(expert_data_parallel_rank=0))
    with pytest.raises(CheckpointError, match="EP rank 0 are not there once each"):
        opened(folder)


def test_replicas_of_experts_are_compared(tmp_path: Path) -> None:
    mixture = Mixture(((0, 1), (1, 2)), stage=3)
    folder = write(mixture, tmp_path / "step3")

    def change(kept: dict[str, Any]) -> None:
        kept["optimizer_state_dict"]["fp32_flat_groups"][1][0] += 1

    rewrite(folder, optimizer_of(1), change)
    with pytest.raises(ValueError, match="different bits"):
        values_of(opened(folder).tensors["model.layers.0.mlp.experts.w1", "fp32"])
