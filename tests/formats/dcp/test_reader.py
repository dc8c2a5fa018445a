"""Reading DCP folders that torch wrote: real runs with the truth beside them, and every tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from reshard.errors import CheckpointError, UnsupportedError, UsageError
from reshard.formats.checkpoint import Checkpoint, Role
from reshard.formats.dcp.options import DcpReading, Keys
from reshard.formats.dcp.reader import open_dcp
from reshard.formats.folders import resolve_folder
from tests.formats.dcp.folders import (
    GOLDEN,
    SHARED,
    elements,
    opened,
    save,
    state_dicts,
    trained,
)

Tree = dict[str, Any]

REAL = sorted({folder.name: folder for folder in (*SHARED.glob("*/"), *GOLDEN.glob("*/"))}.items())


@pytest.mark.parametrize("case", REAL, ids=lambda case: case[0])
class TestRealRuns:
    """FSDP2 on 2 ranks, and on a 2×2 mesh with tensor parallelism: uneven and strided shards.

    And two ranks of torch 2.4.1, one of which has an empty shard.
    """

    def test_every_state_is_exact(self, case: tuple[str, Path]) -> None:
        checkpoint, truth = opened(case[1] / "ckpt"), torch.load(case[1] / "truth.pt")
        expected = {(name, "fp32"): value for name, value in truth["model"].items()}
        steps = {}
        for name, states in truth["optim"].items():
            steps[name, "step"] = states.pop("step").item()
            expected |= {(name, state): value for state, value in states.items()}
        assert checkpoint.tensors.keys() == expected.keys()
        for key, tensor in checkpoint.tensors.items():
            assert torch.equal(elements(tensor), expected[key]), key
        assert {key: scalar.value for key, scalar in checkpoint.scalars.items()} == steps

    def test_what_no_group_trains_is_a_buffer_and_that_is_said(
        self, case: tuple[str, Path]
    ) -> None:
        checkpoint, truth = opened(case[1] / "ckpt"), torch.load(case[1] / "truth.pt")
        roles = {tensor.name: tensor.role for tensor in checkpoint.tensors.values()}
        untrained = [name for name in truth["model"] if name not in truth["optim"]]
        assert [name for name, role in roles.items() if role is Role.BUFFER] == untrained
        said = [problem.what.rpartition(": ")[2] for problem in checkpoint.problems]
        assert said == untrained


def reading(folder: Path, **stated: Any) -> Checkpoint:
    return open_dcp(resolve_folder(folder), DcpReading(**stated))


TREES = ("get_state_dict", "flattened", "torchtitan", "app", "root", "flat_root")


def tree_of(name: str, model: Tree, nested: Tree, flat: Tree) -> Tree:
    """A tree as some training loop saves it."""
    return {
        "get_state_dict": {"model": model, "optim": nested},
        "flattened": {"model": model, "optimizer": flat},
        "torchtitan": {**model, "optimizer": flat, "train_state": {"step": torch.tensor(2)}},
        "app": {"app": {"model": model, "optim": nested}},
        "root": {**model, **nested},
        "flat_root": {**model, **flat},
    }[name]


def groups_of(checkpoint: Checkpoint) -> list[tuple[list[str], dict[str, Any]]]:
    """Names and settings of each group."""
    names: Any = checkpoint.extras["groups"].value
    settings: Any = checkpoint.extras["param_groups"].value
    return list(zip(names, settings, strict=True))


@pytest.mark.parametrize("tree", TREES)
def test_every_tree_is_the_same_checkpoint(tree: str, tmp_path: Path) -> None:
    net, optimizer = trained()
    model, nested = state_dicts(net, optimizer)
    _, flat = state_dicts(net, optimizer, flattened=True)
    checkpoint = opened(save(tree_of(tree, model, nested, flat), tmp_path / "ckpt"))
    expected = {(name, "fp32"): value for name, value in model.items()}
    for name, states in nested["state"].items():
        expected |= {(name, state): states[state] for state in ("exp_avg", "exp_avg_sq")}
    assert checkpoint.tensors.keys() == expected.keys()
    for key, tensor in checkpoint.tensors.items():
        assert torch.equal(elements(tensor), expected[key]), key
    assert {scalar.value for scalar in checkpoint.scalars.values()} == {2.0}
    decays = {tuple(sorted(names)): kept["weight_decay"] for names, kept in groups_of(checkpoint)}
    assert decays == {("norm.bias", "norm.weight"): 0.0, ("up.bias", "up.weight"): 0.1}


def test_a_weight_that_is_stored_transposed_is_read_as_it_is_meant(tmp_path: Path) -> None:
    net, optimizer = trained()
    assert not net.up.weight.is_contiguous()
    model, nested = state_dicts(net, optimizer)
    checkpoint = opened(save({"model": model, "optim": nested}, tmp_path / "ckpt"))
    assert torch.equal(elements(checkpoint.tensors["up.weight", "fp32"]), net.up.weight)


def test_frozen_parameters_are_what_the_user_says(tmp_path: Path) -> None:
    net, optimizer = trained()
    model, nested = state_dicts(net, optimizer)
    folder = save({"model": model, "optim": nested}, tmp_path / "ckpt")
    assert opened(folder).tensors["gate", "fp32"].role is Role.BUFFER
    stated = reading(folder, frozen=("gate",))
    assert stated.tensors["gate", "fp32"].role is Role.FROZEN
    assert stated.tensors["shift", "fp32"].role is Role.BUFFER
    assert stated.problems == ()


def test_frozen_parameters_that_are_not_there_are_refused(tmp_path: Path) -> None:
    net, optimizer = trained()
    model, nested = state_dicts(net, optimizer)
    folder = save({"model": model, "optim": nested}, tmp_path / "ckpt")
    with pytest.raises(UsageError) as caught:
        reading(folder, frozen=("gate", "nothing*"))
    assert str(caught.value) == (
        f"--frozen matches no parameter: {folder / '.metadata'}: found nothing*; next: reshard "
        "inspect --tensors '*' lists the names"
    )


def test_weights_alone_are_parameters(tmp_path: Path) -> None:
    model, _ = state_dicts(*trained())
    checkpoint = opened(save({"model": model}, tmp_path / "ckpt"))
    assert [(tensor.name, tensor.role) for tensor in checkpoint.tensors.values()] == [
        (name, Role.PARAMETER) for name in model
    ]


def test_what_is_neither_model_nor_optimizer_is_said(tmp_path: Path) -> None:
    model, nested = state_dicts(*trained())
    tree = {"model": model, "optim": nested, "epoch": 3, "loss": torch.tensor([0.5])}
    checkpoint = opened(save(tree, tmp_path / "ckpt"))
    assert checkpoint.problems[0].what == (
        "entries of neither the model nor the optimizer are not carried: loss, epoch"
    )


def test_two_models_are_refused_until_the_user_says_which(tmp_path: Path) -> None:
    model, nested = state_dicts(*trained())
    other = {name: value + 1 for name, value in model.items()}
    folder = save({"model": model, "ema": other, "optim": nested}, tmp_path / "ckpt")
    with pytest.raises(CheckpointError) as caught:
        opened(folder)
    assert str(caught.value) == (
        f"the tree holds 2 models: {folder}/.metadata: found ema, model; "
        "next: say which with --model-key"
    )
    found = reading(folder, keys=Keys(model="ema")).tensors["norm.bias", "fp32"]
    assert torch.equal(elements(found), other["norm.bias"])


def test_a_stated_model_that_lacks_a_parameter_is_refused(tmp_path: Path) -> None:
    model, nested = state_dicts(*trained())
    half = {name: value for name, value in model.items() if name != "norm.bias"}
    folder = save({"model": model, "half": half, "optim": nested}, tmp_path / "ckpt")
    with pytest.raises(CheckpointError) as caught:
        reading(folder, keys=Keys(model="half"))
    assert str(caught.value) == (
        "the model at the stated keys lacks a parameter of the optimizer: "
        f"{folder}/.metadata, parameter norm.bias: found 'half'; "
        "next: state another place with --model-key"
    )


def test_an_optimizer_that_numbers_its_parameters_is_refused(tmp_path: Path) -> None:
    net, optimizer = trained()
    tree = {"model": net.state_dict(), "optim": optimizer.state_dict()}
    with pytest.raises(UnsupportedError) as caught:
        opened(save(tree, tmp_path / "ckpt"))
    assert str(caught.value) == (
        "the optimizer numbers its parameters, and no file says which is which: "
        f"{tmp_path}/ckpt/.metadata: found parameter 0; next: save it with "
        "torch.distributed.checkpoint.state_dict.get_state_dict"
    )


def test_a_parameter_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    model, nested = state_dicts(*trained())
    del model["norm.bias"]
    with pytest.raises(CheckpointError) as caught:
        opened(save({"model": model, "optim": nested}, tmp_path / "ckpt"))
    assert caught.value.what == (
        "no place in the tree has the tensors of all parameters of the optimizer"
    )


def test_properties_with_strides_as_later_torch_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 2.13, the state of `TensorProperties` has a sixth field."""
    plain: Any = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*plain(self), (1,)))
    model, nested = state_dicts(*trained())
    checkpoint = opened(save({"model": model, "optim": nested}, tmp_path / "ckpt"))
    assert torch.equal(elements(checkpoint.tensors["norm.bias", "fp32"]), model["norm.bias"])


def test_groups_as_one_object_as_torch_2_3_wrote_them(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import _version

    model, nested = state_dicts(*trained())
    _version._derived_version = "2_3"
    try:
        folder = save({"model": model, "optim": nested}, tmp_path / "ckpt")
    finally:
        _version._derived_version = None
    assert groups_of(opened(folder)) == [
        (group.pop("params"), group) for group in nested["param_groups"]
    ]
