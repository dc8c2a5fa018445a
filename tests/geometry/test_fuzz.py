"""Random maps against the oracle of `scripts.fuzz_geometry`, in part; and that it sees faults."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from reshard.geometry import affine_map, composition, equality, movement, nesting, validation
from scripts.fuzz_geometry import laws
from scripts.fuzz_geometry.__main__ import batch

COUNT = int(os.environ.get("RESHARD_FUZZ_CASES", "2500"))
SEED = int(os.environ.get("RESHARD_FUZZ_SEED", "16"))


def test_reshard_says_what_the_oracle_says() -> None:
    tried, wrong = batch(SEED, range(COUNT))
    assert wrong == {}
    assert set(tried) == {law.__name__ for law in laws.LAWS} or COUNT < 1000


def _nothing(*_: object, **__: object) -> None:
    """Do not look."""


FAULTS: dict[str, tuple[Callable[[random.Random], None], Any, str, Callable[..., object]]] = {
    "a scale is not looked at": (laws.validates, validation, "_check_scales", _nothing),
    "replicas are not compared": (laws.extracts_and_rebuilds, movement, "_compare", _nothing),
    "maps are trusted": (laws.refuses_lies, composition, "check_sound", _nothing),
    "an outer map has no replicas": (laws.nests, nesting, "_holds_once", lambda _: True),
    "holes are not told": (laws.tells_holes_and_holders, affine_map, "gaps", lambda *_: []),
    "all maps are alike": (laws.tells_apart, equality, "same_elements", lambda *_: True),
    "nothing is merged": (
        laws.folds,
        affine_map,
        "fold_table",
        lambda link, group, **_: (link, group),
    ),
}


@pytest.fixture
def _forgetful() -> Iterator[None]:
    composition.KEPT.clear()
    yield
    composition.KEPT.clear()


@pytest.mark.usefixtures("_forgetful")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    law, module, name, wrong = FAULTS[fault]
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises((AssertionError, ValueError)):
        _try(law)


def _try(law: Callable[[random.Random], None]) -> None:
    for number in range(300):
        law(random.Random(number))
