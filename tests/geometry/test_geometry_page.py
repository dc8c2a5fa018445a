"""docs/geometry.md shows what it speaks of. (Its code is run by tests/docs, as on every page.)"""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "geometry.md"


def test_it_shows_pictures_of_the_layouts() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for picture in ("row split", "column split", "Fused QKV", "ZeRO fragment"):
        section = text.split(picture, 1)[1]
        assert "```text" in section.split("\n## ", 1)[0]
