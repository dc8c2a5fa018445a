"""Maps that follow from the shapes of the shards alone, once the kind of cut is known.

Theory. A checkpoint holds shards, so their extents need not be stated: how wide each rank's part
is, is the extent of its shard. These functions take the shapes that the files have and one word
about the cut, and give the map; they refuse shapes that the word cannot have made. A rank that
holds no element may be absent; its part has a width of 0.

A model of many equal layers asks the same many times, so answers are kept: maps are values.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from reshard.errors import LayoutError, count_text
from reshard.geometry import ParamAffineMap
from reshard.layouts.builders import contiguous_split_map, replicated_map, sub_param_map
from reshard.layouts.ranges import require_dim, resized

Shape = tuple[int, ...]
Shards = Mapping[int, Shape]
"""Tensor rank -> shape of its shard."""


def joined(shards: Shards, dim: int, degree: int) -> tuple[Shape, list[int]]:
    """Shape of shards put together along a dim, and the extent of each rank along it.

    Parameters
    ----------
    shards
        Shapes of the shards, at least one.
    dim
        The dim along which they follow each other.
    degree
        Number of ranks.

    Raises
    ------
    LayoutError
        When they differ in another dim, or have no such dim.

    Examples
    --------
    >>> joined({0: (3, 5), 1: (2, 5)}, 0, 3)
    ((5, 5), [3, 2, 0])
    """
    first = next(iter(shards.values()))
    for held in shards.values():
        require_dim(held, dim)
        if resized(held, dim, 0) != resized(first, dim, 0):
            raise LayoutError(
                "shards that should follow each other differ in another dim",
                dim=dim,
                found=dict(shards),
            )
    sizes = [shards[rank][dim] if rank in shards else 0 for rank in range(degree)]
    return resized(first, dim, sum(sizes)), sizes


def replicated(shards: Shards, degree: int, scale: float = 1.0) -> ParamAffineMap:
    """The map of shards that are all the whole parameter.

    Parameters
    ----------
    shards, degree
        As for :func:`joined`.
    scale
        As for :func:`~reshard.layouts.builders.replicated_map`.

    Raises
    ------
    LayoutError
        When they are not of one shape, or a rank holds none.

    Examples
    --------
    >>> replicated({0: (3,), 1: (2,)}, 2)
    Traceback (most recent call last):
    reshard.errors.LayoutError: a replicated parameter has not one shape on all ranks:
    found {0: (3,), 1: (2,)}
    """
    if len(set(shards.values())) != 1 or len(shards) != degree:
        raise LayoutError(
            "a replicated parameter has not one shape on all ranks", found=dict(shards)
        )
    return _replicated(next(iter(shards.values())), degree, scale)


@lru_cache(maxsize=1024)
def _replicated(shape: Shape, degree: int, scale: float) -> ParamAffineMap:
    return replicated_map(shape, degree, scale)


def concatenated(shards: Shards, dim: int, degree: int) -> ParamAffineMap:
    """The map of shards that follow each other along a dim.

    Parameters
    ----------
    shards, dim, degree
        As for :func:`joined`.

    Raises
    ------
    LayoutError
        When they differ in another dim, or have no such dim.

    Examples
    --------
    >>> concatenated({0: (3, 2), 1: (1, 2)}, 0, 2).logical_shape
    (4, 2)
    """
    shape, sizes = joined(shards, dim, degree)
    return _concatenated(shape, tuple(sizes), dim)


@lru_cache(maxsize=1024)
def _concatenated(shape: Shape, sizes: Shape, dim: int) -> ParamAffineMap:
    return contiguous_split_map(shape, sizes, dim)


def equal_parts(shards: Shards, count: int, dim: int, degree: int) -> ParamAffineMap:
    """The map of shards that hold a part of each of `count` equal sub-parameters, in turn.

    Parameters
    ----------
    shards, dim, degree
        As for :func:`joined`.
    count
        Number of sub-parameters; two for a pack of gate and up.

    Raises
    ------
    LayoutError
        When a shard does not divide into that many parts.

    Examples
    --------
    ====  =======  ==============================
    rank  shard    elements of F
    ====  =======  ==============================
    0     (4,)     0, 1 (first), 3, 4 (second)
    1     (2,)     2 (first), 5 (second)
    ====  =======  ==============================

    >>> [
    ...     piece.source_offset
    ...     for piece in equal_parts({0: (4,), 1: (2,)}, 2, 0, 2).pieces_by_rank[1]
    ... ]
    [2, 5]
    """
    shape, sizes = joined(shards, dim, degree)
    if any(size % count for size in sizes):
        raise LayoutError(
            f"a shard does not divide into {count_text(count, 'sub-parameter')}",
            dim=dim,
            found=dict(shards),
        )
    widths = [size // count for size in sizes]
    return sub_param_map(shape, [sum(widths)] * count, [widths] * count, dim)
