"""Real checkpoints with experts: every state equals what the live engines held.

Every expert checkpoint beside the repository, of every DeepSpeed version there is. Experts of
native DeepSpeed MoE have their global number; the truth has them EP rank by EP rank, under the
number local to the rank, so the global one is worked out here.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.errors import CheckpointError, UnsupportedError
from reshard.formats.deepspeed.writing import NativeOptions
from tests.formats.deepspeed.reading import opened, rewrite, wrong_states
from tests.truth import Case, States, by_name, case_named, with_experts

MARK = ".deepspeed_experts."


def truth_of(case: Case) -> States:
    """Return what the engines held, every expert under its global name."""
    full = case.truth().full
    if case.model != "native_moe":
        return full
    whole = {name: states for name, states in full.items() if MARK not in name}
    kept = torch.load(case.folder / "truth.pt", weights_only=True)
    for (_, _, ep_rank), held in kept["shards"].items():
        local = {name for name in held if MARK in name}
        count = 1 + max(int(name.split(MARK)[1].split(".")[0]) for name in local)
        for name in local:
            head, rest = name.split(MARK)
            number, suffix = rest.split(".", 1)
            whole[f"{head}{MARK}{ep_rank * count + int(number)}.{suffix}"] = held[name]
    return whole


@pytest.mark.parametrize("case", by_name(with_experts()))
def test_every_state_is_bit_equal(case: Case) -> None:
    checkpoint = opened(case.tag_path)
    truth = truth_of(case)
    assert wrong_states(checkpoint, truth) == []
    trained = {name for name, state in checkpoint.tensors if state != "fp32"}
    assert trained == set(truth)
    assert {float(scalar.value) for scalar in checkpoint.scalars.values()} == case.truth().steps
    assert checkpoint.topology.ep == 2


@pytest.mark.parametrize("case", by_name(with_experts()))
def test_the_universal_folder_is_the_same_checkpoint(case: Case, tmp_path: Path) -> None:
    reshard.convert(case.path, tmp_path / "universal", fsync=False)
    assert reshard.verify(case.path, tmp_path / "universal").equal


@pytest.mark.parametrize("name", ["mixtral_ep2_z1_fp32", "mixtral_ep2tp2_z3_fp32"])
def test_fused_experts_are_written_as_deepspeed_writes_them(name: str, tmp_path: Path) -> None:
    case = case_named(f"0.19.8/{name}")
    reshard.convert(case.path, tmp_path / "universal", fsync=False)
    file = tmp_path / "universal" / "zero" / "model.layers.1.mlp.experts.w2" / "exp_avg_sq.pt"
    kept = torch.load(file, weights_only=True)
    assert list(kept) == ["param", "cat_dim", "is_expert_param", "ep_num_experts"]
    assert kept["param"].shape == (4, 16, 24)
    assert (kept["cat_dim"], kept["is_expert_param"], kept["ep_num_experts"]) == (0, True, 4)


@pytest.mark.parametrize("with_states", [True, False])
def test_without_zero_fused_experts_are_written_in_the_same_form(
    with_states: bool, tmp_path: Path
) -> None:
    """The optimizer files of EP ranks may be absent: the weights then come from expert files."""
    case = case_named("0.19.8/mixtral_ep2_z1_fp32")
    options = NativeOptions(stage=0, dp=2, ep=2)
    native = tmp_path / "step3"
    reshard.convert(case.path, native, to="deepspeed", options=options, fsync=False)
    (native / "reshard_manifest.json").unlink()
    if not with_states:
        for file in native.glob("expp_rank_*_optim_states.pt"):
            file.unlink()
    reshard.convert(native, tmp_path / "universal", fsync=False)
    folders = list((tmp_path / "universal" / "zero").glob("*.mlp.experts.*"))
    assert len(folders) == 6
    for folder in folders:
        states = sorted(folder.glob("[ef]*.pt"))
        assert len(states) == (3 if with_states else 1)
        for file in states:
            kept = torch.load(file, weights_only=True)
            assert list(kept) == ["param", "cat_dim", "is_expert_param", "ep_num_experts"]
            assert list(kept.values())[1:] == [0, True, kept["param"].shape[0]]


def test_a_universal_folder_of_a_universal_folder_still_cuts_experts(tmp_path: Path) -> None:
    case = case_named("0.19.8/mixtral_ep2_z1_fp32")
    reshard.convert(case.path, tmp_path / "first", fsync=False)
    reshard.convert(tmp_path / "first", tmp_path / "second", fsync=False)
    file = "zero/model.layers.0.mlp.experts.w1/fp32.pt"
    assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()


def test_the_router_is_there_once(tmp_path: Path) -> None:
    """Its other name is an alias, which no file says."""
    case = case_named("0.19.8/mixtral_ep2_z3_fp32")
    checkpoint = opened(case.tag_path)
    alias, owner = "model.layers.0.mlp.gate.gate.weight", "model.layers.0.mlp.router.gate.weight"
    assert checkpoint.aliases[alias] == owner
    assert alias not in checkpoint.names


def test_a_second_router_of_other_values_is_no_alias(tmp_path: Path) -> None:
    case = case_named("0.19.8/mixtral_ep2_z1_fp32")
    folder = tmp_path / "step3"
    shutil.copytree(case.tag_path, folder)
    name = "model.layers.0.mlp.gate.gate.weight"
    rewrite(folder, "mp_rank_*", lambda model: model["module"][name].add_(1))
    checkpoint = opened(folder)
    assert name not in checkpoint.aliases
    assert name in checkpoint.names


@pytest.fixture
def folded(tmp_path: Path) -> Path:
    """AutoEP and AutoTP together: the EP group runs across the tensor ranks."""
    case = case_named("0.19.8/mixtral_ep2tp2_z1_fp32")
    shutil.copytree(case.tag_path, tmp_path / "step3")
    return tmp_path / "step3"


def folding(**values: object) -> Any:
    return lambda kept: kept["folding"].update(values)


def test_experts_cut_by_tensor_parallelism_are_not_implemented(folded: Path) -> None:
    rewrite(folded, "*_optim_states.pt", folding(etp_size=2))
    with pytest.raises(NotImplementedError, match=r"etp_size.*zero_pp_rank_0_mp_rank_00"):
        opened(folded)


def test_folded_experts_without_folding_metadata_are_not_implemented(folded: Path) -> None:
    rewrite(folded, "zero_pp_rank_1_mp_rank_01_*", lambda kept: kept.pop("folding"))
    with pytest.raises(UnsupportedError, match=r"zero_pp_rank_1_mp_rank_01.*found no folding"):
        opened(folded)


def test_folding_that_puts_two_ranks_in_one_place_is_refused(folded: Path) -> None:
    rewrite(folded, "zero_pp_rank_0_mp_rank_01_*", folding(ep_rank=0))
    with pytest.raises(
        CheckpointError, match=r"partition 0 of the experts of EP rank \d is held by 2 ranks"
    ):
        opened(folded)


def test_folding_of_another_rank_is_refused(folded: Path) -> None:
    rewrite(folded, "zero_pp_rank_0_mp_rank_01_*", folding(tp_rank=0))
    with pytest.raises(CheckpointError, match="the folding metadata contradicts the rank"):
        opened(folded)
