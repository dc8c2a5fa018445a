"""Tensors of torch as shards: a ``DTensor`` by its mesh and placements, another as a whole.

Theory. A placement cuts one dim over one dim of the mesh, as ``torch.chunk`` does: the last ranks
may get less, or nothing. Placements of one tensor dim cut what the one before them left, in the
order of the mesh dims. ``_StridedShard``, which FSDP2 makes over tensor parallelism, says that the
order was another: it comes after the placements whose degrees its factor is the product of. DTensor
reads it from left to right, by cutting into `factor` parts first; where sizes do not divide the two
readings differ, and the number of elements that the rank really has tells which one is true. So
what a rank holds is a list of indices along each dim, and its shard the product of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from reshard.errors import UnsupportedError
from reshard.geometry import AffinePiece, ParamAffineMap
from reshard.geometry.index_math import numel, row_major_strides
from reshard.geometry.ordering import Ints
from reshard.layouts import replicated_map
from reshard.live.states import Shard

Cut = tuple[int, int, int]
"""What a placement does to one tensor dim: degree, this rank's index, factor (1 of a plain one)."""
Run = tuple[int, int, int]
"""Neighbouring indices: first index, place in the shard's dim, how many."""


def tensor_shards(name: str, state: str, tensor: torch.Tensor) -> Iterator[Shard]:
    """Yield the shard of a tensor that this rank holds, if it holds one.

    Raises
    ------
    UnsupportedError
        When a placement is a sum that is not made yet, or its reading is not known.
    """
    if not isinstance(tensor, DTensor):
        yield Shard(name, state, replicated_map(tuple(tensor.shape), 1), tensor.detach())
        return
    place = tensor.device_mesh.get_coordinate()
    if place is not None:
        local = tensor.to_local().detach()
        yield Shard(name, state, _map_of(name, tensor, place, local), local)


def _map_of(
    name: str, tensor: DTensor, place: Sequence[int], local: torch.Tensor
) -> ParamAffineMap:
    shape = tuple(tensor.shape)
    cuts = _cuts_by_dim(name, tensor, place)
    for in_order in (_strided_last, _left_to_right):
        read = [in_order(extent, cuts.get(dim, [])) for dim, extent in enumerate(shape)]
        held = [index for index in read if index is not None]
        if len(held) == len(shape) and tuple([len(index) for index in held]) == tuple(local.shape):
            return _product_map(shape, held)
    raise UnsupportedError(
        "a DTensor's own part is not what its placements say",
        parameter=name,
        expected=f"a part of {shape} by {tensor.placements} at {tuple(place)}",
        found=tuple(local.shape),
        next_step="describe this tensor with a map (reshard.live.Shard)",
    )


def _cuts_by_dim(name: str, tensor: DTensor, place: Sequence[int]) -> dict[int, list[Cut]]:
    cuts: dict[int, list[Cut]] = {}
    for degree, index, placement in zip(
        tensor.device_mesh.shape, place, tensor.placements, strict=True
    ):
        cut: Any = placement
        if placement.is_replicate():
            continue
        if placement.is_partial() or not hasattr(placement, "dim"):
            raise UnsupportedError(
                "a DTensor is not cut, but a sum that is not made yet",
                parameter=name,
                found=str(placement),
                next_step="redistribute it to Shard or Replicate first",
            )
        factor = int(getattr(placement, "split_factor", 1))
        cuts.setdefault(cut.dim % tensor.ndim, []).append((degree, index, factor))
    return cuts


def _chunk(indices: Ints, degree: int, index: int) -> Ints:
    """Return one part of as many as `torch.chunk` makes, empty ones too."""
    size = -(-len(indices) // degree)
    return indices[index * size : (index + 1) * size]


def _strided_last(extent: int, cuts: Sequence[Cut]) -> Ints | None:
    """Return the indices when strided cuts come after those that their factors count, or None."""
    held, degrees = np.arange(extent, dtype=np.int64), 1
    plain = [cut for cut in cuts if cut[2] == 1]
    strided = [cut for cut in reversed(cuts) if cut[2] > 1]
    for degree, index, factor in (*plain, *strided):
        if factor > 1 and factor != degrees:
            return None
        held, degrees = _chunk(held, degree, index), degrees * degree
    return held


def _left_to_right(extent: int, cuts: Sequence[Cut]) -> Ints | None:
    """Return the indices as DTensor reads them: strided cuts take a part of each of some parts."""
    held = np.arange(extent, dtype=np.int64)
    for degree, index, factor in cuts:
        parts = [_chunk(held, factor, part) for part in range(factor)]
        held = np.concatenate([_chunk(part, degree, index) for part in parts])
    return held


def _product_map(shape: tuple[int, ...], held: Iterable[Ints]) -> ParamAffineMap:
    """Return the map of a shard that has some indices of each dim."""
    indices = list(held)
    own = tuple([len(index) for index in indices])
    strides, inner = row_major_strides(shape), row_major_strides(own)
    pieces = [
        AffinePiece(
            tuple([count for _, _, count in runs]),
            sum(first * step for (first, _, _), step in zip(runs, strides, strict=True)),
            strides,
            sum(at * step for (_, at, _), step in zip(runs, inner, strict=True)),
            inner,
            (0,),
        )
        for runs in product(*[_runs(index) for index in indices])
        if numel(own)
    ]
    return ParamAffineMap(shape, {0: own}, {0: pieces})


def _runs(indices: Ints) -> list[Run]:
    """Return the stretches of neighbouring indices.

    >>> _runs(np.array([4, 5, 9]))
    [(4, 0, 2), (9, 2, 1)]
    """
    if not len(indices):
        return []
    starts = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist()]
    ends = [*starts[1:], len(indices)]
    return [(int(indices[a]), a, b - a) for a, b in zip(starts, ends, strict=True)]
