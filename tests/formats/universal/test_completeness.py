"""A universal folder is its own index: what it lost is found by what else lists it, and refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import reshard
from reshard import api
from reshard.errors import (
    ArchiveError,
    CheckpointError,
    MissingFileError,
    OutputError,
    ReshardError,
)
from tests.truth import GOLDEN

SOURCE = GOLDEN / "odd_z1_dp2_fp32" / "ckpt"
MANIFEST = "reshard_manifest.json"
FIX = "copy the file again, convert again, or remove the manifest if the folder was written anew"
LISTED = "a file is missing that the manifest of the folder lists"
COPY = "copy the folder again, or leave the state out with --states"
REMEDY = "remove it to read the folder without it; then nothing says whether a file is missing"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A universal folder, written by reshard."""
    reshard.convert(SOURCE, tmp_path / "u", to="universal")
    return tmp_path / "u"


def refusal(folder: Path) -> ReshardError:
    """How a folder is refused, the same by every verb that reads it."""
    with pytest.raises(ReshardError) as found:
        reshard.open_checkpoint(folder)
    for to in ("dcp", "safetensors"):
        out = folder.parent / f"out_{to}"
        with pytest.raises(type(found.value)) as again:
            reshard.convert(folder, out, to=to)
        assert (str(again.value), out.exists()) == (str(found.value), False)
    return found.value


def test_a_whole_folder_is_healthy(folder: Path) -> None:
    assert api.diagnose(folder).healthy


class TestWithAManifest:
    def test_a_lost_parameter(self, folder: Path) -> None:
        shutil.rmtree(folder / "zero" / "embed.weight")
        error = refusal(folder)
        assert type(error) is MissingFileError
        assert str(error) == (
            f"{LISTED}: {folder}/zero/embed.weight/fp32.pt, parameter embed.weight, state fp32: "
            f"found 4 files missing; next: {FIX}"
        )

    def test_the_doctor_lists_every_file(self, folder: Path) -> None:
        shutil.rmtree(folder / "zero" / "embed.weight")
        faults = api.diagnose(folder).faults
        lost = ["fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt"]
        assert [(fault.what, fault.file) for fault in faults] == [
            (LISTED, f"{folder}/zero/embed.weight/{name}") for name in lost
        ]
        assert [fault.parameter for fault in faults] == ["embed.weight"] * 3 + [""]

    @pytest.mark.parametrize(
        ("lost", "where"),
        [
            ("zero/embed.weight/exp_avg.pt", ", parameter embed.weight, state exp_avg"),
            ("zero/embed.weight/step.pt", ""),
            ("zero/gate/fp32.pt", ", parameter gate, state fp32"),
            ("zero/optimizer_state.pt", ""),
            ("mp_rank_00_model_states.pt", ""),
        ],
    )
    def test_one_lost_file(self, folder: Path, lost: str, where: str) -> None:
        (folder / lost).unlink()
        assert str(refusal(folder)) == (
            f"{LISTED}: {folder}/{lost}{where}: found 1 file missing; next: {FIX}"
        )
        assert [fault.file for fault in api.diagnose(folder).faults] == [f"{folder}/{lost}"]

    def test_a_narrowed_output_lists_only_what_it_holds(self, tmp_path: Path) -> None:
        reshard.convert(SOURCE, tmp_path / "n", to="universal", include=["*.bias"])
        assert api.diagnose(tmp_path / "n").healthy
        assert set(reshard.open_checkpoint(tmp_path / "n").names) == {
            "down.bias",
            "head.bias",
            "norm.bias",
            "up.bias",
        }

    def test_a_lost_set_of_another_state(self, tmp_path: Path) -> None:
        out = tmp_path / "s"
        reshard.convert(SOURCE, out, to="safetensors", states=["fp32", "exp_avg"])
        lost = next(path for path in out.glob("*.safetensors") if "exp_avg" in path.name)
        lost.unlink()
        with pytest.raises(MissingFileError, match=LISTED) as found:
            reshard.open_checkpoint(out)
        assert (found.value.file, found.value.state) == (str(lost), "exp_avg")


