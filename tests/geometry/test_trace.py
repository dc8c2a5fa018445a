"""Tracing: any function that only views becomes a map, any other is refused with the reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from reshard.errors import TraceError
from reshard.geometry import AffinePiece, ParamAffineMap, trace_map
from tests.properties import dense_oracle as dense

VIEWS: dict[str, Any] = {
    "a view": lambda full, rank: np.split(full, 2)[rank],
    "a copy": lambda full, rank: np.split(full, 2, axis=1)[rank].copy(),
    "a transposed view": lambda full, rank: np.split(full, 2, axis=1)[rank].T,
    "a stepped view": lambda full, rank: full[rank::2],
    "a reversed view": lambda full, rank: full[::-1] if rank else full[:0],
    "a flat range": lambda full, rank: full.reshape(-1)[9 * rank : 9 * rank + 15],
    "the diagonal beside the whole": lambda full, rank: full if rank else np.diagonal(full),
    "repeated elements": lambda full, rank: np.repeat(full, 2 + rank, axis=0),
    "an overwritten marker": lambda full, rank: np.negative(full, out=full)[rank::2] * -1,
    "one element more dimensions": lambda full, rank: full[None, rank::2, :, None],
    "a shuffle": lambda full, rank: np.random.default_rng(7).permutation(full.reshape(-1))[rank::2],
    "a torch view": lambda full, rank: full.chunk(2, dim=1)[rank].unsqueeze(0),
    "a torch parameter": lambda full, rank: torch.nn.Parameter(full.t()[rank::2]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_what_only_views_is_traced_exactly(name: str) -> None:
    cut = VIEWS[name]
    found = trace_map(cut, (4, 6), range(2))
    assert dense.broken(found) == set()
    assert found == found.canonical()
    numbers = np.arange(24.0).reshape(4, 6)
    given: Any = torch.from_numpy(numbers) if "torch" in name else numbers
    for rank in range(2):
        shard = cut(given.clone() if "torch" in name else given.copy(), rank)
        shard = shard.detach().numpy() if "torch" in name else shard
        assert found.shard_shapes[rank] == shard.shape
        assert np.array_equal(found.extract(numbers, rank), shard)


def test_empty_shards_empty_tensors_and_scalars_have_maps() -> None:
    some = trace_map(lambda full, rank: full if rank == 1 else full[:0], (3, 2), range(3))
    assert [len(pieces) for pieces in some.pieces_by_rank.values()] == [0, 1, 0]
    assert some.shard_shapes[0] == (0, 2)
    some.validate()
    none = trace_map(lambda full, _: full, (0, 2), range(2))
    assert list(none.pieces()) == []
    none.validate()
    scalar = trace_map(lambda full, _: full, (), [0])
    assert scalar.pieces_by_rank[0] == (AffinePiece((), 0, (), 0, (), (0,)),)


def test_holders_are_found_by_running_every_rank() -> None:
    found = trace_map(lambda full, rank: full[: 4 + rank], (6,), range(3))
    assert [found.holders(offset) for offset in range(6)] == [
        *[(0, 1, 2)] * 4,
        (1, 2),
        (2,),
    ]


@pytest.mark.parametrize("factor", [1 / 4, 1 / 3, -2.0, 1e-30])
def test_a_constant_factor_becomes_a_scale(factor: float) -> None:
    for cut in (lambda full, _: full * factor, lambda full, _: full / (1 / factor)):
        found = trace_map(cut, (5,), range(2))
        assert found.is_scaled
        for _, piece in found.pieces():
            assert piece.scale == pytest.approx(factor, rel=1e-15)
            assert piece.locations == (0, 1)


def test_each_part_keeps_its_own_factor() -> None:
    found = trace_map(lambda full, _: full * np.repeat([1.0, 0.5], 4), (8,), [0])
    whole = ParamAffineMap(
        (8,),
        {0: (8,)},
        {
            0: [
                AffinePiece((4,), 0, (1,), 0, (1,), (0,)),
                AffinePiece((4,), 4, (1,), 4, (1,), (0,), 0.5),
            ]
        },
    )
    assert found == whole


REFUSED: dict[str, tuple[Any, str]] = {
    "adding neighbours": (lambda full, _: full[:-1] + full[1:], "adds or averages"),
    "averaging": (lambda full, _: full.mean(axis=0), "adds or averages"),
    "a sum of all": (lambda full, _: full.sum(), "adds or averages"),
    "a difference": (lambda full, _: full[1:] - full[:-1], "adds or averages"),
    "adding a constant": (lambda full, _: full + 1, "adds a constant"),
    "padding with zeros": (lambda full, _: np.pad(full, 1), "no way part of F"),
    "padding with ones": (lambda full, _: np.pad(full, 1, constant_values=1.0), "adds a constant"),
    "sorting": (lambda full, _: np.sort(full, axis=0), "depends on the values"),
    "absolute values": (lambda full, _: np.abs(full), "depends on the values"),
    "squaring": (lambda full, _: full * full, "depends on the values"),
    "clipping": (lambda full, _: np.clip(full, -1, 1), "depends on the values"),
    "rounding": (lambda full, _: np.round(full), "depends on the values"),
    "normalising": (lambda full, _: full / np.abs(full).max(), "depends on the values"),
    "choosing by value": (lambda full, _: full[full > 0], "by value"),
    "another dtype": (lambda full, _: full.astype(np.float32), "changes the dtype"),
    "an integer dtype": (lambda full, _: full.astype(int), "changes the dtype"),
    "no tensor": (lambda *_: None, "returns no tensor"),
    "a failure": (lambda full, _: full.no_such_method(), "failed: AttributeError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_a_view_is_refused_with_the_reason(name: str) -> None:
    cut, said = REFUSED[name]

    def guarded(full: Any, rank: int) -> Any:
        return cut(full, rank) if rank == 2 else full

    with pytest.raises(TraceError, match=said) as refused:
        trace_map(guarded, (6, 4), range(3))
    assert refused.value.rank == 2


def test_without_ranks_there_is_no_map() -> None:
    with pytest.raises(TraceError) as caught:
        trace_map(lambda full, rank: full[rank:], (4,), [])
    assert str(caught.value) == "there is no rank to call the partition function for"
