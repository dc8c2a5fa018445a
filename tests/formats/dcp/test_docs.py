"""The example of docs/dcp.md is run."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import torch

import reshard
from tests.formats.dcp.folders import save, state_dicts, trained
from tests.truth import ROOT

PAGE = (ROOT / "docs" / "dcp.md").read_text()


def test_the_page_loads_what_was_written(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    model, nested = state_dicts(*trained())
    source = save({"model": model, "optim": nested}, tmp_path / "source")
    reshard.convert(source, tmp_path / "out", to="dcp")
    net, optimizer = trained(lr=0.5)
    with torch.no_grad():
        for tensor in net.parameters():
            tensor.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(
            code.replace("runs/8/dcp", str(tmp_path / "out")),
            {"model": net, "optimizer": optimizer},
        )
    assert optimizer.param_groups[0]["lr"] == 0.01
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, model[name]), name
