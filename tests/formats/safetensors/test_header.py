"""Headers: byte for byte those of the ``safetensors`` library, and no lie gets through."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import ArchiveError, CheckpointError, UnsupportedError
from reshard.formats.dtypes import DTYPES
from reshard.formats.safetensors.header import CODES, header_of, read_header

library = pytest.importorskip("safetensors.torch")

TORCH_CODES = [code for code in CODES if hasattr(torch, CODES[code].name)]


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Up to six tensors of any names, element types and shapes."""
    names = draw(st.lists(st.text(max_size=8).filter(_can_be_named), max_size=6, unique=True))
    made = {}
    for name in names:
        code = draw(st.sampled_from(TORCH_CODES))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        made[name] = torch.zeros(shape, dtype=getattr(torch, CODES[code].name))
    return made


def _can_be_named(name: str) -> bool:
    return name != "__metadata__" and not any("\ud800" <= char <= "\udfff" for char in name)


@given(tensors())
def test_the_first_bytes_are_those_of_the_library(some: dict[str, torch.Tensor]) -> None:
    described = [
        (name, DTYPES[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape))
        for name, tensor in some.items()
    ]
    head, entries = header_of(described, {"format": "pt"})
    written = library.save(some, metadata={"format": "pt"})
    assert head == written[: len(head)]
    assert len(head) + (entries[-1].stop if entries else 0) == len(written)


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    some = {"b": torch.arange(6, dtype=torch.bfloat16).view(2, 3), "a": torch.tensor(True)}
    library.save_file(some, tmp_path / "x.safetensors", metadata={"who": "cares"})
    header = read_header(str(tmp_path / "x.safetensors"))
    assert header.metadata == {"who": "cares"}
    found = {entry.name: (str(entry.dtype), entry.shape) for entry in header.entries}
    assert found == {"b": ("bfloat16", (2, 3)), "a": ("bool", ())}
    raw = (tmp_path / "x.safetensors").read_bytes()[header.data :]
    entry = next(entry for entry in header.entries if entry.name == "b")
    assert raw[entry.start : entry.stop] == some["b"].view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", ["__metadata__", "lone \ud800"])
def test_a_name_that_cannot_stand_there_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="a name cannot stand in a safetensors file"):
        header_of([(name, DTYPES["float32"], ())], {})


def test_an_element_type_without_a_code_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no such element type: parameter w: found qint8"):
        header_of([("w", DTYPES["qint8"], (1,))], {})


# --------------------------------------------------------------------------- hostile files


def entry(start: int, stop: int, *, dtype: object = "F32", shape: object = None) -> object:
    """An entry of a header, by default a vector of floats that fills its range."""
    count = (stop - start) // 4
    return {
        "dtype": dtype,
        "shape": [count] if shape is None else shape,
        "data_offsets": [start, stop],
    }


def write(path: Path, table: object, nbytes: int) -> str:
    """Write a file with any header and so many zero bytes of data."""
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(nbytes))
    return str(path)


LIES = [
    ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "tensors overlap: .*parameter b: expected byte 8"),
    ({"a": entry(0, 4), "b": entry(8, 12)}, 12, "there is a hole between tensors: .*parameter b"),
    ({"a": entry(4, 8)}, 8, "there is a hole between tensors: .*parameter a: expected byte 0"),
    ({"a": entry(0, 8)}, 4, "the file is cut short: .*: expected 8 bytes of data, found 4"),
    ({"a": entry(0, 8)}, 9, "bytes after the last tensor: .*: expected 8 bytes of data, found 9"),
    ({"a": entry(0, 1 << 62)}, 4, "the file is cut short"),
    ({"a": entry(0, 8, shape=[3])}, 8, "expected 12 bytes for F32 \\[3\\], found data_offsets"),
    ({"a": entry(0, 8, shape=[1 << 40, 1 << 40])}, 8, "the bytes of a tensor are not as many"),
    ({"a": entry(8, 0, shape=[0])}, 8, "an entry of the header is unsound: .*parameter a"),
    ({"a": entry(0, 8, shape=[-2])}, 8, "expected a list of natural numbers, found \\[-2\\]"),
    ({"a": entry(0, 8, shape=[2.0])}, 8, "expected a list of natural numbers, found \\[2.0\\]"),
    ({"a": entry(0, 4, shape=[True])}, 4, "expected a list of natural numbers, found \\[True\\]"),
    ({"a": entry(0, 8, shape=[1] * 65)}, 8, "expected a list of natural numbers"),
    ({"a": entry(0, 8, shape=[10**30])}, 8, "expected a list of natural numbers"),
    ({"a": entry(0, 8, dtype=["F32"])}, 8, "an entry of the header is unsound"),
    ({"a": [0, 8]}, 8, "expected dtype, shape and data_offsets"),
    ({"a": {"dtype": "F32", "shape": []}}, 4, "expected dtype, shape and data_offsets"),
    ({"__metadata__": {"a": 1}}, 0, "__metadata__ is no table of texts"),
    ([], 0, "the header is no JSON object"),
    (b"", 0, "the header is no sound JSON"),
    (b" {}", 0, "the header is no JSON object"),
    (b"{}x", 0, "the header is no sound JSON"),
    (b'{"a": NaN}', 0, "NaN is no JSON"),
    (b'{"a": \xff}', 0, "the header is no sound JSON"),
    (b'{"a": 1, "a": 2}', 0, "'a' is there twice"),
    (b'{"a": {"dtype": "F32", "dtype": "F16"}}', 0, "'dtype' is there twice"),
    (b"[" * 100_000, 0, "the header is no sound JSON"),
    (b'{"a": ' + b"9" * 5000 + b"}", 0, "the header is no sound JSON"),
]


@pytest.mark.parametrize(("table", "nbytes", "said"), LIES)
def test_a_header_that_lies_is_refused(
    table: object, nbytes: int, said: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "x.safetensors", table, nbytes)
    with pytest.raises(ArchiveError, match=said) as caught:
        read_header(path)
    assert caught.value.file == path


@pytest.mark.parametrize("code", ["F4", "F6_E2M3", "FLOAT", ""])
def test_a_foreign_element_type_is_refused_by_name(code: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"a": entry(0, 4, dtype=code)}, 4)
    with pytest.raises(UnsupportedError, match=f"parameter a: expected one of .*, found {code}"):
        read_header(path)


@pytest.mark.parametrize("nbytes", [0, 7])
def test_a_file_without_a_length_is_refused(nbytes: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(nbytes))
    with pytest.raises(ArchiveError, match=f"cut short.*: expected 8 bytes, found {nbytes} bytes"):
        read_header(str(path))


@pytest.mark.parametrize("length", [100, 1 << 63])
def test_a_header_longer_than_the_file_is_refused(length: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(ArchiveError, match=f"expected a header of {length} bytes, found 10 bytes"):
        read_header(str(path))


def test_a_huge_header_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(100_000_009)  # sparse
    with pytest.raises(ArchiveError, match=r"the header is too long: .*found 100000001"):
        read_header(str(path))


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    whole = library.save({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.float16)})
    path = tmp_path / "x.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ArchiveError, match=re.escape(str(path))):
            read_header(str(path))
