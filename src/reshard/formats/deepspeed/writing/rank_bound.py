"""What of a source belongs to single ranks, so that other ranks cannot go on with it.

Theory. Generators of random numbers and positions in the data are states of a process and not of
the run. Trainers keep them in files of their own, one a process, or in what they hand to DeepSpeed
as client state, of which a checkpoint has one. Nothing in a file says what they are; their names
do, and they are only named to the user, never changed or dropped by them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from reshard.formats.checkpoint import Checkpoint

RNG_FILE = re.compile(r"rng_state(_\d+)?\.pth")
"""RNG states, one a process (``transformers.Trainer``)."""

_KEY = re.compile(r"(^|_)rng(_|$)|data_?loader|sampler", re.IGNORECASE)
"""Keys of client states under which frameworks keep them (Megatron's ``random_rng_state``)."""

SHOWN = 6
"""How many of them a message lists."""


def bound_to_ranks(checkpoint: Checkpoint, *, files: bool = True) -> list[str]:
    """Name the RNG states and data-loader positions of a source.

    Parameters
    ----------
    checkpoint
        The source.
    files
        Whether those in files of their own count, beside the checkpoint.
    """
    return [*_keys(checkpoint), *(_files(Path(checkpoint.path).parent) if files else ())]


def _keys(checkpoint: Checkpoint) -> Iterator[str]:
    extra = checkpoint.extras.get("client_state")
    value = extra.value if extra is not None else None
    if isinstance(value, Mapping):
        yield from (str(key) for key in value if _KEY.search(str(key)))


def _files(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in os.scandir(folder) if RNG_FILE.fullmatch(entry.name))
