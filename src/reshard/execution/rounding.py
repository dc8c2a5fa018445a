"""Rounding: floating-point elements on their way to another type.

Theory. Nothing is rounded unless a target declares it (a model in bf16 beside its fp32 masters,
weights for serving). The rule is that of every trainer and of IEEE 754: to the nearest number of
the new type, a tie to the even one, beyond the largest number to infinity. ``float8_e4m3fn`` has no
infinity; there the largest number stands for all beyond it, and double precision goes by way of
single, both as in torch 2.13. So the result does not depend on who rounds. Elements are gathered
as they are stored, replicas compared exactly, and rounded one small step at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from reshard.formats.dtypes import DType


LARGEST = {"float8_e4m3fn": 448.0}
"""The largest number of each type that has no infinity."""

_STEP = 4096
_SINGLE = 4


def round_into(raw: memoryview, stored: DType, out: memoryview, dtype: DType) -> None:
    """Round floating-point elements to another type.

    A NaN stays a NaN; its payload is the one thing that is not kept.

    Parameters
    ----------
    raw, stored
        The elements, and their type.
    out, dtype
        Where they go, and the type they get there.

    Examples
    --------
    Half-way between two numbers of fp16, and beyond its largest:

    >>> from reshard.formats.dtypes import DTYPES
    >>> out = bytearray(6)
    >>> values = np.array([1 + 2**-11, 1 + 3 * 2**-11, 1e6], "<f4").tobytes()
    >>> round_into(memoryview(values), DTYPES["float32"], memoryview(out), DTYPES["float16"])
    >>> np.frombuffer(out, "<f2").tolist()
    [1.0, 1.001953125, inf]
    """
    values, rounded = np.frombuffer(raw, stored.numpy()), np.frombuffer(out, dtype.numpy())
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if dtype.name in LARGEST or (stored.name == "float64" and dtype.itemsize < _SINGLE):
            _by_way_of_single(values, rounded, LARGEST.get(dtype.name, np.inf))
        else:
            np.copyto(rounded, values, casting="unsafe")


def _by_way_of_single(
    values: NDArray[np.generic], rounded: NDArray[np.generic], largest: float
) -> None:
    """Round through single precision, in steps whose temporary copies are small."""
    for start in range(0, len(values), _STEP):
        step = values[start : start + _STEP].astype(np.float32)
        np.copyto(rounded[start : start + _STEP], np.clip(step, -largest, largest), "unsafe")
