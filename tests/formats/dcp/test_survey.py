"""What `reshard doctor` finds in a DCP folder: all of it at once."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest

from reshard.cli.entry import main
from reshard.formats.dcp.survey import survey_dcp
from reshard.formats.folders import resolve_folder
from reshard.formats.survey import Presence, Survey
from tests.formats.dcp.folders import GOLDEN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A real folder to break."""
    return Path(shutil.copytree(GOLDEN / "fsdp2tp2" / "ckpt", tmp_path / "ckpt"))


def surveyed(folder: Path) -> Survey:
    return survey_dcp(resolve_folder(folder))


def texts(folder: Path) -> list[str]:
    return [str(problem).replace(str(folder), "CKPT") for problem in surveyed(folder).problems]


def test_a_whole_folder(folder: Path) -> None:
    found = surveyed(folder)
    assert (found.problems, found.whole) == ((), True)
    assert [(file.kind, file.dp, file.presence) for file in found.files] == [
        ("index", None, Presence.PRESENT),
        *(("chunks", rank, Presence.PRESENT) for rank in range(4)),
    ]
    assert sum(file.nbytes for file in found.files) == sum(
        path.stat().st_size for path in folder.iterdir()
    )


def test_all_that_is_wrong_at_once(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    with (folder / "__2_0.distcp").open("r+b") as file:
        file.truncate(1000)
    (folder / "__9_0.distcp").write_bytes(b"old")
    places = pickle.loads((folder / ".metadata").read_bytes()).storage_data
    lost = sum(1 for place in places.values() if place.relative_path == "__0_0.distcp")
    assert texts(folder) == [
        (
            f"a data file is missing, with {lost} chunks and objects: CKPT/__0_0.distcp; "
            "next: copy it from the node that wrote it"
        ),
        (
            "the file is cut short (expected at least 68825 bytes, found 1000): CKPT/__2_0.distcp; "
            "next: copy it again from where it was written"
        ),
        (
            "the index does not name this data file: an earlier save left it: CKPT/__9_0.distcp; "
            "next: delete it"
        ),
    ]
    assert not surveyed(folder).whole


def test_a_damaged_index(folder: Path) -> None:
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes()[:1000])
    (text,) = texts(folder)
    assert text.startswith("the pickle cannot be read: at byte ")
    assert surveyed(folder).files[0].presence is Presence.DAMAGED


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "__1_0.distcp").unlink()
    assert main(["doctor", str(folder)]) == 1
    assert "a data file is missing, with " in capsys.readouterr().out
