"""Expert placement: which rank holds which experts, as one map of a fused expert parameter.

Theory. A mixture-of-experts layer keeps its experts fused in one logical tensor
``F = [num_experts, ...]``. Every rank of the expert-parallel (EP) group holds some of them, packed
in an order of its own. A *placement* is that order: for each EP rank the ordered list of global
expert ids. It may be uneven, not contiguous, replicated, or empty on some ranks; all that is asked
is that every expert is somewhere. Expert ``e`` at position ``p`` of a rank is the block
``F[e] -> shard[p]``, so a placement lowers to a map at once::

    ranks 0: [0, 1]   1: [2, 0]      F = [3, 4]
    rank 0:  F[0:1] -> [0:1] on 0, 1     F[1:2] -> [1:2] on 0
    rank 1:  F[2:3] -> [0:1] on 1        F[0:1] -> [1:2] on 0, 1

The *descriptor* is the same as plain data, version 1, as checkpoints carry it
(``{"version": 1, "num_experts": E, "ep_size": R, "ranks": [{"rank": r, "experts": [...]}, ...]}``).
It is foreign input and checked completely.

Source: `checkpoint/autoep_affine.py`, DeepSpeed 0.19.8; section 8.4 of the specification.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from reshard.errors import DocumentError, LayoutError, UsageError
from reshard.geometry import AffinePiece, ParamAffineMap
from reshard.layouts.builders import row_major_strides

PLACEMENT_VERSION = 1
"""The version of the descriptor that is written, and the only one that is read."""


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Which experts each rank of an expert-parallel group holds, in packed order.

    Parameters
    ----------
    num_experts
        Number of experts of the layer.
    experts_by_rank
        For every EP rank its global expert ids, in the order of its packed shard.

    Raises
    ------
    DocumentError
        When an id is out of range or twice on a rank, or an expert is nowhere.

    Examples
    --------
    >>> ExpertPlacement(3, ((0, 1), (2, 0))).holders(0)
    (0, 1)
    """

    num_experts: int
    experts_by_rank: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.num_experts < 1 or not self.experts_by_rank:
            _refuse("a placement has no experts or no ranks", "at least one of each", self)
        for rank, experts in enumerate(self.experts_by_rank):
            outside = [e for e in experts if not 0 <= e < self.num_experts]
            if outside:
                _refuse("unknown expert", f"ids 0 to {self.num_experts - 1}", outside, rank)
            if len(set(experts)) != len(experts):
                _refuse("a rank lists an expert twice", "distinct ids", list(experts), rank)
        placed = {expert for experts in self.experts_by_rank for expert in experts}
        missing = sorted(set(range(self.num_experts)) - placed)
        if missing:
            _refuse("experts that no rank holds", "every expert on some rank", missing)

    @property
    def ep_size(self) -> int:
        """Number of ranks of the expert-parallel group."""
        return len(self.experts_by_rank)

    def holders(self, expert: int) -> tuple[int, ...]:
        """The EP ranks that hold an expert, ascending."""
        return tuple(r for r, held in enumerate(self.experts_by_rank) if expert in held)

    def to_descriptor(self) -> dict[str, object]:
        """The placement as plain data, as checkpoints carry it."""
        ranks = [{"rank": r, "experts": list(held)} for r, held in enumerate(self.experts_by_rank)]
        return {
            "version": PLACEMENT_VERSION,
            "num_experts": self.num_experts,
            "ep_size": self.ep_size,
            "ranks": ranks,
        }


def _refuse(what: str, expected: str, found: object, rank: object = None) -> NoReturn:
    raise DocumentError(
        f"expert placement: {what}",
        rank=None if rank is None else f"ep {rank}",
        expected=expected,
        found=_shown(found),
    )


def _shown(found: object) -> str:
    text = repr(found)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --------------------------------------------------------------------------- makers


def uniform_placement(num_experts: int, ep_size: int) -> ExpertPlacement:
    """The placement that every runtime makes today: equal runs of experts, ranks ascending.

    Raises
    ------
    UsageError
        When the experts cannot be shared out evenly.

    Examples
    --------
    >>> uniform_placement(4, 2).experts_by_rank
    ((0, 1), (2, 3))
    """
    if num_experts < 1 or ep_size < 1 or num_experts % ep_size:
        fitting = [d for d in range(1, max(num_experts, 0) + 1) if num_experts % d == 0]
        raise UsageError(
            "the number of experts is not divisible by the expert-parallel degree",
            expected=f"a divisor of {num_experts}: {', '.join(map(str, fitting))}",
            found=ep_size,
            next_step="choose a degree that divides the experts of every layer",
        )
    local = num_experts // ep_size
    return ExpertPlacement(
        num_experts, tuple(tuple(range(r * local, (r + 1) * local)) for r in range(ep_size))
    )


