"""Reading: logical tensors as arrays in memory, however their pieces lie in files.

Theory. Reading a tensor is the plan whose one output is an array: the identity map of the tensor
after the inverse of its source map. Blocks are gathered into workspaces as for a file, copied to
their place, and replicas are compared on the way. Beside the buffers there is nothing in memory but
the arrays themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reshard.errors import CheckpointError, count_text
from reshard.execution.buffers import Workspace, workspaces
from reshard.execution.crew import Crew, in_order
from reshard.execution.digests import LEAF_NBYTES
from reshard.execution.filling import Filler, RouteIndexes
from reshard.execution.gather import Gatherer
from reshard.execution.replicas import REFUSE
from reshard.execution.sources import SourceFiles
from reshard.planning import PlannedFill, RouteBook, SourceTable, identity_fill
from reshard.planning.routes import missing

if TYPE_CHECKING:
    from reshard.formats.checkpoint import Checkpoint, TensorKey
    from reshard.formats.dtypes import DType

Array = NDArray[np.generic]
_Stretch = tuple[PlannedFill, int, int]


def read_tensors(
    checkpoint: Checkpoint,
    keys: Sequence[TensorKey],
    *,
    workers: int,
    max_memory: int,
    dtype: DType | None = None,
) -> dict[TensorKey, Array]:
    """Read tensors whole.

    Parameters
    ----------
    checkpoint
        Where they are.
    keys
        Which.
    workers
        Threads.
    max_memory
        Hard cap over all buffers, in bytes; the arrays come on top.
    dtype
        Element type that floating-point tensors are rounded to; None for their own.

    Raises
    ------
    CheckpointError
        A file is gone, cannot be read, changed, or does not hold all elements.
    ReplicaMismatchError
        Holders of the same elements differ.
    """
    table, book = SourceTable(checkpoint), RouteBook()
    fills = [_fill(checkpoint, key, dtype, table, book) for key in keys]
    arrays = {fill.key: np.empty(fill.shape, fill.dtype.numpy()) for fill in fills}
    sources, indexes = table.files(), RouteIndexes()
    names = [source.name for source in sources]
    with SourceFiles(sources) as files:

        def work_for(space: Workspace) -> Callable[[_Stretch], int]:
            gatherer = Gatherer(files, space.scratch)
            filler = Filler(gatherer, space, indexes, REFUSE, names)
            return lambda stretch: _read(filler, space, arrays, stretch)

        total = sum(fill.nbytes for fill in fills)
        crew = Crew(workspaces(max_memory, workers))
        crew.run(in_order(_stretches(fills)), work_for, total=total, what="read")
        files.check_unchanged()
    return arrays


def _fill(
    checkpoint: Checkpoint,
    key: TensorKey,
    dtype: DType | None,
    table: SourceTable,
    book: RouteBook,
) -> PlannedFill:
    tensor = checkpoint.tensors[key]
    rounded = dtype if tensor.dtype.is_floating else None
    fill = identity_fill(tensor, table, book, rounded)
    holes = missing(fill.route)
    if holes:
        raise CheckpointError(
            "the files do not hold every element of a tensor",
            parameter=tensor.name,
            state=tensor.state,
            expected=count_text(tensor.numel, "element"),
            found=tensor.numel - holes,
        )
    return fill


def _stretches(fills: Sequence[PlannedFill]) -> Iterator[_Stretch]:
    for fill in fills:
        step = LEAF_NBYTES // fill.dtype.itemsize
        for start in range(0, fill.route.numel, step):
            yield fill, start, min(start + step, fill.route.numel)


def _read(
    filler: Filler, space: Workspace, arrays: Mapping[TensorKey, Array], stretch: _Stretch
) -> int:
    fill, first, last = stretch
    item = fill.dtype.itemsize
    place = arrays[fill.key].reshape(-1).view(np.uint8)
    room = len(space.block) // item
    for start in range(first, last, room):
        stop = min(start + room, last)
        filler.fill(fill, start, stop, space.block)
        made = np.frombuffer(space.block, np.uint8, (stop - start) * item)
        place[start * item : stop * item] = made
    return (last - first) * item
