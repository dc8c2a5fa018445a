"""What somebody stumbled over in a first hour, one test each."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard import NativeOptions, api
from reshard.api.exports import comparable
from reshard.cli import main
from reshard.errors import ReplicaMismatchError, UsageError
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.dtypes import spelled_dtype
from tests.faces.test_convert import differing
from tests.formats.edited import LLAMA, nothing, with_info
from tests.truth import EXAMPLE, case_named

Capture = pytest.CaptureFixture[str]

needs_toml = pytest.mark.skipif(
    sys.version_info < (3, 11) and importlib.util.find_spec("tomli") is None,
    reason="reading TOML needs Python 3.11 or tomli",
)


def said(capsys: Capture, *arguments: object, code: int = 0) -> str:
    assert main([str(word) for word in arguments]) == code
    return capsys.readouterr().out


def document(capsys: Capture, *arguments: object, code: int = 0) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(said(capsys, *arguments, "--json", code=code))
    return made


@pytest.fixture(scope="module")
def unstated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tensor-parallel checkpoint that does not say how it was cut."""
    case = case_named("golden/llama_z1_tp2dp2_fp32")
    return with_info(case, tmp_path_factory.mktemp("unstated"), nothing)


def rules(folder: Path, more: str = "") -> Path:
    file = folder / "llama.toml"
    file.write_text(LLAMA.replace("(weight|bias)", "weight") + more)
    return file


HEAD = "'lm_head\\.weight' = \"column_parallel\"\n"


# ------------------------------------------------------------------------------ layouts


def test_inspect_lists_every_parameter_without_a_layout(unstated: Path, capsys: Capture) -> None:
    assert main(["inspect", str(unstated)]) == 2
    out, err = capsys.readouterr()
    listed = out.split("parameters whose layout nobody states\n")[1].splitlines()[1:]
    assert len(listed) == 13  # the head is uneven: one row for each shape
    assert "  model.layers.0.self_attn.o_proj.weight          [16, 8]   0,1" in listed
    assert "how 12 parameters were cut" in err
    assert "`reshard inspect` lists all of them with the shapes of their shards" in err


def test_the_document_of_that_error_has_them_too(unstated: Path, capsys: Capture) -> None:
    error = document(capsys, "map", unstated, "lm_head.weight", code=2)["error"]
    assert error["kind"] == "UnknownLayoutError"
    assert len(error["shards"]) == 12
    assert error["shards"]["model.norm.weight"] == {"0": [16], "1": [16]}


@needs_toml
def test_a_rule_that_makes_copies_of_what_differs_is_named(unstated: Path, tmp_path: Path) -> None:
    wrong = rules(tmp_path, HEAD).read_text().replace("(o|down)_proj", "down_proj")
    file = tmp_path / "wrong.toml"
    file.write_text(wrong + "'.*o_proj\\.weight' = \"replicated\"\n")
    with pytest.raises(ReplicaMismatchError) as caught:
        api.convert(unstated, tmp_path / "out", layout=file, fsync=False)
    assert caught.value.next_step is not None
    assert caught.value.next_step.startswith(
        r"correct the rule if it is wrong that they are copies (stated: replicated for "
        r"'.*o_proj\.weight'); otherwise choose a copy with --replicas first"
    )


# ------------------------------------------------------------------------------ verify


@pytest.mark.parametrize("policy", ["first", "mean"])
def test_verify_accepts_what_the_policy_of_the_conversion_explains(
    policy: str, sample: Checkpoint, tmp_path: Path, capsys: Capture
) -> None:
    differing(sample)
    out = tmp_path / "universal"
    said(capsys, "convert", sample.path, out, "--replicas", policy)
    told = said(capsys, "verify", sample.path, out, "--replicas", policy)
    assert told.splitlines()[-1].startswith(f"accepted (--replicas {policy}): {sample.path} and")
    found = document(capsys, "verify", sample.path, out, "--replicas", policy)
    assert (found["equal"], found["accepted"], found["policy"]) == (False, True, policy)
    refused = said(capsys, "verify", sample.path, out, code=1).splitlines()[-1]
    if policy == "first":
        assert refused == (
            f"different: {sample.path} and {out} agree, but 1 tensor with copies that differ from "
            "each other inside one side; next: --replicas first accepts that"
        )
        # one more element that differs, and no policy explains it
        said(capsys, "verify", sample.path, out, "--replicas", "mean")
        path = out / "zero" / "embed.weight" / "fp32.pt"
        content = path.read_bytes()
        value = np.float32(3.0).tobytes()
        path.write_bytes(content.replace(value, np.float32(4.5).tobytes(), 1))
        said(capsys, "verify", sample.path, out, "--replicas", "first", code=1)


