"""Broken and hostile DCP folders: each refused by name, with file, rank and parameter."""

from __future__ import annotations

import io
import math
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
)

import reshard
from reshard.errors import ReshardError
from tests.formats.dcp.folders import GOLDEN, edit, opened, save, state_dicts, trained

UP = "model.blocks.0.up.weight"
"""68×22 in four chunks of 17 rows: at 0, 34, 17 and 51, one of each rank."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A real folder to break."""
    return Path(shutil.copytree(GOLDEN / "fsdp2tp2" / "ckpt", tmp_path / "ckpt"))


def refusal(folder: Path) -> str:
    """The one line that opening gives, with the folder's path left out; nothing is written."""
    with pytest.raises(ReshardError) as caught:
        opened(folder)
    with pytest.raises(ReshardError):
        reshard.convert(folder, folder.parent / "out")
    assert sorted(path.name for path in folder.parent.iterdir()) == ["ckpt"]
    return str(caught.value).replace(str(folder), "CKPT")


def chunks(index: Any) -> list[ChunkStorageMetadata]:
    found: list[ChunkStorageMetadata] = index.state_dict_metadata[UP].chunks
    return found


def at(rows: int) -> MetadataIndex:
    return MetadataIndex(UP, [rows, 0])


def drop_chunk(index: Any) -> None:
    del chunks(index)[2]


def widen_chunk(index: Any) -> None:
    chunks(index)[0].sizes = torch.Size((18, 22))


def overreach(index: Any) -> None:
    chunks(index)[3].sizes = torch.Size((18, 22))


def forget_place(index: Any) -> None:
    del index.storage_data[at(34)]


def other_dtype(index: Any) -> None:
    index.state_dict_metadata[UP].properties.dtype = torch.bfloat16


def swap_places(index: Any) -> None:
    bias = MetadataIndex("model.blocks.0.up.bias", [34])
    places = index.storage_data
    places[at(34)], places[bias] = places[bias], places[at(34)]


def beyond_the_file(index: Any) -> None:
    index.storage_data[at(34)].offset += 1 << 40


def negative_offset(index: Any) -> None:
    index.storage_data[at(34)].offset = -64


def outside(index: Any) -> None:
    index.storage_data[at(34)].relative_path = "../other/__1_0.distcp"


def transformed(index: Any) -> None:
    index.storage_data[at(34)].transform_descriptors = ["zstd"]


def huge(index: Any) -> None:
    index.state_dict_metadata[UP].size = torch.Size((1 << 40, 1 << 40))


def not_a_path(index: Any) -> None:
    index.planner_data[UP] = "model"


def no_index(index: Any) -> None:
    index.storage_data = None


EDITS: list[tuple[Callable[[Any], None], str]] = [
    (
        drop_chunk,
        (
            "chunks are missing: elements of the tensor are in none of the files: CKPT, "
            f"parameter {UP}: expected 1496 elements, found 1122 in 3 chunks; "
            "the first missing is at (17, 0); next: "
        ),
    ),
    (
        widen_chunk,
        (
            f"two chunks hold the same elements: CKPT, parameter {UP}: "
            "found [0:18, 0:22] and [17:34, 0:22]; next: "
        ),
    ),
    (
        overreach,
        (
            f"a chunk reaches beyond its tensor: CKPT, parameter {UP}, dim 0: "
            "expected at most 68, found [51:69, 0:22]"
        ),
    ),
    (
        forget_place,
        (
            "the index does not say where a part of an entry lies: CKPT/.metadata, "
            f"parameter {UP}: found no place for the chunk at (34, 0); next: "
        ),
    ),
    (
        other_dtype,
        (
            "a chunk is of another element type than the index says: CKPT/__0_0.distcp, rank 0, "
            f"parameter {UP}: expected bfloat16, found float32"
        ),
    ),
    (
        swap_places,
        (
            "a chunk has another shape than the index says: CKPT/__1_0.distcp, rank 1, "
            f"parameter {UP}: expected (17, 22), found (17,)"
        ),
    ),
    (beyond_the_file, "the file ends early: no 3049 bytes at 10995"),
    (
        negative_offset,
        (
            f"unexpected content at storage_data of {UP}.offset: CKPT/.metadata: "
            "expected an integer of at least 0, not -64, found int"
        ),
    ),
    (
        outside,
        (
            f"the index names a data file outside of its folder: CKPT/.metadata, parameter {UP}: "
            "found '../other/__1_0.distcp'; next: "
        ),
    ),
    (
        transformed,
        (
            f"the bytes went through a transform of an extension: CKPT/.metadata, parameter {UP}: "
            "found ['zstd']; next: "
        ),
    ),
    (huge, f"a tensor is too large to be real: CKPT, parameter {UP}: expected at most "),
    (
        not_a_path,
        (
            "the index flattened an entry from something that is no path: CKPT/.metadata, "
            f"parameter {UP}: expected a tuple of keys, found 'model'"
        ),
    ),
    (no_index, "the index has no storage_data: CKPT/.metadata; next: the save did not finish"),
]


@pytest.mark.parametrize(("change", "line"), EDITS, ids=lambda part: getattr(part, "__name__", ""))
def test_an_index_that_lies_is_refused(
    folder: Path, change: Callable[[Any], None], line: str
) -> None:
    edit(folder, change)
    assert refusal(folder).startswith(line)


