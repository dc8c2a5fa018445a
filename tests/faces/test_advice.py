"""Advice is tried: on the input that raises an error, doing what the error says must help.

Theory. Each row makes an input, runs a command that is refused with a message and a next step, and
carries that step out; the command that follows must then do. Rows run in this process on small
golden folders. The messages that a folder or an option can raise and whose next step no row tries
stand in ``untried_advice.txt``, which may only shrink: a new message with a next step gets a row.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from reshard.cli import main
from scripts.messages_page import KINDS, SOURCE, Module, called
from tests.faces.made_folders import dcp, safetensors, universal
from tests.truth import GOLDEN

UNTRIED = Path(__file__).with_name("untried_advice.txt")
ROOMS = ("api", "cli", "execution", "formats", "planning")
"""Where the errors of commands on files are made."""

Step = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Row:
    """One message and its advice. Paths in commands are relative to a folder of the test's own."""

    id: str
    make: Step
    command: tuple[str, ...]
    message: str
    """A part of it that does not vary."""
    advice: str
    """What of the next step is carried out."""
    follow: Step = lambda _: None
    then: tuple[str, ...] = field(default=())
    """The command that does it; by default the same one again."""


def native(name: str) -> Step:
    return lambda home: _copy(GOLDEN / name / "ckpt", home / "ckpt")


def _copy(source: Path, destination: Path) -> None:
    shutil.copytree(source, destination)


def after(*steps: Step) -> Step:
    def make(home: Path) -> None:
        for step in steps:
            step(home)

    return make


def cut(pattern: str) -> Step:
    def step(home: Path) -> None:
        path = one(home, pattern)
        (home / "kept").write_bytes(path.read_bytes())
        path.write_bytes(path.read_bytes()[:-100])

    return step


def empty(pattern: str) -> Step:
    def step(home: Path) -> None:
        shutil.copy(one(home, pattern), home / "kept")
        one(home, pattern).write_bytes(b"")

    return step


def aside(pattern: str) -> Step:
    return lambda home: _move(one(home, pattern), home / "kept")


def back(name: str) -> Step:
    return lambda home: _move(home / "kept", next((home / "ckpt").rglob("*")).parent / name)


def _move(source: Path, destination: Path) -> None:
    shutil.move(source, destination)


def one(home: Path, pattern: str) -> Path:
    return max((home / "ckpt").rglob(pattern))


def write(name: str, text: str) -> Step:
    return lambda home: _written(home / name, text)


