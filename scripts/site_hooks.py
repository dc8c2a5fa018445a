"""What mkdocs is told beside mkdocs.yml.

The changelog is a page, with links as seen from there. In docstrings a role of Sphinx
(``:func:`~reshard.api.convert```) becomes the name that it ends in. What the button of a
console copies are its commands: the theme takes the text of ``data-copy`` where there is one.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>~?(?:[\w.]*\.)?(\w+)</code>")
_CONSOLE = re.compile(r'<div class="language-console highlight">(?P<code>.*?)</div>', re.DOTALL)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Put the changelog, which lies above `docs`, in the place of the page for it."""
    if page.file.src_uri != "release-notes.md":
        return markdown
    return CHANGELOG.read_text(encoding="utf-8").replace("](docs/", "](")


def on_page_content(content: str, **_: object) -> str:
    """Put names in the places of roles, and give every console what its button copies."""
    return _CONSOLE.sub(_with_commands, _ROLE.sub(r"<code>\1</code>", content))


def _with_commands(console: re.Match[str]) -> str:
    shown = html.unescape(re.sub(r"<[^>]+>", "", console["code"]))
    commands = html.escape("\n".join(_COMMAND.findall(shown)))
    return f'<div class="language-console highlight" data-copy="{commands}">{console["code"]}</div>'
