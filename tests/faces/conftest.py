"""The sample checkpoint, opened in place of any path below its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.formats import registry
from reshard.formats.checkpoint import Checkpoint
from tests.faces.samples import make_checkpoint


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """A checkpoint in `tmp_path / "ckpt"`; opening that path gives it, other paths as ever."""
    checkpoint = make_checkpoint(tmp_path / "ckpt")
    read = registry.open_checkpoint

    def open_sample(path: str, **options: object) -> Checkpoint:
        return checkpoint if path == checkpoint.path else read(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(registry, "open_checkpoint", open_sample)
    return checkpoint
