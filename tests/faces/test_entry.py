"""The command as a user starts it: help, version, bad usage, start-up time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reshard import __version__
from reshard.cli import main
from tests.truth import EXAMPLE

ROOT = Path(__file__).parents[2]
COMMANDS = ("inspect", "doctor", "map", "convert", "verify", "annotate")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if key != "RESHARD_DEBUG"}
    return subprocess.run(
        [sys.executable, "-m", "reshard", *arguments],
        env=inherited | {"PYTHONPATH": str(ROOT / "src")} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_names_every_command(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    for command in COMMANDS:
        assert f"\n  {command} " in done.stdout
    assert "Exit codes: 0 done; 1" in done.stdout
    assert "..." not in done.stdout.replace("[ARGS]...", "")


OPTIONS = {
    "inspect": "--tensors --html --json --also --layout",
    "doctor": "--json --also --layout",
    "map": "--state --files --svg --png --html --json --also --layout",
    "convert": "--to --workers --max-memory --no-fsync --include --exclude --states --dry-run "
    "--resume --overwrite --verify --json --quiet --replicas --also --layout --html",
    "verify": "--replicas --json --also --layout --quiet",
    "annotate": "--dry-run --resume --overwrite --no-fsync --workers --max-memory --json --also "
    "--layout --quiet",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_promised_option_is_in_the_help(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    for option in OPTIONS[command].split():
        assert f"{option} " in said.replace("\n", " ")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"reshard {__version__}\n"


BAD_USAGE = [
    (["inspect"], "missing argument 'CKPT'; next: reshard inspect --help"),
    (["convert", "a"], "missing argument 'OUT'; next: reshard convert --help"),
    (["convrt"], "no such command 'convrt'. Did you mean 'convert'?; next: reshard --help"),
    (["inspect", "a", "b"], "got unexpected extra argument (b); next: reshard inspect --help"),
    (["convert", "a", "b", "--workers"], "option '--workers' requires an argument"),
    (["convert", "a", "b", "--workers", "0"], "invalid value for '--workers': "),
    (["convert", "a", "b", "--workers", "many"], "invalid value for '--workers': "),
    (["convert", "a", "b", "--replicas", "last"], "invalid value for '--replicas': "),
    (["map", "a", "--nmae", "x"], "no such option: --nmae"),
    (["map", "a", "b\n\x1b[2J", "c\n\x1b[2J"], "got unexpected extra argument (c"),
]


@pytest.mark.parametrize(("arguments", "line"), BAD_USAGE)
def test_bad_usage_is_one_line_and_exit_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {line}")
    assert err.count("\n") == 1
    assert "\x1b" not in err


def test_bad_usage_leaves_the_process_with_2() -> None:
    done = run("inspect")
    assert done.returncode == 2
    assert done.stderr == "error: missing argument 'CKPT'; next: reshard inspect --help\n"


def imported(*arguments: str) -> set[str]:
    script = "import sys; from reshard.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split())


def test_help_imports_nothing_heavy() -> None:
    modules = imported("--help")
    assert "reshard.cli.app" in modules
    assert not {"numpy", "torch", "rich", "reshard.api", "reshard.geometry"} & modules


def test_importing_the_package_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import reshard, sys; print(*sys.modules)"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    modules = set(done.stdout.split())
    assert not {"numpy", "torch", "typer", "rich", "reshard.api"} & modules


@pytest.mark.slow
def test_help_is_there_at_once() -> None:
    spent = []  # time on a CPU: what the machine does besides does not count
    for _ in range(3):
        before = os.times()
        run("--help")
        after = os.times()
        spent.append(
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
    assert min(spent) < 0.4


SCRIPT = """
import sys
from reshard.cli import main

source, out = sys.argv[1:]
for words in (
    ["inspect", source, "--html", f"{out}/page.html"],
    ["doctor", source],
    ["map", source, "lm_head.weight", "--svg", f"{out}/map.svg", "--png", f"{out}/map.png"],
    ["convert", source, f"{out}/u/step3", "--verify"],
    ["convert", source, f"{out}/n/step3", *"--to deepspeed --stage 3 --dp 3 --verify".split()],
    ["convert", source, f"{out}/s", "--to", "safetensors", "--verify"],
    ["convert", source, f"{out}/d", "--to", "dcp", "--verify"],
):
    if code := main(words):
        raise SystemExit(code)
"""


def test_no_library_has_anything_to_say(tmp_path: Path) -> None:
    """Every warning is an error, and files that nobody closes are warnings."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", SCRIPT, str(EXAMPLE), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
