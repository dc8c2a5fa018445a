"""Rounded fills: gathered exactly, replicas compared exactly, rounded as torch rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reshard.errors import ReplicaMismatchError
from reshard.execution import execute
from reshard.execution.buffers import KIB, MIB
from reshard.formats.dtypes import DType
from reshard.formats.target import Fill, OutputFile, Slot, Target
from reshard.geometry import ParamAffineMap
from reshard.planning import Plan, plan
from tests.execution.raw import Array, replicated, split, write_checkpoint

torch = pytest.importorskip("torch")
KEY = ("w", "fp32")


def job(folder: Path, full: Array, layout: ParamAffineMap, dtype: str) -> Plan:
    checkpoint = write_checkpoint(folder, {KEY: (full, layout)})
    kind = DType.named(dtype)
    fill = Fill(KEY, kind, replicated(full.shape, 1), 0, 64, cast=True)
    nbytes = 64 + full.size * kind.itemsize
    return plan(
        checkpoint, Target("raw", (OutputFile("w", nbytes, (), (Slot(0, nbytes, (fill,)),)),))
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("cap", [64 * KIB, MIB])
def test_it_rounds_as_torch_does(tmp_path: Path, dtype: str, cap: int) -> None:
    full = np.random.default_rng(0).standard_normal((200, 333)).astype("f4")
    full[0, :5] = (0.0, -0.0, np.inf, 1e30, 1e-42)
    execute(
        job(tmp_path / "in", full, split(full.shape, 1, (100, 233)), dtype),
        tmp_path / "out",
        workers=2,
        max_memory=cap,
    )
    expected = torch.from_numpy(full).to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
    assert (tmp_path / "out" / "w").read_bytes() == bytes(64) + expected


def test_replicas_are_compared_before_they_are_rounded(tmp_path: Path) -> None:
    full = np.ones(100, "f4")
    made = job(tmp_path / "in", full, replicated((100,), 2), "bfloat16")
    path = tmp_path / "in" / "rank_1.bin"
    data = bytearray(path.read_bytes())
    data[64 + 40] ^= 1
    path.write_bytes(data)
    with pytest.raises(ReplicaMismatchError, match="1 elements that differ"):
        execute(made, tmp_path / "out", workers=1, max_memory=MIB)
