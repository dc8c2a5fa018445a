"""Laws of chunks: any cut into boxes is the tensor; a hole or an overlap is always refused."""

from __future__ import annotations

import io
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import process_time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from reshard.errors import CheckpointError
from reshard.formats.dcp.chunks import require_whole
from reshard.formats.dcp.index import Chunk, TensorEntry
from reshard.formats.dtypes import DTYPES
from tests.formats.dcp.folders import elements, opened

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First index and extents."""


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes that make it up: cut again and again anywhere, empty parts among them."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    boxes = [(tuple(0 for _ in shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[dim]))
        boxes.append((offsets, (*sizes[:dim], at, *sizes[dim + 1 :])))
        moved = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        boxes.append((moved, (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])))
    return shape, draw(st.permutations(boxes))


def write(folder: Path, full: torch.Tensor, boxes: list[Box]) -> None:
    """Save a tensor in these boxes with torch's own classes and `torch.save`."""
    data, places = bytearray(), {}
    for offsets, sizes in boxes:
        part = full
        for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
            part = part.narrow(dim, start, size)
        buffer = io.BytesIO()
        torch.save(part.clone(), buffer)
        if part.numel():
            places[MetadataIndex("w", offsets)] = _StorageInfo(
                "__0_0.distcp", len(data), len(buffer.getvalue())
            )
        data += buffer.getvalue()
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in boxes]
    entry = TensorStorageMetadata(TensorProperties(dtype=full.dtype), full.size(), chunks)
    index = Metadata({"w": entry}, {"w": ("w",)}, places)
    (folder / "__0_0.distcp").write_bytes(data)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@given(cut=cuts())
@settings(max_examples=60, deadline=None)
def test_any_cut_is_the_tensor(folder: Path, cut: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = cut
    full = torch.arange(float(torch.Size(shape).numel())).view(shape)
    write(folder, full, boxes)
    assert torch.equal(elements(opened(folder).tensors["w", "fp32"]), full)


@given(cut=cuts(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_missing_box_is_refused(
    folder: Path, cut: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = cut
    full = torch.zeros(shape)
    held = [box for box in boxes if 0 not in box[1]]
    gone = data.draw(st.sampled_from(held))
    write(folder, full, [box for box in boxes if box != gone])
    with pytest.raises(CheckpointError) as caught:
        opened(folder)
    assert (
        caught.value.what == "chunks are missing: elements of the tensor are in none of the files"
    )
    first = tuple(int(part) for part in _first_hole(shape, held, gone))
    assert str(caught.value.found).endswith(f"the first missing is at {first}")


def _first_hole(shape: tuple[int, ...], held: list[Box], gone: Box) -> torch.Tensor:
    """The first index that no box covers, counted densely."""
    covered = torch.zeros(shape, dtype=torch.bool)
    for offsets, sizes in held:
        if (offsets, sizes) != gone:
            place = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
            covered[place] = True
    return (~covered).nonzero()[0]


@given(cut=cuts(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_box_that_reaches_into_another_is_refused(
    folder: Path, cut: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = cut
    offsets = tuple(data.draw(st.integers(0, extent - 1)) for extent in shape)
    sizes = tuple(
        data.draw(st.integers(1, extent - at)) for extent, at in zip(shape, offsets, strict=True)
    )
    boxes = [*(box for box in boxes if box[0] != offsets), (offsets, sizes)]
    held = [box for box in boxes if 0 not in box[1]]
    count = torch.zeros(shape, dtype=torch.int64)
    for at, extents in held:
        place = tuple(slice(start, start + size) for start, size in zip(at, extents, strict=True))
        count[place] += 1
    write(folder, torch.zeros(shape), boxes)
    if bool((count == 1).all()):
        assert opened(folder).tensors["w", "fp32"].shape == shape
        return
    with pytest.raises(CheckpointError) as caught:
        opened(folder)
    overlap = bool((count > 1).any())
    expected = "two chunks hold the same elements" if overlap else "chunks are missing"
    assert caught.value.what.startswith(expected)


def test_columns_by_the_ten_thousand_are_compared_in_no_time() -> None:
    """All meet along dim 0, so comparing each with each would take a quarter of a minute."""
    count = 30_000
    chunks = [Chunk((0, at), (4, 1)) for at in range(count)]
    entry = TensorEntry(DTYPES["float32"], (4, count), tuple(chunks))
    before = process_time()
    require_whole("w", entry, chunks, Path("CKPT"))
    assert process_time() - before < 5
    chunks[20_000] = Chunk((3, 19_999), (1, 2))
    with pytest.raises(CheckpointError) as caught:
        require_whole("w", entry, chunks, Path("CKPT"))
    assert str(caught.value) == (
        "two chunks hold the same elements: CKPT, parameter w: found [0:4, 19999:20000] and "
        "[3:4, 19999:20001]; next: the index is of two saves; take another checkpoint"
    )
