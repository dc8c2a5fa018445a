"""The blocks of code of a page, and what the page says about running them.

Theory. A page is Markdown. Every fenced block is one of

* ``console``: lines ``$ command`` and below each what it prints, to be compared;
* ``sh``: commands that are run and print what they like;
* ``python``: run in one namespace a page, in order;
* ``toml``: a layout file, read as such; ``yaml``: a workflow, its commands run (``test_shown``);
* ``text``: a drawing. What a command prints belongs below it in a ``console`` block; so every
  drawing says ``not run``, and why.

An HTML comment above a block, invisible in the rendered page, says what else the tests must know::

    <!-- folder: runs/7/ckpt = examples/llama_tp2dp2_zero1 -->   a copy of that, before the block
    <!-- file: llama.toml -->                                    the block is written to that file
    <!-- setup: model and optimizer of runs/8/dcp -->            see ``setups``
    <!-- exit: 2 -->                                             what the last command returns
    <!-- tested: tests/deepspeed_judge/test_fsdp.py -->          another test runs it
    <!-- not run: needs GPUs -->                                 nobody does, and why
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.truth import ROOT

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^ *```$", re.DOTALL | re.MULTILINE
)
_COMMENT = re.compile(r"<!--\s*(?P<word>[a-z][a-z ]*):\s*(?P<value>.*?)\s*-->", re.DOTALL)
RUN = ("console", "sh", "python")
SHOWN = ("text", "toml", "yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    code: str
    said: dict[str, list[str]] = field(default_factory=dict)
    """Word of a comment above it -> what it says, in order."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether the tests of the pages run it."""
        return self.language in RUN and not self.said.keys() & {"not run", "tested"}


def pages() -> list[Path]:
    """Return every page that people read, README first."""
    more = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(more)]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page in order, each with the comments since the last."""
    text, before = page.read_text(encoding="utf-8"), 0
    for fence in _FENCE.finditer(text):
        said: dict[str, list[str]] = {}
        for comment in _COMMENT.finditer(text, before, fence.start()):
            said.setdefault(comment["word"], []).append(" ".join(comment["value"].split()))
        before = fence.end()
        yield Block(
            page=page,
            line=text[: fence.start()].count("\n") + 1,
            language=fence["language"],
            code=textwrap.dedent(fence["code"]),
            said=said,
        )
