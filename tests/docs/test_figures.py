"""`make bench` takes every figure that the pages quote, with the command that they quote."""

from __future__ import annotations

import re

from tests.docs.pages import pages
from tests.truth import ROOT

_PROGRAM = re.compile(r"benchmarks[/.](bench_\w+)")


def bench() -> str:
    """The commands of `make bench`."""
    recipes = (ROOT / "Makefile").read_text(encoding="utf-8").split("\nbench:")[1]
    return recipes.split("\n\n")[0]


def test_make_bench_runs_every_benchmark() -> None:
    programs = {path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert len(programs) > 3
    assert set(_PROGRAM.findall(bench())) == programs


def test_pages_quote_what_make_bench_runs() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        assert set(_PROGRAM.findall(text)) <= set(_PROGRAM.findall(bench())), page
        for options in re.findall(r"`python [^`]*bench_\w+(?:\.py)?([^`]*)`", text):
            own = re.sub(r" ?--(size|repeat) \w+", "", options).strip()
            assert own in bench(), f"{page}: {own}"
