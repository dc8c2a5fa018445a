"""Names that some file systems cannot tell apart are told, by every verb, and refused by none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import reshard
from reshard.api.look_alikes import look_alikes
from reshard.cli import main

COMPOSED, APART = "caf\u00e9.weight", "cafe\u0301.weight"
TOLD = "names differ only in case or in how Unicode spells them"


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["a.w", "b.w"], []),
        (["a.w", "a.w"], []),
        (["Layer.w", "b", "layer.w", "LAYER.W"], [("Layer.w", "layer.w", "LAYER.W")]),
        ([COMPOSED, APART], [(COMPOSED, APART)]),
        (["CAF\u00c9.weight", APART], [("CAF\u00c9.weight", APART)]),
        (["stra\u00dfe", "STRASSE"], [("stra\u00dfe", "STRASSE")]),
        (["cafe.weight", COMPOSED], []),
    ],
)
def test_groups(names: list[str], groups: list[tuple[str, ...]]) -> None:
    assert look_alikes(names) == groups


def weights(folder: Path, names: list[str]) -> Path:
    """A set of weights, written by the library."""
    from safetensors.numpy import save_file

    folder.mkdir()
    tensors = {name: np.full(3, number, np.float32) for number, name in enumerate(names)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_it_is_told_and_not_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = weights(tmp_path / "weights", ["A.w", "a.w", COMPOSED, APART])
    (problem,) = reshard.open_checkpoint(source).problems
    assert problem.what.startswith(TOLD)
    assert problem.what.endswith(
        r": 'A.w' and 'a.w'; 'cafe\u0301.weight' and 'caf\xe9.weight'"  # in the order of the file
    )
    assert main(["doctor", str(source)]) == 0
    assert TOLD in capsys.readouterr().out
    out = tmp_path / "universal"
    assert main(["convert", str(source), str(out), "--verify"]) == 0
    assert TOLD in capsys.readouterr().out
    assert {path.name for path in (out / "zero").iterdir() if path.is_dir()} >= {"A.w", "a.w"}


def test_names_that_are_apart_are_not_told(tmp_path: Path) -> None:
    assert reshard.open_checkpoint(weights(tmp_path / "weights", ["a.w", "b.w"])).problems == ()
