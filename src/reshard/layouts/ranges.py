"""The kernel of the builders: ranks that hold ranges of one dim of a parameter.

Theory. Nearly every layout of today cuts a parameter along one dim. A rank then holds a list of
ranges `[start, start + length)` of that dim, one after the other in its shard, and whole slices of
all other dims. Row-parallel and column-parallel layers, fused sub-parameters, replicated segments,
gathered blocks and packed experts differ only in which ranges those are. So there is one place that
turns ranges into pieces (:func:`ranges_map`), and a builder only has to say the ranges.

Two rules make the result what a map must be. A piece has one set of holders, so a range is cut
wherever the set of ranks that hold it changes; who holds what is found by a sweep over the ends of
all ranges. And pieces are maximal: ranges of a rank that follow each other both in `F` and in the
shard are one piece.

With `k` ranges over all ranks the cost is `k log k` and does not depend on the extents.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from reshard.errors import LayoutError
from reshard.geometry import AffinePiece, ParamAffineMap
from reshard.geometry.index_math import row_major_strides
from reshard.geometry.piece import trusted_piece

Range = tuple[int, int]
"""`(start, length)` along the partition dim, in elements of that dim."""

Holders = tuple[int, ...]


def ranges_map(
    shape: Sequence[int],
    ranges_by_rank: Mapping[int, Sequence[Range]],
    partition_dim: int,
    *,
    replica_length: int | None = None,
) -> ParamAffineMap:
    """The map of a parameter of which each rank holds ranges of one dim.

    Parameters
    ----------
    shape
        Shape of the parameter, in elements.
    ranges_by_rank
        For each rank its ranges, in the order of its shard; a rank may have none.
    partition_dim
        The dim that the ranges are of.
    replica_length
        Cut ranges that several ranks hold into runs of this length, instead of leaving them whole.

    Raises
    ------
    LayoutError
        When there is no such dim, or a range leaves it.

    Examples
    --------
    Rank 0 holds rows 0, 1 and 4, rank 1 rows 4, 2 and 3; row 4 is held by both:

    ====  =======  =========
    rank  shard    rows of F
    ====  =======  =========
    0     (3, 2)   0, 1, 4
    1     (3, 2)   4, 2, 3
    ====  =======  =========

    >>> print(ranges_map((5, 2), {0: [(0, 2), (4, 1)], 1: [(4, 1), (2, 2)]}, 0))
    5×2 over 2 ranks
      0 (3×2): F[0 + 2×2 2×1] → [0 + 2×2 2×1] on 0; F[8 + 1×2 2×1] → [4 + 1×2 2×1] on 0,1
      1 (3×2): F[8 + 1×2 2×1] → [0 + 1×2 2×1] on 0,1; F[4 + 2×2 2×1] → [2 + 2×2 2×1] on 1
    """
    full = tuple(shape)
    require_dim(full, partition_dim)
    holding = _Holding(full[partition_dim], partition_dim, ranges_by_rank)
    shapes = {}
    pieces = {}
    for rank, ranges in ranges_by_rank.items():
        shard = resized(full, partition_dim, sum(length for _, length in ranges))
        cut = list(holding.homogeneous(_joined(ranges), replica_length))
        shapes[rank] = shard
        pieces[rank] = list(_pieces(full, shard, partition_dim, cut)) if 0 not in shard else []
    return ParamAffineMap(full, shapes, pieces)


def require_dim(shape: Sequence[object], dim: int) -> None:
    """Refuse a dim that the shape does not have.

    Raises
    ------
    LayoutError
        Also for negative dims, which would mean something else for every shape.
    """
    if not 0 <= dim < len(shape):
        raise LayoutError("the parameter has no such dim", dim=dim, found=f"shape {tuple(shape)}")


def resized(shape: Sequence[int], dim: int, extent: int) -> tuple[int, ...]:
    """A shape with another extent in one dim.

    >>> resized((4, 3), 0, 2)
    (2, 3)
    """
    return (*shape[:dim], extent, *shape[dim + 1 :])


def _joined(ranges: Sequence[Range]) -> Iterator[Range]:
    """Ranges with those that follow each other joined, and empty ones left out."""
    start = length = 0
    for begin, extent in ranges:
        if not extent:
            continue
        if length and begin == start + length:
            length += extent
            continue
        if length:
            yield start, length
        start, length = begin, extent
    if length:
        yield start, length


def _pieces(
    full: tuple[int, ...], shard: tuple[int, ...], dim: int, cut: Sequence[tuple[Range, Holders]]
) -> Iterator[AffinePiece]:
    source, dest = row_major_strides(full), row_major_strides(shard)
    at = 0
    for (start, length), holders in cut:
        # The numbers are ours and the shape was checked: no need to check each piece again.
        yield trusted_piece(
            resized(full, dim, length),
            start * source[dim],
            source,
            at * dest[dim],
            dest,
            holders,
            1.0,
        )
        at += length


class _Holding:
    """Which ranks hold each interval between two ends of ranges."""

    def __init__(
        self, extent: int, dim: int, ranges_by_rank: Mapping[int, Sequence[Range]]
    ) -> None:
        changes: dict[int, list[tuple[int, int]]] = {}
        for rank, ranges in ranges_by_rank.items():
            for start, length in ranges:
                if start < 0 or length < 0 or start + length > extent:
                    raise LayoutError(
                        "a range leaves the dim that it is of",
                        rank=rank,
                        dim=dim,
                        expected=f"inside 0..{extent}",
                        found=f"{start}..{start + length}",
                    )
                if length:
                    changes.setdefault(start, []).append((rank, 1))
                    changes.setdefault(start + length, []).append((rank, -1))
        self._ends = sorted(changes)
        self._holders: list[Holders] = []
        held: Counter[int] = Counter()
        for end in self._ends:
            for rank, step in changes[end]:
                held[rank] += step
                if not held[rank]:
                    del held[rank]  # who holds nothing here must not be looked at again
            self._holders.append(tuple(sorted(held)))

    def homogeneous(
        self, ranges: Iterator[Range], replica_length: int | None
    ) -> Iterator[tuple[Range, Holders]]:
        """Cut ranges where their holders change."""
        for start, length in ranges:
            at = start
            while at < start + length:
                index = bisect_left(self._ends, at + 1) - 1
                holders = self._holders[index]
                end = self._unchanged_until(index, start + length)
                if replica_length and len(holders) > 1:
                    end = min(end, at + replica_length)
                yield (at, end - at), holders
                at = end

    def _unchanged_until(self, index: int, stop: int) -> int:
        """The first end at which the holders differ from those of an interval, at most `stop`."""
        holders = self._holders[index]
        while self._ends[index] < stop and self._holders[index] == holders:
            index += 1
        return min(self._ends[index], stop)
