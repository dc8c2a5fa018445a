"""What mkdocs is told beside mkdocs.yml: the changelog is a page, with links as seen from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Put the changelog, which lies above `docs`, in the place of the page for it."""
    if page.file.src_uri != "release-notes.md":
        return markdown
    return CHANGELOG.read_text(encoding="utf-8").replace("](docs/", "](")
