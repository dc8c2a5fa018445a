"""Adding maps to a checkpoint that has none; the layouts it needs come with step 3."""

from __future__ import annotations

from collections.abc import Sequence
from os import fspath

from reshard.api.opening import AnyPath
from reshard.errors import UnsupportedError


def annotate(
    source: AnyPath,
    destination: AnyPath,
    *,
    also: Sequence[AnyPath] = (),
    layout: AnyPath | None = None,
) -> None:
    """Write a checkpoint again with an ``affine_map`` for every tensor-parallel parameter.

    Parameters
    ----------
    source, also, layout
        As for :func:`~reshard.api.open_checkpoint`.
    destination
        The folder to write.

    Raises
    ------
    UnsupportedError
        Always, in this version.
    """
    del destination, also, layout
    raise UnsupportedError(
        "annotate is not there yet",
        file=fspath(source),
        next_step="it comes with step 3; reshard convert does not need it",
    )
