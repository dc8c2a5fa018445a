"""NaN under rounding: it stays NaN, its payload does not, and a comparison knows both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard.api import ConversionReport
from reshard.formats.safetensors.options import SafetensorsOptions, dtype_rules


@pytest.fixture
def every_bf16(tmp_path: Path) -> Path:
    """Every pattern of 16 bits, signalling NaNs among them."""
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    folder = tmp_path / "in"
    folder.mkdir()
    save_file({"w": bits.view(torch.bfloat16)}, folder / "model.safetensors")
    return folder


def widened(source: Path, out: Path) -> ConversionReport:
    options = SafetensorsOptions(dtypes=dtype_rules(["fp32"]))
    return reshard.convert(source, out, to="safetensors", options=options, verify=True, fsync=False)


def test_a_widened_signalling_nan_is_no_difference(every_bf16: Path, tmp_path: Path) -> None:
    report = widened(every_bf16, tmp_path / "out")
    assert report.sound
    before = load_file(every_bf16 / "model.safetensors")["w"]
    after = load_file(tmp_path / "out" / "model.safetensors")["w"]
    assert torch.equal(before.isnan(), after.isnan())
    numbers = ~before.isnan()
    assert torch.equal(before.float()[numbers], after[numbers])


def test_a_number_in_the_place_of_a_nan_is_one(every_bf16: Path, tmp_path: Path) -> None:
    widened(every_bf16, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    (tmp_path / "out" / "reshard_manifest.json").unlink()
    tensor = load_file(file)["w"]
    place = int(tensor.isnan().nonzero()[0])
    tensor[place] = 1.0
    save_file({"w": tensor}, file)
    found = reshard.verify(every_bf16, tmp_path / "out")
    (difference,) = found.differences
    assert (difference.count, difference.index) == (1, (place,))
