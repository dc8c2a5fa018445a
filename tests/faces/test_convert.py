"""`reshard convert` and `reshard verify`: from a sample to a universal folder, and the truth."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reshard import api, convert
from reshard.cli import main
from reshard.errors import UsageError
from reshard.execution import compare
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.deepspeed.writing import NativeOptions
from reshard.formats.torch_archive import read_archive, read_bytes
from tests.faces.samples import values
from tests.truth import GOLDEN

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where the output goes: beside the input."""
    return tmp_path / "universal"


def files_below(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "ckpt" not in path.relative_to(folder).parts
    }


def stored(folder: Path, name: str, state: str) -> bytes:
    archive = read_archive(str(folder / "zero" / name / f"{state}.pt"))
    return read_bytes(archive, archive.tensors[0], largest=1 << 20)


def test_the_report_says_what_was_done(sample: Checkpoint, out: Path, capsys: Capture) -> None:
    assert main(["convert", sample.path, str(out), "--quiet"]) == 0
    said, err = capsys.readouterr()
    assert err == ""
    head, *_ = said.split("\n\n")
    assert re.sub(r"time .*", "time T", head) == (
        "converted\n"
        f"  from     {sample.path} (sample, ZeRO-1 dp2 tp1 pp1 ep1)\n"
        f"  to       {out} (universal)\n"
        f"  pointer  {out.parent}/latest_universal\n"
        "  tensors  7 (4 names; fp32, exp_avg)\n"
        "  read     360 B\n"
        f"  written  {head.split('written')[1].split(chr(10))[0].strip()}\n"
        "  time T"
    )
    assert "notes\n  1 buffer" in said
    assert "problems of the input\n  a thing to note: norm.scale\n" in said


def test_the_output_holds_the_truth(sample: Checkpoint, out: Path, capsys: Capture) -> None:
    assert main(["convert", sample.path, str(out), "--no-fsync", "--workers", "3"]) == 0
    capsys.readouterr()
    for name, state in sample.tensors:
        assert stored(out, name, state) == values(name, state).tobytes()
    assert (out.parent / "latest_universal").read_text().strip() == out.name


def test_verify_afterwards(sample: Checkpoint, out: Path, capsys: Capture) -> None:
    assert main(["convert", sample.path, str(out), "--verify"]) == 0
    said = capsys.readouterr().out
    assert "  fp32            4      4          0        0\n" in said
    assert said.endswith("verified: the output holds what its source holds, bit for bit\n")


