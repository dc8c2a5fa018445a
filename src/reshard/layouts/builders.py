"""Maps of the basic layouts, by formula.

Theory. Every runtime cuts a parameter by a few words. Each word is a function here that returns the
map; nothing below this layer knows the words.

==================== ===============================================================================
replicated           every rank holds the whole parameter
contiguous split     rank after rank, a block of one dim each; even or not
sub-parameters       the parameter is several blocks one after the other, each split by itself
                     (fused QKV, gate and up)
segmented            as before, but some of the blocks are whole on every rank
block gather         each rank takes some equal blocks, in any order
==================== ===============================================================================

All sizes are elements, all `partition_dim` count from the front. A builder refuses words that
contradict each other (:class:`LayoutError`) and returns maximal pieces whose holders are exact,
also where blocks are held more than once; :meth:`ParamAffineMap.validate` proves the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.errors import LayoutError, count_text
from reshard.geometry import AffinePiece, ParamAffineMap
from reshard.geometry.index_math import row_major_strides
from reshard.layouts.ranges import Range, ranges_map, require_dim

__all__ = [
    "block_gather_map",
    "contiguous_split_map",
    "replicated_map",
    "row_major_strides",
    "segmented_map",
    "sub_param_map",
]


def replicated_map(shape: Sequence[int], tp_degree: int, scale: float = 1.0) -> ParamAffineMap:
    """The map of a parameter that every rank holds whole.

    Parameters
    ----------
    shape
        Shape of the parameter.
    tp_degree
        Number of ranks.
    scale
        The factor by which ranks hold it, `shard = F * scale`: `1 / tp_degree` for the bias of a
        row-parallel layer that is added on every rank before the sum.

    Raises
    ------
    LayoutError
        When there is no rank.

    Examples
    --------
    ====  =======  ==================
    rank  shard    holds
    ====  =======  ==================
    0, 1  (2, 3)   all of F, by half
    ====  =======  ==================

    >>> print(replicated_map((2, 3), 2, scale=0.5))
    2×3 over 2 ranks
      0 (2×3): F[0 + 2×3 3×1] ·0.5 → [0 + 2×3 3×1] on 0,1
      1 (2×3): F[0 + 2×3 3×1] ·0.5 → [0 + 2×3 3×1] on 0,1
    """
    _require_degree(tp_degree)
    whole = tuple(shape)
    strides = row_major_strides(whole)
    ranks = tuple(range(tp_degree))
    piece = AffinePiece(whole, 0, strides, 0, strides, ranks, scale)
    return ParamAffineMap(whole, dict.fromkeys(ranks, whole), dict.fromkeys(ranks, (piece,)))


def contiguous_split_map(
    shape: Sequence[int], per_rank_sizes: Sequence[int], partition_dim: int
) -> ParamAffineMap:
    """The map of a parameter that is cut along one dim, a block a rank.

    Parameters
    ----------
    shape
        Shape of the parameter.
    per_rank_sizes
        Extent of each rank's block; together the extent of the dim. A rank may have none.
    partition_dim
        The dim that is cut: 0 for a column-parallel `[out, in]` weight, 1 for a row-parallel one.

    Raises
    ------
    LayoutError
        When the sizes do not add up to the extent, or there is no such dim.

    Examples
    --------
    ====  =======  ============
    rank  shard    columns of F
    ====  =======  ============
    0     (2, 2)   0, 1
    1     (2, 1)   2
    ====  =======  ============

    >>> print(contiguous_split_map((2, 3), [2, 1], 1))
    2×3 over 2 ranks
      0 (2×2): F[0 + 2×3 2×1] → [0 + 2×2 2×1] on 0
      1 (2×1): F[2 + 2×3 1×1] → [0 + 2×1 1×1] on 1
    """
    require_dim(shape, partition_dim)
    extent = shape[partition_dim]
    _require_sum("the ranks' sizes", per_rank_sizes, extent, partition_dim)
    return sub_param_map(shape, [extent], [per_rank_sizes], partition_dim)


def sub_param_map(
    shape: Sequence[int],
    sub_dim_sizes: Sequence[int],
    shard_widths: Sequence[Sequence[int]],
    partition_dim: int,
) -> ParamAffineMap:
    """The map of a parameter made of sub-parameters that are each split over the ranks.

    Parameters
    ----------
    shape
        Shape of the parameter.
    sub_dim_sizes
        Extent of each sub-parameter along the dim, in order.
    shard_widths
        For each sub-parameter, the extent that each rank holds of it.
    partition_dim
        The dim along which sub-parameters follow each other and are split.

    Raises
    ------
    LayoutError
        When sizes or widths do not add up.

    Examples
    --------
    Q, K and V of 4, 2 and 2 rows over two ranks:

    ====  =======  ==============================
    rank  shard    rows of F
    ====  =======  ==============================
    0     (4, 1)   0, 1 (Q), 4 (K), 6 (V)
    1     (4, 1)   2, 3 (Q), 5 (K), 7 (V)
    ====  =======  ==============================

    >>> qkv = sub_param_map((8, 1), [4, 2, 2], [[2, 2], [1, 1], [1, 1]], 0)
    >>> [(piece.source_offset, piece.numel) for piece in qkv.pieces_by_rank[1]]
    [(2, 2), (5, 1), (7, 1)]
    """
    segments = [(size, False) for size in sub_dim_sizes]
    degree = len(shard_widths[0]) if shard_widths else 0
    return segmented_map(shape, segments, partition_dim, degree, shard_widths)


def segmented_map(
    shape: Sequence[int],
    segments: Sequence[tuple[int, bool]],
    partition_dim: int,
    tp_degree: int,
    split_widths: Sequence[Sequence[int]],
) -> ParamAffineMap:
    """The map of a parameter whose blocks are split or replicated, each by itself.

    Parameters
    ----------
    shape
        Shape of the parameter.
    segments
        `(extent, replicated)` of each block along the dim, in order.
    partition_dim
        The dim along which blocks follow each other.
    tp_degree
        Number of ranks.
    split_widths
        For each block that is not replicated, in order, the extent that each rank holds of it.

    Raises
    ------
    LayoutError
        When extents or widths do not add up.

    Examples
    --------
    Four query rows are split, two key and value rows are on both ranks (multi-query attention):

    ====  =======  =========================
    rank  shard    rows of F
    ====  =======  =========================
    0     (4, 1)   0, 1, and 4, 5 (shared)
    1     (4, 1)   2, 3, and 4, 5 (shared)
    ====  =======  =========================

    >>> one = segmented_map((6, 1), [(4, False), (2, True)], 0, 2, [[2, 2]])
    >>> [(piece.source_offset, piece.numel, piece.locations) for piece in one.pieces_by_rank[1]]
    [(2, 2, (1,)), (4, 2, (0, 1))]
    """
    _require_degree(tp_degree)
    require_dim(shape, partition_dim)
    _require_sum("blocks", [size for size, _ in segments], shape[partition_dim], partition_dim)
    split = sum(not replicated for _, replicated in segments)
    if len(split_widths) != split:
        raise LayoutError(
            "widths are not given for every block that is split",
            expected=f"{count_text(split, 'row')} of widths",
            found=len(split_widths),
        )
    rows = iter(split_widths)
    ranges: dict[int, list[Range]] = {rank: [] for rank in range(tp_degree)}
    start = 0
    for size, replicated in segments:
        if replicated:
            for held in ranges.values():
                held.append((start, size))
        else:
            _add_split(ranges, start, size, next(rows), partition_dim)
        start += size
    return ranges_map(shape, ranges, partition_dim)


def _add_split(
    ranges: dict[int, list[Range]], start: int, size: int, widths: Sequence[int], dim: int
) -> None:
    if len(widths) != len(ranges):
        raise LayoutError(
            "a block has widths for another number of ranks",
            dim=dim,
            expected=len(ranges),
            found=len(widths),
        )
    _require_sum("widths of a block", widths, size, dim)
    for rank, width in enumerate(widths):
        ranges[rank].append((start, width))
        start += width


def block_gather_map(
    shape: Sequence[int],
    block_ids_by_rank: Mapping[int, Sequence[int]],
    block_size: int,
    partition_dim: int,
) -> ParamAffineMap:
    """The map of a parameter of which each rank takes chosen blocks of equal size.

    Parameters
    ----------
    shape
        Shape of the parameter.
    block_ids_by_rank
        For each rank the numbers of its blocks, in the order of its shard. Two ranks may take the
        same block: both are then its holders.
    block_size
        Extent of a block along the dim.
    partition_dim
        The dim that is made of blocks.

    Raises
    ------
    LayoutError
        When a block lies outside the dim.

    Examples
    --------
    ====  =======  ============
    rank  shard    blocks of F
    ====  =======  ============
    0     (4, 1)   0, 2
    1     (4, 1)   3, 1
    ====  =======  ============

    >>> import numpy as np
    >>> one = block_gather_map((8, 1), {0: [0, 2], 1: [3, 1]}, 2, 0)
    >>> one.extract(np.arange(8).reshape(8, 1), 1).reshape(-1).tolist()
    [6, 7, 2, 3]
    """
    ranges = {
        rank: [(number * block_size, block_size) for number in numbers]
        for rank, numbers in block_ids_by_rank.items()
    }
    return ranges_map(shape, ranges, partition_dim)


def _require_degree(tp_degree: int) -> None:
    if tp_degree < 1:
        raise LayoutError("a layout needs a rank", expected="at least 1", found=tp_degree)


def _require_sum(what: str, sizes: Sequence[int], extent: int, dim: int) -> None:
    if any(size < 0 for size in sizes) or sum(sizes) != extent:
        raise LayoutError(
            f"{what} do not add up to the extent",
            dim=dim,
            expected=extent,
            found=f"{list(sizes)}",
        )
