"""Buffers: running pieces on memory, whatever library owns it and whatever the bits mean.

Theory. A piece copies elements; it never looks at them. So every tensor is read as a flat run of
unsigned integers of its item size, on which NumPy moves bits of any dtype (bfloat16, float8, NaN
payloads) unchanged. Offsets of pieces are relative to a tensor's first element, whatever buffer
the tensor is a view into: a tensor that is not contiguous is packed first. Only a scale does
arithmetic, in the tensor's own dtype and library.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.errors import UsageError

Tensor = Any
"""A NumPy array or a torch tensor."""
Bits = NDArray[Any]
"""A flat NumPy array of unsigned integers, a view of a tensor's memory where possible."""

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.dtype("V16")}


def torch_of(tensor: Tensor) -> ModuleType | None:
    """Return the torch module when ``tensor`` is one of its tensors, without importing it."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return torch
    return None


def flat_bits(tensor: Tensor) -> Bits:
    """Return the elements of a tensor in row-major order as flat unsigned integers.

    Shares memory with the tensor when it is contiguous and on the CPU, else is a copy.

    >>> flat_bits(np.array([[1.0, -0.0]], dtype=np.float32)).tolist()
    [1065353216, 2147483648]
    """
    torch = torch_of(tensor)
    if torch is not None:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        if flat.is_conj() or flat.is_neg():
            flat = flat.resolve_conj().resolve_neg()
        array = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
        return array.view(_word(tensor.element_size()))
    flat = np.ascontiguousarray(tensor).reshape(-1)
    return flat.view(_word(flat.dtype.itemsize))


def _word(itemsize: int) -> Any:
    if itemsize not in _WORDS:
        raise UsageError("unknown item size", expected=sorted(_WORDS), found=itemsize)
    return _WORDS[itemsize]


def like(tensor: Tensor, bits: Bits, shape: Sequence[int]) -> Tensor:
    """Return ``bits`` as a tensor of the library and dtype of ``tensor`` and the given shape."""
    torch = torch_of(tensor)
    if torch is not None:
        raw = torch.from_numpy(bits.view(np.uint8))
        return raw.view(tensor.dtype).reshape(tuple(shape)).to(tensor.device)
    return bits.view(np.asarray(tensor).dtype).reshape(tuple(shape))


def strided(bits: Bits, offset: int, shape: Sequence[int], strides: Sequence[int]) -> Bits:
    """Return a strided block of a flat buffer as a view; NumPy checks that it lies inside.

    >>> strided(np.arange(12, dtype=np.uint8), 1, (2, 2), (4, 1)).tolist()
    [[1, 2], [5, 6]]
    """
    item = bits.itemsize
    if 0 in shape:
        return np.empty(tuple(shape), bits.dtype)
    return np.ndarray(
        tuple(shape), bits.dtype, bits, offset * item, tuple([s * item for s in strides])
    )


def scaled(tensor: Tensor, factor: float, *, divide: bool) -> Tensor:
    """Return ``tensor`` times or divided by ``factor``, in its own dtype.

    Raises
    ------
    UsageError
        When the dtype has no such arithmetic (integers, booleans).
    """
    torch = torch_of(tensor)
    if torch is not None:
        fits = tensor.is_floating_point() or tensor.is_complex()
        kind = str(tensor.dtype)
    else:
        # ml_dtypes (bfloat16, float8) have kind "V" and do their own arithmetic.
        fits = tensor.dtype.kind in "fcV"
        kind = str(tensor.dtype)
    if not fits:
        raise UsageError("a scaled piece cannot hold this dtype", expected="floating", found=kind)
    if torch is not None:
        return tensor / factor if divide else tensor * factor
    number = tensor.dtype.type(factor)
    return tensor / number if divide else tensor * number
