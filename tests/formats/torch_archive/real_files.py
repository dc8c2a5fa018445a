"""The real files, and what torch makes of a file, for comparison with what reshard reads.

`torch.load` runs with an unpickler of ours that knows DeepSpeed's classes by name, so that
DeepSpeed, which takes seconds to import, is not needed.
"""

from __future__ import annotations

import enum
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch

from reshard.formats.dtypes import DType
from reshard.formats.torch_archive import (
    Archive,
    EnumRecord,
    LossScaler,
    ObjectRecord,
    Size,
    TensorRecord,
    read_bytes,
)

_SHARED = Path(__file__).parents[4] / "shared"


def real_files() -> list[Path]:
    """Every torch file of the real checkpoints, none where there are none."""
    folders = (
        Path(os.environ.get("RESHARD_CHECKPOINTS", _SHARED / "checkpoints")),
        _SHARED / "checkpoints_old",
    )
    return [path for folder in folders for path in sorted(folder.rglob("*.pt"))]


class LoadedLossScaler:
    """Stands for both loss scalers of DeepSpeed."""


class LoadedFragment:
    """Stands for `fragment_address`."""


class LoadedStage(enum.IntEnum):
    """Stands for `ZeroStageEnum`."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


_CLASSES = {
    "LossScaler": LoadedLossScaler,
    "DynamicLossScaler": LoadedLossScaler,
    "fragment_address": LoadedFragment,
    "ZeroStageEnum": LoadedStage,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if module.startswith("deepspeed."):
            return _CLASSES[name]
        return super().find_class(module, name)


_PICKLE = SimpleNamespace(Unpickler=_Unpickler, load=pickle.load, __name__="pickle")


def load_with_torch(path: Path) -> object:
    """What torch makes of a file, foreign classes included."""
    return torch.load(path, weights_only=False, pickle_module=_PICKLE)


def differences(archive: Archive, value: object, loaded: object, path: str = "") -> Iterator[str]:
    """Yield where an inert value is not what torch loaded."""
    if isinstance(value, TensorRecord):
        yield from _tensor_differences(archive, value, loaded, path)
    elif isinstance(value, ObjectRecord):
        yield from _record_differences(archive, value, loaded, path)
    elif isinstance(value, DType):
        if str(loaded) != f"torch.{value.name}":
            yield f"{path}: {value} for {loaded}"
    elif isinstance(value, dict):
        yield from _dict_differences(archive, value, loaded, path)
    elif isinstance(value, (list, tuple)):
        kind = torch.Size if isinstance(value, Size) else type(value)
        if not isinstance(loaded, (list, tuple)) or type(loaded) is not kind:
            yield f"{path}: {value!r} for {loaded!r}"
        elif len(loaded) != len(value):
            yield f"{path}: {len(value)} items for {len(loaded)}"
        else:
            for index, (mine, theirs) in enumerate(zip(value, loaded, strict=True)):
                yield from differences(archive, mine, theirs, f"{path}[{index}]")
    elif type(value) is not type(loaded) or value != loaded:
        yield f"{path}: {value!r} for {loaded!r}"


def _dict_differences(
    archive: Archive, value: dict[object, object], loaded: object, path: str
) -> Iterator[str]:
    if type(value) is not type(loaded) or list(value) != list(loaded):
        yield f"{path}: keys {list(value)[:9]} for {loaded!r:.200}"
        return
    for key, mine in value.items():
        yield from differences(archive, mine, loaded[key], f"{path}.{key}")
    if isinstance(value, OrderedDict) and set(vars(value)) != set(vars(loaded)):
        yield f"{path}: attributes {vars(value)} for {vars(loaded)}"


def _record_differences(
    archive: Archive, value: ObjectRecord, loaded: object, path: str
) -> Iterator[str]:
    if isinstance(value, EnumRecord):
        if not isinstance(loaded, LoadedStage) or loaded.value != value.value:
            yield f"{path}: {value!r} for {loaded!r}"
        return
    wanted = LoadedLossScaler if isinstance(value, LossScaler) else LoadedFragment
    if type(loaded) is not wanted:
        yield f"{path}: {value!r} for {loaded!r}"
        return
    yield from differences(archive, dict(value.fields), vars(loaded), path)


def _tensor_differences(
    archive: Archive, value: TensorRecord, loaded: object, path: str
) -> Iterator[str]:
    if not isinstance(loaded, torch.Tensor):
        yield f"{path}: a tensor for {type(loaded).__name__}"
        return
    mine = (value.dtype.name, value.shape, value.requires_grad, value.is_parameter)
    parameter = isinstance(loaded, torch.nn.Parameter)
    theirs = (str(loaded.dtype)[6:], tuple(loaded.shape), loaded.requires_grad, parameter)
    if mine != theirs or (loaded.numel() and value.strides != loaded.stride()):
        yield f"{path}: {mine} for {theirs}"
        return
    yield from differences(archive, dict(value.attributes), vars(loaded), path)
    if read_bytes(archive, value) != raw_bytes(loaded):
        yield f"{path}: other elements"


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in row-major order, as bytes."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""
