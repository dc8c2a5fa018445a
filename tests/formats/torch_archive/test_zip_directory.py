"""Whatever is wrong with a file is said in one line with the file in it."""

from __future__ import annotations

import os
import random
import struct
import time
import zipfile
from pathlib import Path

import pytest
import torch

from reshard.errors import ArchiveError, MissingFileError, ReshardError
from reshard.formats.torch_archive import (
    lay_out_archive,
    read_archive,
    read_bytes,
    short_repr,
)
from tests.formats.torch_archive.handmade import archive_bytes_at, tensor


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file as torch writes it."""
    path = tmp_path_factory.mktemp("whole") / "small.pt"
    torch.save({"w": torch.arange(12.0).view(3, 4), "step": torch.tensor(3), "n": [1, "x"]}, path)
    return path.read_bytes()


def refused(folder: Path, data: bytes) -> str:
    path = folder / "broken.pt"
    path.write_bytes(data)
    with pytest.raises(ArchiveError) as caught:
        read_archive(path)
    line = str(caught.value)
    assert "broken.pt" in line
    assert "\n" not in line
    return line


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="not there"):
        read_archive(tmp_path / "absent.pt")
    with pytest.raises(ArchiveError, match="a folder or a device"):
        read_archive(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArchiveError, match="a folder or a device"):
        read_archive(tmp_path / "pipe")
    with pytest.raises(ArchiveError, match="cannot be read"):
        read_archive(tmp_path / ("x" * 300))
    with pytest.raises(ArchiveError, match="cannot be read"):
        read_archive("nul\0")


def test_what_is_no_archive(tmp_path: Path, whole: bytes) -> None:
    assert "zero bytes" in refused(tmp_path, b"")
    assert "not a torch archive" in refused(tmp_path, b"x" * 5000)
    assert "Git LFS" in refused(tmp_path, b"version https://git-lfs.github.com/spec/v1\noid x\n")
    assert "zeros" in refused(tmp_path, whole[:-400] + bytes(400))
    assert "copy it again" in refused(tmp_path, b"PK\3\4" + b"x" * 99)


def test_cut_short_anywhere(tmp_path: Path, whole: bytes) -> None:
    for length in range(0, len(whole), 7):
        line = refused(tmp_path, whole[:length])
        assert f"found {length} bytes" in line
        assert "copy it again" in line or length < 4


def test_bytes_missing_from_the_middle(tmp_path: Path, whole: bytes) -> None:
    line = refused(tmp_path, whole[:500] + whole[600:])
    assert f"expected {len(whole)} bytes, found {len(whole) - 100} bytes" in line


def test_something_after_the_end(tmp_path: Path, whole: bytes) -> None:
    line = refused(tmp_path, whole + b"tail")
    assert f"expected {len(whole)} bytes, found {len(whole) + 4} bytes" in line


def test_every_single_byte_flip_gives_a_result_or_an_error(tmp_path: Path, whole: bytes) -> None:
    rng = random.Random(5)
    path = tmp_path / "flipped.pt"
    positions = [*range(0, 500, 2), *range(len(whole) - 900, len(whole), 2)]
    for position in positions:
        data = bytearray(whole)
        data[position] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        _open_and_use(path)


def test_random_damage_gives_a_result_or_an_error(tmp_path: Path, whole: bytes) -> None:
    rng = random.Random(11)
    path = tmp_path / "damaged.pt"
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        data = bytearray(whole)
        at = rng.randrange(len(data))
        count = rng.choice((1, 3, 64))
        kind = rng.randrange(3)
        if kind == 0:
            del data[at : at + count]
        elif kind == 1:
            data[at:at] = rng.randbytes(count)
        else:
            data[at : at + count] = rng.randbytes(count)
        path.write_bytes(data)
        _open_and_use(path)


def _open_and_use(path: Path) -> None:
    try:
        archive = read_archive(path)
        short_repr(archive.root)
        for record in archive.tensors:
            read_bytes(archive, record)
        lay_out_archive(archive.root, "again")
    except ReshardError as error:
        line = str(error)
        assert line.isprintable(), line


def _repacked(path: Path, method: int = zipfile.ZIP_STORED, skip: str = "") -> Path:
    copy = path.with_name(f"copy_{path.name}")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(copy, "w", method) as target:
        for info in source.infolist():
            if not skip or skip not in info.filename:
                target.writestr(info.filename, source.read(info))
    return copy


def test_an_archive_that_other_tools_packed(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "small.pt"
    path.write_bytes(whole)
    archive = read_archive(_repacked(path))
    assert read_bytes(archive, archive.tensors[0]) == torch.arange(12.0).numpy().tobytes()
    with pytest.raises(ArchiveError, match=r"compressed.*zip -0"):
        read_archive(_repacked(path, zipfile.ZIP_DEFLATED))
    with pytest.raises(ArchiveError, match="no pickle"):
        read_archive(_repacked(path, skip="data.pkl"))
    with pytest.raises(ArchiveError, match="lacks the bytes of storage '0'"):
        read_archive(_repacked(path, skip="data/0"))


def test_compressed_storage_is_refused(tmp_path: Path) -> None:
    path = archive_bytes_at(tmp_path / "c.pt", b"\x80\x02" + tensor() + b".")
    copy = tmp_path / "copy.pt"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(copy, "w") as target:
        for info in source.infolist():
            method = zipfile.ZIP_DEFLATED if "data/" in info.filename else zipfile.ZIP_STORED
            target.writestr(info.filename, source.read(info), method)
    with pytest.raises(ArchiveError, match=r"record 'x/data/0' is compressed"):
        read_archive(copy)


@pytest.mark.parametrize(
    ("records", "what"),
    [
        ({"byteorder": b"big"}, "big-endian"),
        ({"version": b"11\n"}, "unknown version"),
        ({"version": b"soon"}, "unknown version"),
        ({"constants.pkl": b""}, "TorchScript"),
        ({"code/__torch__.py": b""}, "TorchScript"),
        ({"data/0": bytes(15)}, "expected 16 bytes, found 15 bytes"),
    ],
)
def test_other_kinds_of_archive(records: dict[str, bytes], what: str, tmp_path: Path) -> None:
    path = archive_bytes_at(tmp_path / "odd.pt", b"\x80\x02" + tensor() + b".", records)
    with pytest.raises(ArchiveError, match=what):
        read_archive(path)


def test_real_torchscript_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "script.pt"
    with zipfile.ZipFile(path, "w") as zipped:
        zipped.writestr("s/data.pkl", b"\x80\x02N.")
        zipped.writestr("s/code/__torch__/M.py", b"")
    with pytest.raises(ArchiveError, match="TorchScript"):
        read_archive(path)


def test_the_format_before_torch_1_6_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "legacy.pt"
    torch.save({"w": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ArchiveError, match=r"before 1\.6.*torch\.save"):
        read_archive(path)


def test_a_storage_that_is_too_long_is_noted(tmp_path: Path) -> None:
    pickled = b"\x80\x02" + tensor() + b"."
    archive = read_archive(archive_bytes_at(tmp_path / "x.pt", pickled, {"data/0": bytes(20)}))
    assert archive.problems == ("storage '0' has 20 bytes where the pickle says 16",)


def test_something_after_the_pickle_is_noted(tmp_path: Path) -> None:
    archive = read_archive(archive_bytes_at(tmp_path / "x.pt", b"\x80\x02N." + b"cos\nsystem\n."))
    assert archive.root is None
    assert archive.problems == ("12 bytes follow the end of the pickle",)


def test_a_pickle_whose_checksum_fails_is_noted(tmp_path: Path, whole: bytes) -> None:
    # One letter of a text in the pickle: everything still fits together.
    data = whole.replace(b"X\x01\0\0\0x", b"X\x01\0\0\0y")
    path = tmp_path / "noted.pt"
    path.write_bytes(data)
    archive = read_archive(path)
    assert len(archive.problems) == 1
    assert "checksum" in archive.problems[0]


def test_two_records_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "twice.pt"
    with zipfile.ZipFile(path, "w") as zipped:
        zipped.writestr("x/data.pkl", b"\x80\x02N.")
        with pytest.warns(UserWarning, match="Duplicate"):
            zipped.writestr("x/data.pkl", b"\x80\x02K\x01.")
    with pytest.raises(ArchiveError, match="two records"):
        read_archive(path)


def _patched(path: Path, name: str, at: int, value: bytes) -> Path:
    """Change bytes of a record's entry in the central directory."""
    data = bytearray(path.read_bytes())
    entry = data.rfind(name.encode()) - 46
    assert data[entry : entry + 4] == b"PK\1\2"
    data[entry + at : entry + at + len(value)] = value
    path.write_bytes(data)
    return path


