"""Exports as the user meets them: convert, verify, read, and what each says and returns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reshard
from reshard.cli import main
from reshard.errors import UsageError
from tests.truth import case_named

library = pytest.importorskip("safetensors.torch")
Capture = pytest.CaptureFixture[str]

CASE = "golden/odd_z2_dp2_bf16"
TRAINED = 9
"""Parameters that it trains; one of them is tied, so the export holds it twice."""

FP32 = "golden/llama_z3_tp2dp2_fp32"
TIED = "golden/llama_z1_tp2_tied_bias"


def convert(name: str, out: Path, *options: str) -> int:
    """Export a case by the command line."""
    words = ["convert", str(case_named(name).path), str(out), "--to", "safetensors", *options]
    return main([*words, "--no-fsync", "--quiet"])


def verify(name: str, out: Path, *options: str) -> int:
    """Compare a case with an export by the command line."""
    return main(["verify", str(case_named(name).path), str(out), *options])


def rewritten(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    """Put other weights into an export, as somebody would who writes it without reshard."""
    (folder / "reshard_manifest.json").unlink(missing_ok=True)
    path = folder / "model.safetensors"
    library.save_file(weights, path)
    return path


def document(capsys: Capture) -> Any:
    """What was printed, as JSON."""
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def export(tmp_path: Path, capsys: Capture) -> Path:
    """An export of the first case, as by default."""
    assert convert(CASE, tmp_path / "hf") == 0
    capsys.readouterr()
    return tmp_path / "hf"


def test_converting_verifies_and_says_what_was_rounded(tmp_path: Path, capsys: Capture) -> None:
    assert convert(CASE, tmp_path / "hf", "--verify") == 0
    said = capsys.readouterr().out
    assert f"{TRAINED + 1} tensors go from float32 to bfloat16, to the nearest number" in said
    assert "compared in the type of the exported weights, after rounding to nearest" in said
    assert said.endswith(
        "verified: the output holds what was selected of its source, "
        "rounded as said above and otherwise bit for bit\n"
    )


def test_verifying_an_export_says_what_it_does_not_hold(export: Path, capsys: Capture) -> None:
    assert verify(CASE, export) == 0
    said = capsys.readouterr().out
    assert (
        f"{TRAINED + 1} tensors, float32 in CKPT and bfloat16 in OUT: compared in the type" in said
    )
    without = f"exp_avg ({TRAINED}), exp_avg_sq ({TRAINED}), step ({TRAINED})"
    assert f"not compared, for exported weights go without: {without}" in said
    assert re.search(r"^equal after rounding: .*hf: \d+ tensors", said, re.MULTILINE)


def test_the_document_says_so_too(export: Path, capsys: Capture) -> None:
    assert verify(CASE, export, "--json") == 0
    found = document(capsys)
    assert found["equal"] is True
    assert found["casts"] == [{"left": "float32", "right": "bfloat16", "tensors": TRAINED + 1}]
    assert found["not_held"] == dict.fromkeys(("exp_avg", "exp_avg_sq", "step"), TRAINED)


def test_either_side_may_be_the_export(export: Path, capsys: Capture) -> None:
    assert main(["verify", str(export), str(case_named(CASE).path), "--json"]) == 0
    assert document(capsys)["casts"][0]["left"] == "bfloat16"


def test_a_weight_that_differs_after_rounding_is_found(export: Path, capsys: Capture) -> None:
    path = export / "model.safetensors"
    weights = library.load_file(path)
    flat = weights["up.weight"].view(torch.int16).view(-1)
    flat[5] ^= 1
    rewritten(export, weights)
    assert verify(CASE, export, "--json") == 1
    (difference,) = document(capsys)["differences"]
    assert (difference["name"], difference["what"], difference["count"]) == (
        "up.weight",
        "values",
        1,
    )


def test_a_weight_that_is_missing_is_a_difference(export: Path, capsys: Capture) -> None:
    path = export / "model.safetensors"
    weights = library.load_file(path)
    del weights["up.weight"]
    rewritten(export, weights)
    assert verify(CASE, export) == 1
    assert re.search(r"up\.weight\s+fp32\s+only in CKPT", capsys.readouterr().out)
    assert verify(CASE, export, "--exclude", "up.weight") == 0


def test_rounded_otherwise_is_not_equal(tmp_path: Path, capsys: Capture) -> None:
    """Truncation instead of rounding to nearest: found in the first tensor."""
    truth = case_named(FP32).truth().full
    cut = {
        name: (states["fp32"].view(torch.int32) & -65536).view(torch.float32).bfloat16()
        for name, states in truth.items()
    }
    library.save_file(cut, tmp_path / "model.safetensors")
    assert verify(FP32, tmp_path / "model.safetensors", "--json") == 1
    assert {one["what"] for one in document(capsys)["differences"]} == {"values"}


def test_two_exports_are_compared_in_the_smaller_type(tmp_path: Path, capsys: Capture) -> None:
    assert convert(FP32, tmp_path / "a") == 0
    assert convert(FP32, tmp_path / "b", "--dtype", "bf16") == 0
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert main(["verify", str(tmp_path / "b"), str(tmp_path / "a")]) == 0


def test_other_formats_are_not_compared_leniently(tmp_path: Path, capsys: Capture) -> None:
    """Only an export may leave states out, or hold weights in another type."""
    source = case_named(CASE).path
    reshard.convert(source, tmp_path / "uni", states=["fp32"], fsync=False)
    assert main(["verify", str(source), str(tmp_path / "uni")]) == 1
    assert "only in CKPT" in capsys.readouterr().out


def test_new_names_are_verified(tmp_path: Path, capsys: Capture) -> None:
    rules = ("--rename", r"^model\.=", "--rename", "^lm_head=head")
    assert convert(TIED, tmp_path / "hf", "--verify", *rules) == 0
    assert verify(TIED, tmp_path / "hf") == 1
    capsys.readouterr()
    assert verify(TIED, tmp_path / "hf", *rules) == 0
    assert verify(TIED, tmp_path / "hf", *rules, "--include", "*norm*") == 0


@pytest.mark.parametrize("tied", ["drop", "keep"])
def test_tied_names_are_equal_whether_kept_or_not(tied: str, tmp_path: Path) -> None:
    assert convert(TIED, tmp_path / "hf", "--verify", "--tied-weights", tied) == 0
    assert verify(TIED, tmp_path / "hf") == 0


def test_whoever_writes_an_export_chooses_the_tied_name_to_keep(tmp_path: Path) -> None:
    """The library's ``save_model`` keeps the first name in the alphabet, which is the alias."""
    assert convert(TIED, tmp_path / "hf", "--tied-weights", "keep") == 0
    weights = library.load_file(tmp_path / "hf" / "model.safetensors")
    del weights["model.embed_tokens.weight"]
    assert verify(TIED, rewritten(tmp_path / "hf", weights)) == 0
    weights["lm_head.weight"][0] += 1
    assert verify(TIED, rewritten(tmp_path / "hf", weights)) == 1