def parse_placement(descriptor: object) -> ExpertPlacement:
    """Read a descriptor, checking everything.

    Raises
    ------
    DocumentError
        When it is malformed, of another version, or no placement.

    Examples
    --------
    >>> ranks = [{"rank": 1, "experts": [0]}, {"rank": 0, "experts": [1]}]
    >>> descriptor = {"version": 1, "num_experts": 2, "ep_size": 2, "ranks": ranks}
    >>> parse_placement(descriptor).experts_by_rank
    ((1,), (0,))
    """
    entries = _mapping(descriptor, "the descriptor")
    version = entries.get("version")
    if version != PLACEMENT_VERSION or isinstance(version, bool):
        _refuse("unknown version", str(PLACEMENT_VERSION), version)
    num_experts = _integer(entries.get("num_experts"), "num_experts", 1)
    ep_size = _integer(entries.get("ep_size"), "ep_size", 1)
    listed = _list(entries.get("ranks"), "ranks")
    if len(listed) != ep_size:
        _refuse("another number of ranks than ep_size", f"{ep_size} ranks", len(listed))
    by_rank: dict[int, tuple[int, ...]] = {}
    for entry in listed:
        fields = _mapping(entry, "an entry of ranks")
        rank = _integer(fields.get("rank"), "rank", 0)
        if rank >= ep_size or rank in by_rank:
            _refuse("ranks are not 0 to ep_size - 1, each once", f"0 to {ep_size - 1}", rank)
        experts = _list(fields.get("experts"), "experts")
        by_rank[rank] = tuple(_integer(expert, "an expert id", 0) for expert in experts)
    return ExpertPlacement(num_experts, tuple(by_rank[rank] for rank in range(ep_size)))


def _mapping(value: object, what: str) -> Mapping[object, object]:
    if not isinstance(value, Mapping):
        _refuse(f"{what} is not an object", "an object", value)
    return value


def _list(value: object, what: str) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        _refuse(f"{what} is not a list", "a list", value)
    return value


def _integer(value: object, what: str, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        _refuse(f"{what} is no count", f"an integer of at least {minimum}", value)
    return value


# --------------------------------------------------------------------------- lowering


def expert_map(placement: ExpertPlacement | object, logical_shape: Sequence[int]) -> ParamAffineMap:
    """The map of a fused expert parameter over the ranks of its expert-parallel group.

    Parameters
    ----------
    placement
        A placement, or its descriptor as plain data.
    logical_shape
        ``[num_experts, ...]``.

    Raises
    ------
    DocumentError
        When the descriptor is malformed.
    LayoutError
        When the shape does not start with the number of experts.

    Examples
    --------
    >>> print(expert_map(uniform_placement(4, 2), (4, 3)))
    4×3 over 2 ranks
      0 (2×3): F[0 + 6×1] → [0 + 6×1] on 0
      1 (2×3): F[6 + 6×1] → [0 + 6×1] on 1
    """
    placed = placement if isinstance(placement, ExpertPlacement) else parse_placement(placement)
    shape = tuple(logical_shape)
    if not shape or shape[0] != placed.num_experts:
        raise LayoutError(
            "the shape of an expert parameter does not start with the number of experts",
            expected=f"({placed.num_experts}, ...)",
            found=shape,
        )
    strides = row_major_strides(shape)
    shapes = {rank: (len(held), *shape[1:]) for rank, held in enumerate(placed.experts_by_rank)}
    pieces = {
        rank: [
            AffinePiece(
                (count, *shape[1:]),
                expert * strides[0],
                strides,
                position * strides[0],
                strides,
                locations,
            )
            for expert, position, count, locations in _runs(placed, rank)
        ]
        for rank in shapes
    }
    return ParamAffineMap(shape, shapes, pieces).canonical()


def _runs(placed: ExpertPlacement, rank: int) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
    """Runs of consecutive ids with the same holders: first id, position, count, holders."""
    held = placed.experts_by_rank[rank]
    holders = [placed.holders(expert) for expert in held]
    start = 0
    for end in range(1, len(held) + 1):
        goes_on = (
            end < len(held) and held[end] == held[end - 1] + 1 and holders[end] == holders[start]
        )
        if not goes_on:
            yield held[start], start, end - start, holders[start]
            start = end
