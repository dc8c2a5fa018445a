"""Element types: how large an element is, and as what its bits are copied."""

from __future__ import annotations

import functools

import torch

from reshard.errors import UnsupportedError

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
ALIGNMENT = 16
"""The largest size of an element: what starts at a multiple of it is aligned for all."""


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    """Return torch's element type of that name.

    Raises
    ------
    UnsupportedError
        When this torch has none, or its elements have no whole number of bytes.
    """
    dtype = getattr(torch, name, None)
    quantized = name.startswith(("q", "bits"))
    if not isinstance(dtype, torch.dtype) or quantized or dtype.itemsize not in _WORDS:
        raise UnsupportedError("an element type that cannot be moved", found=name)
    return dtype


@functools.cache
def itemsize_of(name: str) -> int:
    """Return the bytes of an element.

    >>> itemsize_of("bfloat16")
    2
    """
    return dtype_of(name).itemsize


@functools.cache
def word_of(name: str) -> torch.dtype:
    """Return the type as which the bits are copied, whatever they mean.

    >>> word_of("float8_e4m3fn"), word_of("float32")
    (torch.uint8, torch.int32)
    """
    return _WORDS[itemsize_of(name)]


def rounds_to(source: str, target: str) -> bool:
    """Whether elements can be rounded from one type to another: both are floating."""
    return dtype_of(source).is_floating_point and dtype_of(target).is_floating_point
