"""States: what one rank holds, as maps and memory.

Theory. A rank says only what it holds itself. A :class:`Shard` is one state of one parameter: the
memory, and the map from the logical tensor ``F`` to that memory, whose only rank is 0. Everything
about the others, who holds the same elements and who wants them, follows when all ranks have said
theirs (:mod:`reshard.live.survey`), so nobody has to know, or can get wrong, another rank's layout.

What is no tensor (steps, parameter groups, schedules, counters) stands beside the shards as plain
values by key, and comes back to the target through ``accept``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from reshard.errors import InvalidMapError, UnsupportedError, UsageError
from reshard.geometry import AffinePiece, ParamAffineMap, nest
from reshard.geometry.index_math import numel, row_major_strides, span

TensorKey = tuple[str, str]
"""Name of the parameter and state."""


def ignore(_values: Mapping[str, object]) -> None:
    """Take nothing over."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One state of one parameter, as far as this rank holds it.

    Raises
    ------
    InvalidMapError
        When the map is not of one rank 0, or of another number of elements than the tensor has.

    Examples
    --------
    >>> rows = AffinePiece((2, 4), 8, (4, 1), 0, (4, 1), [0])
    >>> held = ParamAffineMap((4, 4), {0: (2, 4)}, {0: [rows]})
    >>> Shard("w", "fp32", held, torch.zeros(2, 4)).key
    ('w', 'fp32')
    """

    name: str
    state: str
    """Which tensor it is of; ``"fp32"`` are the weights, whatever their element type."""
    map: ParamAffineMap
    """From ``F`` to the elements of `tensor` in row-major order; its only rank is 0. It may
    leave elements of the tensor out, which then are padding."""
    tensor: torch.Tensor
    """The memory, on any device, in any strides."""

    def __post_init__(self) -> None:
        ranks = self.map.ranks
        if tuple(ranks) != (0,):
            raise InvalidMapError(
                "a shard's own map has one rank, 0",
                broken="form",
                parameter=self.name,
                found=list(ranks),
                next_step="take the rank's part of a map of many: reshard.live.shard_of",
            )
        size = numel(self.map.shard_shapes[0])
        if size != self.tensor.numel():
            raise InvalidMapError(
                "a shard has another number of elements than its map says",
                broken="form",
                parameter=self.name,
                expected=size,
                found=self.tensor.numel(),
            )

    @property
    def key(self) -> TensorKey:
        """Name and state."""
        return (self.name, self.state)

    @property
    def dtype(self) -> str:
        """Its element type, as torch calls it, without ``torch.``."""
        return str(self.tensor.dtype).removeprefix("torch.")

    def in_memory(self) -> ParamAffineMap:
        """Return the map from ``F`` to the stretch of memory that the tensor's strides span."""
        shape, strides = tuple(self.tensor.shape), tuple(self.tensor.stride())
        if self.tensor.is_contiguous():
            return self.map
        inner = AffinePiece(shape, 0, row_major_strides(shape), 0, strides, (0,))
        reach = (span(shape, strides) + 1,)
        return nest(self.map, {0: ParamAffineMap(shape, {0: reach}, {0: [inner]})})

    def memory(self) -> torch.Tensor:
        """Return that stretch of memory, flat; sharing it, never a copy."""
        plain = self.tensor.detach()
        if plain.is_conj() or plain.is_neg():
            raise UnsupportedError(
                "a lazily conjugated or negated tensor has no bits of its own",
                parameter=self.name,
                state=self.state,
                next_step="resolve it first: tensor.resolve_conj().resolve_neg()",
            )
        if not plain.numel():
            return plain.reshape(-1)
        reach = span(plain.shape, plain.stride()) + 1
        return plain.as_strided((reach,), (1,), plain.storage_offset())


def shard_of(
    name: str, state: str, whole: ParamAffineMap, rank: int, tensor: torch.Tensor
) -> Shard:
    """Return a rank's shard under a map of many ranks.

    Raises
    ------
    UsageError
        When the map does not know the rank.
    """
    if rank not in whole.shard_shapes:
        raise UsageError(
            "the map does not know this rank",
            rank=rank,
            parameter=name,
            expected=list(whole.ranks),
        )
    pieces = [piece.held_by((0,)) for piece in whole.pieces_by_rank[rank]]
    own = ParamAffineMap(whole.logical_shape, {0: whole.shard_shapes[rank]}, {0: pieces})
    return Shard(name, state, own, tensor)


@dataclass(frozen=True, slots=True, eq=False)
class LiveState:
    """What this rank has to give, or wants to be given.

    Raises
    ------
    UsageError
        When two shards are of the same state of the same parameter.
    """

    shards: tuple[Shard, ...] = ()
    """Its shards; none of a rank that only takes part."""
    values: Mapping[str, object] = field(default_factory=dict)
    """What is no tensor, by key: plain scalars, texts, lists, tuples and dictionaries of them.
    Ranks that know a key must agree on it."""
    accept: Callable[[Mapping[str, object]], None] = ignore
    """Of a target: takes the source's values over, after all tensors have arrived."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", tuple(self.shards))
        seen: set[TensorKey] = set()
        for shard in self.shards:
            if shard.key in seen:
                raise UsageError(
                    "a rank holds one state of one parameter twice",
                    parameter=shard.name,
                    state=shard.state,
                    next_step="give a tied parameter under one of its names",
                )
            seen.add(shard.key)

    def only(self, *, names: Iterable[str] = ("*",), states: Iterable[str] = ("*",)) -> LiveState:
        """Return the shards whose name and state match one of the glob patterns each."""
        chosen = [
            shard
            for shard in self.shards
            if any(fnmatch.fnmatchcase(shard.name, pattern) for pattern in names)
            and any(fnmatch.fnmatchcase(shard.state, pattern) for pattern in states)
        ]
        return replace(self, shards=tuple(chosen))

    def narrowed(self, name: str, dim: int, length: int) -> LiveState:
        """Return the state with one parameter known by its first `length` steps of a dim.

        What lies beyond, as the padding of a vocabulary, is neither given nor written.
        """
        cut = [
            replace(shard, map=shard.map.narrow(dim, 0, length)) if shard.name == name else shard
            for shard in self.shards
        ]
        return replace(self, shards=tuple(cut))
