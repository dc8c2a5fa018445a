"""Where elements and pieces lie in files: checked by reading the bytes there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.api import element_location, find_tensor, piece_ranges
from reshard.api.locating import shard_offset
from reshard.errors import UsageError
from reshard.formats.checkpoint import Checkpoint, Region, StoredTensor
from reshard.formats.dtypes import DType
from reshard.geometry import AffinePiece, ParamAffineMap
from tests.faces.samples import SHAPES, values

FLOAT = DType.named("float32")


def test_every_element_is_where_it_is_said_to_be(sample: Checkpoint) -> None:
    for tensor in sample.tensors.values():
        truth = values(tensor.name, tensor.state)
        for index in np.ndindex(tensor.shape):
            found = element_location(tensor, index)
            assert len(found) == (1 if tensor.shape else 2)
            for place in found:
                raw = Path(place.file).read_bytes()[place.offset : place.offset + place.nbytes]
                assert raw == truth[index].tobytes()


@pytest.mark.parametrize("index", [(6, 0), (0, 4), (-1, 0), (0,), (0, 0, 0)])
def test_an_index_outside_is_refused(sample: Checkpoint, index: tuple[int, ...]) -> None:
    tensor = find_tensor(sample, "embed.weight")
    with pytest.raises(UsageError, match=r"expected an index into \[6, 4\]"):
        element_location(tensor, index)


def test_ranges_are_absolute_bytes_of_the_file(sample: Checkpoint) -> None:
    tensor = find_tensor(sample, "layers.0.weight", "exp_avg")
    first, second = piece_ranges(tensor)
    assert (first.holder, second.holder) == (0, 1)
    assert (first.run_nbytes, first.runs) == (32, 1)
    for part in (first, second):
        raw = Path(part.file).read_bytes()[part.start : part.stop]
        half = values("layers.0.weight", "exp_avg").reshape(2, 8)[part.holder]
        assert raw == half.tobytes()


def stored(piece: AffinePiece, numel: int, shard: tuple[int, ...]) -> StoredTensor:
    regions = {0: Region("f", 100, 4 * numel)}
    return StoredTensor(
        "w", "fp32", FLOAT, ParamAffineMap((64,), {0: shard}, {0: [piece]}), regions
    )


@pytest.mark.parametrize(
    ("shape", "strides", "run", "runs", "span"),
    [
        ((4, 4), (4, 1), 16, 1, 16),
        ((4, 2), (4, 1), 2, 4, 14),
        ((4, 4), (1, 4), 1, 16, 16),
        ((2, 1, 4), (8, 99, 1), 4, 2, 12),
        ((2, 2, 4), (16, 4, 1), 8, 2, 24),
        ((), (), 1, 1, 1),
        ((0, 4), (4, 1), 0, 1, 0),
    ],
)
def test_a_strided_piece_is_runs_within_a_span(
    shape: tuple[int, ...], strides: tuple[int, ...], run: int, runs: int, span: int
) -> None:
    piece = AffinePiece(shape, 0, strides, 2, strides, (0,))
    (found,) = piece_ranges(stored(piece, 64, (64,)))
    assert (found.start, found.stop) == (108, 108 + 4 * span)
    assert found.run_nbytes * found.runs == 4 * run * runs
    if span:
        assert (found.run_nbytes, found.runs) == (4 * run, runs)


blocks = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9), st.integers(0, 9)), max_size=3)


@given(blocks, st.integers(0, 5), st.integers(0, 60))
def test_an_element_is_found_in_a_piece_exactly_when_it_is_there(
    axes: list[tuple[int, int, int]], offset: int, wanted: int
) -> None:
    shape, source, dest = (tuple(axis[side] for axis in axes) for side in range(3))
    piece = AffinePiece(shape, offset, source, 7, dest, (0,))
    there = {
        7 + sum(i * d for i, d in zip(index, dest, strict=True))
        for index in np.ndindex(shape)
        if offset + sum(i * s for i, s in zip(index, source, strict=True)) == wanted
    }
    found = shard_offset(piece, wanted)
    assert (found in there) if there else found is None


def test_the_first_state_is_taken_when_none_is_named(sample: Checkpoint) -> None:
    assert find_tensor(sample, "embed.weight").state == "fp32"


def test_a_tied_name_means_its_owner(sample: Checkpoint) -> None:
    assert find_tensor(sample, "head.weight").name == "embed.weight"


def test_an_unknown_name_is_refused_with_the_closest(sample: Checkpoint) -> None:
    with pytest.raises(UsageError, match=r"parameter layers\.0\.biass; next: did you mean lay"):
        find_tensor(sample, "layers.0.biass")


def test_a_name_like_no_other_is_told_where_to_look(sample: Checkpoint) -> None:
    with pytest.raises(UsageError, match="reshard inspect --tensors"):
        find_tensor(sample, "qqqqqqqqqqqqqq")


def test_an_unknown_state_is_refused_with_the_known_ones(sample: Checkpoint) -> None:
    with pytest.raises(UsageError, match="state step: expected one of fp32, exp_avg"):
        find_tensor(sample, "embed.weight", "step")


def test_the_sample_is_what_it_claims() -> None:
    assert set(SHAPES) == {"embed.weight", "layers.0.weight", "layers.0.bias", "norm.scale"}
