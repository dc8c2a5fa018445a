"""What all tests share: tests that need DeepSpeed run on one worker, or not at all without it."""

from __future__ import annotations

import importlib.util
import os

import pytest
from hypothesis import settings

# A busy machine makes any example slow; how long things take is asked by tests of their own.
# The same examples in every run, so that what lands is what was tested; HYPOTHESIS_SEARCH=1 looks
# for new ones, as many as it says times the usual number.
SEARCH = int(os.environ.get("HYPOTHESIS_SEARCH", "0"))
settings.register_profile("reshard", deadline=None, print_blob=True, derandomize=not SEARCH)
settings.register_profile(
    "search", settings.get_profile("reshard"), max_examples=100 * max(SEARCH, 1)
)
settings.load_profile("search" if SEARCH else "reshard")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests marked ``deepspeed`` together, so that one process imports it, once."""
    missing = [
        name for name in ("deepspeed", "transformers") if importlib.util.find_spec(name) is None
    ]
    for item in items:
        if item.get_closest_marker("deepspeed") is None:
            continue
        item.add_marker(pytest.mark.xdist_group("deepspeed"))
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"needs {' and '.join(missing)}"))
