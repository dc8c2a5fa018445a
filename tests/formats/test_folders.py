"""Which folder the user meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.api import diagnose, open_checkpoint
from reshard.errors import CheckpointError, MissingFileError, UsageError
from reshard.formats.folders import resolve_folder

NAME = "mp_rank_00_model_states.pt"


def saved(root: Path, *tags: str) -> Path:
    for tag in tags:
        (root / tag).mkdir(parents=True)
        (root / tag / NAME).write_bytes(b"")
    return root


def test_a_pointer_is_followed(tmp_path: Path) -> None:
    saved(tmp_path, "step1", "step2")
    (tmp_path / "latest").write_text("step2\n")
    folder = resolve_folder(tmp_path)
    assert (folder.path, folder.tag, folder.pointer) == (tmp_path / "step2", "step2", "latest")


def test_the_universal_pointer_is_followed_when_it_is_the_only_one(tmp_path: Path) -> None:
    saved(tmp_path, "step1_universal")
    (tmp_path / "latest_universal").write_text("step1_universal")
    assert resolve_folder(tmp_path).tag == "step1_universal"


@pytest.mark.parametrize(
    ("named", "tag"), [("latest", "step1"), ("latest_universal", "step1_universal")]
)
def test_a_pointer_file_that_is_named_is_followed(named: str, tag: str, tmp_path: Path) -> None:
    saved(tmp_path, "step1", "step1_universal")
    (tmp_path / "latest").write_text("step1")
    (tmp_path / "latest_universal").write_text("step1_universal")
    folder = resolve_folder(tmp_path / named)
    assert (folder.tag, folder.pointer, folder.named) == (tag, named, None)


@pytest.mark.parametrize("named", ["step1", f"step1/{NAME}"])
def test_a_tag_folder_or_a_file_in_it_is_taken_as_it_is(named: str, tmp_path: Path) -> None:
    saved(tmp_path, "step1", "step2")
    (tmp_path / "latest").write_text("step2")
    folder = resolve_folder(tmp_path / named)
    assert (folder.tag, folder.pointer) == ("step1", None)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no such file or folder"):
        resolve_folder(tmp_path / "none")


def test_no_pointer_lists_what_is_complete(tmp_path: Path) -> None:
    saved(tmp_path, "step1", "step2")
    with pytest.raises(CheckpointError, match="step1, step2"):
        resolve_folder(tmp_path)


@pytest.mark.parametrize(
    ("named", "what"),
    [
        ("step2", "no checkpoint here: neither checkpoint files nor a pointer file"),
        ("", "latest names a folder without a checkpoint"),
    ],
)
def test_an_empty_folder_is_told_as_such(named: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "step2").mkdir()
    (tmp_path / "latest").write_text("step2")
    for opened in (open_checkpoint, diagnose):
        with pytest.raises(CheckpointError) as refused:
            opened(tmp_path / named)
        assert refused.value.what == what
        assert refused.value.file == str(tmp_path / "step2")
        assert refused.value.found == "an empty folder"
        assert refused.value.next_step == (
            "check the path; if it is right, the save did not finish or was not copied"
        )


def test_beside_a_folder_without_a_checkpoint_others_are_named(tmp_path: Path) -> None:
    saved(tmp_path, "step1")
    (tmp_path / "step2").mkdir()
    (tmp_path / "step2" / "notes.txt").touch()
    (tmp_path / "latest").write_text("step2")
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(tmp_path)
    assert refused.value.found == "'notes.txt'"
    assert refused.value.next_step == "name another tag folder (step1)"


def test_a_pointer_to_an_absent_folder_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "step1")
    (tmp_path / "latest").write_text("step9")
    with pytest.raises(MissingFileError, match=r"'step9'.*step1"):
        resolve_folder(tmp_path)


def test_also_may_be_the_save_folder_or_the_tag_folder(tmp_path: Path) -> None:
    first, second = saved(tmp_path / "a", "step1"), saved(tmp_path / "b", "step1")
    for also in (second, second / "step1"):
        folder = resolve_folder(first / "step1", [str(also)])
        assert folder.also == (second / "step1",)
        assert folder.listing() == {NAME: [first / "step1" / NAME, second / "step1" / NAME]}


def test_also_must_be_a_folder(tmp_path: Path) -> None:
    saved(tmp_path, "step1")
    with pytest.raises(UsageError, match="--also names no folder"):
        resolve_folder(tmp_path / "step1", [str(tmp_path / "none")])
