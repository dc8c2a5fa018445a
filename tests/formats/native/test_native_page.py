"""Each command of docs/native.md is run, on a checkpoint of the kind that it speaks of."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from reshard.cli import main
from tests.truth import case_named

PAGE = (Path(__file__).parents[3] / "docs" / "native.md").read_text()
COMMANDS = re.findall(r"^\$ reshard (convert .*)$", PAGE, re.MULTILINE)
SOURCES = ["golden/odd_z1_dp2_fp32", "0.19.8/pipe_pp2dp1_tied_z1_fp32", "golden/odd_z3_dp4_bf16"]


@pytest.mark.parametrize(("command", "name"), list(zip(COMMANDS, SOURCES, strict=True)))
def test_the_command_does_what_the_page_says(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(command)
    source, out = (Path(word) for word in arguments[1:3])
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
