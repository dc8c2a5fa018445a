"""Mixtures that list no parameters: the order is recovered, and proved by the weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from reshard.errors import CheckpointError, MissingFileError, UnsupportedError
from tests.formats.deepspeed.mixture_files import expert_file
from tests.formats.deepspeed.native_files import MARK, Native, write_native
from tests.formats.deepspeed.reading import opened, rewrite, wrong_states


@pytest.mark.parametrize("true_mappings", [True, False])
@pytest.mark.parametrize("edp", [1, 2, 3])
@pytest.mark.parametrize("ep", [1, 2])
def test_every_state_is_exact(ep: int, edp: int, true_mappings: bool, tmp_path: Path) -> None:
    native = Native(ep=ep, edp=edp, true_mappings=true_mappings)
    if ep == 1:
        native = Native(ep=1, edp=edp)
    checkpoint = opened(write_native(native, tmp_path / "step3"))
    assert wrong_states(checkpoint, native.full()) == []
    assert {scalar.value for scalar in checkpoint.scalars.values()} == {4}
    assert checkpoint.topology.ep == ep
    said_so = any("wrong before DeepSpeed 0.14.5" in str(one) for one in checkpoint.problems)
    assert said_so == (not native.true_mappings)


def test_names_are_global(tmp_path: Path) -> None:
    checkpoint = opened(write_native(Native(), tmp_path / "step3"))
    experts = {name for name in checkpoint.names if MARK in name}
    assert {name.removeprefix(MARK).split(".")[0] for name in experts} == {"0", "1", "2", "3"}


def test_several_groups_of_experts_need_true_mappings(tmp_path: Path) -> None:
    good = Native(groups=2)
    assert wrong_states(opened(write_native(good, tmp_path / "good")), good.full()) == []
    with pytest.raises(UnsupportedError, match="the order of the experts in group 1"):
        opened(write_native(Native(groups=2, true_mappings=False), tmp_path / "bad"))


@pytest.mark.parametrize("file", ["mp_rank_00_model_states.pt", expert_file(0, 2)])
def test_weights_that_contradict_the_order_are_refused(file: str, tmp_path: Path) -> None:
    folder = write_native(Native(true_mappings=False), tmp_path / "step3")

    def change(content: dict[str, Any]) -> None:
        for tensor in content.get("module", content).values():
            tensor.add_(1)

    rewrite(folder, file, change)
    with pytest.raises(CheckpointError, match="master weights are not the weights of the model"):
        opened(folder)


def test_a_missing_expert_file_is_named(tmp_path: Path) -> None:
    folder = write_native(Native(), tmp_path / "step3")
    (folder / expert_file(0, 3)).unlink()
    with pytest.raises(MissingFileError, match="layer_0_expert_3_mp_rank_00"):
        opened(folder)


def test_a_renamed_expert_file_is_refused(tmp_path: Path) -> None:
    folder = write_native(Native(), tmp_path / "step3")
    shutil.copy(folder / expert_file(0, 1), folder / expert_file(0, 2))
    with pytest.raises(CheckpointError, match="something else than its expert"):
        opened(folder)


def test_a_file_of_a_layer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    folder = write_native(Native(), tmp_path / "step3")
    shutil.copy(folder / expert_file(0, 1), folder / expert_file(3, 1))
    with pytest.raises(CheckpointError, match="a layer that the model does not have"):
        opened(folder)


def test_expert_files_of_long_ago_are_refused(tmp_path: Path) -> None:
    folder = write_native(Native(), tmp_path / "step3")
    shutil.copy(folder / expert_file(0, 1), folder / "expert_1_mp_rank_00_model_states.pt")
    with pytest.raises(UnsupportedError, match="without the number of their layer"):
        opened(folder)
