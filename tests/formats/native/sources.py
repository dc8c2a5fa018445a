"""Sources for the native writer, and ways to write them and look at the result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.execution import Comparison, compare, execute
from reshard.formats.checkpoint import (
    Checkpoint,
    Extra,
    Region,
    Role,
    Scalar,
    SourceFile,
    StoredTensor,
    TensorKey,
    Topology,
)
from reshard.formats.deepspeed.writing import NativeOptions, lay_out_deepspeed
from reshard.formats.dtypes import DTYPES
from reshard.formats.registry import open_checkpoint
from reshard.formats.target import Target
from reshard.formats.torch_archive import Archive, TensorRecord, read_archive, read_bytes
from reshard.layouts.builders import replicated_map
from reshard.planning import plan

STATES = ("fp32", "exp_avg", "exp_avg_sq")
COUNTERS = {"global_steps": 3, "skipped_steps": 0, "global_samples": 12}
Shapes = Mapping[str, tuple[int, ...]]


def made_up(
    folder: Path,
    groups: Sequence[Shapes],
    *,
    config: Mapping[str, object] | None = None,
    frozen: Shapes | None = None,
) -> tuple[Checkpoint, dict[TensorKey, NDArray[np.float32]]]:
    """A checkpoint of any shapes, whose tensors lie in one raw file; and their values."""
    generator = np.random.default_rng(7)
    values: dict[TensorKey, NDArray[np.float32]] = {}
    for shapes in groups:
        for name, shape in shapes.items():
            for state in STATES:
                values[name, state] = generator.normal(size=shape).astype(np.float32)
    for name, shape in (frozen or {}).items():
        values[name, "fp32"] = generator.normal(size=shape).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "raw"
    path.write_bytes(b"".join(array.tobytes() for array in values.values()))
    tensors, offset = {}, 0
    for (name, state), array in values.items():
        role = Role.FROZEN if name in (frozen or {}) else Role.PARAMETER
        region = Region(str(path), offset, array.nbytes)
        whole = replicated_map(array.shape, 1)
        tensors[name, state] = StoredTensor(
            name, state, DTYPES["float32"], whole, {0: region}, role
        )
        offset += array.nbytes
    extras = {
        "groups": [list(shapes) for shapes in groups],
        "param_groups": [{"lr": 0.1, "weight_decay": float(k)} for k in range(len(groups))],
        "optimizer_settings": {"clip_grad": 1.0},
        "model_files": [{**COUNTERS, "lr_scheduler": None, "iteration": 3}],
        "client_state": {"iteration": 3},
        "ds_config": dict(config or {"zero_optimization": {"stage": 1}}),
        **COUNTERS,
    }
    checkpoint = Checkpoint(
        format="raw",
        path=str(folder),
        topology=Topology(None, 1),
        tensors=tensors,
        scalars={
            (name, "step"): Scalar(3.0, DTYPES["float32"]) for group in groups for name in group
        },
        extras={key: Extra(value) for key, value in extras.items()},
        files=(SourceFile(str(path), offset, "raw"),),
    )
    return checkpoint, values


def write(checkpoint: Checkpoint, folder: Path, **options: Any) -> Target:
    """Write a native checkpoint as ``folder/step3``, with ``latest`` beside it."""
    target = lay_out_deepspeed(checkpoint, tag="step3", options=NativeOptions(**options))
    run(checkpoint, target, folder / "step3")
    return target


def run(checkpoint: Checkpoint, target: Target, folder: Path) -> None:
    """Carry out a target."""
    job = plan(checkpoint, target)
    execute(job, folder, workers=1, max_memory=1 << 20, fsync=False, overwrite=True)


def converted(source: Path, folder: Path, **options: Any) -> Path:
    """Convert a folder to native form; returns the folder with ``latest``."""
    write(open_checkpoint(source), folder, **options)
    return folder


def compared(left: Path, right: Path) -> Comparison:
    """Compare two checkpoints, all of them."""
    return compare(open_checkpoint(left), open_checkpoint(right), workers=1, max_memory=1 << 20)


def values_of(folder: Path) -> dict[TensorKey, NDArray[Any]]:
    """Every logical tensor of a checkpoint, read as its reader says."""
    found = {}
    for key, tensor in open_checkpoint(folder).tensors.items():
        shards = {}
        for holder, region in tensor.regions.items():
            with Path(region.file).open("rb") as file:
                file.seek(region.offset)
                shape = tensor.map.shard_shapes[holder]
                data = file.read(math.prod(shape) * tensor.dtype.itemsize)
            shards[holder] = np.frombuffer(data, tensor.dtype.numpy()).reshape(shape)
        found[key] = np.asarray(tensor.map.rebuild(shards))
    return found


def content(path: Path) -> Any:
    """The tree of a torch file with arrays for tensors and plain values for known records."""
    archive = read_archive(str(path))
    return plain(archive.root, archive)


def plain(value: Any, archive: Archive) -> Any:
    """One value of a tree; a record becomes the name of its type and its fields."""
    if isinstance(value, TensorRecord):
        raw = np.frombuffer(read_bytes(archive, value), value.dtype.numpy())
        return (value.dtype.name, value.shape, raw.tobytes())
    if isinstance(value, Mapping):
        return {key: plain(item, archive) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, archive) for item in value]
    if hasattr(value, "type_name"):
        fields = {key: plain(item, archive) for key, item in value.fields.items()}
        return (value.type_name, getattr(value, "value", None), fields)
    return value
