"""Every block of code that people read is run, or says why not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import RUN, SHOWN, blocks, pages
from tests.docs.running import Reader
from tests.truth import ROOT

FIRST = (ROOT / "README.md", ROOT / "docs" / "index.md")
"""Pages whose commands a newcomer types in a clone."""

by_page = pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))


@by_page
def test_every_block_runs_and_prints_what_is_shown(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    wanted = [block for block in blocks(page) if block.runs]
    assert list(Reader(tmp_path).follow(page)) == wanted
    if page in FIRST:
        assert left_by(tmp_path) <= ignored()


def left_by(folder: Path) -> set[str]:
    """What the commands of a page leave in the folder where they are typed."""
    ours = {".bin", "examples"}  # our programs, and the part of the clone that the page uses
    return {path.name for path in folder.iterdir()} - ours


def ignored() -> set[str]:
    """Names at the root of a clone that git ignores."""
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    return {line.strip("/") for line in lines if line.startswith("/")}


def test_git_does_not_mind_what_a_newcomer_makes() -> None:
    made = {"env", "ckpt"}
    assert made <= ignored()
    for name in made:
        assert name in FIRST[1].read_text(encoding="utf-8")


@by_page
def test_every_block_says_what_it_is(page: Path) -> None:
    for block in blocks(page):
        assert block.language in (*RUN, *SHOWN), f"{block}: of no language"
        if block.language == "text":
            assert "not run" in block.said, f"{block}: shown without a reason; is it printed?"
        for reason in block.said.get("not run", ()):
            assert len(reason) > 10, f"{block}: no reason"
        for test in block.said.get("tested", ()):
            assert (ROOT / test).is_file(), f"{block}: there is no {test}"


@by_page
def test_no_code_hides_in_indented_text(page: Path) -> None:
    """Markdown takes four spaces for code; such a block would have no language and not be run."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"^(?:[^\s*\-+\d].*)?\n\n {4,}\S.*", text, re.MULTILINE) == []
