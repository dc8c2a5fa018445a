"""Files of two saves under one tag: no verb passes what another one refuses."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.api import conversion
from reshard.errors import CheckpointError, ReplicaMismatchError, ReshardError
from reshard.formats.renaming import renaming_of
from reshard.planning import Plan, plan
from tests.formats.deepspeed.reading import doubled, rewrite
from tests.truth import case_named

MODELS, OPTIMIZERS = "*_model_states.pt", "*_optim_states.pt"
CASES = ["odd_z1_dp2_fp32", "odd_z2_dp2_bf16", "odd_z3_dp4_bf16", "llama_z3_tp2dp2_fp32"]
FEWER, MORE = "made fewer steps than", "made more steps than"


@pytest.fixture(params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return copy_of(request.param, tmp_path)


def copy_of(name: str, tmp_path: Path) -> Path:
    shutil.copytree(case_named(f"golden/{name}").tag_path, tmp_path / "step3")
    return tmp_path / "step3"


def states_of(optimizer_file: dict[str, Any]) -> dict[int, dict[str, Any]]:
    body = optimizer_file["optimizer_state_dict"]
    inner = "base_optimizer_state" if "base_optimizer_state" in body else "optimizer_state_dict"
    states: dict[int, dict[str, Any]] = body[inner]["state"]
    return states


def with_step(value: float) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for state in states_of(content).values():
            state["step"] = torch.tensor(float(value))

    return change


def counting(steps: int, skipped: int = 0) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update(global_steps=steps, skipped_steps=skipped)


VERBS: dict[str, Callable[[Path, Path], object]] = {
    "convert": lambda source, out: reshard.convert(source, out, fsync=False),
    "dry run": lambda source, out: reshard.convert(source, out, dry_run=True),
    "read": lambda source, _: reshard.read(source),
    "verify": lambda source, _: reshard.verify(source, source),
}


def require_refused(folder: Path, error: type[ReshardError], text: str) -> None:
    for verb in VERBS.values():
        with pytest.raises(error, match=text):
            verb(folder, folder.parent / "out")
    assert not (folder.parent / "out").exists()
    assert text in str(reshard.diagnose(folder).faults)


# ------------------------------------------------------------------------------------------ steps


@pytest.mark.parametrize(
    ("pattern", "change", "text"),
    [
        (OPTIMIZERS, with_step(6), MORE),
        (OPTIMIZERS, with_step(2), FEWER),
        (MODELS, counting(6), FEWER),
        (MODELS, counting(1), MORE),
        (MODELS, counting(6, skipped=1), FEWER),
    ],
)
def test_counters_and_steps_of_two_saves(
    folder: Path, pattern: str, change: Callable[[dict[str, Any]], None], text: str
) -> None:
    rewrite(folder, pattern, change)
    require_refused(folder, CheckpointError, text)
    assert text in str(reshard.inspect(folder).checkpoint.problems)
    report = reshard.convert(folder, folder.parent / "out", replicas="first", fsync=False)
    assert any(text in note and "taken as they are" in note for note in report.notes)


def test_steps_that_an_overflow_made_void(folder: Path) -> None:
    rewrite(folder, MODELS, counting(5, skipped=2))
    assert reshard.diagnose(folder).healthy


def test_one_step_more_is_told(folder: Path) -> None:
    rewrite(folder, OPTIMIZERS, with_step(4))
    found = reshard.diagnose(folder)
    assert found.healthy
    assert "one step more (4) than is counted (3)" in str(found.notes)


@pytest.mark.parametrize("name", ["odd_z3_dp2_sub_groups", "odd_z3_dp2_one_group"])
def test_one_step_for_all_groups_runs_ahead(name: str, tmp_path: Path) -> None:
    """DeepSpeed's universal loader shares one `step`, and every group increases it."""
    folder = copy_of(name, tmp_path)

    def share(content: dict[str, Any]) -> None:
        states = states_of(content).values()
        step = torch.tensor(3.0 + 2 * (len(states) - 1) + (len(states) == 1) * 4)
        for state in states:
            state["step"] = step

    rewrite(folder, OPTIMIZERS, share)
    found = reshard.diagnose(folder)
    if name.endswith("sub_groups"):
        assert found.healthy
        assert "its groups share one `step`" in str(found.notes)
    else:
        assert MORE in str(found.faults)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 2.5])
