"""Joins: all pairs of boxes that overlap, from two lists of boxes, without comparing all pairs.

Theory. On one axis, two half-open intervals overlap exactly when one starts inside the other:
either ``lo_b ≤ lo_a < hi_b`` or ``lo_a < lo_b < hi_a``. Each case is a range of a sorted list,
found by bisection, so all pairs come in ``O(n log n + pairs)`` and no other pair is looked at.

Boxes overlap when they do on every axis. Real cuts are products, or nearly: many boxes share few
distinct intervals per axis. So on each axis but the last only the *distinct* intervals are
joined; every pair of them becomes a key under which the boxes of the two go on to the next axis.
A grid of 1,000 × 1,000 blocks against another thus costs what its overlaps cost. The axis with
the fewest overlaps goes first.
"""

from __future__ import annotations

import numpy as np

from reshard.geometry.index_math import MAX_OFFSET
from reshard.geometry.ordering import Ints, classes_of, expanded, order_by, places_of, starts_of

Interval = tuple[Ints, Ints]
Keys = tuple[Ints | None, Ints | None]

SAMPLE = 4096
"""The overlaps of an axis are estimated from about so many intervals a side."""
FEW_PAIRS_PER_BOX = 8
"""Up to so many pairs for each box are all looked at."""


def overlapping_pairs(
    a_lo: Ints,
    a_hi: Ints,
    b_lo: Ints,
    b_hi: Ints,
    a_key: Ints | None = None,
    b_key: Ints | None = None,
) -> tuple[Ints, Ints]:
    """Return the pairs ``(i, j)`` such that box ``i`` of ``a`` and ``j`` of ``b`` overlap.

    Parameters
    ----------
    a_lo, a_hi, b_lo, b_hi
        Bounds, shape ``(boxes, axes)``, half-open, non-empty, axes at least 1.
    a_key, b_key
        Boxes can only overlap when their keys are equal; non-negative.

    Returns
    -------
    tuple
        Two arrays of row numbers, in no particular order.

    Examples
    --------
    >>> box = lambda *bounds: np.array(bounds).reshape(-1, 1)
    >>> i, j = overlapping_pairs(box(0, 4), box(4, 8), box(2, 8), box(6, 9))
    >>> sorted(zip(i.tolist(), j.tolist()))
    [(0, 0), (1, 0)]
    """
    a = np.arange(len(a_lo), dtype=np.int64)
    b = np.arange(len(b_lo), dtype=np.int64)
    if not len(a) or not len(b):
        return a[:0], b[:0]
    few = _few_pairs(len(a), len(b), a_key, b_key)
    if few is not None:
        return _overlapping_of(*few, (a_lo, a_hi), (b_lo, b_hi))
    axes = _order(a_lo, a_hi, b_lo, b_hi)
    for axis in axes[:-1]:
        a, b, a_key, b_key = _narrowed(
            a, b, (a_lo[a, axis], a_hi[a, axis]), (b_lo[b, axis], b_hi[b, axis]), (a_key, b_key)
        )
    last = axes[-1]
    i, j = _interval_pairs(
        *_keyed((a_lo[a, last], a_hi[a, last]), (b_lo[b, last], b_hi[b, last]), (a_key, b_key))
    )
    return a[i], b[j]


def overlaps_among(lo: Ints, hi: Ints, key: Ints) -> tuple[Ints, Ints]:
    """Return the pairs of different boxes of one list that overlap, each pair once.

    >>> lo, hi = np.array([[0], [3], [9]]), np.array([[4], [8], [12]])
    >>> [rows.tolist() for rows in overlaps_among(lo, hi, np.array([5, 5, 5]))]
    [[0], [1]]
    """
    order, label = classes_of([key])
    stop = np.append(starts_of(label)[1:], len(label))[label]
    rows = np.arange(len(order), dtype=np.int64)
    count = stop - rows - 1
    if count.sum() > FEW_PAIRS_PER_BOX * len(order):
        i, j = overlapping_pairs(lo, hi, lo, hi, key, key)
        return i[i < j], j[i < j]
    i, j = np.repeat(order, count), order[expanded(rows + 1, count)]
    return _overlapping_of(i, j, (lo, hi), (lo, hi))


def _overlapping_of(i: Ints, j: Ints, a: Interval, b: Interval) -> tuple[Ints, Ints]:
    """Return those of some pairs of boxes that overlap; what is apart on one axis is out."""
    for axis in range(a[0].shape[1]):
        apart = a[0][:, axis][i] >= b[1][:, axis][j]
        apart |= b[0][:, axis][j] >= a[1][:, axis][i]
        if apart.any():
            near = np.flatnonzero(~apart)
            i, j = i[near], j[near]
    return i, j


