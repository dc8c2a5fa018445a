"""Element types agree with torch and NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from reshard.formats.dtypes import DTYPES, STORAGE_DTYPES, DType


def test_every_dtype_of_torch_is_known() -> None:
    theirs = {
        name: value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
    }
    assert set(theirs) == set(DTYPES)
    for name, dtype in theirs.items():
        mine = DTYPES[name]
        assert (mine.name, str(mine)) == (name, name)
        assert mine.itemsize == dtype.itemsize
        assert mine.is_floating == dtype.is_floating_point
        assert mine.is_complex == dtype.is_complex


def test_storage_classes_are_those_of_torch() -> None:
    theirs = torch.storage._dtype_to_storage_type_map()
    assert {f"torch.{dtype}": name for name, dtype in STORAGE_DTYPES.items()} == {
        str(dtype): name for dtype, name in theirs.items()
    }


@pytest.mark.parametrize("name", DTYPES)
def test_numpy_has_elements_of_the_same_size(name: str) -> None:
    dtype = DType.named(name)
    assert dtype.numpy().itemsize == dtype.itemsize


@pytest.mark.parametrize("name", ["float32", "int64", "bool", "complex128", "uint16"])
def test_numpy_dtypes_of_the_same_name(name: str) -> None:
    assert DType.named(name).numpy() == np.dtype(name)


def test_small_floats_come_from_ml_dtypes() -> None:
    values = np.frombuffer(
        torch.tensor([1.5, -2.0]).to(torch.bfloat16).view(torch.uint8).numpy().tobytes(),
        DTYPES["bfloat16"].numpy(),
    )
    assert values.dtype == ml_dtypes.bfloat16
    assert values.astype(np.float32).tolist() == [1.5, -2.0]


def test_unknown_name() -> None:
    with pytest.raises(KeyError):
        DType.named("float7")
