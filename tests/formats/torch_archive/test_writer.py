"""What is laid out is what torch would write, and every reader of torch files takes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections import OrderedDict
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.serialization import config

from reshard.errors import UsageError
from reshard.formats.dtypes import DTYPES
from reshard.formats.torch_archive import (
    ArchiveLayout,
    Device,
    NewTensor,
    Size,
    lay_out_archive,
    read_archive,
    write_archive,
)
from reshard.formats.torch_archive.zip_layout import ZipLayout
from tests.formats.torch_archive.real_files import raw_bytes

if TYPE_CHECKING:
    from pathlib import Path

FLOAT = DTYPES["float32"]


def fill(path: Path, layout: ArchiveLayout, contents: dict[object, bytes]) -> None:
    """Fill a laid out file as an executor does: slots in reverse order, checksums last."""
    with path.open("wb") as file:
        file.truncate(layout.size)
        for slot in reversed(layout.slots):
            file.seek(slot.offset)
            file.write(contents[slot.label])
        for offset, literal in layout.literals:
            file.seek(offset)
            file.write(literal)
        for slot in layout.slots:
            for offset in slot.crc_offsets:
                file.seek(offset)
                file.write(zlib.crc32(contents[slot.label]).to_bytes(4, "little"))


def check_with_others(path: Path) -> None:
    """`zipfile` and `unzip` find nothing wrong."""
    with zipfile.ZipFile(path) as zipped:
        assert zipped.testzip() is None
    if shutil.which("unzip"):
        run = subprocess.run(["unzip", "-tq", path], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout


def plain_tree(tensor: object) -> dict[str, object]:
    """A tree of everything that a universal checkpoint holds, around a tensor."""
    return OrderedDict(
        param=tensor,
        names=["a.weight", "ünï/..", ""],
        numbers=[0, 255, 256, 65535, 65536, -1, -(1 << 31), 1 << 31, 1 << 70, -(1 << 63), -129],
        floats=[0.0, -0.0, 1e-8, float("inf")],
        flags=(True, False, None),
        nested=({"x": (1, 2, 3, 4), "y": ()}, [[]]),
        raw=b"\x00\xff",
    )


def test_slots_filled_in_any_order_give_a_file_that_torch_loads(tmp_path: Path) -> None:
    numbers = torch.arange(10.0)
    tree = {
        "first": NewTensor(FLOAT, (2, 5), "a"),
        "view": NewTensor(FLOAT, (3,), "a", storage_offset=4),
        "step": NewTensor(DTYPES["int64"], (), ("w", "step")),
        "empty": NewTensor(FLOAT, (0, 3), "nothing"),
        "half": NewTensor(DTYPES["bfloat16"], (4,), "h", requires_grad=True),
        "known": NewTensor(FLOAT, (2,), data=b"\0\0\x80?\0\0\0@"),
    }
    layout = lay_out_archive(tree, "fp32")
    assert [slot.label for slot in layout.slots] == ["a", ("w", "step"), "h"]
    assert [slot.nbytes for slot in layout.slots] == [40, 8, 8]
    assert all(slot.offset % 64 == 0 for slot in layout.slots)
    assert layout.slots[0].tensors == (tree["first"], tree["view"])
    path = tmp_path / "fp32.pt"
    half = torch.arange(4, dtype=torch.bfloat16)
    contents: dict[object, bytes] = {
        "a": raw_bytes(numbers),
        ("w", "step"): raw_bytes(torch.tensor(3)),
        "h": raw_bytes(half),
    }
    fill(path, layout, contents)
    assert path.stat().st_size == layout.size
    check_with_others(path)
    for loaded in (
        torch.load(path),
        torch.load(path, mmap=True),
        torch.load(path, weights_only=True, mmap=True),
    ):
        assert torch.equal(loaded["first"], numbers.view(2, 5))
        assert torch.equal(loaded["view"], numbers[4:7])
        assert loaded["view"].untyped_storage().data_ptr() == (
            loaded["first"].untyped_storage().data_ptr()
        )
        assert loaded["step"].item() == 3
        assert loaded["empty"].shape == (0, 3)
        assert torch.equal(loaded["half"], half)
        assert loaded["half"].requires_grad
        assert loaded["known"].tolist() == [1.0, 2.0]
    assert not read_archive(path).problems


def test_literals_and_slots_tile_the_file() -> None:
    tree = [NewTensor(FLOAT, (5,), number) for number in range(300)]
    layout = lay_out_archive(tree, "x")
    spans = [(offset, len(data)) for offset, data in layout.literals]
    spans += [(slot.offset, slot.nbytes) for slot in layout.slots]
    position = 0
    for offset, length in sorted(spans):
        assert offset == position
        position += length
    assert position == layout.size


@pytest.mark.parametrize("count", [1, 400])
def test_file_is_byte_for_byte_what_torch_writes(count: int, tmp_path: Path) -> None:
    tensors = [torch.full((3, number % 4), float(number)) for number in range(count)]
    tensors[0] = torch.arange(6.0)
    path = tmp_path / "same.pt"
    torch.save(
        [plain_tree(tensors), {1, 2}, torch.Size((2, 3)), torch.device("cuda", 1), torch.float16],
        path,
    )
    mine = tmp_path / "mine" / "same.pt"
    mine.parent.mkdir()
    made = [
        NewTensor(FLOAT, tuple(tensor.shape), at, data=raw_bytes(tensor))
        for at, tensor in enumerate(tensors)
    ]
    write_archive(
        mine, [plain_tree(made), {2, 1}, Size((2, 3)), Device("cuda", 1), DTYPES["float16"]]
    )
    theirs, ours = path.read_bytes(), mine.read_bytes()
    with zipfile.ZipFile(mine) as zipped:
        directory = zipped.start_dir
    # torch ends with one record more, a random number.
    assert theirs[:directory] == ours[:directory]
    with zipfile.ZipFile(path) as zipped:
        their_directory = theirs[zipped.start_dir :]
    entries = ours[directory : ours.rfind(b"PK\6\6")]
    assert their_directory.startswith(entries)


def test_torch_computes_the_places_of_storages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "places.pt"
    tensors = {str(n): torch.full((n,), float(n)) for n in range(40)}
    made = {
        key: NewTensor(FLOAT, tuple(tensor.shape), key, data=raw_bytes(tensor))
        for key, tensor in tensors.items()
    }
    write_archive(path, made)
    # With this variable torch checks every computed place against the header.
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    places = {"load.calculate_storage_offsets": True}
    with config.patch(places):  # type: ignore[attr-defined]
        for loaded in (torch.load(path), torch.load(path, mmap=True)):
            assert all(torch.equal(loaded[key], tensor) for key, tensor in tensors.items())


def test_equal_trees_give_equal_bytes_whatever_the_hash_seed() -> None:
    program = """
