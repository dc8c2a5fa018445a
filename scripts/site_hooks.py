"""What mkdocs is told beside mkdocs.yml.

The changelog is a page, with links as seen from there. In docstrings a role of Sphinx
(``:func:`~reshard.api.convert```) becomes the name that it ends in.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>~?(?:[\w.]*\.)?(\w+)</code>")


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Put the changelog, which lies above `docs`, in the place of the page for it."""
    if page.file.src_uri != "release-notes.md":
        return markdown
    return CHANGELOG.read_text(encoding="utf-8").replace("](docs/", "](")


def on_page_content(html: str, **_: object) -> str:
    """Put names in the places of roles."""
    return _ROLE.sub(r"<code>\1</code>", html)
