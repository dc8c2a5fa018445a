"""A pipeline over tensor and data ranks: converted exactly, and resumed on any other grid.

DeepSpeed trains it here, pp2 x tp2 x dp2 on eight processes. It cuts itself as Megatron does, ties
its embedding to its head across stages, and has frozen vectors and buffers in its layer files only.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

import reshard
from reshard.errors import MissingFileError, ReplicaMismatchError
from scripts.deepspeed_lab.results import Piped
from scripts.deepspeed_lab.topologies import PipeRecipe
from tests.deepspeed_judge.judge import SEED, TAG, Judge, differences, read_universal

pytestmark = pytest.mark.deepspeed

Run: TypeAlias = tuple[Piped, Path]


@pytest.fixture(scope="module")
def trained(judge: Judge, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("pipeline")
    recipe = PipeRecipe(pp=2, tp=2, dp=2)
    held = judge.lab.run("train_pipeline", recipe, folder, SEED, world=recipe.world, timeout=120)
    reshard.convert(folder, folder / "universal" / f"{TAG}_universal", fsync=False)
    return held, folder


def test_every_state_is_exact(trained: Run) -> None:
    held, folder = trained
    found = read_universal(folder / "universal" / f"{TAG}_universal")
    untrained = {name: {"fp32": tensor} for name, tensor in held.untrained.items()}
    assert differences({**held.full, **untrained}, found) == []
    topology = reshard.open_checkpoint(folder).topology
    assert (topology.pp, topology.tp, topology.dp) == (2, 2, 2)


@pytest.mark.parametrize(
    "grid",
    [PipeRecipe(1, 1, 2), PipeRecipe(4), PipeRecipe(1, 2, 1), PipeRecipe(2, 2, 1)],
    ids=str,
)
def test_another_grid_goes_on_from_there(grid: PipeRecipe, judge: Judge, trained: Run) -> None:
    held, folder = trained
    arguments = (grid, folder / "universal", None, SEED)
    after: Piped = judge.lab.run("resume_pipeline", *arguments, world=grid.world)
    assert differences(held.full, after.full) == []
    losses = zip(held.losses, after.losses, strict=True)
    assert max(abs(one - other) for one, other in losses) < 5e-6


@pytest.mark.parametrize(
    "file",
    [
        "layer_02-model_01-model_states.pt",
        "mp_rank_02_model_states.pt",
        "zero_pp_rank_1_mp_rank_03_optim_states.pt",
    ],
)
def test_a_file_that_is_gone_is_named(file: str, trained: Run, tmp_path: Path) -> None:
    shutil.copytree(trained[1] / TAG, tmp_path / TAG)
    (tmp_path / TAG / file).unlink()
    with pytest.raises(MissingFileError, match=file):
        reshard.open_checkpoint(tmp_path / TAG)


@pytest.mark.parametrize("name", ["tied_modules.embed.table.weight", "2.norm.weight"])
def test_replicas_that_differ_are_refused(name: str, trained: Run, tmp_path: Path) -> None:
    """Over stages and over tensor ranks alike."""
    shutil.copytree(trained[1] / TAG, tmp_path / TAG)
    stage = 1 if name.startswith("tied") else 0
    for rank in range(2):
        file = tmp_path / TAG / f"zero_pp_rank_{rank}_mp_rank_0{2 * stage + 1}_optim_states.pt"
        kept = torch.load(file, weights_only=False)
        body = kept["optimizer_state_dict"]
        for group, mapping in enumerate(body["param_slice_mappings"]):
            if name in mapping:
                flat = body["single_partition_of_fp32_groups"][group].detach()
                flat[mapping[name].start] += 1
        torch.save(kept, file)
    with pytest.raises(ReplicaMismatchError, match=name):
        reshard.convert(tmp_path / TAG, tmp_path / "universal", fsync=False)
