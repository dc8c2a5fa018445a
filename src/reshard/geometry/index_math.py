"""Integers behind strided blocks: the only copy of each formula.

Theory. A dense tensor of shape ``(n_0, …, n_{k-1})`` is addressed by one integer, its row-major
offset ``Σ i_j · stride_j`` with ``stride_j = n_{j+1} · … · n_{k-1}``. Everything in this package
is arithmetic on such offsets. They are Python integers until an array needs them, and none may
exceed :data:`MAX_OFFSET`, so that sums of two of them still fit a signed 64-bit integer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from math import prod

from reshard.errors import InvalidMapError

MAX_OFFSET = 1 << 62
"""The largest offset or element count that the package accepts."""


def numel(shape: Iterable[int]) -> int:
    """Return the number of elements of a shape; 1 for a 0-dimensional one.

    >>> numel((3, 4)), numel(()), numel((2, 0))
    (12, 1, 0)
    """
    return prod(shape)


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the element strides of a dense row-major tensor.

    >>> row_major_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def span(shape: Iterable[int], strides: Iterable[int]) -> int:
    """Return the distance from the first to the last element of a non-empty block.

    >>> span((2, 3), (10, 1))
    12
    """
    return sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))


def as_index(value: object, name: str) -> int:
    """Return ``value`` as a non-negative Python integer; integers of NumPy are taken as such.

    Raises
    ------
    InvalidMapError
        When it is not an integer (a truth value is none), is negative, or exceeds
        :data:`MAX_OFFSET`.

    >>> as_index(7, "offset")
    7
    """
    if type(value) is int and 0 <= value <= MAX_OFFSET:
        return value
    try:
        index = operator.index(_no_truth_value(value))  # type: ignore[arg-type]
    except TypeError:
        raise InvalidMapError(
            f"{name} is not an integer", broken="form", expected="an integer", found=repr(value)
        ) from None
    if not 0 <= index <= MAX_OFFSET:
        raise InvalidMapError(
            f"{name} is out of range", broken="form", expected="0 … 2^62", found=index
        )
    return index


def _no_truth_value(value: object) -> object:
    if isinstance(value, bool):
        raise TypeError("a truth value")
    return value


def as_indices(values: object, name: str) -> tuple[int, ...]:
    """Return ``values`` as a tuple of non-negative Python integers.

    Raises
    ------
    InvalidMapError
        When it is not a sequence of such integers.

    >>> as_indices([2, 3], "shape")
    (2, 3)
    """
    if type(values) is tuple:
        # The ordinary case, which every piece goes through many times, is checked without calls.
        for value in values:
            if type(value) is not int or not 0 <= value <= MAX_OFFSET:
                break
        else:
            return values
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise InvalidMapError(
            f"{name} is not a sequence", broken="form", expected="integers", found=repr(values)
        )
    return tuple([as_index(value, name) for value in values])
