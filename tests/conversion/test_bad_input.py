"""Bad input: one clear line, exit status 2, and nothing written; whole kinds, on real files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.truth import Case, golden

Damage = Callable[[Path], None]


def case_of(stage: int, tp: int = 1) -> Case:
    return next(
        case
        for case in golden()
        if (case.stage, case.tp) == (stage, tp) and case.is_zero and case.world == 2 * tp
    )


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "reshard", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def copy_of(case: Case, tmp_path: Path) -> Path:
    shutil.copytree(case.path, tmp_path / "source")
    return tmp_path / "source"


def tag_folder(source: Path) -> Path:
    return next(path for path in source.iterdir() if path.is_dir())


def one(source: Path, pattern: str) -> Path:
    return max(tag_folder(source).glob(pattern))


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def refused(source: Path, tmp_path: Path, *said: str) -> None:
    """Converting gives exactly one line that says these things, and leaves nothing behind."""
    before = sorted(path.name for path in tmp_path.iterdir())
    result = run("convert", source, tmp_path / "out_universal", "--quiet")
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 2, result.stderr
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for words in said:
        assert words in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == before


# --------------------------------------------------------------------------- files


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("pattern", ["*_optim_states.pt", "*_model_states.pt"])
def test_a_file_is_missing(stage: int, pattern: str, tmp_path: Path) -> None:
    source = copy_of(case_of(stage), tmp_path)
    gone = one(source, pattern)
    gone.unlink()
    said = "model-state" if "model" in pattern and stage < 3 else gone.name.removeprefix("bf16_")
    refused(source, tmp_path, said)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("length", [0, 1, 100, -1, -1000])
def test_a_file_is_cut_short(stage: int, length: int, tmp_path: Path) -> None:
    source = copy_of(case_of(stage), tmp_path)
    victim = one(source, "*_optim_states.pt")
    kept = length if length >= 0 else victim.stat().st_size + length
    os.truncate(victim, kept)
    refused(source, tmp_path, victim.name)


def test_a_rank_of_a_larger_run_is_left_over(tmp_path: Path) -> None:
    source = copy_of(case_of(3), tmp_path)
    for path in sorted(tag_folder(source).glob("*zero_pp_rank_1_*")):
        shutil.copy(path, path.with_name(path.name.replace("rank_1_", "rank_2_")))
    refused(source, tmp_path, "does not have", "rank_2_", "left over")


def test_a_left_over_rank_of_another_stage(tmp_path: Path) -> None:
    source = copy_of(case_of(1), tmp_path)
    path = one(source, "mp_rank_00_model_states.pt")
    shutil.copy(path, path.with_name("zero_pp_rank_0_mp_rank_00_model_states.pt"))
    refused(source, tmp_path, "another stage", "zero_pp_rank_0_mp_rank_00_model_states.pt")


def test_a_file_of_another_save(tmp_path: Path) -> None:
    source = copy_of(case_of(3), tmp_path)
    rewrite(one(source, "*_model_states.pt"), lambda root: root.update(global_steps=99))
    refused(source, tmp_path, "ranks disagree on global_steps", "99")


# --------------------------------------------------------------------------- content


def test_ranks_disagree_on_the_step(tmp_path: Path) -> None:
    def change(root: dict[str, Any]) -> None:
        states = root["optimizer_state_dict"]["base_optimizer_state"]["state"]
        states[0]["step"] = states[0]["step"] + 1

    source = copy_of(case_of(1), tmp_path)
    rewrite(one(source, "*_optim_states.pt"), change)
    refused(source, tmp_path, "ranks disagree on step")


def test_a_partition_of_another_size(tmp_path: Path) -> None:
    def change(root: dict[str, Any]) -> None:
        body = root["optimizer_state_dict"]
        flat = body["single_partition_of_fp32_groups"]
        flat[0] = torch.cat([flat[0], torch.zeros(64)])

    source = copy_of(case_of(1), tmp_path)
    rewrite(one(source, "*_optim_states.pt"), change)
    refused(source, tmp_path, "ranks disagree on the partition length of group 0")


def test_mappings_contradict_the_shapes(tmp_path: Path) -> None:
    def change(root: dict[str, Any]) -> None:
        group = root["optimizer_state_dict"]["param_slice_mappings"][0]
        first = next(iter(group))
        group[first].start += 1

    source = copy_of(case_of(1), tmp_path)
    rewrite(one(source, "*_optim_states.pt"), change)
    refused(source, tmp_path, "param_slice_mappings of group 0 contradict param_shapes")


def test_a_hostile_global(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.system, (f"touch {tmp_path}/canary",))

    source = copy_of(case_of(1), tmp_path)
    rewrite(one(source, "mp_rank_00*"), lambda root: root.update(client=Hostile()))
    refused(source, tmp_path, "mp_rank_00_model_states.pt", "system")
    assert not (tmp_path / "canary").exists()


def test_a_name_that_leaves_the_folder(tmp_path: Path) -> None:
    def change(root: dict[str, Any]) -> None:
        root["module"]["../../escaped"] = torch.zeros(3)

    source = copy_of(case_of(1), tmp_path)
    rewrite(one(source, "mp_rank_00*"), change)
    refused(source, tmp_path, "'../../escaped'", "inside the output folder")


# --------------------------------------------------------------------------- tensor parallelism


def first_entry(root: dict[str, Any], words: str) -> dict[int, Any]:
    params = root["universal_checkpoint_info"]["affine_map"]["params"]
    entry = next(value for pattern, value in params.items() if words in pattern)
    ranks: dict[int, Any] = entry["ranks"]
    return ranks


def on_every_rank(source: Path, change: Callable[[dict[str, Any]], None]) -> None:
    for path in sorted(tag_folder(source).glob("mp_rank_*_model_states.pt")):
        rewrite(path, change)


def hole(root: dict[str, Any]) -> None:
    first_entry(root, "q_proj")[1]["pieces"][0]["source"][0] = 0


def out_of_bounds(root: dict[str, Any]) -> None:
    first_entry(root, "q_proj")[1]["pieces"][0]["source"][0] = 10**9


def newer(root: dict[str, Any]) -> None:
    root["universal_checkpoint_info"]["affine_map"]["version"] = 2


def malformed(root: dict[str, Any]) -> None:
    first_entry(root, "q_proj")[1]["pieces"][0].pop("dest")


def no_map(root: dict[str, Any]) -> None:
    root.pop("universal_checkpoint_info")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (hole, ("q_proj", "P")),
        (out_of_bounds, ("q_proj", "bounds")),
        (newer, ("version",)),
        (malformed, ("q_proj", "dest")),
        (no_map, ("how", "is not known", "--layout")),
    ],
)
def test_a_stored_map_is_wrong(damage: Damage, said: tuple[str, ...], tmp_path: Path) -> None:
    source = copy_of(case_of(1, tp=2), tmp_path)
    on_every_rank(source, damage)  # type: ignore[arg-type]
    refused(source, tmp_path, *said)


def test_replicas_differ(tmp_path: Path) -> None:
    def change(root: dict[str, Any]) -> None:
        body = root["optimizer_state_dict"]
        start = body["param_slice_mappings"][1]["model.norm.weight"].start
        body["single_partition_of_fp32_groups"][1].data[start] += 1

    source = copy_of(case_of(1, tp=2), tmp_path)
    holder = next(
        path
        for path in sorted(tag_folder(source).glob("*mp_rank_01_optim_states.pt"))
        if "model.norm.weight"
        in torch.load(path, weights_only=False)["optimizer_state_dict"]["param_slice_mappings"][1]
    )
    rewrite(holder, change)
    refused(source, tmp_path, "model.norm.weight", "differ")


# --------------------------------------------------------------------------- where it goes


def test_latest_is_wrong(tmp_path: Path) -> None:
    source = copy_of(case_of(1), tmp_path)
    (source / "latest").write_text("global_step77")
    refused(source, tmp_path, "global_step77", "is not there", tag_folder(source).name)


@pytest.mark.parametrize("text", ["", "\n", "../elsewhere", "a/b", "x" * 5000])
def test_latest_is_no_folder_name(text: str, tmp_path: Path) -> None:
    source = copy_of(case_of(1), tmp_path)
    (source / "latest").write_text(text)
    refused(source, tmp_path, "one folder name")


def test_there_is_nothing(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", tmp_path, "no such file or folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", tmp_path, "no checkpoint here")


def test_the_output_exists(tmp_path: Path) -> None:
    source = copy_of(case_of(1), tmp_path)
    (tmp_path / "out_universal").mkdir()
    (tmp_path / "out_universal" / "mine").write_text("keep")
    refused(source, tmp_path, "out_universal", "--overwrite")
    assert (tmp_path / "out_universal" / "mine").read_text() == "keep"


def test_the_output_is_the_input(tmp_path: Path) -> None:
    source = copy_of(case_of(1), tmp_path)
    tag = tag_folder(source)
    before = sorted(tag.iterdir())
    for output in (tag, tag / "inside"):
        result = run("convert", source, output, "--overwrite", "--quiet")
        assert result.returncode == 2
        assert result.stderr.count("error: ") == len(result.stderr.strip().splitlines()) == 1
    assert sorted(tag.iterdir()) == before


def test_the_output_cannot_be_written(tmp_path: Path) -> None:
    source = copy_of(case_of(1), tmp_path)
    (tmp_path / "file").write_text("")
    result = run("convert", source, tmp_path / "file" / "out_universal", "--quiet")
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) == 1


# --------------------------------------------------------------------------- what must work


def test_a_path_with_special_characters(tmp_path: Path) -> None:
    folder = tmp_path / "a [b] +c (d) é"
    folder.mkdir()
    source = copy_of(case_of(1), folder)
    result = run("convert", source, folder / "out [1]+_universal/", "--quiet")
    assert result.returncode == 0, result.stderr
    assert (folder / "latest_universal").read_text() == "out [1]+_universal"
    assert run("verify", source, folder / "out [1]+_universal").returncode == 0


def test_ranks_in_two_folders(tmp_path: Path) -> None:
    source = copy_of(case_of(2), tmp_path)
    elsewhere = tmp_path / "node1" / tag_folder(source).name
    elsewhere.mkdir(parents=True)
    moved = one(source, "*_optim_states.pt")
    shutil.move(moved, elsewhere / moved.name)
    refused(source, tmp_path, "--also")
    result = run("convert", source, tmp_path / "out_universal", "--also", elsewhere, "--quiet")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("how", ["folder", "tag", "file"])
def test_what_the_user_may_name(how: str, tmp_path: Path) -> None:
    source = copy_of(case_of(3), tmp_path)
    named = {
        "folder": source,
        "tag": tag_folder(source),
        "file": one(source, "*_optim_states.pt"),
    }[how]
    result = run("convert", named, tmp_path / "out_universal", "--quiet")
    assert result.returncode == 0, result.stderr


def test_two_runs_are_byte_equal(tmp_path: Path) -> None:
    source = case_of(1, tp=2).path
    folders = [tmp_path / name / "out_universal" for name in ("a", "b")]
    for folder, workers in zip(folders, ("1", "3"), strict=True):
        assert run("convert", source, folder, "--workers", workers, "--quiet").returncode == 0
    files = [
        {
            path.relative_to(folder): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        for folder in folders
    ]
    assert files[0] == files[1]
