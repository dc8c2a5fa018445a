"""`reshard map`: pieces, holders, bytes; and the document, which can be read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reshard.cli import main
from reshard.formats.checkpoint import Checkpoint
from reshard.geometry import ParamAffineMap
from tests.faces.samples import values

GOLDEN = """\
tensor
  name         layers.0.weight
  state        exp_avg
  shape        [4, 4]
  dtype        float32
  role         parameter
  saved under  sample, ZeRO-1 dp2 tp1 pp1 ep1
  map          2 pieces over 2 holders
  from         made by hand

holders
  holder  shard  pieces  bytes  file
  0       [8]         1     32  rank_0.bin
  1       [8]         1     32  rank_1.bin

pieces
  holder  piece
  0       F[0 + 8×1] → [0 + 8×1] on 0
  1       F[8 + 8×1] → [0 + 8×1] on 1

read F[…] → […] on r: a block of the full tensor, where it lies in the shard, and all who hold it; \
[o + n×s …] starts at element o and has n steps of s elements in each dimension
"""


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["map", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_the_whole_report(sample: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, sample.path, "layers.0.weight", "--state", "exp_avg") == GOLDEN


def test_files_lead_to_the_very_bytes(
    sample: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    out = said(capsys, sample.path, "layers.0.weight", "--files")
    first, second = out.splitlines()[-2:]
    for rank, line in enumerate((first, second)):
        holder, name, start, stop, *_ = line.split()
        assert (int(holder), name) == (rank, f"rank_{rank}.bin")
        raw = (Path(sample.path) / name).read_bytes()[int(start) : int(stop)]
        assert raw == values("layers.0.weight", "fp32").reshape(2, 8)[rank].tobytes()


def test_the_document_is_the_entry_that_a_map_is_read_from(
    sample: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, state in sample.tensors:
        entry = json.loads(said(capsys, sample.path, name, "--state", state, "--json"))
        assert set(entry) == {"logical_shape", "ranks"}
        assert ParamAffineMap.from_dict(entry) == sample.tensors[name, state].map


def test_the_document_with_files(sample: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(said(capsys, sample.path, "embed.weight", "--files", "--json"))
    assert set(document) == {"schema", "name", "state", "dtype", "map", "ranges"}
    assert document["schema"] == "reshard.map/1"
    assert document["ranges"][1] == {
        "holder": 1,
        "piece": 0,
        "file": f"{sample.path}/rank_1.bin",
        "start": 16,
        "stop": 64,
        "run_nbytes": 48,
        "runs": 1,
    }


REFUSALS = [
    (
        ["layers.0.wieght"],
        (
            "no such parameter: parameter layers.0.wieght; next: did you mean layers.0.weight or "
            "layers.0.bias or head.weight?"
        ),
    ),
    (
        ["embed.weight", "--state", "exp_avgg"],
        (
            "no such state: parameter embed.weight, state exp_avgg: expected one of fp32, exp_avg; "
            "next: did you mean exp_avg?"
        ),
    ),
]


@pytest.mark.parametrize(("arguments", "line"), REFUSALS)
def test_what_is_not_there_is_refused(
    arguments: list[str], line: str, sample: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["map", sample.path, *arguments]) == 2
    assert capsys.readouterr() == ("", f"error: {line}\n")
