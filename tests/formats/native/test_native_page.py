"""Each command of docs/native.md is run, on a checkpoint of the kind that it speaks of."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from reshard.cli import main
from tests.formats.edited import nothing, with_info
from tests.formats.native.sources import converted
from tests.truth import Case, case_named

PAGE = (Path(__file__).parents[3] / "docs" / "native.md").read_text()
COMMANDS = re.findall(r"^\$ reshard (convert .*)$", PAGE.replace("\\\n", " "), re.MULTILINE)
SOURCES = [
    "golden/odd_z1_dp2_fp32",
    "golden/llama_z1_tp2dp2_fp32",
    "0.19.8/pipe_pp2dp1_tied_z1_fp32",
    "golden/odd_z3_dp4_bf16",
]


def never_cut(case: Case, folder: Path) -> None:
    """A checkpoint of one tensor rank that says nothing of cuts, and the page's layout file."""
    [layout] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    Path("llama.toml").write_text(layout)
    converted(case.path, Path("whole/ckpt"), stage=1, dp=1)
    with_info(Case("whole", Path("whole")), folder, nothing)
    (folder / "latest").write_text(case.tag)


@pytest.mark.parametrize(("command", "name"), list(zip(COMMANDS, SOURCES, strict=True)))
def test_the_command_does_what_the_page_says(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(command)
    source, out = (Path(word) for word in arguments[1:3])
    if "--layout" in arguments:
        never_cut(case_named(name), source)
    else:
        shutil.copytree(case_named(name).path, source)
    assert main([*arguments, "--quiet"]) == 0
    assert main(["verify", str(source), str(out), "--quiet"]) == 0
    pointer = out if "--drop-in" in arguments else out.parent
    assert (pointer / "latest").read_text() == "step3"


def test_the_page_names_every_option_of_the_topology(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--help"]) == 0
    said = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    options = re.findall(r"--[a-z-]+", said[said.index("--stage") : said.index("--drop-in") + 9])
    assert {"--stage", "--pp", "--tied", "--dtype", "--drop-in"} <= set(options)
    assert [option for option in options if f"`{option}`" not in PAGE] == []
