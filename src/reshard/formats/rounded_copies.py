"""Master weights and the model's own copy of them: the same numbers, rounded.

Theory. Beside its fp32 masters a checkpoint holds the weights the model ran with, in the model's
dtype, in files of their own. A trainer sets them by rounding the masters after every step, so at
the time of a save they *are* the masters, rounded. This costs nothing to know and proves much: that
flat buffers were cut in the order in which they are read, and that files of one run and one step
lie together. The start of every stored range is compared, which is a small read, and enough: a
wrong order or another run differs everywhere.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from reshard.errors import ReplicaMismatchError
from reshard.formats.checkpoint import Checkpoint, Region, RoundedCopy

_MASTER = "fp32"

SAMPLE = 256
"""Elements of every range that are compared."""


def is_rounded(copy: RoundedCopy) -> bool:
    """Read both, and say whether the copy is the master rounded to nearest, ties to even."""
    master, weight = _read(copy.master), _read(copy.copy)
    if copy.master_dtype != copy.copy_dtype:
        values = np.frombuffer(master, dtype=copy.master_dtype.numpy())
        with np.errstate(all="ignore"):  # overflow to infinity is what the trainer did too
            master = values.astype(copy.copy_dtype.numpy()).tobytes()
    return master == weight


def differing_copies(checkpoint: Checkpoint) -> ReplicaMismatchError | None:
    """Return what is wrong with a checkpoint whose model is not its masters rounded.

    Of its copies, those of parameters whose master it carries are read.
    """
    carried = [copy for copy in checkpoint.copies if (copy.name, _MASTER) in checkpoint.tensors]
    differing = [copy for copy in carried if not is_rounded(copy)]
    if not differing:
        return None
    first = differing[0]
    names, among = len({copy.name for copy in differing}), len({copy.name for copy in carried})
    return ReplicaMismatchError(
        f"the model's own weights are not its master weights rounded, in {names} of {among} "
        "parameters",
        file=first.copy.file,
        parameter=first.name,
        found=f"other values than in {Path(first.master.file).name}",
        next_step="files of different runs or steps lie in one folder, or flat buffers are in "
        "another order; if the model's weights were exchanged on purpose (an average, say), "
        "--replicas first takes the masters",
    )


def _read(region: Region) -> bytes:
    with Path(region.file).open("rb") as file:
        file.seek(region.offset)
        return file.read(region.nbytes)
