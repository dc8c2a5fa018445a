"""What the page advises for frozen parameters and buffers gives a model their values."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import reshard
from scripts.deepspeed_lab.models import Odd
from tests.docs.pages import blocks
from tests.truth import ROOT, case_named

PAGE = ROOT / "docs" / "convert" / "deepspeed-to-universal.md"


@pytest.mark.deepspeed
def test_frozen_parameters_and_buffers_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = [
        block
        for block in blocks(PAGE)
        if f"tests/docs/{Path(__file__).name}" in block.said.get("tested", ())
    ]
    case = case_named("golden/odd_z1_dp2_fp32")
    reshard.convert(case.path, tmp_path / "runs/7/ckpt/step3_universal", fsync=False)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(7)
    model = Odd()
    truth = case.truth()
    assert not torch.equal(model.gate, truth.frozen["gate"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(block.code, {"engine": SimpleNamespace(module=model)})
    assert torch.equal(model.gate, truth.frozen["gate"])
    assert torch.equal(model.get_buffer("shift"), truth.buffers["shift"])