def test_a_dry_run_writes_nothing(sample: Checkpoint, out: Path, capsys: Capture) -> None:
    before = files_below(out.parent)
    assert main(["convert", sample.path, str(out), "--dry-run", "--max-memory", "1MB"]) == 0
    said = capsys.readouterr().out
    assert files_below(out.parent) == before
    assert not out.exists()
    assert (
        "  embed.weight     [6, 4]  fp32,exp_avg  float32    192        2  parameter  made by"
        in said
    )
    assert "dry run: nothing was written\n" in said
    assert re.search(r"  time +about \S+ \S+, by a probe of the disks\n", said)
    for word in ("would read   360 B, 4 B of it to compare", "would write  ", "disk ", "memory  "):
        assert word in said


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_the_topology_of_the_output_is_said(dry: list[str], out: Path, capsys: Capture) -> None:
    source = GOLDEN / "llama_z1_tp2dp2_fp32/ckpt"
    words = ["convert", str(source), str(out), *dry, "--to", "deepspeed"]
    topology = ["--stage", "3", "--dp", "3", "--tp", "2"]
    assert main([*words, *topology, "--quiet"]) == 0
    line = re.search(r"^  to +(.*)$", capsys.readouterr().out, re.MULTILINE)
    assert line is not None
    assert line[1] == f"{out} (deepspeed, ZeRO-3 dp3 tp2 pp1 ep1)"
    assert main([*words, *topology, "--json", "--overwrite"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["source"]["topology"] == {"stage": 1, "dp": 2, "tp": 2, "pp": 1, "ep": 1}
    assert said["topology"] == {"stage": 3, "dp": 3, "tp": 2, "pp": 1, "ep": 1}


def test_a_format_that_is_the_same_for_all_has_no_topology(
    sample: Checkpoint, out: Path, capsys: Capture
) -> None:
    assert main(["convert", sample.path, str(out), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["topology"] is None


def test_a_dry_run_refuses_what_the_run_would_refuse(
    sample: Checkpoint, out: Path, capsys: Capture
) -> None:
    (out / "something").mkdir(parents=True)
    assert main(["convert", sample.path, str(out), "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert main(["convert", sample.path, str(out), "--dry-run", "--overwrite"]) == 2
    assert "no checkpoint converter wrote" in capsys.readouterr().err
    (out / "reshard_manifest.json").write_text("old")
    assert main(["convert", sample.path, str(out), "--dry-run", "--overwrite"]) == 0


def test_the_document(sample: Checkpoint, out: Path, capsys: Capture) -> None:
    arguments = ["convert", sample.path, str(out), "--json", "--verify", "--states", "fp32,step"]
    assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "reshard.convert/1"
    assert document["verified"] is True
    assert document["comparison"]["equal"] is True
    assert (len(document["tensors"]), document["left_out"]) == (4, 3)
    assert document["replicas"] == {"policy": "refuse", "differ": []}
    assert document["destination"] == str(out)
    assert document["write_nbytes"] > document["read_nbytes"] > 0


def test_a_selection_is_all_that_is_written(sample: Checkpoint, out: Path, capsys: Capture) -> None:
    chosen = ["--include", "layers.*", "--exclude", "*.bias", "--states", "fp32"]
    assert main(["convert", sample.path, str(out), "--verify", *chosen]) == 0
    assert "  tensors  1 (1 name; fp32), 6 left out\n" in capsys.readouterr().out
    assert {path.name for path in (out / "zero").iterdir() if path.is_dir()} == {"layers.0.weight"}
    assert [path.name for path in (out / "zero" / "layers.0.weight").iterdir()] == ["fp32.pt"]


REFUSALS = [
    (
        ["--to", "hf"],
        "cannot write the format 'hf': expected universal or deepspeed or safetensors or dcp; next",
    ),
    (["--to", "deepspeed"], "a native DeepSpeed checkpoint is written for one topology; next: "),
    (
        ["--to", "deepspeed", "--stage", "1", "--dp", "2", "--stage-starts", "0;3"],
        "no list of layers: expected numbers like 0,3, found 0;3",
    ),
    (
        ["--to", "deepspeed", "--stage", "1", "--dp", "2", "--pp", "2", "--stage-starts", "1,3"],
        "the first layers of the pipeline stages must ascend from 0: expected 2 numbers, found ",
    ),
    (
        ["--to", "deepspeed", "--stage", "1", "--dp", "2", "--tied", "embed"],
        "no tied module and its layers: expected something like embed=0,5, found embed",
    ),
    (
        ["--to", "deepspeed", "--dp", "2"],
        "a native DeepSpeed checkpoint is written for one topology; next: name it with both",
    ),
    (
        ["--stage", "1", "--dp", "2"],
        "the format 'universal' does not take --stage and --dp; next: leave them out, or write",
    ),
    (
        ["--to", "deepspeed", "--stage", "1", "--dp", "1", "--dtype", "int8"],
        "no element type of a model: expected one of fp32, bf16, fp16, found int8",
    ),
    (["--max-memory", "lots"], "not a size: found 'lots'; next: write it like 512MB"),
    (["--max-memory", "1kB"], "the memory cap is too small: "),
    (["--include", "nope*"], "a pattern matches no parameter: found 'nope*'; next: "),
    (
        ["--states", "momentum"],
        "no such state: state momentum: expected one of exp_avg, fp32, step; next: name one of",
    ),
    (["--exclude", "*"], "nothing is selected: "),
]


def test_options_of_another_format_are_refused(sample: Checkpoint, out: Path) -> None:
    with pytest.raises(UsageError) as caught:
        convert(sample.path, out, options=NativeOptions(stage=1, dp=1))
    assert str(caught.value) == (
        "these options are not of the format 'universal': "
        "expected UniversalOptions, found NativeOptions"
    )
    with pytest.raises(UsageError) as caught:
        convert(sample.path, out, to="deepspeed")
    assert str(caught.value) == (
        "the format 'deepspeed' is not written without options; "
        "next: say how: options=reshard.NativeOptions(...)"
    )
    assert not out.exists()


@pytest.mark.parametrize(("options", "line"), REFUSALS)
def test_bad_requests_are_refused_and_write_nothing(
    options: list[str], line: str, sample: Checkpoint, out: Path, capsys: Capture
) -> None:
    before = files_below(out.parent)
    assert main(["convert", sample.path, str(out), *options]) == 2
    said, err = capsys.readouterr()
    assert said == ""
    assert err.startswith(f"error: {line}")
    assert err.count("\n") == 1
    assert files_below(out.parent) == before


def test_an_output_that_exists_is_kept_unless_it_may_go(
    sample: Checkpoint, out: Path, capsys: Capture
) -> None:
    assert main(["convert", sample.path, str(out)]) == 0
    before = {name: (out / name).read_bytes() for name in files_below(out)}
    capsys.readouterr()
    assert main(["convert", sample.path, str(out)]) == 2
    assert re.match(r"error: .*universal.*--overwrite", capsys.readouterr().err)
    assert {name: (out / name).read_bytes() for name in files_below(out)} == before
    assert main(["convert", sample.path, str(out), "--overwrite"]) == 0
    assert {name: (out / name).read_bytes() for name in files_below(out)} == before


def test_the_input_is_no_output(sample: Checkpoint, capsys: Capture) -> None:
    inside = str(Path(sample.path) / "universal")
    for target in (sample.path, inside):
        assert main(["convert", sample.path, target, "--overwrite"]) == 2
        assert capsys.readouterr().err.startswith("error: the output would touch its own input: ")


def differing(sample: Checkpoint) -> None:
    """Let the two copies of `norm.scale` differ."""
    region = sample.tensors["norm.scale", "fp32"].regions[1]
    content = bytearray(Path(region.file).read_bytes())
    content[region.offset : region.offset + 4] = np.float32(7.0).tobytes()
    Path(region.file).write_bytes(content)


def test_copies_that_differ_are_refused(sample: Checkpoint, out: Path, capsys: Capture) -> None:
    differing(sample)
    assert main(["convert", sample.path, str(out)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: holders that should keep the same values differ: rank_0.bin and")
    assert "parameter norm.scale, state fp32" in err
    assert not out.exists()


@pytest.mark.parametrize(("policy", "value"), [("first", 300.0), ("mean", 153.5)])
def test_a_policy_for_copies_is_carried_out_and_told(
    policy: str, value: float, sample: Checkpoint, out: Path, capsys: Capture
) -> None:
    differing(sample)
    assert main(["convert", sample.path, str(out), "--replicas", policy, "--verify"]) == 0
    said = capsys.readouterr().out
    assert f"copies that differ (--replicas {policy})\n" in said
    assert re.search(r"norm\.scale +fp32 +1 +0 +293 +rank_0.bin, rank_1.bin\n", said)
    assert said.endswith(f"copies that differ in the source; taken: {policy}\n")
    assert stored(out, "norm.scale", "fp32") == np.float32(value).tobytes()


@pytest.fixture
def converted(sample: Checkpoint, out: Path, capsys: Capture) -> Path:
    """A universal folder of the sample."""
    assert main(["convert", sample.path, str(out), "--quiet"]) == 0
    capsys.readouterr()
    return out


def test_verify_says_equal(sample: Checkpoint, converted: Path, capsys: Capture) -> None:
    assert main(["verify", sample.path, str(converted), "--quiet"]) == 0
    said, err = capsys.readouterr()
    assert err == ""
    assert said.startswith(
        "states\n"
        "  state    compared  equal  different  missing\n"
        "  fp32            4      4          0        0\n"
        "  exp_avg         3      3          0        0\n"
    )
    assert f"equal: {sample.path} and {converted}: 7 tensors (356 B), 3 scalars, " in said


def test_verify_finds_one_bit(sample: Checkpoint, converted: Path, capsys: Capture) -> None:
    path = converted / "zero" / "layers.0.weight" / "fp32.pt"
    archive = read_archive(str(path))
    content = bytearray(path.read_bytes())
    content[archive.tensors[0].offset + 4 * 5] ^= 1
    path.write_bytes(content)
    assert main(["verify", sample.path, str(converted)]) == 1
    said = capsys.readouterr().out
    assert "  fp32            4      3          1        0\n" in said
    row = r"layers\.0\.weight +fp32 +values +1 of 16 +\[1, 1\] +105\.0 +105\.00001 +7\.6\S+\n"
    assert re.search(row, said)
    assert "different: " in said
    assert main(["verify", sample.path, str(converted), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["equal"]) == ("reshard.verify/1", False)
    assert document["differences"][0]["index"] == [1, 1]


def test_verify_sees_bytes_that_belong_to_no_tensor(
    sample: Checkpoint, converted: Path, capsys: Capture
) -> None:
    path = converted / "zero" / "layers.0.weight" / "fp32.pt"
    content = bytearray(path.read_bytes())
    content[10] ^= 1  # the time of a record, in its local header: no reader looks at it
    path.write_bytes(content)
    (converted / "stranger").write_text("new")
    assert main(["verify", sample.path, str(converted)]) == 1
    said = capsys.readouterr().out
    assert "files that are not as the manifest beside them says\n" in said
    row = r"OUT +zero/layers\.0\.weight/fp32\.pt +other bytes outside the tensors\n"
    assert re.search(row, said)
    assert re.search(r"OUT +stranger +a file that was added\n", said)
    assert f"{converted}: 2 changes against a manifest; compared: 7 tensors (356 B), " in said
    assert main(["verify", sample.path, str(converted), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["differences"] == []
    assert document["changes"][1] == {
        "side": "right",
        "file": "zero/layers.0.weight/fp32.pt",
        "what": "other bytes",
        "name": "",
        "state": "",
    }


def test_verify_names_what_is_missing(sample: Checkpoint, out: Path, capsys: Capture) -> None:
    assert main(["convert", sample.path, str(out), "--exclude", "embed*", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["verify", sample.path, str(out)]) == 1
    said = capsys.readouterr().out
    assert "  fp32            3      3          0        1\n" in said
    assert re.search(r"embed\.weight +exp_avg +only in CKPT\n", said)


def test_verify_needs_two_checkpoints(sample: Checkpoint, tmp_path: Path, capsys: Capture) -> None:
    assert main(["verify", sample.path, str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("error: no such file or folder: ")


def test_to_resume_nothing_is_told(sample: Checkpoint, out: Path, capsys: Capture) -> None:
    said = (
        "there was nothing to resume: no interrupted run had left work for this output, so all of "
        "it was done from the beginning"
    )
    assert said not in api.convert(sample.path, out.with_name("other")).notes
    assert main(["convert", sample.path, str(out), "--resume", "--quiet"]) == 0
    assert f"  {said}\n" in capsys.readouterr().out
    again = api.convert(sample.path, out, resume=True)  # as after a kill behind the last rename
    assert said not in again.notes
    assert again.kept > 0


def test_an_unexpected_fault_is_one_line(
    sample: Checkpoint, out: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(api, "convert", fail)
    assert main(["convert", sample.path, str(out)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: internal: ZeroDivisionError: division by zero (reshard ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("verb", "more"),
    [
        ("inspect", ""),
        ("verify", ""),
        ("convert", "; next: the same command with --resume goes on from here"),
    ],
)
def test_an_interrupt_is_one_line_and_130(
    verb: str,
    more: str,
    sample: Checkpoint,
    out: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, verb, interrupt)
    paths = [sample.path] if verb == "inspect" else [sample.path, str(out)]
    assert main([verb, *paths]) == 130
    assert capsys.readouterr().err == f"error: interrupted{more}\n"


def test_the_same_call_from_python(sample: Checkpoint, out: Path) -> None:
    told: list[tuple[int, int, str]] = []
    report = api.convert(
        sample.path, out, verify=True, progress=lambda *step: told.append(step), workers=1
    )
    assert report.sound
    assert report.comparison is not None
    assert {phase for *_, phase in told} >= {"convert", "compare"}
    assert api.verify(sample.path, out).equal


def test_a_difference_that_no_policy_explains_is_unsound(sample: Checkpoint, out: Path) -> None:
    report = api.convert(sample.path, out, verify=True)
    assert report.comparison is not None
    other = replace(sample, tensors=dict(list(sample.tensors.items())[1:]))
    found = compare(sample, other, workers=1, max_memory=1 << 20)
    assert not replace(report, comparison=found).sound