def test_accepts_refuses_an_unknown_policy(sample: Checkpoint) -> None:
    found = api.verify(sample.path, sample.path)
    assert api.accepts(found, "refuse")
    with pytest.raises(UsageError, match="expected one of refuse, first, mean, found 'last'"):
        api.accepts(found, "last")


# ------------------------------------------------------------------------------ annotate


@needs_toml
def test_annotate_has_the_options_that_its_errors_advise(
    unstated: Path, tmp_path: Path, capsys: Capture
) -> None:
    out, file = tmp_path / "annotated", rules(tmp_path, HEAD)
    words = ("annotate", unstated, out, "--layout", file)
    forecast = document(capsys, *words, "--dry-run")
    assert not out.exists()
    assert forecast["dry_run"] is True
    assert forecast["pointer"] == str(tmp_path / "latest")
    report = said(capsys, *words, "--no-fsync", "--workers", "1", "--max-memory", "64MB")
    assert f"  pointer     {tmp_path}/latest\n  parameters  12 with a map\n" in report
    assert (tmp_path / "latest").read_text() == "annotated"
    assert main([str(word) for word in words]) == 2
    assert "replace it with --overwrite" in capsys.readouterr().err
    again = document(capsys, *words, "--overwrite")
    assert again["schema"] == "reshard.annotate/1"
    assert again["write_nbytes"] == forecast["write_nbytes"]
    assert len(again["maps"]) == 12
    fresh = [*words[:2], tmp_path / "other", *words[3:], "--resume"]
    assert document(capsys, *fresh)["pointer"] is None  # it names another folder, and stays
    assert (tmp_path / "latest").read_text() == "annotated"


# ------------------------------------------------------------------------------ convert


def test_a_pointer_that_is_replaced_is_told(
    sample: Checkpoint, tmp_path: Path, capsys: Capture
) -> None:
    pointer = tmp_path / "latest_universal"
    pointer.write_text("step1_universal\n")
    out = tmp_path / "step2"
    row = f"  pointer      {pointer} (names 'step1_universal' now)\n"
    assert row in said(capsys, "convert", sample.path, out, "--dry-run")
    report = said(capsys, "convert", sample.path, out)
    assert f"  pointer  {pointer} (named 'step1_universal' before)\n" in report
    again = document(capsys, "convert", sample.path, out, "--overwrite")
    assert again["pointed_to"] is None


def test_a_dry_run_has_one_row_for_a_tensor(tmp_path: Path, capsys: Capture) -> None:
    report = said(capsys, "convert", EXAMPLE, tmp_path / "out", "--dry-run")
    rows = report.split("\n\n")[0].splitlines()[2:]
    assert len(rows) == 21
    assert all(" fp32,exp_avg,exp_avg_sq " in row for row in rows)


def test_no_difference_that_can_be_computed_is_null(
    sample: Checkpoint, tmp_path: Path, capsys: Capture
) -> None:
    said(capsys, "convert", sample.path, tmp_path / "out")
    found = document(capsys, "verify", sample.path, tmp_path / "out")
    assert [state["largest"] for state in found["states"]] == [None, None]


# ------------------------------------------------------------------------------ inspect, map


