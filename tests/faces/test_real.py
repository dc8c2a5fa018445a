"""The commands on real checkpoints, whole and broken, when there are any on this machine."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from reshard.cli import main

ROOT = Path(os.environ.get("RESHARD_CHECKPOINTS", "../shared/checkpoints"))
Capture = pytest.CaptureFixture[str]
Break = Callable[[Path], object]

pytestmark = pytest.mark.skipif(not ROOT.is_dir(), reason="no RESHARD_CHECKPOINTS")
CASE = "llama_tp2dp2_z1_fp32"


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    """A copy of a ZeRO-1, TP2, DP2 checkpoint, the folder that holds `latest`."""
    return Path(shutil.copytree(ROOT / CASE / "ckpt", tmp_path / "ckpt"))


def test_it_converts_and_verifies(ckpt: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "universal"
    assert main(["convert", str(ckpt), str(out), "--quiet"]) == 0
    assert main(["verify", str(ckpt), str(out), "--quiet"]) == 0
    said, err = capsys.readouterr()
    assert err == ""
    assert "  exp_avg_sq        21     21          0        0\n" in said


@pytest.mark.parametrize("inside", ["", "step3", "step3/mp_rank_00_model_states.pt", "step3/"])
def test_every_way_to_name_it_works(inside: str, ckpt: Path, capsys: Capture) -> None:
    assert main(["inspect", f"{ckpt}/{inside}"]) == 0
    assert f"  path          {ckpt}/step3\n" in capsys.readouterr().out


def test_ranks_in_two_folders(ckpt: Path, tmp_path: Path, capsys: Capture) -> None:
    away = tmp_path / "node 1" / "step3"
    away.mkdir(parents=True)
    for file in (ckpt / "step3").glob("zero_pp_rank_1_*"):
        file.rename(away / file.name)
    assert main(["inspect", str(ckpt), "--also", str(away.parent)]) == 0
    assert "optimizer states      4" in capsys.readouterr().out


def optimizer_file(ckpt: Path) -> Path:
    return ckpt / "step3" / "zero_pp_rank_1_mp_rank_01_optim_states.pt"


def cut_short(ckpt: Path) -> None:
    path = optimizer_file(ckpt)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


BROKEN: dict[str, tuple[Break, str]] = {
    "missing rank": (lambda c: optimizer_file(c).unlink(), "a file of optimizer states is missing"),
    "zero bytes": (lambda c: optimizer_file(c).write_bytes(b""), ""),
    "cut short": (cut_short, ""),
    "no archive": (lambda c: optimizer_file(c).write_bytes(b"x" * 4096), ""),
    "wrong latest": (lambda c: (c / "latest").write_text("step4"), "the pointer file names a fol"),
    "empty latest": (lambda c: (c / "latest").write_text(""), "the pointer file does not hold one"),
    "no latest": (lambda c: (c / "latest").unlink(), "no checkpoint here"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("verb", ["inspect", "convert"])
def test_broken_input_is_one_line_and_leaves_nothing(
    case: str, verb: str, ckpt: Path, tmp_path: Path, capsys: Capture
) -> None:
    damage, line = BROKEN[case]
    damage(ckpt)
    out = tmp_path / "universal"
    assert main([verb, str(ckpt), *([str(out)] if verb == "convert" else [])]) == 2
    said, err = capsys.readouterr()
    assert err.startswith(f"error: {line}")
    assert not err.startswith("error: internal")
    assert err.count("\n") == 1
    assert "next: " in err
    assert verb == "inspect" or said == ""
    assert {path.name for path in tmp_path.iterdir()} == {"ckpt"}


def test_inspect_shows_the_files_there_are_before_it_says_what_is_wrong(
    ckpt: Path, capsys: Capture
) -> None:
    optimizer_file(ckpt).write_bytes(b"")
    assert main(["inspect", str(ckpt)]) == 2
    said = capsys.readouterr().out
    assert said.startswith("files\n  name ")
    assert any(line.split() == [optimizer_file(ckpt).name, "0"] for line in said.splitlines())


@pytest.mark.slow
def test_every_checkpoint_is_inspected_in_a_moment_or_refused_in_one_line(capsys: Capture) -> None:
    for case in sorted(ROOT.glob("*/ckpt")):
        start = time.process_time()
        code = main(["inspect", str(case)])
        assert time.process_time() - start < 5
        err = capsys.readouterr().err
        assert (code, err) == (0, "") or (code == 2 and err.count("\n") == 1)
        assert "error: internal" not in err
