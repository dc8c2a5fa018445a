"""Expert placement: which experts each rank of an expert-parallel group holds.

Theory. A layer's experts are one logical tensor `[num_experts, …]`, and each rank of the
expert-parallel group holds some of them, packed, in an order of its own. The *placement descriptor*
says which, as plain data::

    {
        "version": 1,
        "num_experts": 4,
        "ep_size": 2,
        "ranks": [{"rank": 0, "experts": [0, 1]}, {"rank": 1, "experts": [3, 2]}],
    }

Ranks are those of the expert-parallel group. An expert may be held by several ranks, a rank may
hold none, and neither counts nor order need be regular; but every expert is held, no rank holds one
twice, and every rank of the group is listed once. The descriptor records where experts were, not
where they should go.

The map follows: expert after expert a block of dim 0, neighbours joined where one rank holds both
alone. A replicated expert is always a piece of its own, because DeepSpeed compares stored maps with
its own spelling, field by field.

Sources: specification §8.4; `checkpoint/autoep_affine.py`, DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from reshard.errors import LayoutError
from reshard.geometry import ParamAffineMap
from reshard.layouts.ranges import ranges_map

PLACEMENT_VERSION = 1
"""The version of the descriptor that is read and written."""


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """A placement that satisfies every rule.

    Raises
    ------
    LayoutError
        When a rule is broken; the text says which, by which rank and expert.

    Examples
    --------
    >>> ExpertPlacement(3, ((0, 1), (1,)))
    Traceback (most recent call last):
    reshard.errors.LayoutError: experts are on no rank: found [2]
    """

    num_experts: int
    """Number of experts of the layer."""
    experts_by_rank: tuple[tuple[int, ...], ...]
    """For each rank of the expert-parallel group its experts, in the order of its shard."""

    def __post_init__(self) -> None:
        if not _is_count(self.num_experts) or self.num_experts < 1 or not self.experts_by_rank:
            raise LayoutError(
                "a placement needs an expert and a rank",
                found=f"{self.num_experts!r} experts, {len(self.experts_by_rank)} ranks",
            )
        for rank, experts in enumerate(self.experts_by_rank):
            for expert in experts:
                if not _is_count(expert) or not 0 <= expert < self.num_experts:
                    raise LayoutError(
                        "a rank holds an expert that does not exist",
                        rank=rank,
                        expected=f"0 to {self.num_experts - 1}",
                        found=repr(expert),
                    )
            if len(set(experts)) != len(experts):
                raise LayoutError("a rank holds an expert twice", rank=rank, found=list(experts))
        held = {expert for experts in self.experts_by_rank for expert in experts}
        missing = sorted(set(range(self.num_experts)) - held)
        if missing:
            raise LayoutError("experts are on no rank", found=missing)

    @classmethod
    def uniform(cls, num_experts: int, ep_size: int) -> ExpertPlacement:
        """Equal contiguous blocks, as today's runtimes place experts.

        Raises
        ------
        LayoutError
            When the experts do not divide.

        Examples
        --------
        >>> ExpertPlacement.uniform(4, 2).experts_by_rank
        ((0, 1), (2, 3))
        """
        each, rest = divmod(num_experts, ep_size) if ep_size > 0 else (0, 1)
        if rest:
            raise LayoutError(
                "the experts do not divide by the ranks",
                expected=f"a multiple of {ep_size}",
                found=num_experts,
            )
        ranks = (tuple(range(rank * each, (rank + 1) * each)) for rank in range(ep_size))
        return cls(num_experts, tuple(ranks))

    @classmethod
    def from_descriptor(cls, descriptor: object) -> ExpertPlacement:
        """Read the plain data of a placement; every field is checked.

        Parameters
        ----------
        descriptor
            See the theory of this module.

        Raises
        ------
        LayoutError
            When it is malformed, of another version, or breaks a rule.
        """
        version, num_experts, size, ranks = _fields(
            descriptor, "a placement", ("version", "num_experts", "ep_size", "ranks")
        )
        if not _is_count(version) or version != PLACEMENT_VERSION:
            raise LayoutError(
                "a placement of an unknown version", expected=PLACEMENT_VERSION, found=repr(version)
            )
        if not _is_count(num_experts) or not _is_count(size):
            raise LayoutError(
                "a placement does not count its experts and ranks",
                found=f"num_experts {num_experts!r}, ep_size {size!r}",
            )
        return cls(num_experts, _experts_by_rank(ranks, size))

    def to_descriptor(self) -> dict[str, object]:
        """The placement as plain data.

        Examples
        --------
        >>> placement = ExpertPlacement(2, ((1,), (0,)))
        >>> ExpertPlacement.from_descriptor(placement.to_descriptor()) == placement
        True
        """
        return {
            "version": PLACEMENT_VERSION,
            "num_experts": self.num_experts,
            "ep_size": len(self.experts_by_rank),
            "ranks": [
                {"rank": rank, "experts": list(experts)}
                for rank, experts in enumerate(self.experts_by_rank)
            ],
        }


def expert_map(
    placement: ExpertPlacement | Mapping[str, object], logical_shape: Sequence[int]
) -> ParamAffineMap:
    """The map of one expert parameter `[num_experts, …]` over the ranks of its group.

    Parameters
    ----------
    placement
        The placement, or its descriptor.
    logical_shape
        Shape of the parameter of all experts; dim 0 counts them.

    Raises
    ------
    LayoutError
        When the descriptor is malformed, or dim 0 is not the number of experts.

    Examples
    --------
    Three experts over two ranks; expert 1 is on both, and rank 1 packs it last:

    ====  =======  ==========
    rank  shard    experts
    ====  =======  ==========
    0     (2, 4)   0, 1
    1     (2, 4)   2, 1
    ====  =======  ==========

    >>> print(expert_map(ExpertPlacement(3, ((0, 1), (2, 1))), (3, 4)))
    3×4 over 2 ranks
      0 (2×4): F[0 + 1×4 4×1] → [0 + 1×4 4×1] on 0; F[4 + 1×4 4×1] → [4 + 1×4 4×1] on 0,1
      1 (2×4): F[8 + 1×4 4×1] → [0 + 1×4 4×1] on 1; F[4 + 1×4 4×1] → [4 + 1×4 4×1] on 0,1
    """
    if not isinstance(placement, ExpertPlacement):
        placement = ExpertPlacement.from_descriptor(placement)
    if not logical_shape or logical_shape[0] != placement.num_experts:
        raise LayoutError(
            "an expert parameter does not count its experts in dim 0",
            expected=placement.num_experts,
            found=f"shape {tuple(logical_shape)}",
        )
    ranges = {
        rank: [(expert, 1) for expert in experts]
        for rank, experts in enumerate(placement.experts_by_rank)
    }
    return ranges_map(logical_shape, ranges, 0, replica_length=1)


def _experts_by_rank(ranks: object, size: int) -> tuple[tuple[int, ...], ...]:
    if not isinstance(ranks, list) or len(ranks) != size:
        raise LayoutError(
            "a placement does not list its ranks",
            expected=f"a list of {size}",
            found=f"a list of {len(ranks)}" if isinstance(ranks, list) else type(ranks).__name__,
        )
    by_rank: dict[int, tuple[int, ...]] = {}
    for entry in ranks:
        rank, experts = _fields(entry, "a rank of a placement", ("rank", "experts"))
        if not _is_count(rank) or not 0 <= rank < size or rank in by_rank:
            raise LayoutError(
                "a placement lists a rank twice, or one that does not exist",
                expected=f"0 to {size - 1}, each once",
                found=repr(rank),
            )
        if not isinstance(experts, list) or not all(map(_is_count, experts)):
            raise LayoutError(
                "the experts of a rank are not a list of numbers", rank=rank, found=repr(experts)
            )
        by_rank[rank] = tuple(experts)
    return tuple(by_rank[rank] for rank in range(size))


def _fields(value: object, what: str, names: tuple[str, ...]) -> tuple[object, ...]:
    """The named entries of a mapping that has exactly those."""
    if not isinstance(value, Mapping) or set(value) != set(names):
        found = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
        raise LayoutError(f"{what} has other fields", expected=", ".join(names), found=found)
    return tuple(value[name] for name in names)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
