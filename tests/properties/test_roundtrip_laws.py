"""Extract, then rebuild: every bit comes back, and holders that disagree are named."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from numpy.typing import NDArray

from reshard.errors import InvalidMapError, ReplicaMismatchError
from reshard.geometry import ParamAffineMap
from tests.properties import dense_oracle as dense
from tests.properties.strategies import SETTINGS, Case, cases

DTYPES = (np.uint8, np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex128)


def any_bits(case: Case, dtype: Any) -> NDArray[Any]:
    """Values with random bits: NaN payloads, infinities, denormals, -0.0."""
    rng = np.random.default_rng(case.seed)
    raw = rng.integers(0, 256, case.total * np.dtype(dtype).itemsize, np.uint8)
    values: NDArray[Any] = raw.view(dtype)
    return values


def bits(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def expected_shard(one: ParamAffineMap, full: NDArray[Any], rank: int) -> NDArray[Any]:
    made = np.empty(dense.size(one.shard_shapes[rank]), full.dtype)
    for holder, d, s, _, _ in dense.relation(one):
        if holder == rank:
            made[d] = full[s]
    return made.reshape(one.shard_shapes[rank])


def shards_of(one: ParamAffineMap, full: NDArray[Any]) -> dict[int, NDArray[Any]]:
    return {rank: one.extract(full.reshape(one.logical_shape), rank) for rank in one.ranks}


@SETTINGS
@given(cases)
def test_a_shard_holds_what_the_dense_map_says(case: Case) -> None:
    one, full = case.map(), any_bits(case, np.float32)
    for rank, shard in shards_of(one, full).items():
        expected = expected_shard(one, full, rank)
        assert shard.shape == expected.shape
        assert bits(shard) == bits(expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@SETTINGS
@given(case=cases)
def test_numpy_round_trip_keeps_every_bit(dtype: Any, case: Case) -> None:
    one, full = case.map(), any_bits(case, dtype)
    again = one.rebuild(shards_of(one, full))
    assert (again.shape, again.dtype) == (one.logical_shape, full.dtype)
    assert bits(again) == bits(full)


@pytest.mark.parametrize(
    ("raw", "dtype"), [(torch.int16, torch.bfloat16), (torch.int32, torch.float32)]
)
@SETTINGS
@given(case=cases)
def test_torch_round_trip_keeps_every_bit(raw: torch.dtype, dtype: torch.dtype, case: Case) -> None:
    one = case.map()
    kept = torch.from_numpy(any_bits(case, np.int16 if raw is torch.int16 else np.int32))
    full = kept.view(dtype).reshape(one.logical_shape)
    shards = {rank: one.extract(full, rank) for rank in one.ranks}
    assert all(tuple(shards[r].shape) == one.shard_shapes[r] for r in one.ranks)
    again = one.rebuild(shards)
    assert again.dtype == dtype
    assert torch.equal(again.reshape(-1).view(raw), kept)


@SETTINGS
@given(cases)
def test_views_into_larger_buffers_are_read_where_they_begin(case: Case) -> None:
    one, full = case.map(), any_bits(case, np.int32)
    shards = {
        rank: torch.cat([torch.zeros(3, dtype=torch.int32), torch.from_numpy(shard).reshape(-1)])[
            3:
        ]
        for rank, shard in shards_of(one, full).items()
    }
    assert bits(one.rebuild(shards).numpy()) == bits(full)
    wide = np.stack([full, full], axis=1)[:, 1]
    for rank, shard in shards_of(one, full).items():
        assert bits(one.extract(wide, rank)) == bits(shard)


@SETTINGS
@given(cases)
def test_scales_are_applied_and_taken_back(case: Case) -> None:
    one = case.map(scaled=True)
    full = np.random.default_rng(case.seed).integers(-99, 99, case.total).astype(np.float32)
    shards = shards_of(one, full)
    for (rank, d), (s, scale) in dense.places(one).items():
        assert shards[rank].reshape(-1)[d] == full[s] * np.float32(scale)
    assert bits(one.rebuild(shards)) == bits(full)


@SETTINGS
@given(cases)
def test_replicas_that_differ_are_refused_with_ranks_and_offset(case: Case) -> None:
    one = case.map()
    full = any_bits(case, np.uint16)
    shards = {rank: shard.copy() for rank, shard in shards_of(one, full).items()}
    held = dense.holders(one)
    shared = sorted(place for place, (s, _) in dense.places(one).items() if len(held[s]) > 1)
    if not shared:
        return
    rank, d = case.random("place").choice(shared)
    shards[rank].reshape(-1)[d] ^= 1
    s, _ = dense.places(one)[rank, d]
    with pytest.raises(ReplicaMismatchError) as refused:
        one.rebuild(shards)
    assert refused.value.offset == s
    assert set(refused.value.ranks) <= held[s]
    assert rank in refused.value.ranks


@SETTINGS
@given(cases)
def test_a_missing_rank_matters_only_when_no_other_holds_its_elements(case: Case) -> None:
    one, full = case.map(), any_bits(case, np.int64)
    assume(len(one.ranks) > 1)
    shards = shards_of(one, full)
    gone = case.random("rank").choice(one.ranks)
    del shards[gone]
    lost = [s for s, ranks in dense.holders(one).items() if ranks == {gone}]
    if lost:
        with pytest.raises(InvalidMapError) as refused:
            one.rebuild(shards)
        assert (refused.value.broken, refused.value.offset) == ("P1", min(lost))
    else:
        assert bits(one.rebuild(shards)) == bits(full)
