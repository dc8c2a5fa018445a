"""A report says what DeepSpeed's universal loader will not give back, where that is so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from reshard import api
from tests.truth import Case, by_name, case_named, cases, golden

NATIVE = "write --to deepspeed --stage 3 --dp N"
GROUPS = (
    "there are 2 parameter groups: under ZeRO-3 DeepSpeed's universal loader gives all of them the "
    "hyperparameters of the first{}; to resume under ZeRO-3, " + NATIVE
)
AHEAD = " and lets their one step run ahead"
STATES = (
    "under ZeRO-3 DeepSpeed's universal loader reads the optimizer states exp_avg and exp_avg_sq "
    "only, and this optimizer keeps {}: resume at stage 1 or 2, or " + NATIVE
)
DEALT = (
    "the source was trained with round_robin_gradients: DeepSpeed's universal loader puts every "
    "state in the wrong place under it, so switch it off in the configuration of the run that "
    "resumes"
)


def told(case: Case, tmp_path: Path) -> list[str]:
    """The notes of a dry run about the loader's losses, those about frozen weights left out."""
    notes = api.convert(case.path, tmp_path / "u", dry_run=True).notes
    return [note for note in notes if "written to zero/" not in note]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("odd_z3_dp2_one_group", []),
        ("odd_z1_dp2_fp32", [GROUPS.format(AHEAD)]),
        ("odd_z3_dp2_sub_groups", [GROUPS.format(AHEAD)]),
        ("odd_z1_dp2_sgdm", [GROUPS.format(""), STATES.format("momentum_buffer")]),
        ("odd_z3_dp2_sgdm", [GROUPS.format(""), STATES.format("momentum_buffer")]),
        ("odd_z2_dp2_round_robin", [GROUPS.format(AHEAD), DEALT]),
    ],
)
def test_losses_are_told_where_they_are(name: str, expected: list[str], tmp_path: Path) -> None:
    assert told(case_named(f"golden/{name}"), tmp_path) == expected


@pytest.mark.parametrize("case", by_name(golden()))
def test_groups_are_told_of_every_source_that_has_several(case: Case, tmp_path: Path) -> None:
    several = [note for note in told(case, tmp_path) if "parameter groups" in note]
    assert len(several) == (1 if case.groups > 1 else 0)


OTHERS = ("plain_amsgrad_z1_dp2", "plain_lion_z1_dp2", "muon_z1_dp2")


@pytest.mark.parametrize("case", by_name([c for c in cases() if c.name.endswith(OTHERS)]))
def test_other_optimizers_than_adam_are_named(case: Case, tmp_path: Path) -> None:
    file = next(case.tag_path.glob("*zero_pp_rank_0_*_optim_states.pt"))
    body = torch.load(file, weights_only=False)["optimizer_state_dict"]
    kept = body["base_optimizer_state"]["state"].values()
    states = {
        k for state in kept for k, v in state.items() if isinstance(v, torch.Tensor) and v.ndim
    }
    assert STATES.format(", ".join(sorted(states))) in told(case, tmp_path)


def test_it_is_said_again_of_a_universal_source(tmp_path: Path) -> None:
    case = case_named("golden/odd_z2_dp2_round_robin")
    api.convert(case.path, tmp_path / "u", fsync=False)
    notes = api.convert(tmp_path / "u", tmp_path / "again", dry_run=True).notes
    assert {GROUPS.format(AHEAD), DEALT} <= set(notes)


def test_weights_alone_lose_nothing(tmp_path: Path) -> None:
    case = case_named("golden/odd_z3_dp2_one_group")
    notes = api.convert(case.path, tmp_path / "u", dry_run=True, states="fp32").notes
    assert not [note for note in notes if "optimizer" in note]


@pytest.mark.parametrize("case", by_name([c for c in cases() if "native_moe" in c.name]))
def test_nobody_is_sent_to_a_stage_that_trains_no_native_experts(
    case: Case, tmp_path: Path
) -> None:
    assert not [note for note in told(case, tmp_path) if "--stage 3" in note]
