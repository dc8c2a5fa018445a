"""Limits of the system: calls that move less than they were asked to, and few open files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import reshard
from reshard import api
from tests.truth import GOLDEN, ROOT

SOURCE = GOLDEN / "odd_z1_dp2_fp32" / "ckpt"
LIMITED = """
import resource, sys
import numpy as np
from pathlib import Path
from reshard.execution import compare
from reshard.execution.buffers import KIB
from tests.execution.raw import split, write_checkpoint
limit, place = int(sys.argv[1]), Path(sys.argv[2])
full, layout = np.arange(600.0, dtype="f4").reshape(150, 4), split((150, 4), 0, [1] * 150)
sides = [
    write_checkpoint(place / side, {("w", "fp32"): (full, layout)}) for side in ("left", "right")
]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
assert compare(*sides, workers=4, max_memory=256 * KIB).equal
"""
FOLDER = """
import resource, sys
import reshard
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
assert reshard.convert(sys.argv[2], sys.argv[3], verify=True).sound
"""


def under(limit: int, code: str, *words: Path) -> None:
    """Run code in a process that may open so many files."""
    command = [sys.executable, "-c", code, str(limit), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def short(call: object, most: int) -> object:
    """A system call that moves a few bytes at a time, as network disks may."""

    def moved(handle: int, data: object, offset: int) -> object:
        parts = [data[0][:most]] if isinstance(data, list) else memoryview(data)[:most]  # type: ignore[arg-type]
        return call(handle, parts, offset)  # type: ignore[operator]

    return moved


@pytest.mark.parametrize("most", [1000, 4096])
def test_short_reads_and_writes_are_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    out = tmp_path / "out"
    real = os.pread
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", short(os.preadv, most))
        patch.setattr(os, "pwrite", short(os.pwrite, most))
        patch.setattr(os, "pread", lambda h, n, o: real(h, min(n, most), o))
        made = reshard.convert(SOURCE, out, to="universal", verify=True, max_memory=1 << 16)
        again = reshard.convert(SOURCE, out, to="universal", resume=True)
        assert made.sound
        assert again.kept == len(reshard.open_checkpoint(out).tensors)
        assert reshard.verify(SOURCE, out).equal
    assert reshard.verify(SOURCE, out).changes == ()


def test_a_file_that_ends_early_is_damage(tmp_path: Path) -> None:
    """Reading on is no excuse: what is not there is told."""
    out = tmp_path / "out"
    reshard.convert(SOURCE, out, to="universal")
    victim = out / "zero" / "embed.weight" / "exp_avg.pt"
    os.truncate(victim, victim.stat().st_size - 1)
    assert not api.diagnose(out).healthy


@pytest.mark.parametrize("limit", [40, 120, 200, 250])
def test_any_limit_of_open_files_serves_two_sides(tmp_path: Path, limit: int) -> None:
    """Two sides of 150 files each: all of one fit into some of these limits, of both into none."""
    under(limit, LIMITED, tmp_path)


def test_a_dcp_folder_of_more_files_than_may_be_open(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    reshard.convert(SOURCE, folder, to="dcp", options=reshard.DcpOptions(max_shard_bytes=64))
    assert len(list(folder.glob("*.distcp"))) > 120
    under(120, FOLDER, folder, tmp_path / "out")
