"""Each block of code of docs/geometry.md is run, in order, as a reader would type it."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "geometry.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_every_block_of_code_runs() -> None:
    text = PAGE.read_text(encoding="utf-8")
    names: dict[str, object] = {}
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) > 10
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        code = compile("\n" * line + block[1], str(PAGE), "exec")
        exec(code, names)


def test_it_shows_pictures_of_the_layouts() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for picture in ("row split", "column split", "Fused QKV", "ZeRO fragment"):
        section = text.split(picture, 1)[1]
        assert "```text" in section.split("\n## ", 1)[0]
