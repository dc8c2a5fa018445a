"""A trainer's whole folder is made for the target."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard.cli import main
from reshard.errors import UsageError
from reshard.formats.deepspeed.writing import NativeOptions, lay_out_deepspeed
from reshard.formats.deepspeed.writing.drop_in import lay_out_drop_in
from reshard.formats.registry import open_checkpoint
from reshard.formats.target import Target
from tests.formats.native.sources import compared, run
from tests.truth import case_named

CARRIED = {
    "trainer_state.json": b'{"global_step": 3}',
    "scheduler.pt": b"any bytes",
    "empty.txt": b"",
    "adapter/adapter_config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 9000,
}


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    folder = tmp_path / "runs/checkpoint-3"
    shutil.copytree(case_named("golden/odd_z1_dp2_fp32").path, folder)
    for name, data in {**CARRIED, "rng_state_0.pth": b"0", "rng_state_1.pth": b"1"}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    shutil.copytree(folder / "step3", folder / "step2")
    return folder


def drop_in(trainer: Path, out: Path, **options: Any) -> Target:
    source, target = lay_out_drop_in(open_checkpoint(trainer), NativeOptions(**options))
    run(source, target, out)
    return target


def test_the_folder_is_whole_and_leads_to_the_checkpoint(trainer: Path, tmp_path: Path) -> None:
    out = tmp_path / "new/checkpoint-3"
    target = drop_in(trainer, out, stage=3, dp=3)
    assert {name: (out / name).read_bytes() for name in CARRIED} == CARRIED
    assert (out / "latest").read_text() == "step3"
    assert compared(trainer, out).equal
    assert not list(out.glob("rng_state*"))
    assert not (out / "step2").exists()
    assert list(out.parent.iterdir()) == [out]
    assert any("rng_state_0.pth, rng_state_1.pth" in note for note in target.notes)


def test_the_command_line_makes_the_folder_and_says_what_stays_behind(
    trainer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new/checkpoint-3"
    topology = ["--to", "deepspeed", "--stage", "3", "--dp", "3"]
    assert main(["convert", str(trainer), str(out), *topology, "--drop-in", "--verify"]) == 0
    said = capsys.readouterr().out
    assert "RNG states and data-loader positions" not in said  # said once, by the files' names
    assert "left out, of ranks of another topology: rng_state_0.pth, rng_state_1.pth" in said
    assert "verified: the output holds what its source holds, bit for bit" in said
    assert {name: (out / name).read_bytes() for name in CARRIED} == CARRIED
    assert (out / "latest").read_text() == "step3"
    assert main(["verify", str(trainer), str(out)]) == 0


BOUND = "RNG states and data-loader positions belong to single ranks, and other ranks cannot go on"


@pytest.mark.parametrize("ranks", [2, 3])
def test_states_of_single_ranks_are_named_where_there_are_some(
    trainer: Path, tmp_path: Path, ranks: int
) -> None:
    bare = Path(shutil.copytree(trainer / "step3", tmp_path / "bare/step3"))
    states = Path(shutil.copytree(bare, tmp_path / "states/step3"))
    file = states / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    torch.save({**content, "random_rng_state": [1, 2], "dataloader": {}, "arng": 0}, file)

    def said(folder: Path) -> list[str]:
        options = NativeOptions(stage=1, dp=ranks)
        target = lay_out_deepspeed(open_checkpoint(folder), tag="new", options=options)
        return [note for note in target.notes if note.startswith(BOUND)]

    assert said(bare) == []
    if ranks == 2:
        assert said(trainer) == said(states) == []
    else:
        assert said(trainer) == [f"{BOUND} with them: rng_state_0.pth, rng_state_1.pth"]
        assert said(states) == [f"{BOUND} with them: random_rng_state, dataloader"]


def test_states_of_single_ranks_are_carried_to_the_same_ranks(
    trainer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new"
    drop_in(trainer, out, stage=2, dp=2)
    assert [(out / f"rng_state_{rank}.pth").read_bytes() for rank in (0, 1)] == [b"0", b"1"]


def test_a_drop_in_can_be_dropped_in_again(trainer: Path, tmp_path: Path) -> None:
    drop_in(trainer, tmp_path / "one", stage=3, dp=3)
    drop_in(tmp_path / "one", tmp_path / "two", stage=1, dp=1)
    assert compared(trainer, tmp_path / "two").equal
    assert (tmp_path / "two/scheduler.pt").read_bytes() == b"any bytes"


def test_heads_are_taken_from_the_trainers_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(case_named("golden/llama_z1_tp2dp2_fp32").path, folder)
    (folder / "config.json").write_text('{"num_attention_heads": 4, "num_key_value_heads": 2}')
    drop_in(folder, tmp_path / "out", stage=1, dp=1, tp=4)
    assert compared(folder, tmp_path / "out").equal


def test_a_folder_without_its_pointer_is_no_trainers(trainer: Path) -> None:
    (trainer / "latest").unlink()
    with pytest.raises(UsageError, match="leave out --drop-in"):
        lay_out_drop_in(open_checkpoint(trainer / "step3"), NativeOptions(stage=1, dp=1))


def test_what_stays_behind_is_named_with_its_reason(trainer: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep/secret.txt").write_bytes(b"not ours")
    os.mkfifo(trainer / "pipe")
    (trainer / "void/within").mkdir(parents=True)
    (trainer / "reshard_manifest.json").write_bytes(b"{}")
    links: dict[str, str | Path] = {
        "gone": "nowhere",
        "self": "self",
        "passwd.txt": outside / "deep/secret.txt",
        "cache": outside,
        "root": "/",
        "adapter/up": "..",
        "adapter/round": ".",
        "again.json": "trainer_state.json",
        "twin": "adapter",
    }
    for name, end in links.items():
        (trainer / name).symlink_to(end)
    out = tmp_path / "new"
    target = drop_in(trainer, out, stage=3, dp=3)
    left = {note for note in target.notes if note.startswith("left out")}
    assert left == {
        (
            "left out, links to a folder that they lie in: adapter/round, adapter/up, "
            "twin/round, twin/up"
        ),
        (
            "left out, links that lead out of the folder (copy what they point to): "
            "cache, passwd.txt, root"
        ),
        "left out, links that lead nowhere: gone, self",
        "left out, no regular files: pipe",
        "left out, of which the output has its own: reshard_manifest.json",
        "left out, of ranks of another topology: rng_state_0.pth, rng_state_1.pth",
        "left out, other checkpoints (convert each): step2",
        "left out, empty folders: void/within",
    }
    held = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    beside = {name for name in held if not name.startswith("step3/")}
    followed = {"again.json", "twin/adapter_config.json"}
    assert beside == {*CARRIED, *followed, "latest", "reshard_manifest.json"}
    assert (out / "again.json").read_bytes() == CARRIED["trainer_state.json"]
    assert (out / "reshard_manifest.json").read_bytes() != b"{}"


def test_many_names_are_not_all_said(trainer: Path, tmp_path: Path) -> None:
    for k in range(20):
        (trainer / f"link{k:02}").symlink_to("nowhere")
    target = drop_in(trainer, tmp_path / "new", stage=3, dp=3)
    (note,) = (note for note in target.notes if "nowhere" in note)
    assert note.endswith(": " + ", ".join(f"link{k:02}" for k in range(16)) + " and 4 more")
