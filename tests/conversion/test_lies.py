"""Files that contradict themselves, or hold something else than they seem to: never believed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from tests.conversion.reading import param, same_bits
from tests.conversion.test_bad_input import case_of, copy_of, one, refused, rewrite, tag_folder

Change = Callable[[torch.Tensor], torch.Tensor]


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor * 2, tensor], 1)[:, 1]


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    return torch.tensor([5.0]).expand(tensor.shape[0])


def negated(tensor: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(tensor)


@pytest.mark.parametrize("change", [strided, expanded, negated])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("what", ["master", "state"])
def test_flat_tensors_must_be_what_their_bytes_are(
    change: Change, stage: int, what: str, tmp_path: Path
) -> None:
    def edit(root: dict[str, Any]) -> None:
        body = root["optimizer_state_dict"]
        if what == "master":
            key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
            body[key][0] = change(body[key][0].detach())
        else:
            optimizer = body["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
            optimizer["state"][0]["exp_avg"] = change(optimizer["state"][0]["exp_avg"])

    source = copy_of(case_of(stage), tmp_path)
    rewrite(one(source, "*_optim_states.pt"), edit)
    refused(source, tmp_path, "view")


def test_a_state_may_not_be_called_like_the_masters(tmp_path: Path) -> None:
    def edit(root: dict[str, Any]) -> None:
        state = root["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        state["fp32"] = state["exp_avg"].clone()

    source = copy_of(case_of(1), tmp_path)
    for path in tag_folder(source).glob("*_optim_states.pt"):
        rewrite(path, edit)
    refused(source, tmp_path, "state fp32")


@pytest.mark.parametrize("stage", [1, 3])
def test_swapped_rank_files(stage: int, tmp_path: Path) -> None:
    source = copy_of(case_of(stage), tmp_path)
    first, second = sorted(tag_folder(source).glob("*_optim_states.pt"))[:2]
    shutil.move(first, tmp_path / "aside")
    shutil.move(second, first)
    shutil.move(tmp_path / "aside", second)
    refused(source, tmp_path, "carries the name of another rank")


def test_shapes_that_contradict_the_weights(tmp_path: Path) -> None:
    def edit(root: dict[str, Any]) -> None:
        shapes = next(
            group for group in root["param_shapes"] if any(len(s) == 2 for s in group.values())
        )
        name = next(name for name, shape in shapes.items() if len(set(shape)) == 2)
        shapes[name] = torch.Size(reversed(shapes[name]))

    source = copy_of(case_of(1), tmp_path)
    path = one(source, "mp_rank_00*")
    content = torch.load(path, weights_only=False)
    edit(content)
    torch.save(content, path)
    refused(source, tmp_path, "param_shapes contradicts the shape of the weights")


def test_a_tie_to_nothing(tmp_path: Path) -> None:
    source = copy_of(case_of(1), tmp_path)
    rewrite(one(source, "mp_rank_00*"), lambda root: root.update(shared_params={"a": "nowhere"}))
    refused(source, tmp_path, "tied", "nowhere")


def test_an_absurd_world_size(tmp_path: Path) -> None:
    source = copy_of(case_of(1), tmp_path)
    rewrite(one(source, "mp_rank_00*"), lambda root: root.update(dp_world_size=10**9))
    refused(source, tmp_path, "more ranks than any run has")


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    source = copy_of(case_of(1), tmp_path)

    def edit(root: dict[str, Any]) -> None:
        root["module"]["\ud800x"] = torch.zeros(3)

    rewrite(one(source, "mp_rank_00*"), edit)
    refused(source, tmp_path, "inside the output folder")


def test_a_transposed_frozen_weight_is_read_in_its_own_order(tmp_path: Path) -> None:
    source = copy_of(case_of(1), tmp_path)
    weight = torch.arange(12.0).view(3, 4).t()
    rewrite(one(source, "mp_rank_00*"), lambda root: root["module"].update(turned=weight))
    reshard.convert(source, tmp_path / "out_universal", fsync=False)
    assert same_bits(param(tmp_path / "out_universal", "turned", "fp32"), weight.contiguous())


def test_the_two_model_files_of_a_universal_folder_must_agree(tmp_path: Path) -> None:
    source = copy_of(case_of(1), tmp_path)
    reshard.convert(source, tmp_path / "out_universal", fsync=False)
    path = tmp_path / "out_universal" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    rewrite(path, lambda root: root.update(global_steps=99))
    with pytest.raises(reshard.CheckpointError, match="disagree on global_steps"):
        reshard.open_checkpoint(tmp_path / "out_universal")


def test_a_foreign_folder_is_not_overwritten(tmp_path: Path) -> None:
    source = copy_of(case_of(1), tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "work").write_text("years")
    with pytest.raises(reshard.OutputError, match="no checkpoint converter wrote"):
        reshard.convert(source, tmp_path / "mine", overwrite=True, fsync=False)
    assert (tmp_path / "mine" / "work").read_text() == "years"


def other_masters(root: dict[str, Any]) -> None:
    """Masters of another run: the same lengths, the same step."""
    body = root["optimizer_state_dict"]
    body["single_partition_of_fp32_groups"] = [
        master.detach().roll(1) for master in body["single_partition_of_fp32_groups"]
    ]


@pytest.mark.parametrize("stage", [1, 2])
def test_masters_that_are_not_the_weights_of_the_model(stage: int, tmp_path: Path) -> None:
    source = copy_of(case_of(stage), tmp_path)
    rewrite(one(source, "*_optim_states.pt"), other_masters)
    refused(source, tmp_path, "the model's own weights are not its master weights rounded")


@pytest.mark.parametrize("stage", [1, 2])
def test_a_tied_weight_that_is_another(stage: int, tmp_path: Path) -> None:
    """The state dict holds a tied parameter under both names, and one of them was changed."""

    def edit(root: dict[str, Any]) -> None:
        alias, *_ = root["shared_params"]
        root["module"][alias] = root["module"][alias].clone() + 1

    source = copy_of(case_of(stage), tmp_path)
    rewrite(one(source, "mp_rank_00_model_states.pt"), edit)
    refused(source, tmp_path, "the model's own weights are not its master weights rounded, in 1 of")


def test_the_user_may_choose_the_masters(tmp_path: Path) -> None:
    source = copy_of(case_of(1), tmp_path)
    rewrite(one(source, "*_optim_states.pt"), other_masters)
    report = reshard.convert(source, tmp_path / "out", replicas="first", fsync=False)
    (note,) = [note for note in report.notes if "master weights were taken" in note]
    assert "not its master weights rounded, in" in note


def test_an_order_that_is_stated_wrong_shows_in_the_weights(tmp_path: Path) -> None:
    """Both `param_shapes` and the mappings of all ranks tell of another order of the buffer."""

    def reverse(root: dict[str, Any]) -> None:
        if "param_shapes" in root:
            root["param_shapes"] = [dict(reversed(s.items())) for s in root["param_shapes"]]
            return
        root["optimizer_state_dict"]["param_slice_mappings"] = None

    source = copy_of(case_of(1), tmp_path)
    for path in tag_folder(source).glob("*.pt"):
        rewrite(path, reverse)
    refused(source, tmp_path, "the model's own weights are not its master weights rounded")


def test_a_client_state_that_differs_by_rank_is_told(tmp_path: Path) -> None:
    source = copy_of(case_of(3), tmp_path)
    first, second = sorted(tag_folder(source).glob("zero_pp_rank_*_model_states.pt"))[:2]
    rewrite(first, lambda root: root.update(seen=0, same=[1.0]))
    rewrite(second, lambda root: root.update(seen=1, same=[1.0]))
    (told,) = [p for p in reshard.open_checkpoint(source).problems if "client state" in p.what]
    assert told.what.endswith("differs from that of rank 0, which is taken: seen")
    assert told.file == str(second)
