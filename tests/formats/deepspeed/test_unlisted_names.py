"""What stands in `module` under a name that no list has: a second name, a layer's table, an object.

Real folders, whose `module` is edited as models of these kinds save it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard.formats.checkpoint import Role
from tests.formats.deepspeed.reading import opened, values_of, wrong_states
from tests.truth import case_named

STAGES = ["golden/odd_z1_dp2_fp32", "golden/odd_z2_dp2_bf16", "golden/odd_z3_dp4_bf16"]


def edited(name: str, folder: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """The folder of a case, with the `module` of every model-state file edited."""
    tag = shutil.copytree(case_named(name).tag_path, folder / "step3")
    for path in tag.glob("*model_states.pt"):
        content = torch.load(path, weights_only=False)
        edit(content["module"])
        torch.save(content, path)
    return tag


def trained(name: str) -> str:
    return next(iter(case_named(name).truth().full))


@pytest.mark.parametrize("name", STAGES)
def test_a_second_name_of_one_storage_is_a_tie(name: str, tmp_path: Path) -> None:
    owner = trained(name)
    tag = edited(name, tmp_path, lambda module: module.update(again=module[owner]))
    checkpoint = opened(tag)
    assert checkpoint.aliases == {**opened(case_named(name).tag_path).aliases, "again": owner}
    assert not [key for key in checkpoint.tensors if key[0] == "again"]
    assert wrong_states(checkpoint, case_named(name).truth().full) == []


def test_a_table_of_a_layer_is_carried_as_a_buffer(tmp_path: Path) -> None:
    table = torch.arange(9, dtype=torch.uint8)
    tag = edited(STAGES[2], tmp_path, lambda module: module.update(table=table))
    checkpoint = opened(tag)
    held = checkpoint.tensors["table", "fp32"]
    assert held.role is Role.BUFFER
    assert values_of(held).tolist() == table.tolist()
    said = "1 entry of the model: in no list of the model; carried as buffers: table"
    assert said in [problem.what for problem in checkpoint.problems]


def test_an_empty_entry_is_left_out_and_said(tmp_path: Path) -> None:
    tag = edited(STAGES[2], tmp_path, lambda module: module.update(gone=torch.empty(0)))
    checkpoint = opened(tag)
    assert ("gone", "fp32") not in checkpoint.tensors
    said = "1 entry of the model: empty and in no list of the model; left out: gone"
    assert said in [problem.what for problem in checkpoint.problems]


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("state", [None, {"scale": 1.0}])
def test_an_object_is_named(name: str, state: object, tmp_path: Path) -> None:
    tag = edited(name, tmp_path, lambda module: module.update({"l._extra_state": state}))
    said = "1 entry of the model: in `module` and no tensors; left out: l._extra_state"
    assert said in [problem.what for problem in opened(tag).problems]


def test_a_trained_parameter_that_is_not_in_the_module_is_missed(tmp_path: Path) -> None:
    owner = trained(STAGES[0])
    tag = edited(STAGES[0], tmp_path, lambda module: module.update(other=module.pop(owner)))
    said = f"trained and not in `module`, which has gate, other in no list: {owner}"
    found = [problem.what for problem in opened(tag).problems]
    assert f"1 entry of the model: {said}" in found