def _written(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def gone(name: str) -> Step:
    return lambda home: (home / name).unlink()


def _restore(home: Path) -> None:
    for step in sorted((home / "ckpt" / "zero").rglob("step.pt")):
        if not step.with_name("exp_avg.pt").exists():
            shutil.copy(home / "kept", step.with_name("exp_avg.pt"))


CONVERT = ("convert", "ckpt", "out", "--no-fsync")
OPTIM = "*_optim_states.pt"
RANK = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
ODD = native("odd_z1_dp2_fp32")


def left_over(home: Path) -> None:
    path = one(home, "*zero_pp_rank_1_*_optim_states.pt")
    shutil.copy(path, path.with_name(path.name.replace("rank_1_", "rank_2_")))


def renamed_rank(home: Path) -> None:
    _move(one(home, OPTIM), one(home, OPTIM).with_name(RANK.replace("rank_1", "rank_7")))


ROWS = (
    Row(
        "no path",
        ODD,
        ("inspect", "ckptt"),
        "no such file or folder",
        "check the path",
        then=("inspect", "ckpt"),
    ),
    Row(
        "pointer to nothing",
        after(ODD, write("ckpt/latest", "step9")),
        CONVERT,
        "the pointer file names",
        "name the tag folder itself",
        then=("convert", "ckpt/step3", "out"),
    ),
    Row(
        "pointer empty",
        after(ODD, write("ckpt/latest", "")),
        CONVERT,
        "the pointer file does not hold one folder name",
        "name the tag folder itself",
        then=("convert", "ckpt/step3", "out"),
    ),
    Row(
        "cut short",
        after(ODD, cut(RANK)),
        CONVERT,
        "the file is cut short",
        "copy it again",
        after(
            lambda h: one(h, RANK).unlink(), lambda h: _move(h / "kept", h / "ckpt/step3" / RANK)
        ),
    ),
    Row(
        "zero bytes",
        after(ODD, empty(RANK)),
        CONVERT,
        "the file has zero bytes",
        "copy it again",
        after(
            lambda h: one(h, RANK).unlink(), lambda h: _move(h / "kept", h / "ckpt/step3" / RANK)
        ),
    ),
    Row(
        "rank missing",
        after(ODD, aside(RANK)),
        CONVERT,
        "a file of optimizer states is missing",
        "copy it from the node",
        lambda h: _move(h / "kept", h / "ckpt/step3" / RANK),
    ),
    Row(
        "rank missing, --also",
        after(
            ODD,
            aside(RANK),
            lambda h: (h / "more").mkdir(),
            lambda h: _move(h / "kept", h / "more" / RANK),
        ),
        CONVERT,
        "a file of optimizer states is missing",
        "--also",
        then=(*CONVERT, "--also", "more"),
    ),
    Row(
        "left over",
        after(ODD, left_over),
        CONVERT,
        "a file of a rank that this checkpoint does not have",
        "move it away",
        lambda h: one(h, "*rank_2_*").unlink(),
    ),
    Row(
        "output exists",
        after(ODD, write("out/x", "")),
        CONVERT,
        "the output exists already",
        "choose",
        then=("convert", "ckpt", "out2"),
    ),
    Row(
        "no such parameter",
        ODD,
        ("map", "ckpt", "embed.weigth"),
        "no such parameter",
        "",
        then=("map", "ckpt", "embed.weight"),
    ),
    Row(
        "no such state",
        ODD,
        (*CONVERT, "--states", "exp_avgg"),
        "no such state",
        "",
        then=(*CONVERT, "--states", "exp_avg"),
    ),
    Row(
        "pattern matches none",
        ODD,
        (*CONVERT, "--include", "nothing*"),
        "a pattern matches no parameter",
        "",
        then=(*CONVERT, "--include", "*weight"),
    ),
    Row(
        "size",
        ODD,
        (*CONVERT, "--max-memory", "lots"),
        "not a size",
        "",
        then=(*CONVERT, "--max-memory", "64MB"),
    ),
    Row(
        "other format's options",
        ODD,
        (*CONVERT, "--dp", "2"),
        "does not take",
        "",
        then=("convert", "ckpt", "out", "--to", "deepspeed", "--stage", "1", "--dp", "2"),
    ),
    Row(
        "no layout file",
        ODD,
        (*CONVERT, "--layout", "none.json"),
        "no such file of layouts",
        "check --layout",
        then=CONVERT,
    ),
    Row(
        "DCP index missing",
        after(dcp, lambda h: _move(h / "ckpt/.metadata", h / "ckpt/.metadata.tmp")),
        CONVERT,
        "",
        "",
        lambda h: _move(h / "ckpt/.metadata.tmp", h / "ckpt/.metadata"),
    ),
    Row(
        "DCP with --also",
        after(dcp, lambda h: (h / "more").mkdir()),
        (*CONVERT, "--also", "more"),
        "a DCP folder is one folder",
        "one folder at a time",
        then=CONVERT,
    ),
    Row(
        "DCP data file missing",
        after(dcp, aside("__0_0.distcp")),
        CONVERT,
        "a data file that the index names is not there",
        "copy",
        lambda h: _move(h / "kept", h / "ckpt/__0_0.distcp"),
    ),
    Row(
        "shard missing",
        after(safetensors, aside("model-00002-*")),
        CONVERT,
        "the index names a file that is not there",
        "fetch it again",
        lambda h: _move(h / "kept", h / "ckpt" / "model-00002-of-00004.safetensors"),
    ),
    Row(
        "manifest lists more",
        after(universal, aside("exp_avg.pt")),
        CONVERT,
        "a file is missing that the manifest of the folder lists",
        "copy",
        _restore,
    ),
    Row(
        "shard read alone",
        after(safetensors, aside("model-00002-*"), gone("ckpt/model.safetensors.index.json")),
        CONVERT,
        "a file of the set is missing",
        "name a file to read it alone",
        then=("convert", "ckpt/model-00001-of-00004.safetensors", "out"),
    ),
    Row(
        "shard not in the index",
        after(
            safetensors,
            lambda h: _copied(h / "ckpt/model-00001-of-00004.safetensors", "model.safetensors"),
        ),
        CONVERT,
        "a file of the set is not named by its index",
        "remove what is stale",
        gone("ckpt/model.safetensors"),
    ),
    Row(
        "renamed over another",
        after(ODD, lambda h: shutil.copy(one(h, "*rank_0_*optim*"), h / "ckpt/step3" / RANK)),
        CONVERT,
        "a file carries the name of another",
        "copy it again",
        lambda h: shutil.copy(
            GOLDEN / "odd_z1_dp2_fp32/ckpt/step3" / RANK, h / "ckpt/step3" / RANK
        ),
    ),
    Row(
        "two stages in one folder",
        after(
            ODD,
            lambda h: _copied(
                one(h, "mp_rank_00_model_states.pt"), "zero_pp_rank_0_mp_rank_00_model_states.pt"
            ),
        ),
        CONVERT,
        "model-state files of ZeRO-3 and of another stage lie in one folder",
        "move it away",
        gone("ckpt/step3/zero_pp_rank_0_mp_rank_00_model_states.pt"),
    ),
    Row(
        "nothing selected",
        ODD,
        (*CONVERT, "--exclude", "*"),
        "nothing is selected",
        "",
        then=(*CONVERT, "--exclude", "*bias"),
    ),
    Row(
        "renaming meets nothing",
        ODD,
        (*CONVERT, "--to", "safetensors", "--rename", "^module=model"),
        "a renaming meets no parameter",
        "",
        then=(*CONVERT, "--to", "safetensors", "--rename", "^up=above"),
    ),
    Row(
        "two parameters, one name",
        ODD,
        (*CONVERT, "--to", "safetensors", "--rename", "^.*$=one"),
        "two parameters would get one name",
        "",
        then=(*CONVERT, "--to", "safetensors", "--rename", "^=one."),
    ),
    Row(
        "unknown format",
        ODD,
        (*CONVERT, "--to", "zip"),
        "cannot write the format",
        "",
        then=(*CONVERT, "--to", "dcp"),
    ),
    Row(
        "not torch",
        after(ODD, lambda h: _kept(h, RANK), write(f"ckpt/step3/{RANK}", "<html>not found</html>")),
        CONVERT,
        "the file is not a torch archive (no zip)",
        "",
        lambda h: shutil.copy(h / "kept", h / "ckpt/step3" / RANK),
    ),
    Row(
        "Git LFS",
        after(
            ODD,
            lambda h: _kept(h, RANK),
            write(f"ckpt/step3/{RANK}", "version https://git-lfs.github.com/spec/v1\n"),
        ),
        CONVERT,
        "the file is a Git LFS pointer and not the data",
        "git lfs pull",
        lambda h: shutil.copy(h / "kept", h / "ckpt/step3" / RANK),
    ),
    Row(
        "interrupted work",
        after(ODD, lambda h: (h / "out").write_text("a file")),
        CONVERT,
        "the output is taken by something that is not a folder",
        "",
        then=("convert", "ckpt", "out2"),
    ),
    Row(
        "manifest no JSON",
        after(universal, write("ckpt/reshard_manifest.json", "{")),
        CONVERT,
        "the manifest is not JSON",
        "remove it",
        gone("ckpt/reshard_manifest.json"),
    ),
)


def _copied(path: Path, name: str) -> None:
    shutil.copy(path, path.with_name(name))


def _kept(home: Path, name: str) -> None:
    shutil.copy(one(home, name), home / "kept")


def run(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(list(arguments))
    return code, capsys.readouterr().err


@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in ROWS])
def test_advice_helps(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    row.make(tmp_path)
    code, said = run(row.command, capsys)
    assert (code, said.startswith("error: "), said.count("\n")) == (2, True, 1), said
    assert row.message in said
    assert row.advice in said.partition("; next: ")[2], said
    row.follow(tmp_path)
    code, said = run(row.then or row.command, capsys)
    assert code == 0, said


def with_next_step() -> set[str]:
    """Every message of the conversion of files whose error gives a next step."""
    found = set()
    for file in sorted(file for room in ROOMS for file in (SOURCE / room).rglob("*.py")):
        module = Module(file)
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call) or called(node) not in KINDS or not node.args:
                continue
            if any(keyword.arg == "next_step" for keyword in node.keywords):
                found |= {text.strip() for text in module.texts(node.args[0])}
    return found


def untried() -> set[str]:
    tried = {row.message for row in ROWS if row.message}
    return {text for text in with_next_step() if not any(_is_of(text, one) for one in tried)}


def _is_of(text: str, message: str) -> bool:
    varying = ".*".join(map(re.escape, text.split("…")))
    return message in text or re.fullmatch(varying, message) is not None


def test_a_message_with_a_next_step_has_a_row_or_is_listed() -> None:
    """What is listed may only get less: take out what has a row, and add rows, not lines."""
    listed = UNTRIED.read_text(encoding="utf-8").splitlines()
    assert sorted(untried() - {*listed}) == []
