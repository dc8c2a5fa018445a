"""Fixtures of the live tests: the crews of ranks, once a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live.ranks import Crews


@pytest.fixture(scope="session")
def crews() -> Iterator[Crews]:
    """Crews of real processes."""
    with Crews() as crews:
        yield crews


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests that need crews together, so that there is one server."""
    for item in items:
        if "crews" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("live"))
