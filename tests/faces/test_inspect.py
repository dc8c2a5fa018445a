"""`reshard inspect`: what it says as text and as JSON, and that it reads no tensor."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from reshard.api import inspect
from reshard.cli import main
from reshard.cli.render_inspect import inspection_blocks
from reshard.cli.screen import plain
from reshard.formats.checkpoint import Checkpoint, Extra, Role
from reshard.formats.torch_archive import Global, ObjectRecord

GOLDEN = """\
checkpoint
  path          {path}
  tag           ckpt
  format        sample
  versions      sample 1.0
  topology      ZeRO-1 dp2 tp1 pp1 ep1
  holds         3 parameters, 1 buffer
  elements      45
  tensor bytes  356 B, not read

files
  kind    files   size
  shards      2  400 B

states
  state    tensors  elements  dtypes    size
  fp32           4        45  float32  180 B
  exp_avg        3        44  float32  176 B

scalars
  state  value  parameters
  step   3               3

groups
  group  parameters  hyperparameters
  0               3  lr=0.01, betas=(0.9, 0.95)

tied names
  name         is
  head.weight  embed.weight

extras
  key           value  file
  global_steps  3

problems
  a thing to note: norm.scale
"""


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_the_whole_report(sample: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "inspect", sample.path) == GOLDEN.format(path=sample.path)


def test_tensors_are_listed_on_demand(
    sample: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    out = said(capsys, "inspect", sample.path, "--tensors", "layers.*")
    assert (
        "tensors\n"
        "  name             state    shape   dtype    bytes  holders  role       map\n"
        "  layers.0.weight  fp32     [4, 4]  float32     64        2  parameter  made by hand\n"
        "  layers.0.bias    fp32     [4]     float32     16        2  parameter  made by hand\n"
        "  layers.0.weight  exp_avg  [4, 4]  float32     64        2  parameter  made by hand\n"
        "  layers.0.bias    exp_avg  [4]     float32     16        2  parameter  made by hand\n"
    ) in out
    assert "norm.scale  fp32" not in out


def test_a_glob_that_matches_nothing_is_refused(
    sample: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", sample.path, "--tensors", "layrs.*"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: a pattern matches no parameter: found 'layrs.*'; next: ")


KEYS = {
    "schema": str,
    "path": str,
    "tag": str,
    "format": str,
    "versions": dict,
    "topology": dict,
    "parameters": dict,
    "numel": int,
    "nbytes": int,
    "files": list,
    "states": list,
    "scalars": list,
    "aliases": dict,
    "extras": list,
    "inert": list,
    "problems": list,
    "tensors": list,
}


def test_the_document_has_its_promised_keys(
    sample: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(said(capsys, "inspect", sample.path, "--json", "--tensors", "norm*"))
    assert {key: type(value) for key, value in document.items()} == KEYS
    assert document["schema"] == "reshard.inspect/1"
    assert document["topology"] == {"stage": 1, "dp": 2, "tp": 1, "pp": 1, "ep": 1}
    assert document["parameters"] == {"parameter": 3, "buffer": 1}
    assert document["states"][1] == {
        "state": "exp_avg",
        "tensors": 3,
        "numel": 44,
        "dtypes": ["float32"],
        "nbytes": 176,
    }
    assert document["tensors"] == [
        {
            "name": "norm.scale",
            "state": "fp32",
            "shape": [],
            "dtype": "float32",
            "nbytes": 4,
            "holders": 2,
            "role": "buffer",
            "provenance": "made by hand",
        }
    ]
    assert document["problems"][0]["what"] == "a thing to note"


def test_numbers_that_json_lacks_are_text(
    sample: Checkpoint, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (key, scalar), *_ = sample.scalars.items()
    odd = replace(sample, scalars={key: replace(scalar, value=float("nan"))})
    monkeypatch.setattr("reshard.formats.registry.open_checkpoint", lambda *_, **__: odd)
    document = json.loads(said(capsys, "inspect", sample.path, "--json"))
    assert document["scalars"][0]["value"] == "nan"


def test_no_tensor_byte_is_needed(sample: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    for file in sample.files:
        Path(file.path).unlink()
    assert "tensor bytes" in said(capsys, "inspect", sample.path)


def test_roles_are_counted_once_a_name(sample: Checkpoint) -> None:
    found = inspect(sample.path)
    assert found.roles == {Role.PARAMETER: 3, Role.BUFFER: 1}
    assert found.numel == 45


def record(name: str, *arguments: object) -> ObjectRecord:
    return ObjectRecord(form="reduce", callable=Global("my.module", name), args=arguments)


def test_inert_records_are_found_wherever_they_are(
    sample: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    cycle: list[object] = [record("InList")]
    cycle.append(cycle)
    extras = {
        "client_state": Extra({"a": {"b": (1, record("Deep", record("Inner")))}, "l": cycle}, "f"),
    }
    odd = replace(sample, extras=extras)
    monkeypatch.setattr("reshard.formats.registry.open_checkpoint", lambda *_, **__: odd)
    found = {(one.where, one.what, one.file) for one in inspect(sample.path).inert}
    assert found == {
        ("client_state.a.b[1]", "my.module.Deep", "f"),
        ("client_state.a.b[1](0)", "my.module.Inner", "f"),
        ("client_state.l[0]", "my.module.InList", "f"),
    }


def test_hostile_text_of_a_checkpoint_cannot_move_the_cursor(
    sample: Checkpoint, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = "w\x1b[2J\u202e\n  all good"
    tensor = next(iter(sample.tensors.values()))
    odd = replace(
        sample,
        tensors={(evil, "fp32"): replace(tensor, name=evil, provenance=evil)},
        aliases={evil: evil},
        extras={evil: Extra(evil, evil), "groups": Extra([[evil]])},
        versions={evil: evil},
        problems=(),
    )
    monkeypatch.setattr("reshard.formats.registry.open_checkpoint", lambda *_, **__: odd)
    out = said(capsys, "inspect", sample.path, "--tensors", "*")
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "\n  all good" not in out
    assert r"w\x1b[2J\u202e\n  all good" in out
    assert json.loads(said(capsys, "inspect", sample.path, "--json"))["aliases"] == {evil: evil}


def test_blocks_are_values_that_can_be_drawn_anywhere(sample: Checkpoint) -> None:
    blocks = list(inspection_blocks(inspect(sample.path)))
    assert plain(blocks[2]).startswith("states\n")
