"""Gathering against dense indexing: any pair of layouts, any block size, any scratch size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.execution import gather
from reshard.execution.gather import Gatherer, MoveIndex
from reshard.formats.dtypes import DType
from reshard.geometry import ParamAffineMap
from reshard.planning import Move, Place, RouteBook
from reshard.planning.routes import missing
from tests.execution.raw import Array, replicated, shard_of, split
from tests.execution.strategies import layout_pairs

DTYPES = ("uint8", "bfloat16", "float32", "float64", "complex128")


class Memory:
    """Files in memory that count what is read from them."""

    def __init__(self, files: Sequence[bytes]) -> None:
        self.files = files
        self.nbytes = 0
        self.reads = 0

    def read_into(self, source: int, offset: int, buffer: memoryview) -> None:
        data = self.files[source][offset : offset + len(buffer)]
        assert len(data) == len(buffer), "a read left its file"
        buffer[:] = data
        self.nbytes += len(buffer)
        self.reads += 1


def values(shape: Sequence[int], dtype: str) -> Array:
    """Random bits of an element type, as unsigned integers of its size."""
    item = DType.named(dtype).itemsize
    count = int(np.prod(shape, dtype=np.int64)) * item
    bits = np.random.default_rng(7).integers(0, 256, count, dtype=np.uint8)
    return bits.view(f"V{item}").reshape(shape) if count else np.empty(shape, f"V{item}")


def gathered(
    source: ParamAffineMap,
    target: ParamAffineMap,
    rank: int,
    full: Array,
    *,
    dtype: str,
    block: int,
    scratch: int,
) -> tuple[bytes, Memory]:
    """The shard of a target rank, gathered in blocks of so many elements."""
    lead = b"\xaa" * 3
    memory = Memory([lead + shard_of(full, source, r).tobytes() for r in source.ranks])
    route = RouteBook().route(target, source, rank)
    assert missing(route) == 0
    places = [Place(source.ranks.index(holder), len(lead)) for holder in route.holders]
    kind = DType.named(dtype)
    worker = Gatherer(memory, memoryview(bytearray(scratch)))
    index = MoveIndex(route.moves)
    out = bytearray(route.numel * kind.itemsize)
    for start in range(0, route.numel, block):
        stop = min(start + block, route.numel)
        view = memoryview(out)[start * kind.itemsize : stop * kind.itemsize]
        worker.gather(index.within(start, stop), places, kind, start, view)
    return bytes(out), memory


@settings(deadline=None)
@given(layout_pairs(), st.sampled_from(DTYPES), st.integers(1, 40), st.sampled_from((16, 64, 4096)))
def test_blocks_equal_dense_indexing(
    pair: tuple[ParamAffineMap, ParamAffineMap], dtype: str, block: int, scratch: int
) -> None:
    source, target = pair
    full = values(source.logical_shape, dtype)
    for rank in target.ranks:
        found, _ = gathered(source, target, rank, full, dtype=dtype, block=block, scratch=scratch)
        assert found == shard_of(full, target, rank).tobytes()


@settings(deadline=None)
@given(layout_pairs(), st.integers(1, 40))
def test_sparse_reading_gives_the_same(
    pair: tuple[ParamAffineMap, ParamAffineMap], block: int
) -> None:
    source, target = pair
    full = values(source.logical_shape, "float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "CHEAP_GAP_NBYTES", 1)
        for rank in target.ranks:
            found, _ = gathered(
                source, target, rank, full, dtype="float32", block=block, scratch=64
            )
            assert found == shard_of(full, target, rank).tobytes()


@pytest.mark.parametrize("sizes", [(64, 64), (100, 28), (32, 32, 32, 32)])
@pytest.mark.parametrize("dim", [0, 1])
def test_each_source_byte_is_read_once(sizes: tuple[int, ...], dim: int) -> None:
    shape = (128, 128)
    full = values(shape, "float32")
    found, memory = gathered(
        split(shape, dim, sizes),
        replicated(shape, 1),
        0,
        full,
        dtype="float32",
        block=128 * 16,
        scratch=1 << 16,
    )
    assert found == full.tobytes()
    assert memory.nbytes == full.nbytes


def test_a_large_gap_is_not_read() -> None:
    shape = (4, 40_000)
    full = values(shape, "float32")
    narrow = split(shape, 1, (10, 39_990))
    found, memory = gathered(
        replicated(shape, 1), narrow, 0, full, dtype="float32", block=40, scratch=1 << 20
    )
    assert found == shard_of(full, narrow, 0).tobytes()
    assert (memory.nbytes, memory.reads) == (160, 4)


def test_scale_multiplies_in_single_precision() -> None:
    full = np.linspace(-3, 3, 32, dtype="f4")
    for dtype, kind in (("float32", "f4"), ("float16", "f2"), ("float64", "f8")):
        stored = full.astype(kind)
        memory = Memory([stored.tobytes()])
        worker = Gatherer(memory, memoryview(bytearray(64)))
        out = bytearray(stored.nbytes)
        move = Move((32,), 0, 0, (1,), 0, (1,), 0.1)
        worker.gather(iter([move]), [Place(0, 0)], DType.named(dtype), 0, memoryview(out))
        wide = np.float64 if kind == "f8" else np.float32
        factor = np.full(32, 0.1, wide)
        expected = np.multiply(stored.astype(wide), factor).astype(kind)
        assert out == expected.tobytes()


def test_bfloat16_scales_as_torch_does() -> None:
    torch = pytest.importorskip("torch")
    stored = torch.linspace(-3, 3, 256).to(torch.bfloat16)
    data = stored.view(torch.uint8).numpy().tobytes()
    out = bytearray(len(data))
    move = Move((256,), 0, 0, (1,), 0, (1,), 1 / 3)
    worker = Gatherer(Memory([data]), memoryview(bytearray(64)))
    worker.gather(iter([move]), [Place(0, 0)], DType.named("bfloat16"), 0, memoryview(out))
    assert out == (stored * (1 / 3)).view(torch.uint8).numpy().tobytes()


def test_an_index_finds_interleaved_moves() -> None:
    moves = [Move((100, 1), 0, 0, (1, 1), k, (10, 1)) for k in range(10)]
    index = MoveIndex([next(iter(_ordered(move))) for move in moves])
    found = sorted(part.target_offset for part in index.within(505, 515))
    assert found == list(range(505, 515))


def _ordered(move: Move) -> Sequence[Move]:
    from reshard.planning import ordered

    return list(ordered(move))