def test_map_takes_the_weights_in_every_format(
    sample: Checkpoint, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "universal"
    said(capsys, "convert", sample.path, out)
    for path in (sample.path, out):
        assert "\n  state        fp32\n" in said(capsys, "map", path, "embed.weight")
    states = said(capsys, "inspect", out).split("\nstates\n")[1].splitlines()
    assert [row.split()[0] for row in states[1:3]] == ["fp32", "exp_avg"]


def test_inspect_leaves_out_what_readers_keep_for_writers(capsys: Capture) -> None:
    report = said(capsys, "inspect", EXAMPLE)
    assert "model_files" not in report
    assert "restore_keys" not in report
    keys = {extra["key"] for extra in document(capsys, "inspect", EXAMPLE)["extras"]}
    assert {"model_files", "restore_keys"} <= keys


def test_the_notation_of_pieces_is_explained(capsys: Capture) -> None:
    report = said(capsys, "map", EXAMPLE, "lm_head.weight")
    assert (
        "\nread F[…] → […] on r: a block of the full tensor, where it lies in the shard" in report
    )


def test_a_folder_that_adds_nothing_is_told(tmp_path: Path, capsys: Capture) -> None:
    other = tmp_path / "node1"
    other.mkdir()
    report = said(capsys, "inspect", EXAMPLE, "--also", other)
    assert (
        "problems\n  --also names a folder that adds nothing: no file in it is read: "
        f"{other}; next: check the path, or leave it out\n"
    ) in report


def test_a_folder_that_adds_ranks_is_not(tmp_path: Path, capsys: Capture) -> None:
    here, there = tmp_path / "node0" / "step3", tmp_path / "node1" / "step3"
    shutil.copytree(EXAMPLE / "step3", here)
    there.mkdir(parents=True)
    for file in here.glob("*zero_pp_rank_1*"):
        shutil.move(file, there)
    assert "adds nothing" not in said(capsys, "inspect", here, "--also", there)
    assert "adds nothing" not in said(capsys, "inspect", here, "--also", there.parent)


def test_a_folder_one_level_above_says_where_the_checkpoint_is(
    tmp_path: Path, capsys: Capture
) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "run" / "ckpt")
    assert main(["inspect", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert (
        "found folders with a pointer file: ckpt (latest: step3); next: name one of them, " in err
    )
    assert err.endswith(f"such as {tmp_path}/run/ckpt\n")


# ------------------------------------------------------------------------------ Python


def test_one_text_is_a_list_of_one(sample: Checkpoint) -> None:
    kept = api.select(sample, include="layers.*", exclude="*.bias", states="fp32")
    assert list(kept.tensors) == [("layers.0.weight", "fp32")]
    assert api.open_checkpoint(EXAMPLE, also=EXAMPLE / "step3").problems == ()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            {"include": [1]},
            "include is not a list of texts: expected texts, or one text, found [1]",
        ),
        ({"states": b"fp32"}, "states is not a list of texts: expected texts, or one text, found "),
        ({"exclude": None}, "exclude is not a list of texts: expected texts, or one text, found N"),
        ({"also": 3}, "also is not a list of folders: expected paths, or one path, found 3"),
        ({"max_memory": "lots"}, "not a size: found 'lots'"),
        ({"max_memory": 1.5}, "max_memory is not a size: expected a whole number of bytes, or a "),
        ({"max_memory": True}, "max_memory is not a size: "),
        (
            {"max_memory": 10**400},
            "max_memory is not a size: expected a whole number of bytes, or ",
        ),
        ({"max_memory": "9" * 400}, "not a size: found '999"),
        ({"max_memory": "9" * 39}, "not a size: found '999"),
        ({"workers": "2"}, "workers is not a whole number: found '2'"),
        ({"workers": True}, "workers is not a whole number: found True"),
        ({"workers": 10**400}, "workers is not a whole number: found a number beyond 2^63"),
    ],
)
def test_other_arguments_are_refused_before_anything_is_read(
    arguments: dict[str, Any], line: str, sample: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        api.convert(sample.path, tmp_path / "out", **arguments)
    assert str(caught.value).startswith(line)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("destination", "found"), [("a\0b", "'a\\x00b'"), ("", "''"), (5, "5"), (b"out", "b'out'")]
)
def test_what_is_no_path_is_no_output(destination: Any, found: str, sample: Checkpoint) -> None:
    with pytest.raises(UsageError) as caught:
        api.convert(sample.path, destination)
    assert str(caught.value) == f"the output is not a path: found {found}"
    with pytest.raises(UsageError) as caught:
        api.annotate(EXAMPLE, destination)
    assert str(caught.value) == f"the output is not a path: found {found}"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"dtype": 5}, "dtype is not a text: expected one text, found 5"),
        ({"names": 5}, "names is not a list of texts: expected texts, or one text, found 5"),
        ({"state": 5}, "state is not a text: expected one text, found 5"),
        ({"workers": "2"}, "workers is not a whole number: found '2'"),
        ({"max_memory": None}, "max_memory is not a size: expected a whole number of bytes, or a "),
    ],
)
def test_reading_refuses_other_arguments(
    arguments: dict[str, Any], line: str, sample: Checkpoint
) -> None:
    with pytest.raises(UsageError) as caught:
        api.read(sample.path, **arguments)
    assert str(caught.value).startswith(line)


