"""Every way to fail: one line that says what to do, the right exit code, never a traceback."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from reshard import errors
from reshard.api import open_checkpoint
from reshard.cli import failure
from reshard.cli.failure import describe
from tests.truth import EXAMPLE, ROOT

FREE_SPACE = "free space or choose another disk, then run it again"
CASES = [
    (
        errors.MissingFileError(
            "a rank file is missing", file="zero_1.pt", rank=1, next_step="--also"
        ),
        "a rank file is missing: zero_1.pt, rank 1; next: --also",
    ),
    (errors.OutputError("the output exists", file="out"), "the output exists: out"),
    (MemoryError(), "out of memory; next: lower --max-memory or --workers"),
    (KeyboardInterrupt(), "interrupted"),
    (
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out/zero"),
        f"no space left on device: out/zero; next: {FREE_SPACE}",
    ),
    (
        FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "x"),
        "no such file or directory: x; next: check the path",
    ),
    (
        PermissionError(errno.EACCES, os.strerror(errno.EACCES), b"by\xfftes"),
        "permission denied: by\\udcfftes; next: check the permissions of the file and its folders",
    ),
    (OSError(errno.ENOTEMPTY, "Directory not empty", "a", None, "b"), "directory not empty: a: b"),
]


@pytest.mark.parametrize(("error", "line"), CASES)
def test_each_error_is_one_line(
    error: BaseException, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = failure.refuse(error)
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"error: {line}\n")
    assert code == (130 if isinstance(error, KeyboardInterrupt) else 2)


@pytest.mark.parametrize(
    "error", [KeyError("x"), errors.InternalError("a plan does not prove"), OSError("odd")]
)
def test_a_fault_of_ours_says_so_and_how_to_report_it(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(type(error)) as caught:
        raise error
    assert failure.refuse(caught.value) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(
        r"error: internal: .*\(reshard \S+, Python \S+, test_failure\.py:\d+\); next: .*"
        r"report it .*RESHARD_DEBUG=1\n",
        err,
    )


class BrokenPath:
    """What raises outside of reshard, called from inside."""

    def __fspath__(self) -> str:
        raise TypeError("no path")


def test_the_place_is_the_last_one_inside_reshard() -> None:
    with pytest.raises(TypeError) as caught:
        open_checkpoint(BrokenPath())
    assert traceback.extract_tb(caught.value.__traceback__)[-1].filename == __file__
    assert re.search(r" \(reshard \S+, Python \S+, opening\.py:\d+\); ", describe(caught.value))


def test_the_traceback_comes_with_debug_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RESHARD_DEBUG", "1")
    with pytest.raises(KeyError) as caught:
        raise KeyError("x")
    failure.refuse(caught.value)
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("error: internal: KeyError: 'x'")
    assert rest[0] == "Traceback (most recent call last):"


def test_a_name_cannot_forge_a_second_line(capsys: pytest.CaptureFixture[str]) -> None:
    failure.refuse(errors.CheckpointError("bad", parameter="w\nerror: all good\x1b[A"))
    err = capsys.readouterr().err
    assert err == "error: bad: parameter w\\nerror: all good\\x1b[A\n"


def test_every_public_error_has_a_line() -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.ReshardError)
    ]
    for kind in kinds:
        error = kind("what", broken="P1") if kind is errors.InvalidMapError else kind("what")
        assert "what" in failure.describe(error)
        assert "\n" not in failure.describe(error)


def test_codes_are_those_that_are_promised() -> None:
    assert (failure.DONE, failure.DIFFERENT, failure.REFUSED) == (0, 1, 2)
    assert sys.version_info >= (3, 10)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["inspect", str(EXAMPLE), "--json"], f"no space left on device; next: {FREE_SPACE}"),
        (["inspect", "/nowhere", "--json"], "no such file or folder: /nowhere; next: .*"),
        (["inspekt", "--json"], "no such command 'inspekt'. .*"),
    ],
)
def test_a_full_output_is_told_in_one_line(
    arguments: list[str], line: str, unbuffered: str
) -> None:
    environment = {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "reshard", *arguments],
            env={**os.environ, "RESHARD_DEBUG": "", **environment},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 2
    assert re.fullmatch(f"error: {line}\n", done.stderr)
