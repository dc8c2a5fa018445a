"""DeepSpeed's converter, asked about one parameter."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

STATES = ("fp32", "exp_avg", "exp_avg_sq")


def merged_by_deepspeed(
    info: Mapping[str, Any], name: str, shards: Sequence[torch.Tensor], folder: Path
) -> dict[str, Any]:
    """Return what ``merge_tp_slices`` writes for ``fp32`` when these are the ranks' slices."""
    converter = importlib.import_module("deepspeed.checkpoint.ds_to_universal")
    slices, output = folder / "slices", folder / "zero"
    for rank, shard in enumerate(shards):
        place = slices / name / str(rank)
        place.mkdir(parents=True, exist_ok=True)
        if shard.numel():
            for state in STATES:
                torch.save(shard.flatten().clone(), place / f"{state}.00")
    shapes = [shard.shape for shard in shards]
    converter.merge_tp_slices(dict(info), str(output), str(slices), len(shards), (name, shapes))
    merged = torch.load(output / name / "fp32.pt", weights_only=False)
    assert isinstance(merged, dict)
    return merged