def test_a_cap_may_be_a_text(sample: Checkpoint, tmp_path: Path) -> None:
    report = api.convert(sample.path, tmp_path / "out", max_memory="100MB", dry_run=True)
    assert 0 < report.memory_bytes <= 100_000_000


# ------------------------------------------------------------------------------ errors as JSON


@pytest.mark.parametrize("command", ["inspect", "map", "convert", "verify", "annotate"])
def test_an_error_is_a_document_too(command: str, tmp_path: Path, capsys: Capture) -> None:
    more = {"inspect": [], "map": ["w"]}.get(command, [str(tmp_path / "out")])
    missing = str(tmp_path / "none")
    assert main([command, missing, *more, "--json"]) == 2
    out, err = capsys.readouterr()
    found = json.loads(out)
    line = f"no such file or folder: {missing}; next: check the path"
    assert err == f"error: {line}\n"
    assert found == {
        "schema": "reshard.error/1",
        "error": {
            "kind": "MissingFileError",
            "message": line,
            "exit_code": 2,
            "what": "no such file or folder",
            "file": missing,
            "next_step": "check the path",
        },
    }


def test_bad_usage_is_a_document_too(capsys: Capture) -> None:
    assert main(["inspect", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "UsageError"


@pytest.mark.parametrize(
    ("line", "word", "offered"),
    [
        ("reshard anno", 1, ["annotate"]),
        (
            f"reshard map {EXAMPLE} model.layers.1.self_attn.",
            3,
            [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkvo"],
        ),
        (f"reshard map {EXAMPLE} w --state exp", 5, ["exp_avg", "exp_avg_sq"]),
        ("reshard convert a b --to uni", 5, ["universal"]),
        ("reshard map /nowhere x", 3, []),
    ],
)
def test_shells_can_complete(
    line: str, word: int, offered: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("_RESHARD_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(word))
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert (out.split(), err) == (offered, "")


def test_a_folder_with_the_configuration_of_the_model_adds_something(
    tmp_path: Path, capsys: Capture
) -> None:
    model, out = tmp_path / "model", tmp_path / "served"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    report = said(capsys, "convert", EXAMPLE, out, "--to", "safetensors", "--also", model)
    assert (out / "config.json").read_text() == '{"model_type": "llama"}'
    assert "adds nothing" not in report
    assert "adds nothing" in said(capsys, "inspect", EXAMPLE, "--also", model)
    report = said(capsys, "convert", EXAMPLE, tmp_path / "u", "--also", model)
    assert "adds nothing" in report  # a universal folder carries no configuration


# ------------------------------------------------------------------------------ pointers


def test_a_pointer_file_is_the_checkpoint_it_names(tmp_path: Path, capsys: Capture) -> None:
    ckpt = Path(shutil.copytree(EXAMPLE, tmp_path / "ckpt"))
    said(capsys, "convert", ckpt, ckpt / "step3_universal")
    for pointer, tag in (("latest", "step3"), ("latest_universal", "step3_universal")):
        assert document(capsys, "inspect", ckpt / pointer)["path"] == str(ckpt / tag)


# ------------------------------------------------------------------------------ rounding


@pytest.mark.parametrize("to", ["deepspeed", "dcp"])
def test_what_was_to_be_rounded_is_verified_after_rounding(
    to: str, tmp_path: Path, capsys: Capture
) -> None:
    case, out = case_named("golden/odd_z3_dp4_bf16"), tmp_path / "step3"
    native = ("--stage", "2", "--dp", "2") if to == "deepspeed" else ()
    words = ("convert", case.tag_path, out, "--to", to, "--dtype", "fp32", *native, "--verify")
    report = said(capsys, *words)
    assert ", bfloat16 in CKPT and float32 in OUT: compared" in report
    assert "verified: the output holds what its source holds, rounded as said above" in report
    said(capsys, "verify", case.tag_path, out, code=1)  # nobody told this one


def test_masters_are_compared_as_they_are_beside_rounded_weights(tmp_path: Path) -> None:
    case, out = case_named("golden/odd_z3_dp4_bf16"), tmp_path / "step3"
    source = api.open_checkpoint(case.tag_path)
    options = NativeOptions(stage=2, dp=2, dtype=spelled_dtype("fp16"))
    report = api.convert(case.tag_path, out, to="deepspeed", options=options)
    pair = comparable(source, api.open_checkpoint(out)).rounded_by(report.plan)
    trained = {name for name, state in source.tensors if state == "exp_avg"}
    assert pair.dtypes
    assert not any(name in trained for name, _ in pair.dtypes)
