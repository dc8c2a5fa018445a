"""Memory: the shards of one side of a transfer on this rank, claimed and given back as it goes.

Theory. A storage of torch may be emptied and filled again under all tensors that view it
(``resize_``, as FSDP does). So a target may come with storages that are empty and get them when
their tensors' turn has come, and a source's storage goes when the last of the tensors in it has
arrived. Several shards may lie in one storage, as in ZeRO's flat buffers; what a storage holds
beside them keeps it alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from reshard.live.states import LiveState, Shard, TensorKey


class Memory:
    """The shards of one side on this rank, by key."""

    __slots__ = ("_flat", "_left", "_shards")

    def __init__(self, state: LiveState) -> None:
        self._shards: dict[TensorKey, Shard] = {shard.key: shard for shard in state.shards}
        self._flat: dict[TensorKey, torch.Tensor] = {}
        self._left: dict[int, int] = {}
        for shard in state.shards:
            owner = storage_key(shard)
            self._left[owner] = self._left.get(owner, 0) + 1

    def flat(self, key: TensorKey) -> torch.Tensor:
        """Return the memory of a shard, flat."""
        if key not in self._flat:
            self._flat[key] = self._shards[key].memory()
        return self._flat[key]

    def claim(self, keys: Iterable[TensorKey]) -> None:
        """Give shards whose storage is empty the memory that their tensors need."""
        for shard in self._of(keys):
            storage = shard.tensor.untyped_storage()
            if storage.nbytes() == 0:
                storage.resize_(needed_bytes(shard.tensor))

    def release(self, keys: Iterable[TensorKey]) -> None:
        """Give back the storages of which these were the last shards."""
        for shard in self._of(keys):
            self._flat.pop(shard.key, None)
            owner = storage_key(shard)
            self._left[owner] -= 1
            storage = shard.tensor.untyped_storage()
            if not self._left[owner] and storage.resizable():
                storage.resize_(0)

    def _of(self, keys: Iterable[TensorKey]) -> list[Shard]:
        return [self._shards[key] for key in keys if key in self._shards]


def storage_key(shard: Shard) -> int:
    """Return a number that tensors of one storage share, empty ones too."""
    return int(shard.tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch's own identity


def needed_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a storage must have for a tensor that views it."""
    if not tensor.numel():
        return 0
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + reach + 1) * tensor.element_size()


def peak_bytes(
    source: LiveState,
    target: LiveState,
    windows: Sequence[Iterable[TensorKey]],
    staging: int,
    *,
    release: bool,
) -> int:
    """Return the bytes of states and staging that this rank has at most at any moment.

    Parameters
    ----------
    source, target
        Its states.
    windows
        The tensors of each window.
    staging
        Bytes of its staging buffers.
    release
        Whether the source's memory is given back.
    """
    sizes: dict[int, int] = {}
    left: dict[int, int] = {}
    for state in (source, target):
        for shard in state.shards:
            owner = storage_key(shard)
            sizes[owner] = max(
                sizes.get(owner, 0),
                needed_bytes(shard.tensor),
                shard.tensor.untyped_storage().nbytes(),
            )
    by_key = [{shard.key: shard for shard in state.shards} for state in (source, target)]
    for shard in source.shards:
        left[storage_key(shard)] = left.get(storage_key(shard), 0) + 1
    alive = {
        storage_key(shard)
        for state in (source, target)
        for shard in state.shards
        if shard.tensor.untyped_storage().nbytes()
    }
    peak = sum(sizes[owner] for owner in alive)
    for keys in windows:
        listed = list(keys)
        alive |= {storage_key(by_key[1][key]) for key in listed if key in by_key[1]}
        peak = max(peak, sum(sizes[owner] for owner in alive))
        for key in listed if release else ():
            if key in by_key[0]:
                shard = by_key[0][key]
                owner = storage_key(shard)
                left[owner] -= 1
                if not left[owner] and shard.tensor.untyped_storage().resizable():
                    alive.discard(owner)
    return peak + staging
