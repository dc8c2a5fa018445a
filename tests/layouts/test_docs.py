"""The examples of docs/layouts.md are run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reshard
from reshard.formats.stated_layouts import read_stated_layouts
from tests.layouts.deepspeed_merge import merged_by_deepspeed

PAGE = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def own_layout() -> dict[str, Any]:
    """Run the example of a framework's author; its five lines are all there is."""
    (code,) = blocks("python")
    lines = [line for line in code.splitlines() if line and not line.startswith("import")]
    assert len(lines) <= 5
    names: dict[str, Any] = {}
    exec(code, names)
    return names


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is of Python 3.11")
def test_every_layout_file_of_the_page_can_be_read(tmp_path: Path) -> None:
    files = blocks("toml")
    assert len(files) == 3
    for text in files:
        file = tmp_path / "layouts.toml"
        file.write_text(text)
        read = read_stated_layouts(file)
        assert read.rules or read.waived


def test_bring_your_own_layout() -> None:
    names = own_layout()
    found = names["maps"]["attn.qkv.weight"]
    full = np.random.default_rng(0).standard_normal((48, 8)).astype(np.float32)
    shards = {rank: names["cut"](full, rank) for rank in range(2)}
    assert np.array_equal(found.rebuild(shards), full)
    assert len(found.pieces_by_rank[0]) == 1
    info = names["client_state"]["universal_checkpoint_info"]
    document = info["affine_map"]["params"]
    assert list(document) == [r"^attn\.qkv\.weight$"]
    assert reshard.ParamAffineMap.from_dict(document[r"^attn\.qkv\.weight$"]) == found


@pytest.mark.deepspeed
def test_deepspeeds_converter_reads_ones_own_layout(tmp_path: Path) -> None:
    names = own_layout()
    full = torch.randn(48, 8)
    shards = [names["cut"](full, rank).contiguous() for rank in range(2)]
    info = names["client_state"]["universal_checkpoint_info"]
    assert torch.equal(
        merged_by_deepspeed(info, "attn.qkv.weight", shards, tmp_path)["param"], full
    )