def test_records_that_do_not_fit(tmp_path: Path) -> None:
    pickled = b"\x80\x02" + tensor() + b"."

    def fresh() -> Path:
        return archive_bytes_at(tmp_path / "odd.pt", pickled)

    sizes = struct.pack("<2I", 60, 60)
    with pytest.raises(ArchiveError, match="overlap"):
        read_archive(_patched(fresh(), "x/data/0", 20, sizes))
    huge = struct.pack("<2I", 1 << 30, 1 << 30)
    with pytest.raises(ArchiveError, match=r"reaches into the directory|overlap"):
        read_archive(_patched(fresh(), "x/version", 20, huge))
    with zipfile.ZipFile(fresh()) as zipped:
        start = zipped.getinfo("x/data/0").header_offset
    path = fresh()
    data = bytearray(path.read_bytes())
    data[start : start + 2] = b"XX"
    path.write_bytes(data)
    with pytest.raises(ArchiveError, match=r"no local header of record 'x/data/0'"):
        read_archive(path)
    with pytest.raises(ArchiveError, match="encrypted"):
        read_archive(_patched(fresh(), "x/data/0", 8, b"\1"))
    with pytest.raises(ArchiveError, match="printable"):
        read_archive(_patched(fresh(), "x/data/0", 46, b"x/data\n0"))


def test_a_file_that_changes_after_it_was_opened(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "small.pt"
    path.write_bytes(whole)
    archive = read_archive(path)
    path.write_bytes(whole[:800])
    with pytest.raises(ArchiveError, match="changed since it was opened"):
        read_bytes(archive, archive.tensors[0])


def test_names_of_parameters_are_only_keys(tmp_path: Path) -> None:
    names = ["../../etc/passwd", "/abs", "a/b", "ünï.wéïght", "\U0001f9ea", " ", "", "a\nb", "\0"]
    path = tmp_path / "names.pt"
    torch.save({name: torch.full((2,), float(at)) for at, name in enumerate(names)}, path)
    archive = read_archive(path)
    assert isinstance(archive.root, dict)
    assert list(archive.root) == names
