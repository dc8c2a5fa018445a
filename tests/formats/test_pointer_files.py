"""Pointer files: small regular files, whatever else has the name."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

import reshard
from reshard.cli import main
from reshard.errors import CheckpointError, ReshardError


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"step3")
        file.truncate(3 << 30)


@pytest.mark.parametrize("make", [pipe, endless, circle, huge])
def test_what_is_no_small_file_is_no_pointer(make: object, tmp_path: Path) -> None:
    make(tmp_path / "latest")  # type: ignore[operator]
    with pytest.raises(ReshardError):
        reshard.open_checkpoint(tmp_path)
    with contextlib.suppress(CheckpointError):
        assert not reshard.diagnose(tmp_path).healthy


def test_a_name_cannot_paint_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latest").write_text("x\x1b[2Jy")
    assert main(["doctor", str(tmp_path)]) != 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err


def test_numbers_of_any_length_are_shown() -> None:
    with pytest.raises(ReshardError, match="an integer of 16610 bits"):
        raise CheckpointError("a number is too large", found=10**5000)
