"""Rounded fills: gathered exactly, replicas compared exactly, rounded as torch rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reshard.errors import ReplicaMismatchError
from reshard.execution import execute
from reshard.execution.buffers import KIB, MIB
from reshard.execution.rounding import round_into
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


KINDS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
PAIRS = [(stored, dtype) for stored in KINDS for dtype in KINDS if stored != dtype]


def patterns(stored: str) -> Array:
    """Bit patterns of a type: all of them up to 16 bits, else what lies around every rounding."""
    kind = DType.named(stored)
    if kind.itemsize <= 2:
        return np.arange(256**kind.itemsize, dtype=f"u{kind.itemsize}").view(kind.numpy())
    upper = np.arange(1 << 16, dtype="u4") << 16
    middle = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0FFF, 0x1000, 0x1001], "u4")
    singles: Array = (upper[:, None] | middle[None, :]).reshape(-1).view("f4")
    if stored == "float32":
        return singles
    with np.errstate(all="ignore"):
        wide = singles.astype("f8")
        return np.concatenate([wide, np.nextafter(wide, np.inf), np.nextafter(wide, -np.inf)])


@pytest.mark.parametrize(("stored", "dtype"), PAIRS)
def test_every_pair_of_types_is_rounded_as_torch_rounds(stored: str, dtype: str) -> None:
    """Denormals, ties, overflow and infinities to the bit; a NaN is a NaN, of whatever payload."""
    raw, kind = patterns(stored), DType.named(dtype)
    out = np.empty(len(raw), kind.numpy())
    round_into(raw.view("u1").data, DType.named(stored), out.view("u1").data, kind)
    tensor = torch.from_numpy(raw.view("u1").copy()).view(getattr(torch, stored))
    expected = tensor.to(getattr(torch, dtype))
    found = torch.from_numpy(out.view("u1")).view(expected.dtype)
    nan = expected.double().isnan()
    assert torch.equal(found.double().isnan(), nan)
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.itemsize]
    assert torch.equal(found[~nan].view(size), expected[~nan].view(size))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "float8_e4m3fn"])
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
    with pytest.raises(ReplicaMismatchError, match="1 element differing"):
        execute(made, tmp_path / "out", workers=1, max_memory=MIB)
