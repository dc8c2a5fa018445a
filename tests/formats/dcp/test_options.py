"""The options of the command that are about DCP folders, written and read."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from reshard.cli.entry import main
from tests.formats.dcp.folders import opened, save, state_dicts, trained
from tests.truth import GOLDEN

CASE = GOLDEN / "odd_z1_dp2_fp32" / "ckpt"
Capture = pytest.CaptureFixture[str]


def entries(folder: Path) -> set[str]:
    return set(pickle.loads((folder / ".metadata").read_bytes()).state_dict_metadata)


def test_tree_size_and_element_type_of_the_output(tmp_path: Path) -> None:
    out = tmp_path / "out"
    chosen = ["--dcp-tree", "torchtitan", "--max-shard-size", "4kB", "--dtype", "bfloat16"]
    assert main(["convert", str(CASE), str(out), "--to", "dcp", *chosen]) == 0
    assert {"up.bias", "optimizer.state.up.bias.exp_avg", "optimizer.param_groups.up.bias.lr"} <= (
        entries(out)
    )
    assert max(path.stat().st_size for path in out.glob("*.distcp")) <= 4000
    written = opened(out)
    assert str(written.tensors["up.bias", "fp32"].dtype) == "bfloat16"
    assert str(written.tensors["shift", "fp32"].dtype) == "float32"  # a buffer
    assert str(written.tensors["up.bias", "exp_avg"].dtype) == "float32"


REFUSALS = [
    (["--dcp-tree", "lightning"], "there is no such tree: expected get_state_dict or torchtitan, "),
    (["--max-shard-size", "big"], "not a size: found 'big'"),
    (["--stage", "1"], "the format 'dcp' does not take --stage"),
    (["--dtype", "int8"], "no element type of a model: "),
    (["--model-key", "model"], "this checkpoint says itself where its model and optimizer are: "),
]


@pytest.mark.parametrize(("chosen", "line"), REFUSALS, ids=lambda part: part[0])
def test_options_that_make_no_sense(
    tmp_path: Path, capsys: Capture, chosen: list[str], line: str
) -> None:
    assert main(["convert", str(CASE), str(tmp_path / "out"), "--to", "dcp", *chosen]) == 2
    assert f"error: {line}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_options_of_dcp_are_refused_by_other_formats(tmp_path: Path, capsys: Capture) -> None:
    assert main(["convert", str(CASE), str(tmp_path / "out"), "--dcp-tree", "torchtitan"]) == 2
    assert "the format 'universal' does not take --dcp-tree" in capsys.readouterr().err


@pytest.fixture
def two_models(tmp_path: Path) -> Path:
    """A tree with an average beside the model."""
    model, nested = state_dicts(*trained())
    ema = {name: torch.zeros_like(value) for name, value in model.items()}
    return save({"net": model, "ema": ema, "opt": nested}, tmp_path / "ckpt")


def test_the_user_says_where_the_model_is(two_models: Path, capsys: Capture) -> None:
    assert main(["inspect", str(two_models)]) == 2
    assert "say which with --model-key" in capsys.readouterr().err
    stated = ["--model-key", "net", "--optimizer-key", "opt", "--frozen", "gate"]
    assert main(["inspect", str(two_models), *stated]) == 0
    assert "4 parameters, 1 frozen parameter, 1 buffer" in capsys.readouterr().out
    assert main(["map", str(two_models), "up.weight", *stated]) == 0
    assert main(["inspect", str(two_models), "--model-key", "nowhere"]) == 2
    assert "no tensors at the stated keys: " in capsys.readouterr().err


def test_what_was_stated_holds_for_conversion_and_comparison(
    two_models: Path, tmp_path: Path
) -> None:
    stated, out = ["--model-key", "net", "--frozen", "gate"], tmp_path / "universal"
    assert main(["convert", str(two_models), str(out), "--verify", *stated]) == 0
    assert main(["verify", str(two_models), str(out), *stated]) == 0
    other = ["--model-key", "ema"]
    assert main(["verify", str(two_models), str(out), *other]) == 1
