"""Real checkpoints: what is read equals what torch reads, and what is written loads as the same."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

import pytest
import torch

from reshard.formats.torch_archive import read_archive, same_value, write_archive
from tests.formats.torch_archive.real_files import differences, load_with_torch, real_files

if TYPE_CHECKING:
    from pathlib import Path

FILES = real_files()
PARTS = 8

pytestmark = pytest.mark.skipif(not FILES, reason="no real checkpoints here")


@pytest.mark.parametrize("part", range(PARTS))
def test_tree_equals_what_torch_loads_before_and_after_rewriting(part: int, tmp_path: Path) -> None:
    for path in FILES[part::PARTS]:
        archive = read_archive(path)
        assert archive.size == path.stat().st_size
        copy = tmp_path / "copy.pt"
        write_archive(copy, archive.root, path.stem)
        for file in (path, copy):
            found = list(differences(archive, archive.root, load_with_torch(file)))
            assert not found, (file, path, found[:5])


@pytest.mark.parametrize("part", range(PARTS))
def test_rewritten_file_reads_as_the_same(part: int, tmp_path: Path) -> None:
    for path in FILES[part :: 8 * PARTS]:
        archive = read_archive(path)
        copy = tmp_path / path.name
        write_archive(copy, archive.root)
        again = read_archive(copy)
        assert not again.problems
        assert same_value(archive.root, again.root), path
        with zipfile.ZipFile(copy) as zipped:
            assert zipped.testzip() is None
        if not any(name.startswith("deepspeed.") for name in archive.globals):
            torch.load(copy, mmap=True, weights_only=True)
        twice = tmp_path / "twice" / path.name
        twice.parent.mkdir(exist_ok=True)
        write_archive(twice, again.root)
        assert twice.read_bytes() == copy.read_bytes()


def test_problems_are_few_and_known() -> None:
    noted = {path.name: read_archive(path).problems for path in FILES if "layer" in path.name}
    # One expert file was written by two ranks at once.
    assert [name for name, problems in noted.items() if problems] == [
        "layer_0_expert_0_mp_rank_00_model_states.pt"
    ][: sum(map(bool, noted.values()))]


def test_every_tensor_and_storage_is_listed() -> None:
    for path in FILES[::40]:
        archive = read_archive(path)
        keys = {tensor.storage_key for tensor in archive.tensors}
        assert keys == set(archive.storages)
        assert all(tensor.path == str(path) for tensor in archive.tensors)