class TestWithoutAManifest:
    """As in a folder by DeepSpeed's converter."""

    @pytest.fixture
    def bare(self, folder: Path) -> Path:
        (folder / MANIFEST).unlink()
        return folder

    @pytest.mark.parametrize("file", ["", "fp32.pt"])
    def test_a_lost_parameter(self, bare: Path, file: str) -> None:
        lost = bare / "zero" / "embed.weight" / file
        lost.unlink() if file else shutil.rmtree(lost)
        said = "a parameter is missing that the model-state file mp_rank_00_model_states.pt lists"
        error = refusal(bare)
        assert type(error) is MissingFileError
        assert str(error) == (
            f"{said}: {bare}/zero/embed.weight/fp32.pt, parameter embed.weight: "
            "expected 9 parameters, found all but 1; "
            "next: copy its folder again, or convert again"
        )
        assert [fault.parameter for fault in api.diagnose(bare).faults] == ["embed.weight"]

    @pytest.mark.parametrize("state", ["exp_avg", "exp_avg_sq", "step"])
    def test_a_lost_state_of_several(self, bare: Path, state: str) -> None:
        (bare / "zero" / "embed.weight" / f"{state}.pt").unlink()
        left = ", ".join(sorted({"exp_avg", "exp_avg_sq", "step"} - {state}))
        error = refusal(bare)
        assert type(error) is CheckpointError
        assert str(error) == (
            f"a state of a parameter is missing that others of its group have: {bare}/zero, "
            f"parameter embed.weight, state {state}: found only {left}; next: {COPY}"
        )

    def test_no_state_at_all_is_told(self, bare: Path) -> None:
        """As of a parameter that was never updated."""
        for state in ("exp_avg", "exp_avg_sq", "step"):
            (bare / "zero" / "embed.weight" / f"{state}.pt").unlink()
        assert [str(note) for note in reshard.open_checkpoint(bare).problems] == [
            f"no {state}, which other parameters have: {bare}/zero, embed.weight"
            for state in ("exp_avg", "exp_avg_sq")
        ]

    @pytest.mark.parametrize("state", ["fp32", "exp_avg", "exp_avg_sq"])
    def test_a_state_of_another_shape(self, bare: Path, state: str) -> None:
        path = bare / "zero" / "embed.weight" / f"{state}.pt"
        whole = torch.load(path)["param"]
        torch.save({"param": whole[:, :-1].clone()}, path)
        odd = "exp_avg" if state == "fp32" else state  # the weights say what the shape is
        shapes = [tuple(whole.shape), tuple(whole[:, :-1].shape)]
        if state == "fp32":
            shapes.reverse()
        assert str(refusal(bare)) == (
            f"a state has another shape than its parameter: {bare}/zero/embed.weight/{odd}.pt, "
            f"parameter embed.weight, state {odd}: expected {shapes[0]}, found {shapes[1]}; "
            f"next: {COPY}"
        )

    @pytest.mark.parametrize("state", ["exp_avg", "exp_avg_sq"])
    def test_a_state_of_another_type(self, bare: Path, state: str) -> None:
        path = bare / "zero" / "embed.weight" / f"{state}.pt"
        torch.save({"param": torch.load(path)["param"].bfloat16()}, path)
        assert str(refusal(bare)) == (
            "a state is of another element type than with other parameters: "
            f"{path}, parameter embed.weight, state {state}: expected float32, found bfloat16; "
            f"next: {COPY}"
        )

    def test_one_type_for_all_moments(self, bare: Path) -> None:
        """The moments may be of another type than the weights, and be so for all parameters."""
        for path in (bare / "zero").rglob("exp_avg*.pt"):
            torch.save({"param": torch.load(path)["param"].bfloat16()}, path)
        assert api.diagnose(bare).healthy

    def test_a_number_has_no_shape(self, bare: Path) -> None:
        for path in (bare / "zero").rglob("exp_avg.pt"):
            torch.save({"param": torch.tensor(2.0)}, path.with_name("trust.pt"))
        assert api.diagnose(bare).healthy

    def test_without_loss_it_is_read(self, bare: Path) -> None:
        assert api.diagnose(bare).healthy


