"""Reading a universal folder with torch alone: the independent eye of these tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def load(path: Path) -> Any:
    """Load one file as DeepSpeed does."""
    return torch.load(path, map_location="cpu", weights_only=False)


def param(folder: Path, name: str, state: str) -> torch.Tensor:
    """Load one state of one parameter."""
    content = load(folder / "zero" / name / f"{state}.pt")
    tensor = content["param"]
    assert isinstance(tensor, torch.Tensor)
    return tensor


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Tell whether two tensors have the same shape and the same bits as fp32.

    The truth is kept as fp32; every lower precision fits into it without loss.
    """
    if left.shape != right.shape:
        return False
    if left.is_floating_point():
        left, right = left.float().view(torch.int32), right.float().view(torch.int32)
    return torch.equal(left, right)
