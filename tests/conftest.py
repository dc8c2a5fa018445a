"""What all tests share: tests that need DeepSpeed run on one worker, or not at all without it."""

from __future__ import annotations

import importlib.util

import pytest


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