def head(**entries: object) -> str:
    """A manifest with these entries, else sound and empty."""
    sound = {"format": "reshard-manifest", "version": 1, "files": [], "tensors": []}
    return json.dumps(sound | entries)


UNSOUND = [
    ("", "the manifest is not JSON", None, "Expecting value: line 1 column 1 (char 0)"),
    ("NaN", "the manifest is not JSON", None, "NaN is no JSON"),
    ("[" * 100_000, "the manifest is not JSON", None, "brackets nested too deep"),
    ("[]", "the manifest is no JSON object", None, "a list of 0"),
    ("null", "the manifest is no JSON object", None, "null"),
    ("{}", "the manifest is of another version", "reshard-manifest 1", "null null"),
    (
        head(version=True),
        "the manifest is of another version",
        "reshard-manifest 1",
        '"reshard-manifest" true',
    ),
    (head(files=None), "the manifest is malformed", "a list of files", "null"),
    (
        head(files=[["../a", 1, "x", []]]),
        "the manifest is malformed",
        "[path, bytes, digest, slots] of a file",
        '"../a"',
    ),
    (
        head(files=[["a", 1, "x", [[0, 1.5]]]]),
        "the manifest is malformed",
        "[offset, bytes] of the slots of a",
        "a list of 1",
    ),
]


@pytest.mark.parametrize(("text", "what", "expected", "found"), UNSOUND)
def test_an_unsound_manifest(
    folder: Path, text: str, what: str, expected: str | None, found: str
) -> None:
    (folder / MANIFEST).write_text(text)
    for act in (reshard.open_checkpoint, lambda path: reshard.verify(SOURCE, path)):
        verb: Callable[[Path], object] = act
        with pytest.raises(ArchiveError) as refused:
            verb(folder)
        error = refused.value
        assert (error.what, error.file) == (what, str(folder / MANIFEST))
        assert (error.expected, error.found, error.next_step) == (expected, found, REMEDY)
    said = [(fault.file, fault.next_step) for fault in api.diagnose(folder).faults]
    assert said == [(str(folder / MANIFEST), REMEDY)]


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def two_gigabytes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2 << 30)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (os.mkfifo, "the manifest cannot be read"),
        (a_device, "the manifest cannot be read"),
        (two_gigabytes, "the manifest is too long"),
    ],
)
def test_a_manifest_that_has_no_end(folder: Path, make: Callable[[Path], None], what: str) -> None:
    (folder / MANIFEST).unlink()
    make(folder / MANIFEST)
    error = refusal(folder)
    assert (type(error), error.what, error.next_step) == (ArchiveError, what, REMEDY)


def test_a_hostile_manifest_and_resume(folder: Path) -> None:
    (folder / MANIFEST).write_text("[" * 100_000)
    before = sorted(path.name for path in folder.parent.iterdir())
    with pytest.raises(OutputError, match="the output exists already"):
        reshard.convert(SOURCE, folder, to="universal", resume=True)
    assert sorted(path.name for path in folder.parent.iterdir()) == before


@pytest.mark.parametrize("target", ["universal", "safetensors", "dcp"])
def test_what_was_written_opens(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "out"
    reshard.convert(SOURCE, folder, to=target)
    assert reshard.open_checkpoint(folder).listing is not None


@pytest.mark.parametrize("state", ["fp32", "exp_avg", "exp_avg_sq"])
def test_exchanged_files_of_one_shape(folder: Path, state: str) -> None:
    """Only the manifest beside them can tell."""
    first, second = (
        folder / "zero" / f"norm.{name}" / f"{state}.pt" for name in ("bias", "weight")
    )
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)
    error = refusal(folder)
    assert (error.what, error.file) == ("a file does not hold what was written", str(first))
    assert (error.parameter, error.state, error.next_step) == ("norm.bias", state, FIX)
