"""Weights are rounded as torch rounds, whatever the bits, in bounded memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from reshard.execution import execute
from reshard.execution.rounding import round_into
from reshard.formats.deepspeed.writing import NativeOptions, lay_out_deepspeed
from reshard.formats.dtypes import DTYPES
from reshard.planning import plan
from tests.formats.native.sources import content, made_up

KINDS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def edges() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Every exponent with mantissas around every rounding border, both signs, and infinity."""
    exponents = np.arange(256, dtype=np.uint32)[:, None] << 23
    low = np.concatenate([np.arange(4), np.arange(0xFFC, 0x1005), np.arange(0x7FFD, 0x8004)])
    high = np.array([0, 1, 2, 3, 0x7E, 0x7F]) << 16
    mantissas = np.unique((high[:, None] | low).ravel()).astype(np.uint32)
    mantissas = np.concatenate([mantissas, np.uint32(0x7FFFFF) - mantissas[:64]])
    bits = (exponents | mantissas).ravel()
    both = np.concatenate([bits, bits | np.uint32(1 << 31)])
    return both.view(np.float32)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_number_is_rounded_as_torch_rounds_it(name: str) -> None:
    values = edges()
    out = bytearray(2 * len(values))
    round_into(memoryview(values.tobytes()), DTYPES["float32"], memoryview(out), DTYPES[name])
    mine = np.frombuffer(out, np.uint16)
    theirs = torch.from_numpy(values).to(KINDS[name]).view(torch.int16).numpy().view(np.uint16)
    number = ~np.isnan(values)
    assert np.array_equal(mine[number], theirs[number])
    assert np.isnan(np.frombuffer(out, DTYPES[name].numpy())[~number].astype(np.float32)).all()


def test_a_tensor_larger_than_every_buffer_is_rounded_step_by_step(tmp_path: Path) -> None:
    source, values = made_up(tmp_path / "s", [{"w": (1009, 97)}, {"b": (3,)}])
    options = NativeOptions(stage=1, dp=3, dtype=DTYPES["bfloat16"])
    job = plan(source, lay_out_deepspeed(source, tag="t", options=options))
    execute(job, tmp_path / "t", workers=2, max_memory=1 << 17, fsync=False)
    module = content(tmp_path / "t/mp_rank_00_model_states.pt")["module"]
    expected = torch.from_numpy(values["w", "fp32"]).bfloat16().view(torch.int16).numpy()
    assert module["w"] == ("bfloat16", (1009, 97), expected.tobytes())
