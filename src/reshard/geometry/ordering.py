"""Ordering: sorting and grouping rows of integer columns, as fast as NumPy can.

Theory. Everything that is done to many pieces at once sorts them first. The columns of a sort are
put into one number where they fit. NumPy sorts row numbers by 16-bit values in linear time, so
short numbers are sorted by their digits, the last first. Longer ones are put into one number with
the number of the row, where both fit into 62 bits, because sorting values is about twice as fast
as sorting row numbers by values: the low bits then say which row it was, and ties stay in their
order. Rows that are in order already are left alone.

Columns that belong together are one array of shape ``(rows, columns)`` in which each column lies
in one stretch of memory (Fortran's order): NumPy is several times faster by columns of many rows
than by rows of few columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
"""An array of signed 64-bit integers."""
BATCH = 1 << 17
"""Groups do not know of each other; so many rows are seen to at a time, which stay in the cache."""
_DIGIT = 16
"""Bits of a digit; up to two of them are sorted faster than values."""
_ROOM = 1 << 62
"""Packed columns stay below this."""


def order_by(columns: Sequence[Ints]) -> Ints:
    """Return the rows in order of some columns, the first most significant, ties as they were.

    >>> order_by([np.array([1, 0, 1]), np.array([5, 9, 3])]).tolist()
    [1, 2, 0]
    """
    return _sorted(columns)[0]


def classes_of(columns: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Group rows that agree in all columns.

    Returns
    -------
    order
        The rows, sorted by the columns (first column most significant), stably.
    label
        The group of each row of ``order``, ascending from 0.

    Examples
    --------
    >>> order, label = classes_of([np.array([7, 5, 7])])
    >>> order.tolist(), label.tolist()
    ([1, 0, 2], [0, 1, 1])
    """
    order, ordered = _sorted(columns)
    new = np.zeros(len(order), bool)
    for column in ordered:
        new[1:] |= column[1:] != column[:-1]
    return order, np.cumsum(new)


def kinds_of(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], Ints]:
    """Return the distinct values, ascending, and the index of each value among them.

    As `numpy.unique`, but nearly all columns hold one value, for which it takes long.

    >>> kinds, index = kinds_of(np.array([0.5, 1.0, 0.5]))
    >>> kinds.tolist(), index.tolist()
    ([0.5, 1.0], [0, 1, 0])
    """
    if (values == values[:1]).all():
        return values[:1], np.zeros(len(values), np.int64)
    kinds = np.unique(values)
    return kinds, np.searchsorted(kinds, values)