class TestFiles:
    def test_a_data_file_that_is_not_there(self, folder: Path) -> None:
        (folder / "__2_0.distcp").unlink()
        line = refusal(folder)
        assert line.startswith(
            "a data file that the index names is not there: CKPT/__2_0.distcp, rank 2, parameter "
        )
        assert line.endswith("next: copy it from the node that wrote it")

    def test_a_data_file_that_is_cut_short(self, folder: Path) -> None:
        with (folder / "__3_0.distcp").open("r+b") as file:
            file.truncate(100_000)
        assert refusal(folder).startswith("the file ends early: no ")

    def test_a_data_file_of_zeros(self, folder: Path) -> None:
        path = folder / "__1_0.distcp"
        path.write_bytes(bytes(path.stat().st_size))
        assert "the file ends in zeros: it was never written to its end" in refusal(folder)

    def test_an_index_that_is_cut_short(self, folder: Path) -> None:
        path = folder / ".metadata"
        path.write_bytes(path.read_bytes()[:-100])
        assert refusal(folder).startswith("the pickle cannot be read: at byte ")

    def test_an_index_with_something_behind_it(self, folder: Path) -> None:
        path = folder / ".metadata"
        path.write_bytes(path.read_bytes() + b"more")
        assert refusal(folder).startswith("4 bytes follow the end of the pickle: CKPT/.metadata")


class TestIndexes:
    def test_a_save_that_did_not_finish(self, folder: Path) -> None:
        (folder / ".metadata").rename(folder / ".metadata.tmp")
        assert refusal(folder) == (
            "the save did not finish: its index still has its temporary name: CKPT/.metadata.tmp; "
            "next: take another checkpoint"
        )

    def test_an_index_of_each_rank(self, folder: Path) -> None:
        (folder / ".metadata").rename(folder / "__0.metadata")
        assert refusal(folder).startswith(
            "the ranks saved an index each, and none says what the whole is: CKPT/__0.metadata; "
        )

    def test_data_files_alone(self, folder: Path) -> None:
        (folder / ".metadata").unlink()
        assert refusal(folder).startswith("no checkpoint here: neither checkpoint files nor a ")


class Evil:
    """Runs a command where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, (f"touch {self.mark}",)


class Custom:
    """Not of DCP, and harmless."""


class TestPickles:
    def test_code_in_the_index_is_refused_and_never_runs(
        self, folder: Path, tmp_path: Path
    ) -> None:
        mark = tmp_path / "ran"

        def plant(index: Any) -> None:
            index.planner_data["x"] = Evil(mark)

        edit(folder, plant)
        assert "the file names posix.system, which never belongs in a checkpoint" in refusal(folder)
        assert not mark.exists()

    def test_a_class_that_an_index_does_not_have_is_refused_by_name(self, folder: Path) -> None:
        def plant(index: Any) -> None:
            index.planner_data["x"] = Custom()

        edit(folder, plant)
        assert refusal(folder).startswith(
            "the file names 'tests.formats.dcp.test_hostile.Custom', which its format does not have"
            ": CKPT/.metadata; next: "
        )

    def test_code_in_an_object_is_refused_and_never_runs(self, tmp_path: Path) -> None:
        model, nested = state_dicts(*trained())
        mark = tmp_path / "ran"
        nested["param_groups"][0]["lr"] = Evil(mark)
        folder = save({"model": model, "optim": nested}, tmp_path / "ckpt")
        assert "the file names posix.system, which never belongs in a checkpoint" in refusal(folder)
        assert not mark.exists()

    def test_an_index_of_something_else(self, folder: Path) -> None:
        (folder / ".metadata").write_bytes(pickle.dumps({"a": 1}))
        assert refusal(folder) == (
            "unexpected content at .metadata: CKPT/.metadata: expected a Metadata, found dict"
        )


def with_step(folder: Path, value: object) -> None:
    """Put another step in the place of the first parameter's."""
    archive = io.BytesIO()
    torch.save(value, archive)
    (folder / "step.distcp").write_bytes(archive.getvalue())

    def put(index: Any) -> None:
        key = MetadataIndex(STEP, [] if isinstance(value, torch.Tensor) else None)
        del index.storage_data[MetadataIndex(STEP, [])]
        index.storage_data[key] = _StorageInfo("step.distcp", 0, len(archive.getvalue()))
        if not isinstance(value, torch.Tensor):
            index.state_dict_metadata[STEP] = BytesStorageMetadata()
        else:
            index.state_dict_metadata[STEP].properties.dtype = value.dtype

    edit(folder, put)


STEP = "optim.state.blocks.0.up.weight.step"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 2.5, -3.0, 1e30])
def test_a_step_that_is_no_count_is_refused(folder: Path, number: float) -> None:
    with_step(folder, torch.tensor(number, dtype=torch.float64))
    assert refusal(folder) == no_count(repr(number))


@pytest.mark.parametrize(
    ("value", "found"), [(math.nan, "nan"), (-1, "-1"), (True, "True"), (1 << 63, str(1 << 63))]
)
def test_a_step_that_is_an_object_is_held_to_it_too(
    folder: Path, value: object, found: str
) -> None:
    with_step(folder, value)
    assert refusal(folder) == no_count(found)


def no_count(found: str) -> str:
    return (
        "a step is no count: CKPT/step.distcp, parameter blocks.0.up.weight, state step: expected "
        f"a whole number from 0 to 2**63 - 1, found {found}; next: the file was changed or is "
        "damaged; take another checkpoint"
    )


def test_one_place_for_two_chunks_is_no_tie(folder: Path) -> None:
    def share(index: Any) -> None:
        info = index.storage_data[at(0)]
        index.storage_data[at(34)] = _StorageInfo(info.relative_path, info.offset, info.length)

    edit(folder, share)
    assert refusal(folder).startswith("two chunks of a tensor lie at one place: CKPT/.metadata")