def test_one_tensor_and_only_what_is_trained(tmp_path: Path) -> None:
    assert convert(CASE, tmp_path / "one", "--include", "norm.weight", "--verify") == 0
    assert library.load_file(tmp_path / "one" / "model.safetensors").keys() == {"norm.weight"}
    assert convert(CASE, tmp_path / "trained", "--trainable", "--verify") == 0
    found = library.load_file(tmp_path / "trained" / "model.safetensors").keys()
    assert found >= case_named(CASE).truth().full.keys()
    assert verify(CASE, tmp_path / "trained") == 1
    assert verify(CASE, tmp_path / "trained", "--trainable") == 0


def test_an_export_is_a_source_too(export: Path, tmp_path: Path) -> None:
    """Inspect and map read it; universal and safetensors folders are made of it."""
    assert main(["inspect", str(export), "--tensors", "*"]) == 0
    assert main(["map", str(export), "norm.weight", "--files"]) == 0
    for to in ("universal", "safetensors"):
        again = str(tmp_path / to)
        assert main(["convert", str(export), again, "--to", to, "--verify", "-q"]) == 0
        assert main(["verify", str(export), again]) == 0
    twin = (tmp_path / "safetensors" / "model.safetensors").read_bytes()
    assert twin == (export / "model.safetensors").read_bytes()


REFUSALS = [
    (["--stage", "1"], "the format 'safetensors' does not take --stage; next: leave it out, or"),
    (["--dtype", "int4"], "weights are not rounded to this element type: "),
    (["--dtype", "nope*=bf16"], "a pattern for an element type matches no parameter: "),
    (["--max-shard-size", "some"], "not a size: found 'some'"),
    (["--rename", "none=x"], "a renaming meets no parameter: found --rename 'none=x'"),
    (["--rename", "n"], "not a renaming: expected OLD=NEW, found 'n'"),
    (["--rename-table", "/none"], "the table of names cannot be read: /none"),
    (["--include", "none"], "a pattern matches no parameter: found 'none'"),
    (["--states", "step"], "nothing is selected"),
]


@pytest.mark.parametrize(("options", "line"), REFUSALS)
def test_bad_requests_are_refused_and_write_nothing(
    options: list[str], line: str, tmp_path: Path, capsys: Capture
) -> None:
    assert convert(CASE, tmp_path / "out", *options) == 2
    said, err = capsys.readouterr()
    assert said == ""
    assert err.startswith(f"error: {line}")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------- reading


def test_reading_gives_the_truth_of_every_state() -> None:
    case = case_named(FP32)
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        found = reshard.read(case.path, state=state, workers=2, max_memory=1 << 20)
        assert found.keys() == case.truth().full.keys()
        for name, array in found.items():
            assert array.tobytes() == case.truth().full[name][state].numpy().tobytes()


def test_reading_chooses_names_and_follows_ties() -> None:
    case = case_named(TIED)
    found = reshard.read(case.path, ["lm_head.weight", "*norm.weight"])
    assert found["lm_head.weight"] is found["model.embed_tokens.weight"]
    assert {name for name in found if name.endswith("norm.weight")} == {
        name for name in case.truth().full if name.endswith("norm.weight")
    }
    checkpoint = reshard.open_checkpoint(case.path)
    (one,) = reshard.read(checkpoint, "model.norm.weight").values()
    assert np.array_equal(one, case.truth().full["model.norm.weight"]["fp32"].numpy())


def test_reading_rounds_when_asked_to() -> None:
    case = case_named(FP32)
    found = reshard.read(case.path, "model.norm.weight", dtype="bf16")["model.norm.weight"]
    expected = case.truth().full["model.norm.weight"]["fp32"].bfloat16()
    assert str(found.dtype) == "bfloat16"
    assert torch.equal(torch.from_numpy(found.view(np.int16)), expected.view(torch.int16))


def test_reading_refuses_what_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"a pattern matches no parameter: found 'nope'"):
        reshard.read(case_named(FP32).path, "nope")
    with pytest.raises(UsageError, match="no such state: state momentum"):
        reshard.read(case_named(FP32).path, state="momentum")
