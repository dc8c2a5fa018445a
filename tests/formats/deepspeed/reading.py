"""What a checkpoint holds, read from the byte ranges it names: the eye of these tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from reshard.formats.checkpoint import Checkpoint, StoredTensor
from reshard.formats.deepspeed.reader import open_deepspeed
from reshard.formats.folders import resolve_folder

States: TypeAlias = Mapping[str, Mapping[str, torch.Tensor]]


def opened(folder: Path) -> Checkpoint:
    """Open a tag folder."""
    return open_deepspeed(resolve_folder(folder))


def values_of(tensor: StoredTensor) -> Any:
    """Rebuild a tensor from the bytes of its holders; replicas must agree."""
    shards = {}
    for holder, region in tensor.regions.items():
        with Path(region.file).open("rb") as file:
            file.seek(region.offset)
            data = file.read(region.nbytes)
        shape = tensor.map.shard_shapes[holder]
        shards[holder] = np.frombuffer(data, tensor.dtype.numpy()).reshape(shape)
    return tensor.map.rebuild(shards)


def wrong_states(checkpoint: Checkpoint, truth: States) -> list[str]:
    """Name every state that is not what it should be, bit for bit."""
    wrong = []
    for name, states in truth.items():
        for state, expected in states.items():
            stored = checkpoint.tensors.get((name, state))
            if stored is None:
                wrong.append(f"{name}/{state}: missing")
                continue
            found = torch.from_numpy(np.array(values_of(stored), dtype=np.float32))
            if found.shape != expected.shape:
                wrong.append(f"{name}/{state}: {tuple(found.shape)}")
            elif not torch.equal(found.view(torch.int32), expected.float().view(torch.int32)):
                wrong.append(f"{name}/{state}: values")
    return wrong


def rewrite(folder: Path, pattern: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Let ``change`` edit every file that matches."""
    files = sorted(folder.glob(pattern))
    assert files, f"no {pattern} in {folder}"
    for file in files:
        content = torch.load(file, weights_only=False)
        change(content)
        torch.save(content, file)


def nameless(file: Path) -> None:
    """Write a file again as a stream, so that the archive does not say what it was called."""
    content = torch.load(file, weights_only=False)
    with file.open("wb") as stream:
        torch.save(content, stream)


def exchange(first: Path, second: Path) -> None:
    """Give two files each other's name."""
    aside = first.with_suffix(".aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def doubled(folder: Path, pattern: str) -> None:
    """Let files be of another run: all floating-point tensors twice as large.

    Rounding commutes with that, so files that are doubled together agree as before.
    """
    rewrite(folder, pattern, lambda content: _double(content, set()))


def _double(value: object, seen: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        if value.is_floating_point() and value.ndim and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            torch.empty(0, dtype=value.dtype).set_(storage).mul_(2)
    elif isinstance(value, dict):
        for entry in value.values():
            _double(entry, seen)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            _double(entry, seen)
