"""Raw checkpoints for tests: shards are files of bytes, maps are given, nothing else is in the way.

The oracle everywhere is NumPy on full arrays: a shard is `full.reshape(-1)[index]`, where `index`
is a dense array of offsets made from the pieces element by element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.formats.checkpoint import (
    Checkpoint,
    Region,
    Scalar,
    SourceFile,
    StoredTensor,
    TensorKey,
    Topology,
)
from reshard.formats.dtypes import DType
from reshard.formats.target import Fill, OutputFile, Slot, Target
from reshard.formats.torch_archive import crc32
from reshard.geometry import AffinePiece, ParamAffineMap

Array = NDArray[Any]


def dense(piece: AffinePiece) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Source and destination offsets of every element of a piece, as dense arrays."""
    grid = np.indices(piece.shape, dtype=np.int64)
    numel = int(np.prod(piece.shape, dtype=np.int64))
    source, dest = np.zeros(numel, np.int64), np.zeros(numel, np.int64)
    for axis, index in enumerate(grid):
        source += index.reshape(-1) * piece.source_strides[axis]
        dest += index.reshape(-1) * piece.dest_strides[axis]
    return source + piece.source_offset, dest + piece.dest_offset


def shard_of(full: Array, layout: ParamAffineMap, rank: int) -> Array:
    """The flat shard of a rank, by dense indexing."""
    size = int(np.prod(layout.shard_shapes[rank], dtype=np.int64))
    shard = np.zeros(size, full.dtype)
    flat = full.reshape(-1)
    for piece in layout.pieces_by_rank[rank]:
        source, dest = dense(piece)
        shard[dest] = flat[source]
    return shard


def split(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> ParamAffineMap:
    """A split along one axis into parts of the given sizes."""
    strides = tuple(int(np.prod(shape[k + 1 :], dtype=np.int64)) for k in range(len(shape)))
    pieces, shapes, at = {}, {}, 0
    for rank, size in enumerate(sizes):
        part = (*shape[:dim], size, *shape[dim + 1 :])
        dest = tuple(int(np.prod(part[k + 1 :], dtype=np.int64)) for k in range(len(part)))
        pieces[rank] = [AffinePiece(part, at * strides[dim], strides, 0, dest, (rank,))]
        shapes[rank] = part
        at += size
    return ParamAffineMap(tuple(shape), shapes, pieces)


def replicated(shape: Sequence[int], ranks: int) -> ParamAffineMap:
    """Every rank holds everything."""
    strides = tuple(int(np.prod(shape[k + 1 :], dtype=np.int64)) for k in range(len(shape)))
    piece = AffinePiece(tuple(shape), 0, strides, 0, strides, tuple(range(ranks)))
    return ParamAffineMap(
        tuple(shape), {r: tuple(shape) for r in range(ranks)}, {r: [piece] for r in range(ranks)}
    )


def write_checkpoint(
    folder: Path,
    tensors: Mapping[TensorKey, tuple[Array, ParamAffineMap]],
    *,
    dtype: str = "float32",
    scalars: Mapping[TensorKey, Scalar] | None = None,
    lead: int = 64,
) -> Checkpoint:
    """One file a rank, shards one after the other, `lead` bytes of something before each."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = DType.named(dtype)
    contents: dict[int, bytearray] = {}
    stored: dict[TensorKey, StoredTensor] = {}
    for key, (full, layout) in tensors.items():
        regions = {}
        for rank in layout.ranks:
            data = shard_of(full, layout, rank).tobytes()
            file = contents.setdefault(rank, bytearray())
            file += b"\xaa" * lead
            regions[rank] = Region(str(folder / f"rank_{rank}.bin"), len(file), len(data))
            file += data
        stored[key] = StoredTensor(*key, kind, layout, regions)
    for rank, content in contents.items():
        (folder / f"rank_{rank}.bin").write_bytes(content)
    files = tuple(
        SourceFile(str(folder / f"rank_{rank}.bin"), len(content), "shards")
        for rank, content in sorted(contents.items())
    )
    return Checkpoint(
        "raw", str(folder), Topology(dp=len(files)), stored, scalars=scalars or {}, files=files
    )


HEADER = b"HEADER--"


def target_for(
    checkpoint: Checkpoint,
    layouts: Mapping[TensorKey, ParamAffineMap] | None = None,
    *,
    together: bool = False,
    pointer: tuple[str, str] | None = ("latest", "out"),
) -> Target:
    """One file a tensor and rank (or all in one file a rank): header, CRC, slot, trailer."""
    files: dict[str, list[Fill]] = {}
    for key, tensor in checkpoint.tensors.items():
        layout = layouts[key] if layouts else replicated(tensor.shape, 1)
        for rank in layout.ranks:
            name = f"all/{rank}.bin" if together else f"{key[0]}/{key[1]}.{rank}.bin"
            files.setdefault(name, []).append(Fill(key, tensor.dtype, layout, rank))
    return Target("raw", tuple(_file(name, fills) for name, fills in files.items()), pointer)


def _file(name: str, fills: list[Fill]) -> OutputFile:
    placed, at = [], 0
    for fill in fills:
        at = -(-at // 64) * 64
        placed.append(Fill(fill.key, fill.dtype, fill.map, fill.rank, at))
        shape = fill.map.shard_shapes[fill.rank]
        at += int(np.prod(shape, dtype=np.int64)) * fill.dtype.itemsize
    start = len(HEADER) + 4
    trailer = b"--END"
    slot = Slot(start, at, tuple(placed), (len(HEADER),))
    literals = ((0, HEADER + b"\0" * 4), (start + at, trailer))
    return OutputFile(name, start + at + len(trailer), literals, (slot,))


def expected_file(fulls: Mapping[TensorKey, Array], output: OutputFile) -> bytes:
    """The bytes an output file must have, by dense indexing."""
    (slot,) = output.slots
    body = bytearray(slot.nbytes)
    for fill in slot.fills:
        data = shard_of(fulls[fill.key], fill.map, fill.rank).tobytes()
        body[fill.offset : fill.offset + len(data)] = data
    crc = crc32(bytes(body)).to_bytes(4, "little")
    return HEADER + crc + bytes(body) + b"--END"


def tree(folder: Path) -> dict[str, bytes]:
    """Every file of a folder with its bytes."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
