"""The notation: pieces, ranks and ranges as one would write them by hand.

Theory. A strided block is written ``[offset + n×s n×s …]``, outermost dimension first: ``[4 + 8×8
4×1]`` starts at 4, has 8 rows that are 8 apart, each of 4 neighbours. Ranks that follow each
other are written as an interval, ``0-3,8``. Messages, tests and the documentation use the same
text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

SHOWN = 3
"""Ranges that are written out."""

NOTATION = (
    "F[…] → […] on r: a block of the full tensor, where it lies in the shard, and all who hold it; "
    "[o + n×s …] starts at element o and has n steps of s elements in each dimension"
)
"""The notation in one line, for whoever reads a piece for the first time."""


def block_text(offset: int, shape: Sequence[int], strides: Sequence[int]) -> str:
    """Write one side of a piece.

    >>> block_text(4, (8, 4), (8, 1))
    '[4 + 8×8 4×1]'
    >>> block_text(3, (), ())
    '[3]'
    """
    dims = " ".join(f"{n}×{s}" for n, s in zip(shape, strides, strict=True))
    return f"[{offset} + {dims}]" if dims else f"[{offset}]"


def ranks_text(ranks: Iterable[int]) -> str:
    """Write a set of ranks, runs of three and more as intervals.

    >>> ranks_text([0, 1, 2, 3, 8, 9])
    '0-3,8,9'
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = []
    for first, last in runs:
        if last - first > 1:
            parts.append(f"{first}-{last}")
        else:
            parts.extend(str(rank) for rank in range(first, last + 1))
    return ",".join(parts)


def ranges_text(ranges: Collection[range], numel: int | None = None) -> str:
    """Write the first three of some half-open ranges; of more, how many, with how many elements.

    ``numel`` is that number, where it is known without going through all of them.

    >>> ranges_text([range(0, 4), range(8, 9)])
    '[0, 4), [8, 9)'
    >>> ranges_text([range(k, k + 1) for k in range(0, 10, 2)])
    '[0, 1), [2, 3), [4, 5) and 2 more, 5 elements in all'
    """
    shown = ", ".join(f"[{r.start}, {r.stop})" for r in islice(ranges, SHOWN))
    if len(ranges) <= SHOWN:
        return shown
    elements = sum(map(len, ranges)) if numel is None else numel
    return f"{shown} and {len(ranges) - SHOWN} more, {elements} elements in all"
