"""Rounding: floating-point elements on their way to another type.

Theory. Nothing is rounded unless a target declares it (a model in bf16 beside its fp32 masters,
weights for serving). The rule is that of every trainer and of IEEE 754: to the nearest number of
the new type, a tie to the even one, beyond the largest number to infinity. So the result does not
depend on who rounds. Elements are gathered as they are stored, replicas compared exactly, and
rounded one small step at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from reshard.formats.dtypes import DType


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
    values = np.frombuffer(raw, stored.numpy())
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        np.copyto(np.frombuffer(out, dtype.numpy()), values, casting="unsafe")
