"""Fixtures of the judge: DeepSpeed's server, and each case converted once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from scripts.deepspeed_lab.client import Lab
from tests.deepspeed_judge.judge import Judge
from tests.truth import Case

Converted: TypeAlias = Callable[[Case], Path]


@pytest.fixture(scope="session")
def judge() -> Iterator[Judge]:
    """DeepSpeed, imported once in a process of its own."""
    with Lab() as lab:
        yield Judge(lab)


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """Return a function from a case to the folder that has ``<tag>_universal`` in it."""
    done: dict[str, Path] = {}

    def convert(case: Case) -> Path:
        import reshard

        if case.name not in done:
            root = tmp_path_factory.mktemp("universal")
            reshard.convert(case.path, root / f"{case.tag}_universal")
            done[case.name] = root
        return done[case.name]

    return convert
