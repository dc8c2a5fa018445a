"""A checkpoint on disk as the source: each rank reads only what it wants of it.

Theory. The files of a checkpoint are holders of its tensors like any others, but they do not speak:
so nothing is sent, and every rank composes the map of its own shard with that of the files and
reads the ranges that come out. What one rank refuses, a file that is damaged or a tensor that is
not there, all raise. Steps, and the settings of groups where the checkpoint says which parameters
are in which, come from it too.
"""

from __future__ import annotations

from os import PathLike, fspath
from typing import TYPE_CHECKING

import numpy as np
import torch

from reshard.errors import TransferError
from reshard.execution.reading import read_shards
from reshard.formats.manifest import require_as_written
from reshard.formats.registry import open_checkpoint
from reshard.live.adapting import state_of
from reshard.live.agreement import together
from reshard.live.elements import word_of
from reshard.live.settings import plain_settings
from reshard.live.trainers import OPTIMIZER
from reshard.live.transport import transport_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.formats.checkpoint import Checkpoint
    from reshard.live.states import LiveState, Shard


def load(
    source: str | PathLike[str],
    target: object,
    *,
    group: object = None,
    also: Sequence[str] = (),
    layout: str | PathLike[str] | None = None,
    max_memory: int = 64 << 20,
    timeout: float = 300.0,
) -> int:
    """Fill a target's tensors from a checkpoint of any format.

    Every rank of the group calls this.

    Parameters
    ----------
    source
        The folder of a checkpoint, which all ranks see.
    target
        As for :func:`~reshard.live.move`.
    group
        A process group of ``torch.distributed``; None for all ranks.
    also, layout
        Further folders, and a file of layouts, as for ``reshard.open_checkpoint``.
    max_memory
        Bytes of buffers that a rank may use; its largest shard comes on top.
    timeout
        Seconds that one wait for another rank may take.

    Returns
    -------
    int
        Bytes that this rank took.

    Raises
    ------
    TransferError
        The same on all ranks, where one refused.
    """
    transport = transport_of(group, timeout)
    ready: list[tuple[LiveState, Checkpoint]] = []

    def prepare() -> None:
        state = state_of(target, target=True)
        checkpoint = open_checkpoint(fspath(source), also=also, layout=layout)
        if checkpoint.listing is not None:
            require_as_written(checkpoint.listing, (file.path for file in checkpoint.files))
        for shard in state.shards:
            _check(shard, checkpoint)
        ready.append((state, checkpoint))

    together(transport, prepare)
    state, checkpoint = ready[0]

    def fill() -> int:
        return sum(_filled(shard, checkpoint, max_memory) for shard in state.shards)

    taken = together(transport, fill)
    together(transport, lambda: state.accept(_told(checkpoint)))
    return int(taken[transport.rank])


def _check(shard: Shard, checkpoint: Checkpoint) -> None:
    stored = checkpoint.tensors.get(shard.key)
    found: object = None if stored is None else (stored.shape, stored.dtype.name)
    wanted = (shard.map.logical_shape, shard.dtype)
    if found != wanted:
        raise TransferError(
            "a checkpoint does not hold a tensor that is wanted, or another",
            parameter=shard.name,
            state=shard.state,
            expected=f"{wanted[0]} of {wanted[1]}",
            found=found,
            next_step="leave it out of the target (LiveState.only), or convert the checkpoint",
        )


def _filled(shard: Shard, checkpoint: Checkpoint, max_memory: int) -> int:
    """Read one shard and put its elements, and no padding, in place."""
    read = read_shards(checkpoint, {shard.key: shard.map}, workers=1, max_memory=max_memory)
    array = np.ascontiguousarray(read[shard.key]).reshape(-1)
    bits = torch.from_numpy(array.view(np.uint8)).view(word_of(shard.dtype))
    tensor = shard.tensor.detach().view(word_of(shard.dtype))
    memory = tensor.contiguous()  # itself, where it is
    for piece in shard.map.pieces_by_rank[0]:
        block = bits.as_strided(piece.shape, piece.dest_strides, piece.dest_offset)
        at = memory.storage_offset() + piece.dest_offset
        memory.as_strided(piece.shape, piece.dest_strides, at).copy_(block)
    if not tensor.is_contiguous():
        tensor.copy_(memory)
    return array.nbytes


def _told(checkpoint: Checkpoint) -> dict[str, object]:
    """Return steps and settings of groups, by name, as a target takes them."""
    counts: dict[str, dict[str, float]] = {}
    for (name, state), scalar in checkpoint.scalars.items():
        counts.setdefault(state, {})[name] = float(scalar.value)
    extras = [checkpoint.extras.get(key) for key in ("groups", "param_groups")]
    names, settings = ([] if one is None else one.value for one in extras)
    groups: list[dict[str, object]] = []
    if isinstance(names, (list, tuple)) and isinstance(settings, (list, tuple)):
        groups += [
            {"names": list(members), "settings": plain_settings(group)}
            for members, group in zip(names, settings, strict=False)
        ]
    return {OPTIMIZER: {"groups": groups, "counts": counts}}
