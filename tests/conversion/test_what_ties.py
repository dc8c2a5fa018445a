"""Files that no value ties to the others: copies of one are found, and the rest is told."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import reshard
from reshard.errors import CheckpointError
from tests.conversion.test_one_save import OPTIMIZERS, copy_of, require_refused, states_of
from tests.formats.deepspeed.reading import doubled, nameless, rewrite

UNTIED = "share no value; nothing but names, counters and settings ties"


def overwrite(folder: Path, kind: str) -> None:
    """Copy rank 0's file over rank 1's, in archives that do not say what they were called."""
    first, second = sorted(folder.glob(f"*zero_pp_rank_?_mp_rank_00_{kind}"))[:2]
    nameless(first)
    shutil.copy(first, second)


@pytest.mark.parametrize("name", ["odd_z1_dp2_fp32", "odd_z2_dp2_bf16", "odd_z3_dp4_bf16"])
def test_an_optimizer_file_that_was_copied_over_another(name: str, tmp_path: Path) -> None:
    folder = copy_of(name, tmp_path)
    overwrite(folder, "optim_states.pt")
    with pytest.raises(CheckpointError):
        reshard.convert(folder, tmp_path / "out", fsync=False)


@pytest.mark.parametrize(
    ("kind", "what"),
    [("optim_states.pt", "optimizer states"), ("model_states.pt", "frozen parameters")],
)
def test_where_nothing_else_tells_the_content_does(kind: str, what: str, tmp_path: Path) -> None:
    folder = copy_of("odd_z3_dp2_offload", tmp_path)
    for file in folder.glob("*.pt"):
        rewrite(file.parent, file.name, lambda _: None)
    rewrite(folder, OPTIMIZERS, _without_partition)
    overwrite(folder, kind)
    require_refused(folder, CheckpointError, f"the files of two ranks hold the same {what}")


def _without_partition(content: dict[str, object]) -> None:
    """Older releases do not state which partition a file is."""
    body = content["optimizer_state_dict"]
    assert isinstance(body, dict)
    body.pop("ds_zero_partition_groups", None)


def test_ranks_without_a_moment_may_be_alike(tmp_path: Path) -> None:
    """Before the first step, and where a rank holds padding alone."""
    folder = copy_of("odd_z3_dp2_offload", tmp_path)

    def still(content: dict[str, object]) -> None:
        _without_partition(content)
        for state in states_of(content).values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()

    rewrite(folder, OPTIMIZERS, still)
    overwrite(folder, "optim_states.pt")
    assert reshard.diagnose(folder).healthy


def test_ranks_whose_parameters_are_all_replicas_are_alike(tmp_path: Path) -> None:
    """Tensor-parallel ranks of a run that trains norms alone; nothing is cut."""
    from reshard.formats.deepspeed.optimizer_records import read_optimizer_states
    from reshard.formats.deepspeed.ties import twins

    folder = copy_of("llama_z1_tp2dp2_fp32", tmp_path)
    first, second = (folder / f"zero_pp_rank_0_mp_rank_0{tp}_optim_states.pt" for tp in (0, 1))
    shutil.copy(first, second)
    ranks = {(0, tp): read_optimizer_states(str(f), 0, tp) for tp, f in ((0, first), (1, second))}
    assert list(twins({}, ranks)) == []


@pytest.mark.parametrize(
    ("name", "told"),
    [("odd_z3_dp4_bf16", True), ("odd_z1_dp2_fp32", False), ("llama_z1_tp2dp2_fp32", False)],
)
def test_what_nothing_ties_together_is_told(name: str, told: bool, tmp_path: Path) -> None:
    folder = copy_of(name, tmp_path)
    out = tmp_path / "out"
    found = reshard.diagnose(folder)
    assert found.healthy
    report = reshard.convert(folder, out, fsync=False)
    for texts in (
        found.notes,
        reshard.inspect(folder).checkpoint.problems,
        report.source.problems,
    ):
        assert (UNTIED in str(texts)) is told


def test_a_rank_of_another_run_at_the_same_step_is_told(tmp_path: Path) -> None:
    folder = copy_of("odd_z3_dp4_bf16", tmp_path)
    doubled(folder, "*zero_pp_rank_1_*_optim_states.pt")
    report = reshard.convert(folder, tmp_path / "out", fsync=False)
    assert UNTIED in str(report.source.problems)


def test_times_that_stand_far_apart_are_a_hint(tmp_path: Path) -> None:
    folder = copy_of("odd_z3_dp4_bf16", tmp_path)
    for file in folder.iterdir():
        os.utime(file, (1_700_000_000, 1_700_000_000))
    assert "far apart" not in str(reshard.diagnose(folder).notes)
    late = next(folder.glob("*zero_pp_rank_1_*_optim_states.pt"))
    os.utime(late, (1_700_090_000, 1_700_090_000))
    found = reshard.diagnose(folder)
    assert found.healthy
    assert f"{late.name} is 25 h younger" in str(found.notes)
