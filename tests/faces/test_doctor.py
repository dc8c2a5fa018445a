"""`reshard doctor`: several faults at once, each with its fix; what is whole is healthy."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard import api
from reshard.cli import main
from reshard.errors import CheckpointError
from reshard.formats.checkpoint import Problem
from tests.formats.edited import nothing, with_info
from tests.truth import EXAMPLE, Case, by_name, case_named, cases, golden

Capture = pytest.CaptureFixture[str]

TAG = "step3"
OPTIMIZER = "bf16_zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt"
MODEL = "mp_rank_{:02d}_model_states.pt"


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """A copy of the example: ZeRO-1 under tp2 dp2, with `latest`."""
    return Path(shutil.copytree(EXAMPLE, tmp_path / "ckpt"))


def faults(path: Path, **options: Any) -> list[Problem]:
    """What is to be mended."""
    return list(api.diagnose(path, **options).faults)


# ------------------------------------------------------------------------------ one at a time


def missing_rank(save: Path) -> None:
    (save / TAG / OPTIMIZER.format(1, 0)).unlink()


def cut_short(save: Path) -> None:
    file = save / TAG / OPTIMIZER.format(0, 1)
    os.truncate(file, file.stat().st_size // 2)


def spoil(file: Path) -> None:
    """Change the checksum of the pickle, the first record in the directory of an archive."""
    data = bytearray(file.read_bytes())
    data[data.index(b"PK\x01\x02") + 16] ^= 1
    file.write_bytes(data)


def wrong_checksum(save: Path) -> None:
    spoil(save / TAG / MODEL.format(0))


def stale_rank(save: Path) -> None:
    tag = save / TAG
    content = torch.load(tag / OPTIMIZER.format(1, 1), weights_only=False)
    torch.save(content, tag / OPTIMIZER.format(7, 0))


def another_step(save: Path) -> None:
    file = save / TAG / MODEL.format(1)
    content = torch.load(file, weights_only=False)
    content["global_steps"] = 7
    torch.save(content, file)


def optimizer_of_another_step(save: Path) -> None:
    file = save / TAG / OPTIMIZER.format(1, 1)
    content = torch.load(file, weights_only=False)
    for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["step"] = torch.tensor(9.0)
    torch.save(content, file)


def lost_pointer(save: Path) -> None:
    (save / "latest").unlink()


def pointer_to_nothing(save: Path) -> None:
    (save / "latest").write_text("step9")


def pointer_of_noise(save: Path) -> None:
    (save / "latest").write_bytes(b"\xff\x00/..")


def stopped_run(save: Path) -> None:
    work = save / ".step3_universal.reshard"
    work.mkdir()
    (work / "lock").touch()


def copied_over(save: Path) -> None:
    tag = save / TAG
    shutil.copy(tag / MODEL.format(0), tag / MODEL.format(1))


def renamed_over(save: Path) -> None:
    tag = save / TAG
    content = torch.load(tag / OPTIMIZER.format(0, 1), weights_only=False)
    torch.save(content, tag / OPTIMIZER.format(7, 1))
    (tag / OPTIMIZER.format(7, 1)).rename(tag / OPTIMIZER.format(0, 1))


def no_model_files(save: Path) -> None:
    for file in (save / TAG).glob("mp_rank_*"):
        file.unlink()


FAULTS: list[tuple[Callable[[Path], None], str, str, str]] = [
    (
        missing_rank,
        "1 of 4 files of optimizer states missing: bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "ckpt/step3",
        "copy it from the node that wrote it, or name that folder with --also",
    ),
    (
        cut_short,
        "the file is cut short",
        OPTIMIZER.format(0, 1),
        "copy it again from where it was written",
    ),
    (
        wrong_checksum,
        "the checksum of the pickle does not hold",
        MODEL.format(0),
        "copy it again from where it was written",
    ),
    (
        stale_rank,
        "a file of a rank that this checkpoint does not have (dp 7, mp 0)",
        OPTIMIZER.format(7, 0),
        "move it away: it is left over from another run",
    ),
    (
        another_step,
        (
            "files state another step (global_steps) than the other files: "
            "mp_rank_00_model_states.pt: 3; mp_rank_01_model_states.pt: 7"
        ),
        "ckpt/step3",
        "move it away: it is left over from another run",
    ),
    (
        optimizer_of_another_step,
        "ranks disagree on step of ",
        "_optim_states.pt",
        "files of different saves lie in one folder; move the stale ones away",
    ),
    (
        lost_pointer,
        "no pointer file, so nothing says which of these folders is the newest: step3",
        "ckpt",
        "ckpt/latest, or name the folder itself",
    ),
    (
        pointer_to_nothing,
        "the pointer file names no folder with a checkpoint: 'step9'",
        "ckpt/latest",
        "write one of these names into it: step3",
    ),
    (
        pointer_of_noise,
        "the pointer file does not hold one folder name",
        "ckpt/latest",
        "write one of these names into it: step3",
    ),
    (
        stopped_run,
        "a run that was writing step3_universal was stopped",
        "ckpt/.step3_universal.reshard",
        "finish it with the same command and --resume, or remove this folder",
    ),
    (
        copied_over,
        "a file carries the name of another rank (mp_rank_00_model_states.pt)",
        MODEL.format(1),
        "the one of that name was copied over it; copy it again from where it was written",
    ),
    (
        renamed_over,
        f"a file carries the name of another rank ({OPTIMIZER.format(7, 1)})",
        OPTIMIZER.format(0, 1),
        "the file was renamed or copied over another; give it back its name",
    ),
    (
        no_model_files,
        "there is no model-state file",
        "ckpt/step3",
        "copy it from the node that wrote it, or name that folder with --also",
    ),
]


@pytest.mark.parametrize(
    ("damage", "what", "where", "fix"), FAULTS, ids=[damage.__name__ for damage, *_ in FAULTS]
)
def test_each_fault_is_found_with_its_place_and_its_fix(
    damage: Callable[[Path], None], what: str, where: str, fix: str, save: Path
) -> None:
    damage(save)
    (found,) = faults(save)
    assert found.what.startswith(what)
    assert found.file.endswith(where)
    assert found.next_step.endswith(fix)


def test_the_reader_says_the_same_of_a_file_that_was_copied_over(save: Path) -> None:
    copied_over(save)
    with pytest.raises(CheckpointError) as refused:
        api.open_checkpoint(save)
    assert refused.value.found == MODEL.format(0)
    assert refused.value.next_step == faults(save)[0].next_step


def test_two_files_that_were_swapped_get_their_names_back(save: Path) -> None:
    first, second = (save / TAG / OPTIMIZER.format(rank, 0) for rank in range(2))
    first.rename(save / "aside")
    second.rename(first)
    (save / "aside").rename(second)
    said = {Path(found.file).name: found.next_step for found in faults(save)}
    fix = "the file was renamed or copied over another; give it back its name"
    assert said == {first.name: fix, second.name: fix}


def test_inspect_and_convert_tell_a_wrong_checksum_with_the_same_fix(save: Path) -> None:
    wrong_checksum(save)
    (fault,) = faults(save)
    assert fault.what == (
        "the checksum of the pickle does not hold: the file was written without checksums, by two "
        "processes at once, or it is damaged"
    )
    assert list(api.open_checkpoint(save).problems) == [fault]
    assert list(api.convert(save, save / "u", dry_run=True).source.problems) == [fault]


SEVERAL = (
    "the checksum of the pickle does not hold, as where several ranks wrote the file at once, "
    "which DeepSpeed lets them do with files of experts"
)
EXPERTS = [case for case in cases() if case.name.endswith("mixtral_ep2tp2_z1_fp32")]


@pytest.mark.parametrize("case", by_name(EXPERTS))
def test_of_an_expert_it_is_a_note_and_told_by_whoever_reads_the_file(
    case: Case, tmp_path: Path
) -> None:
    """DeepSpeed itself wrote one of these files by two ranks at once; one more is made here."""
    tag = Path(shutil.copytree(case.tag_path, tmp_path / TAG))
    own, made = (tag / f"layer_0_expert_{e}_mp_rank_00_model_states.pt" for e in range(2))
    spoil(made)
    found = api.diagnose(tag)
    assert found.healthy
    told_of = {note for note in found.notes if "checksum" in note.what}
    assert told_of == {Problem(SEVERAL, str(file)) for file in (own, made)}
    assert list(api.open_checkpoint(tag).problems) == []  # it has no need of these files
    for file in tag.glob("*_optim_states.pt"):
        file.unlink()
    told = [note for note in api.open_checkpoint(tag).problems if "checksum" in note.what]
    assert told == [Problem(SEVERAL, str(file)) for file in (own, made)]


LEFT_OVER = "a file of a rank that this checkpoint does not have"
LARGER = "the file states other degrees than the other files"


@pytest.mark.parametrize(
    ("of_models", "of_optimizers"), [((2, 3), (2, 3)), ((2,), (2,)), ((3,), ()), ((), (3,))]
)
def test_each_left_over_file_of_a_larger_run_is_one_fault(
    of_models: tuple[int, ...], of_optimizers: tuple[int, ...], tmp_path: Path
) -> None:
    """ZeRO-3: model and optimizer files together, in the order of their names."""
    tag = Path(shutil.copytree(case_named("golden/llama_z3_tp2dp2_fp32").tag_path, tmp_path / TAG))
    larger = case_named("golden/odd_z3_dp4_bf16").tag_path
    told = {}
    for rank in of_models:
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        shutil.copy(larger / name, tag)
        told[name] = (
            f"{LARGER} (expected dp 2, pp 1, tp 2, found dp 4, pp 1, tp 1); "
            f"{LEFT_OVER} (dp {rank}, mp 0)"
        )
    for rank in of_optimizers:
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        shutil.copy(larger / name, tag)
        told[name] = f"{LEFT_OVER} (dp {rank}, mp 0)"
    assert {Path(found.file).name: found.what for found in faults(tag)} == told
    assert len(faults(tag)) == len(told)
    assert main(["doctor", str(tag)]) == 1


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("odd_z1_dp2_bf16opt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("odd_z1_dp2_fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("odd_z3_dp4_bf16", "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        ("odd_z3_dp4_bf16", "zero_pp_rank_2_mp_rank_00_model_states.pt"),
    ],
)
def test_a_missing_file_is_called_what_it_was_called(
    name: str, lost: str, tmp_path: Path, capsys: Capture
) -> None:
    tag = Path(shutil.copytree(case_named(f"golden/{name}").tag_path, tmp_path / TAG))
    (tag / lost).unlink()
    (found,) = faults(tag)
    assert found.what.endswith(f" missing: {lost}")
    assert main(["convert", str(tag), str(tmp_path / "out")]) == 2
    assert f" is missing: {tag / lost}, rank dp " in capsys.readouterr().err
    main(["inspect", str(tag)])
    assert f" is missing: {tag / lost}, rank dp " in capsys.readouterr().err


# ------------------------------------------------------------------------------ all at once


def test_all_of_them_are_found_at_once(save: Path, capsys: Capture) -> None:
    together = (missing_rank, cut_short, wrong_checksum, stale_rank, pointer_to_nothing)
    for damage in (*together, stopped_run):
        damage(save)
    assert main(["doctor", str(save), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "reshard.doctor/1"
    assert document["healthy"] is False
    said = [found["what"] for found in document["faults"]]
    assert all(found["next_step"] for found in document["faults"])
    expected = [what for damage, what, *_ in FAULTS if damage in (*together, stopped_run)]
    assert len(said) == len(expected)
    for what in expected:
        assert [text for text in said if text.startswith(what)], what
    (folder,) = document["folders"]
    presence = {Path(file["path"]).name: file["presence"] for file in folder["files"]}
    assert presence == {
        MODEL.format(0): "present",
        MODEL.format(1): "present",
        OPTIMIZER.format(0, 0): "present",
        OPTIMIZER.format(0, 1): "damaged",
        OPTIMIZER.format(1, 1): "present",
        OPTIMIZER.format(7, 0): "left over",
        OPTIMIZER.format(1, 0): "missing",
    }


def test_the_report_numbers_them(save: Path, capsys: Capture) -> None:
    missing_rank(save)
    stopped_run(save)
    assert main(["doctor", str(save)]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert out == (
        "looked at\n"
        f"  folder  {save}\n"
        "  step3   5 files, 134 kB, ZeRO-1 dp2 tp2 pp1 ep1\n"
        "\n"
        "1. 1 of 4 files of optimizer states missing: "
        f"{OPTIMIZER.format(1, 0)}\n"
        f"  where  {save}/step3\n"
        "  fix    copy it from the node that wrote it, or name that folder with --also\n"
        "\n"
        "2. a run that was writing step3_universal was stopped\n"
        f"  where  {save}/.step3_universal.reshard\n"
        "  fix    finish it with the same command and --resume, or remove this folder\n"
        "\n"
        "good to know\n"
        "  layouts, shapes and lengths were not compared: that needs every file: "
        f"{save}/step3\n"
        "\n"
        "2 things to mend\n"
    )


# ------------------------------------------------------------------------------ the topology


NEW = [case for case in cases() if case.name.startswith(("golden", "0.19"))]


@pytest.mark.parametrize("case", by_name(NEW))
def test_the_topology_is_said_with_its_stage(case: Case) -> None:
    ((_, survey),) = api.diagnose(case.path).folders
    assert survey.topology is not None
    assert survey.topology.stage == case.stage
    stated = case.topology.get("ep", 1), (case.topology.get("model_args") or {}).get("ep", 1)
    assert survey.topology.ep == max(stated)


@pytest.mark.parametrize(
    "name", ["odd_z1_dp2_fp32", "odd_z2_dp2_bf16", "odd_z3_dp4_bf16", "odd_z0_dp2_fp32"]
)
def test_the_stage_is_said_of_a_folder_that_no_reader_opens(name: str, tmp_path: Path) -> None:
    case = case_named(f"golden/{name}")
    tag = Path(shutil.copytree(case.tag_path, tmp_path / TAG))
    if case.stage == 0:
        torch.save({}, tag / MODEL.format(7))
    else:
        next(tag.glob("*zero_pp_rank_1_*_optim_states.pt")).unlink()
    found = api.diagnose(tag)
    assert not found.healthy
    ((_, survey),) = found.folders
    assert survey.topology is not None
    assert survey.topology.stage == case.stage


@pytest.mark.parametrize("case", by_name([case for case in NEW if case.model == "mixtral"]))
def test_so_is_the_degree_of_experts(case: Case, tmp_path: Path) -> None:
    tag = Path(shutil.copytree(case.tag_path, tmp_path / TAG))
    next(tag.glob("*zero_pp_rank_1_*_optim_states.pt")).unlink()
    ((_, survey),) = api.diagnose(tag).folders
    assert survey.topology is not None
    assert survey.topology.ep == case.topology["ep"] == 2


# ------------------------------------------------------------------------------ healthy


@pytest.mark.parametrize("case", by_name(golden()))
def test_a_whole_checkpoint_is_healthy(case: Case) -> None:
    assert api.diagnose(case.path).healthy
    assert api.diagnose(case.tag_path).healthy


def test_healthy_is_exit_0(capsys: Capture) -> None:
    assert main(["doctor", str(EXAMPLE)]) == 0
    assert capsys.readouterr().out.endswith("\nhealthy: nothing to mend\n")


def test_what_reshard_wrote_is_healthy_until_a_file_is_damaged(save: Path) -> None:
    out = save / "step3_universal"
    api.convert(save, out, fsync=False)
    assert api.diagnose(save).healthy
    file = out / "zero" / "lm_head.weight" / "exp_avg.pt"
    os.truncate(file, 100)
    (found,) = faults(save)
    assert found.file == str(file)


# ------------------------------------------------------------------------------ more folders


def test_ranks_of_another_node_complete_it(save: Path, tmp_path: Path) -> None:
    node = tmp_path / "node1" / TAG
    node.mkdir(parents=True)
    shutil.move(save / TAG / OPTIMIZER.format(1, 0), node)
    assert len(faults(save)) == 1
    assert faults(save, also=node.parent) == []
    (idle,) = faults(save, also=[node.parent, tmp_path])
    assert idle.what == "--also names a folder that adds nothing: no file in it is read"


def test_two_folders_with_different_files_of_a_rank(save: Path, tmp_path: Path) -> None:
    node = tmp_path / "node1"
    node.mkdir()
    (node / MODEL.format(0)).write_bytes(b"another")
    found = faults(save, also=node)[0]
    assert found.what == f"two folders hold a {MODEL.format(0)} of different sizes"


def test_layouts_that_nobody_states(tmp_path: Path) -> None:
    tag = with_info(case_named("golden/llama_z1_tp2dp2_fp32"), tmp_path, nothing)
    (found,) = faults(tag)
    assert found.what == "the files do not say how parameters are cut over 2 tensor-parallel ranks"
    assert found.next_step.startswith("state them with --layout FILE (docs/layouts.md)")
    missing = next(tag.glob("*optim_states.pt"))
    missing.unlink()
    assert len(faults(tag)) == 2


# ------------------------------------------------------------------------------ careful


@pytest.fixture
def held(save: Path) -> Iterator[Path]:
    """The work folder of a run that is alive."""
    stopped_run(save)
    lock = save / ".step3_universal.reshard" / "lock"
    with lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield lock.parent


def test_a_run_at_work_is_no_fault(save: Path, held: Path) -> None:
    found = api.diagnose(save)
    assert found.healthy
    assert [str(note) for note in found.notes] == [f"a run is writing step3_universal now: {held}"]


def test_an_old_result_that_was_set_aside_is_told(save: Path) -> None:
    stopped_run(save)
    (save / ".step3_universal.reshard" / "replaced").mkdir()
    (found,) = faults(save)
    assert "the old step3_universal is in `replaced`" in found.what


def test_bytes_of_tensors_are_not_read(tmp_path: Path) -> None:
    tag = tmp_path / "step1"
    tag.mkdir()
    for rank in range(2):
        content = {"module": {"w": torch.zeros(1 << 22)}, "mp_world_size": 2, "dp_world_size": 1}
        torch.save(content, tag / MODEL.format(rank))
    counters = Path("/proc/self/io")
    if not counters.is_file():
        pytest.skip("needs /proc/self/io")
    before = int(counters.read_text().split()[1])
    assert not api.diagnose(tag).healthy
    assert int(counters.read_text().split()[1]) - before < 1 << 20


@pytest.mark.parametrize("what", ["nothing", "empty", "other"])
def test_what_is_no_checkpoint_is_exit_2(what: str, tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "folder"
    if what != "nothing":
        folder.mkdir()
    if what == "other":
        (folder / "notes.txt").touch()
    assert main(["doctor", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: no such file" if what == "nothing" else "error: no checkpoint")


def test_other_formats_are_looked_at_too(tmp_path: Path) -> None:
    for name in ("safetensors", "dcp"):
        out = tmp_path / name / "out"
        api.convert(EXAMPLE, out, to=name, fsync=False)
        assert api.diagnose(out).healthy
        file = max(out.rglob("*"), key=lambda path: path.stat().st_size)
        os.truncate(file, file.stat().st_size // 2)
        assert [found.next_step for found in faults(out)] != []
