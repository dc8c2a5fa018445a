"""The attack, a short part of it: no damaged or mixed folder gives other values without a word.

``make attack`` makes thousands, of all families.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.attack.__main__ import in_parallel
from scripts.attack.campaign import Campaign, Verdict
from scripts.attack.excuses import excuse

FOLDERS = 120
OPEN = {
    66: "a buffer that buffer_names lists is missing from the module",
    91: "a trained parameter is missing from the module under its name",
}
"""What is known to be wrong still. It may only shrink: what is mended leaves the list."""

FINE = ("exact", "refused", "undecidable")
FAMILIES = frozenset({"ZeRO-0", "ZeRO-1", "ZeRO-2", "AutoTP, ZeRO-1", "frozen", "tied"})


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[Verdict]:
    home = tmp_path_factory.mktemp("attack")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESHARD_CHECKPOINTS", str(home))  # golden ones only: the same everywhere
        campaign = Campaign(15, home / "cache", home, FAMILIES)
    return in_parallel(campaign, range(FOLDERS), servers=1)


def test_nothing_is_wrong_without_a_word(verdicts: list[Verdict]) -> None:
    bad = [verdict for verdict in verdicts if verdict.outcome not in FINE]
    assert {verdict.number for verdict in bad} <= set(OPEN), [
        (verdict.number, verdict.family, verdict.did, verdict.outcome, verdict.why, verdict.differs)
        for verdict in bad
    ]
    assert {"exact", "refused"} <= {verdict.outcome for verdict in verdicts}


def test_a_number_is_the_same_folder_again(tmp_path: Path) -> None:
    told = []
    for again in ("one", "two"):
        home = tmp_path / again
        campaign = Campaign(15, home / "cache", home, frozenset({"ZeRO-1"}))
        told.append([verdict.did for verdict in in_parallel(campaign, range(3), servers=1)])
    assert told[0] == told[1]


def test_a_value_that_stands_twice_is_not_excused() -> None:
    """What the harness counts as wrong must be wrong: it can fail."""
    weights = ("x/zero/l1.weight/fp32.pt:/param",)
    moments = ("x/zero/l1.weight/exp_avg.pt:/param",)
    gone = ("x/zero/l1.weight/exp_avg.pt: gone",)
    assert excuse("value changed", "", moments, "", "ZeRO-1")
    assert not excuse("value changed", "", gone, "", "ZeRO-1")
    assert not excuse("value changed", "", weights, "", "ZeRO-1")
    assert not excuse("files of another run", "", weights, "", "ZeRO-3")
    assert not excuse("bit in a tensor", "(tensor at 0)", weights, "", "universal")
