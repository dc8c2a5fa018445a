"""Proving that two checkpoints hold the same, of whatever formats and topologies."""

from __future__ import annotations

from collections.abc import Sequence

from reshard.api.arguments import size_of
from reshard.api.budgets import DEFAULT_MAX_MEMORY_BYTES, Progress, default_workers
from reshard.api.opening import AnyPath, open_checkpoint
from reshard.api.selection import select
from reshard.execution import Comparison, compare


def verify(  # noqa: PLR0913 - keyword-only, and each is an option of the command
    source: AnyPath,
    destination: AnyPath,
    *,
    also: Sequence[AnyPath] | AnyPath = (),
    layout: AnyPath | None = None,
    include: Sequence[str] | str = (),
    exclude: Sequence[str] | str = (),
    states: Sequence[str] | str = (),
    workers: int | None = None,
    max_memory: int | str = DEFAULT_MAX_MEMORY_BYTES,
    progress: Progress | None = None,
) -> Comparison:
    """Compare two checkpoints bit for bit: every state of every tensor, every scalar and extra.

    Parameters
    ----------
    source, destination
        The two checkpoints; each as for :func:`~reshard.api.open_checkpoint`.
    also, layout
        For the source, as for :func:`~reshard.api.open_checkpoint`.
    include, exclude, states
        Compare only what they select on both sides, as for :func:`~reshard.api.convert`.
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
    left, right = (
        select(side, include=include, exclude=exclude, states=states)
        for side in (
            open_checkpoint(source, also=also, layout=layout),
            open_checkpoint(destination),
        )
    )
    return compare(
        left,
        right,
        workers=workers if workers is not None else default_workers(),
        max_memory=memory,
        progress=progress,
    )
