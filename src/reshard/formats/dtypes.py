"""Element types: one value per torch dtype that can be in a file.

Theory. A checkpoint names an element type in four ways: ``torch.float16`` (a global of a pickle),
``torch.HalfStorage`` (the class of a storage), ``F16`` (safetensors) and, once bytes are compared,
a NumPy dtype. :class:`DType` is the one value behind all of them. Moving bytes needs only
``itemsize``; NumPy is imported by :meth:`DType.numpy` alone, so opening a checkpoint never pays for
it. The seventeen dtypes of torch's ``_dtype_to_storage_type_map`` have a storage class of their
own; later ones are stored in an ``UntypedStorage`` beside the dtype (``torch._utils.
_rebuild_tensor_v3``) and have ``storage_class`` ``None`` (source: ``torch/storage.py``, 2.13).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Examples
    --------
    >>> DType.named("bfloat16").itemsize
    2
    >>> DType.named("float8_e4m3fn").storage_class is None
    True
    """

    name: str
    """Name without the ``torch.`` prefix, for example ``"bfloat16"``."""
    itemsize: int
    """Size of one element in bytes (of one byte that packs several for sub-byte types)."""
    storage_class: str | None
    """Name of the torch storage class, for example ``"BFloat16Storage"``; ``None`` for dtypes
    that torch keeps in an ``UntypedStorage``."""
    is_floating: bool
    """Whether torch calls it floating point (complex types are not)."""

    @staticmethod
    def named(name: str) -> DType:
        """Return the dtype of that name; ``KeyError`` when torch has none."""
        return DTYPES[name]

    @property
    def is_complex(self) -> bool:
        """Whether an element is a complex number."""
        return self.name.startswith("complex")

    def numpy(self) -> np.dtype[np.generic]:
        """Return the NumPy dtype whose elements have the same bits.

        Types that only ``ml_dtypes`` knows (bfloat16, the float8 family) come from there;
        quantised, ``bits*`` and packed sub-byte types, which NumPy cannot compute with, as unsigned
        integers of the same size; ``complex32`` as ``uint32``.
        """
        import numpy as np

        if self.name in _ML_DTYPES:
            return np.dtype(_ml_dtype(self.name))
        return np.dtype(_RAW_NUMPY.get(self.name, self.name))

    def __str__(self) -> str:
        return self.name


def _ml_dtype(name: str) -> type[np.generic]:
    try:
        import ml_dtypes

        found: type[np.generic] = getattr(ml_dtypes, name)
    except (ImportError, AttributeError) as missing:
        raise UnsupportedError(
            f"elements of type {name} cannot be shown or computed with without ml_dtypes",
            next_step="pip install --upgrade ml_dtypes",
        ) from missing
    return found


_ML_DTYPES = frozenset(
    (
        "bfloat16",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
)
_RAW_NUMPY = {
    "bits8": "uint8",
    "bits16": "uint16",
    "bits1x8": "uint8",
    "bits2x4": "uint8",
    "bits4x2": "uint8",
    "complex32": "uint32",
    "float4_e2m1fn_x2": "uint8",
    "qint8": "int8",
    "qint32": "int32",
    "quint8": "uint8",
    "quint4x2": "uint8",
    "quint2x4": "uint8",
    **{f"{sign}{bits}": "uint8" for sign in ("int", "uint") for bits in range(1, 8)},
}


def _all_dtypes() -> Iterable[DType]:
    for name, itemsize, storage_class, is_floating in (
        ("float64", 8, "DoubleStorage", True),
        ("float32", 4, "FloatStorage", True),
        ("float16", 2, "HalfStorage", True),
        ("bfloat16", 2, "BFloat16Storage", True),
        ("int64", 8, "LongStorage", False),
        ("int32", 4, "IntStorage", False),
        ("int16", 2, "ShortStorage", False),
        ("int8", 1, "CharStorage", False),
        ("uint8", 1, "ByteStorage", False),
        ("bool", 1, "BoolStorage", False),
        ("complex128", 16, "ComplexDoubleStorage", False),
        ("complex64", 8, "ComplexFloatStorage", False),
        ("qint8", 1, "QInt8Storage", False),
        ("qint32", 4, "QInt32Storage", False),
        ("quint8", 1, "QUInt8Storage", False),
        ("quint4x2", 1, "QUInt4x2Storage", False),
        ("quint2x4", 1, "QUInt2x4Storage", False),
        ("uint64", 8, None, False),
        ("uint32", 4, None, False),
        ("uint16", 2, None, False),
        ("complex32", 4, None, False),
        ("float8_e4m3fn", 1, None, True),
        ("float8_e4m3fnuz", 1, None, True),
        ("float8_e5m2", 1, None, True),
        ("float8_e5m2fnuz", 1, None, True),
        ("float8_e8m0fnu", 1, None, True),
        ("float4_e2m1fn_x2", 1, None, True),
        ("bits8", 1, None, False),
        ("bits16", 2, None, False),
        ("bits1x8", 1, None, False),
        ("bits2x4", 1, None, False),
        ("bits4x2", 1, None, False),
    ):
        yield DType(name, itemsize, storage_class, is_floating)
    for sign in ("int", "uint"):
        for bits in range(1, 8):
            yield DType(f"{sign}{bits}", 1, None, is_floating=False)


DTYPES: dict[str, DType] = {dtype.name: dtype for dtype in _all_dtypes()}
"""Every dtype by its name without ``torch.``."""

STORAGE_DTYPES: dict[str, DType] = {
    dtype.storage_class: dtype for dtype in DTYPES.values() if dtype.storage_class is not None
}
"""The dtype of each typed torch storage class, by the name of the class."""

_SHORT = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""Short names that people write."""


def spelled_dtype(text: str) -> DType:
    """Return the dtype that a user means.

    Raises
    ------
    UsageError
        There is none of that name.

    Examples
    --------
    >>> [spelled_dtype(text).name for text in ("bf16", "torch.float32", "float8_e5m2")]
    ['bfloat16', 'float32', 'float8_e5m2']
    """
    word = text.strip().removeprefix("torch.").lower()
    found = DTYPES.get(_SHORT.get(word, word))
    if found is None:
        raise UsageError(
            "no such element type", expected="one like bf16, fp16, fp32 or bfloat16", found=text
        )
    return found


def short_names(names: Iterable[str]) -> str:
    """List dtypes as people write them.

    Examples
    --------
    >>> short_names(["float32", "bfloat16", "float8_e4m3fn", "int8"])
    'fp32, bf16, fp8_e4m3, int8'
    """
    short = {dtype: word for word, dtype in _SHORT.items() if word != "half"}
    return ", ".join(short.get(name, name) for name in names)
