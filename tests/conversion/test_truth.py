"""Every state of every parameter equals what the live engine held when it saved."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

import reshard
from tests.conversion.reading import load, param, same_bits
from tests.truth import (
    Case,
    by_name,
    cases,
    dense,
    golden,
    with_drift,
    with_pipeline,
    with_undescribed_cuts,
    without_zero,
)

KEPT_WHOLE = "muon"
"""ZeRO keeps Muon's momentum of every parameter that touches a partition whole, so a parameter
that a boundary cuts is there twice. The truth files of these cases read it as if it were cut, which
puts the momentum of all but the first parameter at the wrong place; see the test at the end."""


def converted(case: Case, tmp_path: Path, **options: object) -> Path:
    destination = tmp_path / f"{case.tag}_universal"
    reshard.convert(case.path, destination, fsync=False, **options)  # type: ignore[arg-type]
    return destination


WHOLE = [
    *dense(),
    *with_pipeline(case for case in cases() if case.is_zero and not case.drifts),
    *(case for case in without_zero() if not case.has_experts and not case.is_pipeline),
]


@pytest.mark.parametrize("case", by_name(WHOLE))
def test_every_state_is_bit_equal(case: Case, tmp_path: Path) -> None:
    folder = converted(case, tmp_path)
    wrong = [
        f"{name}/{state}"
        for name, states in case.truth().full.items()
        for state, tensor in states.items()
        if not (case.model == KEPT_WHOLE and state == "momentum_buffer")
        and not same_bits(param(folder, name, state), tensor)
    ]
    assert wrong == []


@pytest.mark.parametrize("case", by_name(dense()))
def test_nothing_else_is_lost(case: Case, tmp_path: Path) -> None:
    folder = converted(case, tmp_path)
    truth = case.truth()
    sharded = case.tp > 1
    for name, tensor in truth.frozen.items():
        found = param(folder, name, "fp32")
        assert same_bits(found, tensor) or (sharded and found.numel() > tensor.numel()), name
    for name, tensor in truth.buffers.items():
        if (folder / "zero" / name).exists():
            found = param(folder, name, "fp32")
            assert same_bits(found, tensor.to(found.dtype)), name
    steps = {float(load(path)) for path in (folder / "zero").rglob("step.pt")}
    assert steps == set(truth.steps)


@pytest.mark.parametrize("case", by_name(golden()))
def test_files_are_valid_for_others(case: Case, tmp_path: Path) -> None:
    folder = converted(case, tmp_path)
    for path in sorted(folder.rglob("*.pt")):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        if path.parent.name != "zero" and path.parent != folder:
            torch.load(path, weights_only=True)
            torch.load(path, mmap=True, weights_only=True)


def test_pointer_and_model_files(tmp_path: Path) -> None:
    case = next(case for case in dense() if case.tp == 2)
    folder = converted(case, tmp_path)
    assert (tmp_path / "latest_universal").read_text() == folder.name
    for pattern in ("mp_rank_*", "zero_pp_rank_0_mp_rank_*"):
        files = sorted(folder.glob(f"{pattern}_model_states.pt"))
        assert len(files) == case.tp
        for path in files:
            root = load(path)
            assert root["mp_world_size"] == case.tp
            assert {"global_steps", "skipped_steps", "lr_scheduler", "ds_version"} <= set(root)


@pytest.mark.parametrize("case", by_name(with_undescribed_cuts()))
def test_unknown_layout_is_refused(case: Case, tmp_path: Path) -> None:
    with pytest.raises(reshard.LayoutError, match="is not known") as refusal:
        converted(case, tmp_path)
    assert "--layout" in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", by_name(with_drift()))
class TestDrift:
    def test_is_refused_by_default(self, case: Case, tmp_path: Path) -> None:
        with pytest.raises(reshard.ReplicaMismatchError, match="differ"):
            converted(case, tmp_path)
        assert not (tmp_path / f"{case.tag}_universal").exists()

    def test_first_takes_the_lowest_rank(self, case: Case, tmp_path: Path) -> None:
        folder = converted(case, tmp_path, replicas="first")
        for name, states in case.truth().full.items():
            for state, tensor in states.items():
                assert same_bits(param(folder, name, state), tensor), f"{name}/{state}"

    def test_every_drifting_tensor_is_reported(self, case: Case, tmp_path: Path) -> None:
        report = reshard.convert(
            case.path, tmp_path / "mean_universal", replicas="mean", fsync=False
        )
        named = {f"{finding.key[0]}/{finding.key[1]}" for finding in report.drift}
        drifting = {line.split(":")[0] for line in case.truth().drift}
        assert named == drifting


# --------------------------------------------------------------------------- Muon


def muon_cases() -> list[object]:
    return by_name(case for case in cases() if case.model == KEPT_WHOLE and case.is_zero)


@pytest.mark.parametrize("case", muon_cases())
def test_muon_momentum_is_whole_on_every_rank(case: Case, tmp_path: Path) -> None:
    """Each rank's buffer is the momentum of the parameters in its partition, whole, in order."""
    folder = converted(case, tmp_path)
    shapes = load(next(iter(sorted(case.tag_path.glob("mp_rank_00*")))))["param_shapes"][0]
    for path in sorted(case.tag_path.glob("*_optim_states.pt")):
        body = load(path)["optimizer_state_dict"]
        buffer = body["base_optimizer_state"]["state"][0]["momentum_buffer"]
        start = 0
        for name in body["param_slice_mappings"][0]:
            numel = shapes[name].numel()
            held = buffer[start : start + numel].view(shapes[name])
            assert same_bits(param(folder, name, "momentum_buffer"), held), f"{path.name}: {name}"
            start += numel
        assert start == buffer.numel()