def groups_of(columns: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Group rows that agree in all columns, like :func:`classes_of`, groups in any order.

    Many columns are mixed into one number, and what was grouped by it is compared.

    >>> groups_of([np.array([1, 0, 1]), np.array([2, 2, 2])])[1].tolist()
    [0, 1, 1]
    """
    packed, _ = _packed(columns)
    if len(packed) == 1:
        return classes_of(packed)
    order, label = classes_of([mixed(packed)])
    follows = label[1:] == label[:-1]
    for column in packed:
        if (column[order][1:] != column[order][:-1])[follows].any():
            return classes_of(columns)
    return order, label


def mixed(columns: Sequence[Ints]) -> Ints:
    """Return one number for each row, equal where the rows are; it may wrap around."""
    number = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        number = (number ^ (number >> np.int64(29))) * np.int64(0x3F58476D1CE4E5B9) + column
    return np.asarray((number ^ (number >> np.int64(31))) & np.int64(_ROOM - 1))


def _sorted(columns: Sequence[Ints]) -> tuple[Ints, list[Ints]]:
    """Return the order of the rows, and columns that tell them apart, in that order."""
    packed, room = _packed(columns)
    count = len(packed[0])
    if len(packed) > 1:
        order = np.lexsort(packed[::-1])
        return order, [column[order] for column in packed]
    (key,) = packed
    if (key[1:] >= key[:-1]).all():
        return np.arange(count), packed
    bits = count.bit_length()
    if room > 1 << 2 * _DIGIT and room << bits <= _ROOM:
        both = np.sort((key << bits) | np.arange(count))
        return both & ((1 << bits) - 1), [both >> bits]
    order = _by_digits(key, room) if room < _ROOM else np.argsort(key, kind="stable")
    return order, [key[order]]


def _by_digits(key: Ints, room: int) -> Ints:
    """Return the order of keys below ``room``, sorted by one digit after the other."""
    order = np.argsort(key.astype(np.uint16), kind="stable")
    for shift in range(_DIGIT, (room - 1).bit_length(), _DIGIT):
        digit = (key >> shift).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
    return order


def _packed(columns: Sequence[Ints]) -> tuple[list[Ints], int]:
    """Put several columns in one where their ranges allow it, keeping their order.

    The second result is above every value of the last column.
    """
    packed: list[Ints] = []
    room = 1
    for column in columns:
        if not len(column):
            return [column], 1
        low = int(column.min())
        width = int(column.max()) - low + 1
        if width == 1:
            continue
        # A range that hardly fits 64 bits could wrap; it leaves no room for others anyway.
        shifted = column - low if low and width < _ROOM else column
        if packed and room * width < _ROOM:
            packed[-1] = packed[-1] * width + shifted
            room *= width
        else:
            packed.append(shifted)
            room = width
    return packed or [np.zeros(len(columns[0]), np.int64)], room


def places_of(values: Ints) -> tuple[Ints, Ints]:
    """Return the place of each value among the distinct ones, and these, ascending.

    >>> places_of(np.array([30, 10, 30]))[0].tolist()
    [1, 0, 1]
    """
    order, label = classes_of([values])
    place = np.empty(len(order), np.int64)
    place[order] = label
    return place, values[order[starts_of(label)]]


def starts_of(label: Ints) -> Ints:
    """Return where each group begins in labels that ascend from 0.

    >>> starts_of(np.array([0, 0, 1, 2, 2])).tolist()
    [0, 2, 3]
    """
    return np.flatnonzero(np.diff(label, prepend=-1))


def batches(group: Ints) -> Iterator[Ints]:
    """Yield the rows of whole groups, in order of groups, about :data:`BATCH` at a time.

    >>> [rows.tolist() for rows in batches(np.array([1, 0, 1]))]
    [[1, 0, 2]]
    """
    order, label = classes_of([group])
    stops = np.append(starts_of(label)[1:], len(label))
    first = 0
    while first < len(label):
        last = min(int(np.searchsorted(stops, first + BATCH)), len(stops) - 1)
        yield order[first : stops[last]]
        first = int(stops[last])


def expanded(starts: Ints, counts: Ints) -> Ints:
    """Return the concatenation of ``range(start, start + count)`` for each pair.

    >>> expanded(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.asarray(
        np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)
    )


def grouped_sums(label: Ints, values: Ints) -> dict[int, int]:
    """Return the exact sum of the values beside each label.

    >>> grouped_sums(np.array([3, 1, 3]), np.array([5, 6, 7]))
    {1: 6, 3: 12}
    """
    order, kind = classes_of([label])
    first = starts_of(kind)
    if not len(first):
        return {}
    sums = np.add.reduceat(values[order], first)
    return dict(zip(label[order[first]].tolist(), sums.tolist(), strict=True))


def rows_of(columns: NDArray[Any], index: Ints | NDArray[np.bool_] | slice) -> NDArray[Any]:
    """Return some rows of columns that stand side by side, each still in one stretch of memory.

    >>> rows_of(np.array([[1, 2], [3, 4], [5, 6]]), np.array([2, 0])).tolist()
    [[5, 6], [1, 2]]
    """
    if isinstance(index, slice):
        return columns[index]
    if index.dtype == bool:
        index = np.flatnonzero(index)
    taken = np.empty((columns.shape[1], len(index)), columns.dtype)
    for column, place in zip(columns.T, taken, strict=True):
        place[:] = column[index]
    return taken.T


def beside(*parts: Ints) -> Ints:
    """Return columns, or blocks of them, side by side, each in one stretch of memory.

    >>> beside(np.array([1, 2]), np.array([[3, 4], [5, 6]])).tolist()
    [[1, 3, 4], [2, 5, 6]]
    """
    return np.concatenate([part.T if part.ndim == 2 else part[None] for part in parts]).T
