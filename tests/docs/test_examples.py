"""The examples run as a reader would run them, and say what they should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.programs import path_with_reshard
from tests.truth import ROOT


def run(script: str, tmp_path: Path) -> str:
    """Run a script of an example in the repository's folder; return what it prints."""
    program = ["sh"] if script.endswith(".sh") else [sys.executable]
    environment = os.environ | {
        "OUT": str(tmp_path / "out"),
        "PATH": path_with_reshard(tmp_path),
        "PYTHONPATH": str(ROOT / "src"),
        "DS_ACCELERATOR": "cpu",
    }
    done = subprocess.run(
        [*program, f"examples/{script}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_change_tp(tmp_path: Path) -> None:
    said = run("change_tp/run.sh", tmp_path)
    assert "verified: the output holds what its source holds, bit for bit" in said
    before, after = said.split("model.layers.0.mlp.down_proj.weight")[1:]
    for rank, (first, width) in enumerate([(0, 7), (7, 7)]):
        assert f"F[{first} + 16×14 {width}×1] → [0 + 16×{width} {width}×1] on {rank}" in before
    for rank, (first, width) in enumerate([(0, 4), (4, 4), (8, 3), (11, 3)]):
        assert f"F[{first} + 16×14 {width}×1] → [0 + 16×{width} {width}×1] on {rank}" in after


def test_own_layout(tmp_path: Path) -> None:
    said = run("own_layout/run.py", tmp_path)
    assert said.splitlines()[-1] == "moved from 2 ranks to 4, equal to the last bit"


def test_verify_in_ci(tmp_path: Path) -> None:
    said = run("verify_in_ci/run.sh", tmp_path)
    assert "lm_head.weight" in said
    assert said.splitlines()[-1] == "exit code 1"


@pytest.mark.deepspeed
def test_zero3_to_hf(tmp_path: Path) -> None:
    said = run("zero3_to_hf/run.py", tmp_path)
    assert said.splitlines()[-1] == "from_pretrained has the master weights; logits (1, 8, 97)"


@pytest.mark.deepspeed
def test_resume_in_deepspeed(tmp_path: Path) -> None:
    said = run("resume_in_deepspeed/run.py", tmp_path)
    assert "resumed at step 3 with equal master weights and moments" in said
    assert "step 4, loss " in said


def test_each_example_is_listed_and_run() -> None:
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    here = Path(__file__).read_text(encoding="utf-8")
    names = [path.parent.name for path in (ROOT / "examples").glob("*/run.*")]
    shown = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert len(names) == 6
    for name in names:
        assert f"`examples/{name}`" in listed
        assert f'--8<-- "examples/{name}/README.md:text"' in shown
        assert f"--8<--\nexamples/{name}/run." in shown
        assert f'run("{name}/run.' in here


def test_no_page_runs_what_only_the_tests_have() -> None:
    """A newcomer has the environment that README makes; that of the tests is 1.5 GB."""
    for page in (ROOT / "examples").rglob("*.md"):
        assert ".venv" not in page.read_text(encoding="utf-8"), page


def test_live(tmp_path: Path) -> None:
    said = run("live/run.py", tmp_path).splitlines()
    assert "sent:     1574 bytes; no choice sends less than 1574" in said
    assert said[-1] == "4 → 3 → 4 ranks: the losses are those of the run that was never interrupted"


@pytest.mark.deepspeed
def test_live_to_zero3(tmp_path: Path) -> None:
    said = run("live/to_zero3.py", tmp_path)
    assert "DeepSpeed ZeRO-3 goes on with the losses of FSDP2" in said
