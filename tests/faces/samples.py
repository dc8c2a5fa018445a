"""Checkpoints made by hand: values, a file of bytes, no format."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np

from reshard.formats.checkpoint import (
    Checkpoint,
    Extra,
    Problem,
    Region,
    Role,
    Scalar,
    SourceFile,
    StoredTensor,
    Topology,
)
from reshard.formats.dtypes import DType
from reshard.geometry import AffinePiece, ParamAffineMap

SHAPES: Mapping[str, tuple[int, ...]] = {
    "embed.weight": (6, 4),
    "layers.0.weight": (4, 4),
    "layers.0.bias": (4,),
    "norm.scale": (),
}
STATES = ("fp32", "exp_avg")
PER_HOLDER_BYTES = 512


def row_split(shape: tuple[int, ...]) -> ParamAffineMap:
    """Two holders, each with half of the rows; both hold what has no rows to divide."""
    numel = prod(shape)
    if not shape:
        both = AffinePiece((), 0, (), 0, (), (0, 1))
        return ParamAffineMap(shape, {0: (), 1: ()}, {0: [both], 1: [both]})
    half = numel // 2
    pieces = {rank: [AffinePiece((half,), rank * half, (1,), 0, (1,), (rank,))] for rank in (0, 1)}
    return ParamAffineMap(shape, {0: (half,), 1: (half,)}, pieces)


def values(name: str, state: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """The true values of a state of a parameter."""
    first = 100 * list(SHAPES).index(name) + 1000 * STATES.index(state)
    return np.arange(first, first + prod(SHAPES[name]), dtype=np.float32).reshape(SHAPES[name])


def write_shards(folder: Path) -> dict[tuple[str, str], dict[int, Region]]:
    """Write both holders' files, and return where each shard lies."""
    folder.mkdir(parents=True, exist_ok=True)
    regions: dict[tuple[str, str], dict[int, Region]] = {}
    for rank in (0, 1):
        content = bytearray(b"\xee" * 16)
        for state in STATES:
            for name, shape in SHAPES.items():
                shard = row_split(shape).extract(values(name, state), rank)
                data = np.asarray(shard).tobytes()
                place = Region(str(folder / f"rank_{rank}.bin"), len(content), len(data))
                regions.setdefault((name, state), {})[rank] = place
                content += data
        (folder / f"rank_{rank}.bin").write_bytes(content)
    return regions


def make_checkpoint(folder: Path) -> Checkpoint:
    """Write a checkpoint of four parameters, two states and two holders."""
    tensors = {
        (name, state): StoredTensor(
            name,
            state,
            DType.named("float32"),
            row_split(SHAPES[name]),
            regions,
            role=Role.BUFFER if name == "norm.scale" else Role.PARAMETER,
            provenance="made by hand",
        )
        for (name, state), regions in write_shards(folder).items()
        if (name, state) != ("norm.scale", "exp_avg")
    }
    files = [folder / "rank_0.bin", folder / "rank_1.bin"]
    return Checkpoint(
        format="sample",
        path=str(folder),
        topology=Topology(stage=1, dp=2),
        tensors=tensors,
        scalars={
            (tensor.name, "step"): Scalar(3, source="made by hand")
            for tensor in tensors.values()
            if tensor.role is Role.PARAMETER
        },
        aliases={"head.weight": "embed.weight"},
        extras={
            "param_groups": Extra([{"lr": 0.01, "betas": (0.9, 0.95)}], str(files[0])),
            "groups": Extra([[name for name in SHAPES if name != "norm.scale"]]),
            "global_steps": Extra(3),
        },
        versions={"sample": "1.0"},
        files=tuple(SourceFile(str(file), file.stat().st_size, "shards") for file in files),
        problems=(Problem("a thing to note", parameter="norm.scale"),),
    )