def test_what_is_no_step(folder: Path, value: float) -> None:
    rewrite(folder, OPTIMIZERS, with_step(value))
    with pytest.raises(CheckpointError, match=r"is no number of steps|ranks disagree on step"):
        reshard.open_checkpoint(folder)


def test_more_steps_than_are_counted_in_the_same_file(tmp_path: Path) -> None:
    folder = copy_of("odd_z0_dp2_fp32", tmp_path)
    rewrite(folder, MODELS, counting(1))
    require_refused(folder, CheckpointError, "more steps than are counted in the same file")


def test_fewer_steps_are_those_of_a_parameter_that_was_frozen(tmp_path: Path) -> None:
    folder = copy_of("odd_z0_dp2_fp32", tmp_path)
    rewrite(folder, MODELS, counting(9))
    assert reshard.diagnose(folder).healthy


@pytest.mark.parametrize(
    ("key", "value"),
    [("skipped_steps", 1), ("global_samples", 99), ("lr_scheduler", {"last_epoch": 7})],
)
def test_counters_that_ranks_disagree_on(tmp_path: Path, key: str, value: object) -> None:
    folder = copy_of("odd_z3_dp4_bf16", tmp_path)
    rewrite(folder, "zero_pp_rank_2_*_model_states.pt", lambda root: root.update({key: value}))
    with pytest.raises(CheckpointError, match=f"ranks disagree on .*{key}"):
        reshard.open_checkpoint(folder)


# ----------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("name", CASES[:2])
def test_weights_of_another_run(name: str, tmp_path: Path) -> None:
    folder = copy_of(name, tmp_path)
    doubled(folder, MODELS)
    require_refused(folder, ReplicaMismatchError, "not its master weights rounded")


def test_other_names_do_not_hide_it(tmp_path: Path) -> None:
    folder = copy_of("odd_z1_dp2_fp32", tmp_path)
    doubled(folder, MODELS)
    renaming = renaming_of(["^=other."])
    with pytest.raises(ReplicaMismatchError, match="not its master weights rounded"):
        reshard.convert(folder, tmp_path / "out", to="safetensors", rename=renaming)


def test_copies_that_differ(tmp_path: Path) -> None:
    """Only bytes tell, so a dry run passes, and says that it did not compare."""
    folder = copy_of("llama_z1_tp2dp2_fp32", tmp_path)

    def change(content: dict[str, Any]) -> None:
        for state in states_of(content).values():
            state["exp_avg"] += 1

    rewrite(folder, "*_mp_rank_01_optim_states.pt", change)
    text = "holders that should keep the same values differ"
    with pytest.raises(ReplicaMismatchError, match=text):
        reshard.convert(folder, tmp_path / "out", fsync=False)
    with pytest.raises(ReplicaMismatchError, match=text):
        reshard.read(folder, state="exp_avg")
    assert not reshard.verify(folder, folder).equal
    assert text in str(reshard.diagnose(folder).faults)
    assert reshard.convert(folder, tmp_path / "out", dry_run=True).cost.compared_nbytes


# -------------------------------------------------------------------------------- a save meanwhile


@pytest.mark.parametrize("pattern", [MODELS, OPTIMIZERS])
def test_a_save_between_headers_and_bytes(
    folder: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has the same size, and even the same content: nobody can know that later."""

    def late(*args: Any, **options: Any) -> Plan:
        done = plan(*args, **options)
        rewrite(folder, pattern, lambda _: None)
        return done

    monkeypatch.setattr(conversion, "plan", late)
    with pytest.raises(CheckpointError, match="a source file changed since it was opened"):
        reshard.convert(folder, folder.parent / "out", fsync=False)
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize("to", ["universal", "dcp", "safetensors"])
def test_a_checkpoint_that_was_opened_before_a_save(tmp_path: Path, to: str) -> None:
    source = copy_of("odd_z1_dp2_fp32", tmp_path)
    reshard.convert(source, tmp_path / "out", to=to, fsync=False)
    opened = reshard.open_checkpoint(tmp_path / "out")
    for file in opened.files:
        content = Path(file.path).read_bytes()
        Path(file.path).unlink()
        Path(file.path).write_bytes(content)
    with pytest.raises(CheckpointError, match="changed since it was opened"):
        reshard.read(opened)