import hashlib
from reshard.formats.dtypes import DTYPES
from reshard.formats.torch_archive import NewTensor, lay_out_archive
tree = {"s": {"b", "a", "c", "long name"}, "f": frozenset([(1, "x"), (2, "y"), None, 3, "z"]),
        "t": NewTensor(DTYPES["float32"], (3,), "k")}
layout = lay_out_archive(tree, "n")
print(hashlib.sha256(repr((layout.size, layout.literals)).encode()).hexdigest())
"""
    digests = set()
    for seed in ("0", "1", "77"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, check=True
        )
        digests.add(run.stdout)
    assert len(digests) == 1


@pytest.mark.parametrize("name", ["float8_e4m3fn", "uint16", "float16", "complex64", "bool"])
def test_new_tensors_of_every_kind_of_storage(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name)
    raw = bytes([0, 1]) * (4 * DTYPES[name].itemsize)
    path = tmp_path / "kind.pt"
    write_archive(
        path,
        {
            "whole": NewTensor(DTYPES[name], (8,), "s", data=raw),
            "part": NewTensor(DTYPES[name], (2, 2), "s", storage_offset=1, strides=(2, 1)),
        },
    )
    loaded = torch.load(path, weights_only=True)
    assert loaded["whole"].dtype is dtype
    assert raw_bytes(loaded["whole"]) == raw
    assert raw_bytes(loaded["part"]) == raw_bytes(loaded["whole"][1:5])
    read = read_archive(path)
    assert [record.dtype.name for record in read.tensors] == [name, name]


def test_parameters_and_attributes(tmp_path: Path) -> None:
    data = raw_bytes(torch.arange(2.0))
    path = tmp_path / "wrapped.pt"
    write_archive(
        path,
        [
            NewTensor(FLOAT, (2,), data=data, is_parameter=True, requires_grad=True),
            NewTensor(FLOAT, (2,), data=data, is_parameter=True, attributes={"tag": 1}),
            NewTensor(FLOAT, (2,), data=data, requires_grad=True, attributes={"ds_id": "0_8"}),
        ],
    )
    parameter, tagged, flat = torch.load(path, weights_only=True)
    assert isinstance(parameter, torch.nn.Parameter)
    assert parameter.requires_grad
    assert isinstance(tagged, torch.nn.Parameter)
    assert not tagged.requires_grad
    assert tagged.tag == 1  # type: ignore[attr-defined]
    assert flat.ds_id == "0_8"
    assert flat.requires_grad
    assert flat.is_leaf


def test_a_storage_is_as_long_as_its_longest_tensor() -> None:
    tree = [NewTensor(FLOAT, (2,), "s"), NewTensor(FLOAT, (2,), "s", storage_offset=6)]
    (slot,) = lay_out_archive(tree, "x").slots
    assert slot.nbytes == 32
    (slot,) = lay_out_archive([NewTensor(FLOAT, (2,), "s", storage_numel=100)], "x").slots
    assert slot.nbytes == 400


def test_the_same_tensor_twice_is_one(tmp_path: Path) -> None:
    tensor = NewTensor(FLOAT, (2,), data=bytes(8))
    path = tmp_path / "twice.pt"
    write_archive(path, [tensor, tensor, NewTensor(FLOAT, (2,), data=bytes(8))])
    first, second, third = torch.load(path)
    assert first is second
    assert third is not first


@pytest.mark.parametrize(
    ("tree", "what"),
    [
        (object(), "cannot be written.*object"),
        ([lambda: 0], "cannot be written.*function"),
        ([NewTensor(FLOAT, (2,), "s"), NewTensor(DTYPES["int8"], (2,), "s")], "two types"),
        (NewTensor(FLOAT, (2,), data=b"1234"), "expected 8 bytes, found 4 bytes"),
        (NewTensor(FLOAT, (2,)), "has no bytes"),
    ],
)
def test_what_cannot_be_written(tree: object, what: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=what):
        write_archive(tmp_path / "x.pt", tree)
    assert not (tmp_path / "x.pt").exists()


@pytest.mark.parametrize("name", ["", "a/b", "nul\0", "x" * 2000])
def test_names_of_archives(name: str) -> None:
    with pytest.raises(UsageError, match="plain name"):
        lay_out_archive({}, name)


def test_wrong_new_tensors() -> None:
    with pytest.raises(UsageError, match="negative"):
        NewTensor(FLOAT, (-1,))
    with pytest.raises(UsageError, match="as many strides"):
        NewTensor(FLOAT, (1,), strides=(1, 1))


def test_more_storages_than_16_bits_count(tmp_path: Path) -> None:
    layout = ZipLayout()
    layout.add("many/data.pkl", 4, data=b"\x80\x02N.", crc32=zlib.crc32(b"\x80\x02N."))
    for number in range(65_600):
        layout.add(f"many/data/{number}", 0)
    _, ((start, whole),), _ = layout.finish()
    assert start == 0
    path = tmp_path / "many.pt"
    path.write_bytes(whole)
    assert read_archive(path).root is None
    with zipfile.ZipFile(path) as zipped:
        assert len(zipped.namelist()) == 65_601


def test_deep_and_long_trees(tmp_path: Path) -> None:
    deep: list[object] = []
    for _ in range(150):
        deep = [deep, {"k": deep}]
    path = tmp_path / "deep.pt"
    write_archive(path, [deep, list(range(2500)), {str(n): n for n in range(1001)}])
    loaded = torch.load(path)
    assert loaded[1] == list(range(2500))
    assert loaded[2] == {str(n): n for n in range(1001)}
    assert loaded[0][0] is loaded[0][1]["k"]


def test_a_tree_nested_too_deep_is_refused(tmp_path: Path) -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UsageError, match="a value is nested too deep to be written"):
        write_archive(tmp_path / "deep.pt", deep)
    assert not (tmp_path / "deep.pt").exists()


# -------------------------------------------------------------------------------- beyond 4 GiB

GIB = 1 << 30


def sparse(path: Path, layout: ArchiveLayout) -> None:
    """Write the literals only; the rest are holes, whose checksums are wrong."""
    with path.open("wb") as file:
        file.truncate(layout.size)
        for offset, literal in layout.literals:
            file.seek(offset)
            file.write(literal)


@pytest.fixture
def large(tmp_path: Path) -> tuple[Path, ArchiveLayout]:
    """A sparse file with storages below, at and beyond 4 GiB, and some that start there."""
    sizes = {"a": 3, "b": 5 * GIB // 4, "c": 7, "d": (4 * GIB - 4) // 4, "e": 0, "f": GIB, "g": 2}
    tree = {key: NewTensor(FLOAT, (numel,), key) for key, numel in sizes.items()}
    tree["h"] = NewTensor(FLOAT, (2,), "h", data=raw_bytes(torch.tensor([1.0, 2.0])))
    tree["i"] = NewTensor(DTYPES["uint8"], (4 * GIB - 1,), "i")
    layout = lay_out_archive(tree, "large")
    path = tmp_path / "large.pt"
    sparse(path, layout)
    return path, layout


def test_zip64_is_what_torch_writes(large: tuple[Path, ArchiveLayout], tmp_path: Path) -> None:
    path, _ = large
    sizes = {"a": 3, "b": 5 * GIB // 4, "c": 7, "d": (4 * GIB - 4) // 4, "e": 0, "f": GIB, "g": 2}
    # The memory is never touched, and not written.
    tensors = {key: torch.empty(numel) for key, numel in sizes.items()}
    tensors["h"] = torch.empty(2)
    tensors["i"] = torch.empty(4 * GIB - 1, dtype=torch.uint8)
    theirs = tmp_path / "theirs" / "large.pt"
    theirs.parent.mkdir()
    with torch.serialization.skip_data():
        torch.save(tensors, theirs)
    with zipfile.ZipFile(path) as mine, zipfile.ZipFile(theirs) as other:
        for info in mine.infolist():
            known = other.getinfo(info.filename)
            assert (info.header_offset, info.file_size) == (known.header_offset, known.file_size)
            assert (info.extra, info.flag_bits) == (known.extra, known.flag_bits)
        with path.open("rb") as left, theirs.open("rb") as right:
            for info in mine.infolist():
                left.seek(info.header_offset)
                right.seek(info.header_offset)
                assert left.read(128)[:64] == right.read(128)[:64], info.filename


def test_zip64_is_read_by_everyone(large: tuple[Path, ArchiveLayout]) -> None:
    path, layout = large
    archive = read_archive(path)
    assert archive.size == layout.size > 14 * GIB
    offsets = {slot.label: (slot.offset, slot.nbytes) for slot in layout.slots}
    for name, record in archive.root.items():  # type: ignore[attr-defined]
        if name in offsets:
            assert (record.offset, record.nbytes) == offsets[name]
    loaded = torch.load(path, mmap=True)
    assert loaded["b"].numel() == 5 * GIB // 4
    assert loaded["b"][-1].item() == 0.0
    assert loaded["h"].tolist() == [1.0, 2.0]
    assert loaded["i"].numel() == 4 * GIB - 1
    with zipfile.ZipFile(path) as zipped:
        assert zipped.getinfo("large/data/1").file_size == 5 * GIB


def test_checksums_go_where_readers_look_beyond_4_gib(tmp_path: Path) -> None:
    tree = {"b": NewTensor(FLOAT, (5 * GIB // 4,), "b"), "c": NewTensor(FLOAT, (2,), "c")}
    layout = lay_out_archive(tree, "x")
    path = tmp_path / "x.pt"
    sparse(path, layout)
    content = raw_bytes(torch.tensor([3.0, 4.0]))
    slot = layout.slots[1]
    assert slot.offset > 5 * GIB
    with path.open("r+b") as file:
        file.seek(slot.offset)
        file.write(content)
        for offset in slot.crc_offsets:
            file.seek(offset)
            file.write(zlib.crc32(content).to_bytes(4, "little"))
    with zipfile.ZipFile(path) as zipped:
        assert zipped.read("x/data/1") == content
    if shutil.which("unzip"):
        run = subprocess.run(
            ["unzip", "-tq", path, "x/data/1", "x/data.pkl", "x/version"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stdout
