"""Proving that two checkpoints hold the same, of whatever formats and topologies.

Theory. Equal tensors prove that a conversion was right; they do not prove that the files are as
they were written, for not every byte of a file is part of a tensor. What reshard wrote has a
manifest beside it with a digest of every byte, so a side that has one is held against it as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from reshard.api.arguments import paths_of, size_of, texts_of, workers_of
from reshard.api.budgets import DEFAULT_MAX_MEMORY_BYTES, Progress
from reshard.api.exports import comparable
from reshard.api.naming import named
from reshard.api.opening import AnyPath, opened
from reshard.api.selection import select
from reshard.execution import MANIFEST_NAME, SIDES, Comparison, check_manifest
from reshard.formats.checkpoint import Checkpoint, TensorKey
from reshard.formats.registry import ReadOptions
from reshard.formats.renaming import Renaming, renamed
from reshard.formats.soundness import require_sound


def verify(  # noqa: PLR0913 - keyword-only, and each is an option of the command
    source: AnyPath,
    destination: AnyPath,
    *,
    also: Sequence[AnyPath] | AnyPath = (),
    layout: AnyPath | None = None,
    reading: ReadOptions | None = None,
    include: Sequence[str] | str = (),
    exclude: Sequence[str] | str = (),
    states: Sequence[str] | str = (),
    trainable: bool = False,
    rename: Renaming | None = None,
    replicas: str = "refuse",
    names: Sequence[AnyPath] | AnyPath = (),
    names_states: str = "all",
    workers: int | None = None,
    max_memory: int | str = DEFAULT_MAX_MEMORY_BYTES,
    progress: Progress | None = None,
) -> Comparison:
    """Compare two checkpoints bit for bit: every state of every tensor, every scalar and extra.

    Where one side is an export (safetensors), what it holds is compared: the states that it leaves
    out are listed in `not_held`, and weights in another element type are compared in that type.
    A side with a manifest is also held against that: whatever changed in its files since it was
    written is listed in `changes`.

    Parameters
    ----------
    source, destination
        The two checkpoints; each as for :func:`~reshard.api.open_checkpoint`.
    also, layout, reading
        For the source, as for :func:`~reshard.api.open_checkpoint`.
    include, exclude, states, trainable
        Compare only what they select of the source, as for :func:`~reshard.api.convert`, and the
        same names and states of the other side.
    rename
        Other names that the destination has for parameters of the source.
    replicas
        The policy by which the destination was made; all but ``"refuse"`` also compare sides whose
        files are not of one save.
    names, names_states
        Rules by which the destination spells the source, as for :func:`~reshard.api.convert`.
    workers
        Stretches compared at a time; by default one a CPU.
    max_memory
        Hard cap on the buffers of all workers: bytes, or a text like ``"2GB"``.
    progress
        Told ``(done_bytes, total_bytes, phase)`` about ten times a second.

    Raises
    ------
    ReshardError
        One of the two is not a whole and sound checkpoint. Differences are no error: they are in
        the result, whose ``equal`` says whether there are any.
    """
    memory = size_of(max_memory)
    states = texts_of("states", states)
    whole = opened(source, also=also, layout=layout, reading=reading)
    left = select(whole, include=include, exclude=exclude, states=states, trainable=trainable)
    right = opened(destination)
    for side in (left, right):
        require_sound(side, replicas)
    if rename:
        left = renamed(left, rename, whole)
    left = named(left, names, states=names_states, also=paths_of("also", also)).checkpoint
    if include or exclude or states or trainable:
        right = _narrowed_to(right, left, states)
    threads = workers_of(workers)
    found = comparable(left, right).compared(workers=threads, max_memory=memory, progress=progress)
    changes = tuple(
        (side, change)
        for side, folder in zip(SIDES, (whole.path, right.path), strict=True)
        if (Path(folder) / MANIFEST_NAME).exists()
        for change in check_manifest(folder, workers=threads, max_memory=memory, progress=progress)
    )
    return replace(found, changes=changes)


def _narrowed_to(right: Checkpoint, left: Checkpoint, states: Sequence[str]) -> Checkpoint:
    """What the destination holds of the names that were chosen of the source, and the states."""
    names = {*left.names, *left.aliases}

    def keeps(key: TensorKey) -> bool:
        return key[0] in names and (not states or key[1] in states)

    return replace(
        right,
        tensors={key: tensor for key, tensor in right.tensors.items() if keeps(key)},
        scalars={key: scalar for key, scalar in right.scalars.items() if keeps(key)},
    )
