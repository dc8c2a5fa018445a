"""Bytes and numbers of tensors are those that torch has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from reshard.errors import ArchiveError, UnsupportedError
from reshard.formats.dtypes import DTYPES
from reshard.formats.torch_archive import Archive, read_archive, read_bytes, read_scalar
from tests.formats.torch_archive.real_files import raw_bytes

if TYPE_CHECKING:
    from pathlib import Path


def saved(folder: Path, value: object) -> Archive:
    path = folder / "saved.pt"
    torch.save(value, path)
    return read_archive(path)


def views() -> list[torch.Tensor]:
    base = torch.arange(120, dtype=torch.float32).view(2, 3, 4, 5)
    return [
        base,
        base.transpose(0, 3),
        base.permute(2, 0, 3, 1),
        base[:, 1],
        base[1, :, ::2, 1:4],
        base[..., 2],
        base.flatten()[7:20],
        base.flatten()[::7],
        torch.tensor(3.5).expand(2, 3),
        torch.arange(4.0).expand(3, 4),
        base[:, :0],
        torch.empty(0),
        torch.empty(2, 0, 3),
        torch.tensor(-0.0),
        base.flatten().as_strided((3, 3), (1, 1), 5),
    ]


def test_strided_views(tmp_path: Path) -> None:
    tensors = views()
    archive = saved(tmp_path, tensors)
    for record, tensor in zip(archive.tensors, tensors, strict=True):
        assert record.shape == tuple(tensor.shape)
        assert read_bytes(archive, record) == raw_bytes(tensor)
        assert record.is_contiguous == (tensor.is_contiguous() or not tensor.numel())


def torch_dtypes() -> list[torch.dtype]:
    found = (getattr(torch, name, None) for name in DTYPES)
    return [dtype for dtype in found if isinstance(dtype, torch.dtype)]


@pytest.mark.parametrize("dtype", torch_dtypes(), ids=str)
def test_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    name = str(dtype)[6:]
    known = DTYPES[name]
    assert known.itemsize == dtype.itemsize
    assert known.is_floating == dtype.is_floating_point
    assert known.is_complex == dtype.is_complex
    if (
        name.startswith(("q", "int", "uint"))
        and known.storage_class is None
        and name[-1] in "1234567"
    ):
        return
    if name.startswith("q"):
        return
    raw = torch.arange(48, dtype=torch.uint8)
    tensor = (raw % 2).view(torch.bool) if name == "bool" else raw.view(dtype)
    archive = saved(tmp_path, [tensor, tensor[1:3]])
    whole, part = archive.tensors
    assert whole.dtype is part.dtype is known
    assert read_bytes(archive, whole) == tensor.view(torch.uint8).numpy().tobytes()
    assert read_bytes(archive, part) == tensor[1:3].view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3, dtype=torch.int64),
        torch.tensor(-3, dtype=torch.int8),
        torch.tensor(200, dtype=torch.uint8),
        torch.tensor(3.25, dtype=torch.float64),
        torch.tensor(3.25, dtype=torch.float32),
        torch.tensor(3.25, dtype=torch.float16),
        torch.tensor(-3.25, dtype=torch.bfloat16),
        torch.tensor([[7]], dtype=torch.int32),
        torch.tensor(data=True),
    ],
    ids=lambda value: str(value.dtype),
)
def test_scalars(value: torch.Tensor, tmp_path: Path) -> None:
    archive = saved(tmp_path, value)
    found = read_scalar(archive, archive.tensors[0])
    assert found == value.item()
    assert type(found) is type(value.item())


def test_what_is_no_scalar(tmp_path: Path) -> None:
    archive = saved(tmp_path, [torch.zeros(2), torch.zeros((), dtype=torch.complex64)])
    with pytest.raises(ArchiveError, match="single number"):
        read_scalar(archive, archive.tensors[0])
    with pytest.raises(UnsupportedError, match="complex64"):
        read_scalar(archive, archive.tensors[1])


def test_large_tensors_are_not_read_by_accident(tmp_path: Path) -> None:
    archive = saved(tmp_path, torch.zeros(()).expand(1 << 20, 1 << 20))
    with pytest.raises(ArchiveError, match="too large"):
        read_bytes(archive, archive.tensors[0])
    archive = saved(tmp_path, torch.zeros(100))
    with pytest.raises(ArchiveError, match="at most 99 bytes"):
        read_bytes(archive, archive.tensors[0], largest=99)


def test_wrapped_tensors(tmp_path: Path) -> None:
    plain = torch.zeros(2)
    attributed = torch.zeros(2, requires_grad=True)
    attributed.ds_id = "0_8"  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    with_state = torch.nn.Parameter(torch.zeros(2))
    with_state.tag = 7  # type: ignore[attr-defined]
    conj = torch.zeros(2, dtype=torch.complex64).conj()
    tree = [plain, attributed, parameter, with_state, conj, parameter]
    archive = saved(tmp_path, tree)
    assert isinstance(archive.root, list)
    records = archive.root
    assert records[5] is records[2]
    assert [record.is_parameter for record in records[:5]] == [False, False, True, True, False]
    assert [record.requires_grad for record in records[:5]] == [False, True, False, True, False]
    assert records[1].attributes == {"ds_id": "0_8"}
    assert records[3].attributes == {"tag": 7}
    assert records[4].metadata == {"conj": True}
    assert archive.tensors == tuple(records[:5])
