"""Blocks that are shown and not run are what they look like: layout files and workflows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from reshard.formats.stated_layouts import read_stated_layouts
from tests.docs.pages import Block, blocks, pages
from tests.docs.running import Reader
from tests.truth import ROOT


def shown(language: str) -> list[Block]:
    """Every block of a language, on whatever page."""
    return [block for page in pages() for block in blocks(page) if block.language == language]


@pytest.mark.parametrize("block", shown("toml"), ids=str)
def test_a_layout_file_is_read_by_our_own_parser(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "layouts.toml"
    file.write_text(block.code, encoding="utf-8")
    read = read_stated_layouts(file)
    assert read.rules or read.waived


@pytest.mark.parametrize("block", shown("yaml"), ids=str)
def test_the_commands_of_a_workflow_succeed(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CKPT", str(tmp_path / "ckpt"))
    steps: list[dict[str, Any]] = yaml.safe_load(block.code)
    reader = Reader(tmp_path)
    source = ROOT / "examples" / "llama_tp2dp2_zero1"
    assert reader.shell(f"cp -r {source} ckpt && reshard convert ckpt ckpt/step3_universal")[0] == 0
    commands = [step["run"] for step in steps if "run" in step]
    assert commands
    for command in commands:
        code, printed = reader.shell(command)
        assert code == 0, f"{block}: {command}\n{printed}"
    wanted = [step["with"]["path"] for step in steps if "uses" in step]
    assert all((tmp_path / path).is_file() for path in wanted)
