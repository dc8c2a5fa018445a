"""What all tests share: tests that need DeepSpeed run on one worker, or not at all without it."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import settings

# A busy machine makes any example slow; how long things take is asked by tests of their own.
settings.register_profile("reshard", deadline=None, print_blob=True)
settings.load_profile("reshard")


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