def _few_pairs(a: int, b: int, a_key: Ints | None, b_key: Ints | None) -> tuple[Ints, Ints] | None:
    """Return all pairs of equal key when they are so few that looking at each is fastest."""
    most = FEW_PAIRS_PER_BOX * (a + b)
    if a_key is None or b_key is None:
        if a * b > most:
            return None
        return np.repeat(np.arange(a), b), np.tile(np.arange(b), a)
    order = order_by([b_key])
    ordered = b_key[order]
    first = np.searchsorted(ordered, a_key, "left")
    count = np.searchsorted(ordered, a_key, "right") - first
    if count.sum() > most:
        return None
    return np.repeat(np.arange(a), count), order[expanded(first, count)]


def _order(a_lo: Ints, a_hi: Ints, b_lo: Ints, b_hi: Ints) -> list[int]:
    """Return the axes worth looking at, the most selective first."""
    axes = a_lo.shape[1]
    if axes == 1:
        return [0]
    useful = []
    for axis in range(axes):
        sides = a_lo[:, axis], a_hi[:, axis], b_lo[:, axis], b_hi[:, axis]
        # Where every interval of a meets every interval of b the axis decides nothing.
        if sides[0].max() >= sides[3].min() or sides[2].max() >= sides[1].min():
            useful.append((pair_count(*[side[:: 1 + len(side) // SAMPLE] for side in sides]), axis))
    return [axis for _, axis in sorted(useful)] or [0]


def pair_count(a_lo: Ints, a_hi: Ints, b_lo: Ints, b_hi: Ints) -> int:
    """Return the number of overlapping pairs of intervals, without making them."""
    before = np.searchsorted(np.sort(a_lo), np.sort(b_hi), "left").sum()
    return int(before - np.searchsorted(np.sort(a_hi), np.sort(b_lo), "right").sum())


def _keyed(a: Interval, b: Interval, keys: Keys) -> tuple[Ints, Ints, Ints, Ints]:
    """Return both sides' intervals on one line where different keys cannot overlap."""
    a_key, b_key = keys
    if a_key is None or b_key is None:
        return (*a, *b)
    keys_of = (a_key, a_key, b_key, b_key)
    borders = (*a, *b)
    width = max([int(border.max(initial=0)) for border in borders]) + 1
    if width * (max([int(key.max(initial=0)) for key in keys_of]) + 1) >= MAX_OFFSET:
        # Places of the borders instead of the borders: key · width then cannot overflow.
        place, distinct = places_of(np.concatenate(borders))
        width = len(distinct) + 1
        a_lo, a_hi, b_lo, b_hi = np.split(place, np.cumsum([len(side) for side in borders[:-1]]))
        borders = (a_lo, a_hi, b_lo, b_hi)
    a_lo, a_hi, b_lo, b_hi = (
        border + key * width for border, key in zip(borders, keys_of, strict=True)
    )
    return a_lo, a_hi, b_lo, b_hi


def _interval_pairs(a_lo: Ints, a_hi: Ints, b_lo: Ints, b_hi: Ints) -> tuple[Ints, Ints]:
    # Looked up in order: bisection then runs along both lists instead of jumping about.
    a_order = order_by([a_lo])
    b_order = order_by([b_lo])
    a_sorted, b_sorted = a_lo[a_order], b_lo[b_order]
    # Starts of a inside b, the same start included; then starts of b strictly inside a.
    first = np.searchsorted(a_sorted, b_sorted, "left")
    count = np.searchsorted(a_sorted, b_hi[b_order], "left") - first
    inner = np.searchsorted(b_sorted, a_sorted, "right")
    inner_count = np.searchsorted(b_sorted, a_hi[a_order], "left") - inner
    i = np.concatenate([a_order[expanded(first, count)], np.repeat(a_order, inner_count)])
    j = np.concatenate([np.repeat(b_order, count), b_order[expanded(inner, inner_count)]])
    return i, j


def _narrowed(
    a: Ints, b: Ints, a_side: Interval, b_side: Interval, keys: Keys
) -> tuple[Ints, Ints, Ints, Ints]:
    """Join the distinct intervals of one axis; each pair is a key for the rows of both."""
    a_first, a_rows, a_count, a_interval, a_key = _distinct(a_side, keys[0])
    b_first, b_rows, b_count, b_interval, b_key = _distinct(b_side, keys[1])
    i, j = _interval_pairs(*_keyed(a_interval, b_interval, (a_key, b_key)))
    pairs = np.arange(len(i), dtype=np.int64)
    return (
        a[a_rows[expanded(a_first[i], a_count[i])]],
        b[b_rows[expanded(b_first[j], b_count[j])]],
        np.repeat(pairs, a_count[i]),
        np.repeat(pairs, b_count[j]),
    )


def _distinct(side: Interval, key: Ints | None) -> tuple[Ints, Ints, Ints, Interval, Ints | None]:
    """Return where each distinct interval's rows start in a list of rows, and the intervals."""
    columns = (*side,) if key is None else (key, *side)
    order, label = classes_of(columns)
    first = starts_of(label)
    count = np.diff(np.append(first, len(order)))
    lead = order[first]
    return first, order, count, (side[0][lead], side[1][lead]), None if key is None else key[lead]
