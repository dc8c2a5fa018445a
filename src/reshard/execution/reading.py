"""Reading: logical tensors as arrays in memory, or only to compare the copies of their elements.

Theory. Reading a tensor is the plan whose one output is an array: the identity map of the tensor
after the inverse of its source map. Blocks are gathered into workspaces as for a file, copied to
their place, and replicas are compared on the way. Beside the buffers there is nothing in memory but
the arrays themselves. Who only wants to know whether copies agree lets the blocks go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reshard.errors import CheckpointError, count_text
from reshard.execution.buffers import Workspace, workspaces
from reshard.execution.crew import Crew, Progress, in_order
from reshard.execution.digests import LEAF_NBYTES
from reshard.execution.filling import Filler, RouteIndexes
from reshard.execution.gather import Gatherer
from reshard.execution.replicas import FIRST, REFUSE, ReplicaFinding, joined_findings
from reshard.execution.sources import SourceFiles
from reshard.planning import PlannedFill, RouteBook, SourceTable
from reshard.planning.planner import shard_fill
from reshard.planning.routes import identity_map, missing

if TYPE_CHECKING:
    from reshard.formats.checkpoint import Checkpoint, TensorKey
    from reshard.formats.dtypes import DType
    from reshard.geometry import ParamAffineMap

Array = NDArray[np.generic]
_Stretch = tuple[PlannedFill, int, int]


def read_tensors(
    checkpoint: Checkpoint,
    keys: Sequence[TensorKey],
    *,
    workers: int,
    max_memory: int,
    dtype: DType | None = None,
    replicas: str = REFUSE,
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
    replicas
        The policy for copies that differ.

    Raises
    ------
    CheckpointError
        A file is gone, cannot be read, changed, or does not hold all elements.
    ReplicaMismatchError
        Holders of the same elements differ, and the policy is to refuse.
    """
    maps = {key: identity_map(checkpoint.tensors[key].shape) for key in keys}
    return read_shards(
        checkpoint, maps, workers=workers, max_memory=max_memory, dtype=dtype, replicas=replicas
    )


def read_shards(
    checkpoint: Checkpoint,
    maps: Mapping[TensorKey, ParamAffineMap],
    *,
    workers: int,
    max_memory: int,
    dtype: DType | None = None,
    replicas: str = REFUSE,
) -> dict[TensorKey, Array]:
    """Read a shard of each of some tensors, and of the files only what it is made of.

    Parameters
    ----------
    maps
        From each logical tensor to the shard, whose only rank is 0; what it leaves out is 0.
    checkpoint, workers, max_memory, dtype, replicas
        As for :func:`read_tensors`, which raises the same.
    """
    table, book = SourceTable(checkpoint), RouteBook()
    fills = [_fill(checkpoint, key, one, dtype, table, book) for key, one in maps.items()]
    arrays = {fill.key: np.empty(fill.shape, fill.dtype.numpy()) for fill in fills}

    def keep(fill: PlannedFill, start: int, stop: int, made: memoryview) -> None:
        item = fill.dtype.itemsize
        place = arrays[fill.key].reshape(-1).view(np.uint8)
        place[start * item : stop * item] = np.frombuffer(made, np.uint8, (stop - start) * item)

    _stream(fills, table, replicas, Crew(workspaces(max_memory, workers)), keep)
    return arrays


def compare_copies(
    checkpoint: Checkpoint, *, workers: int, max_memory: int, progress: Progress | None = None
) -> tuple[ReplicaFinding, ...]:
    """Read every tensor that has copies, and return what differs.

    Parameters
    ----------
    checkpoint
        Where they are.
    workers
        Threads.
    max_memory
        Hard cap over all buffers, in bytes.
    progress
        Told how far it is.

    Raises
    ------
    CheckpointError
        A file is gone, cannot be read, changed, or does not hold all elements.
    """
    table, book = SourceTable(checkpoint), RouteBook()
    fills = [
        _fill(checkpoint, key, identity_map(tensor.shape), None, table, book)
        for key, tensor in checkpoint.tensors.items()
    ]
    copied = [fill for fill in fills if fill.route.checks]
    crew = Crew(workspaces(max_memory, workers), progress)
    return joined_findings(_stream(copied, table, FIRST, crew, _let_go))


_Use = Callable[[PlannedFill, int, int, memoryview], None]
"""Takes a block: elements `[start, stop)` of a fill."""


def _let_go(fill: PlannedFill, start: int, stop: int, made: memoryview) -> None:
    """Take nothing of a block."""


def _stream(
    fills: Sequence[PlannedFill], table: SourceTable, replicas: str, crew: Crew, use: _Use
) -> list[ReplicaFinding]:
    """Fill blocks of all fills one after the other; return the copies that differ."""
    sources, indexes = table.files(), RouteIndexes()
    names = [source.name for source in sources]
    findings: list[ReplicaFinding] = []
    with SourceFiles(sources) as files:

        def work_for(space: Workspace) -> Callable[[_Stretch], int]:
            gatherer = Gatherer(files, space.scratch)
            filler = Filler(gatherer, space, indexes, replicas, names)

            def work(stretch: _Stretch) -> int:
                done = _read(filler, space, use, stretch)
                findings.extend(filler.taken())
                return done

            return work

        total = sum(fill.nbytes for fill in fills)
        crew.run(in_order(_stretches(fills)), work_for, total=total, what="read")
        files.check_unchanged()
    return findings


def _fill(
    checkpoint: Checkpoint,
    key: TensorKey,
    shard: ParamAffineMap,
    dtype: DType | None,
    table: SourceTable,
    book: RouteBook,
) -> PlannedFill:
    tensor = checkpoint.tensors[key]
    rounded = dtype if tensor.dtype.is_floating else None
    fill = shard_fill(tensor, shard, table, book, rounded)
    wanted = sum(piece.numel for _, piece in shard.pieces())
    holes = missing(fill.route) - (fill.route.numel - wanted)
    if holes:
        raise CheckpointError(
            "the files do not hold every element of a tensor",
            parameter=tensor.name,
            state=tensor.state,
            expected=count_text(wanted, "element"),
            found=wanted - holes,
        )
    return fill


def _stretches(fills: Sequence[PlannedFill]) -> Iterator[_Stretch]:
    for fill in fills:
        step = LEAF_NBYTES // fill.dtype.itemsize
        for start in range(0, fill.route.numel, step):
            yield fill, start, min(start + step, fill.route.numel)


def _read(filler: Filler, space: Workspace, use: _Use, stretch: _Stretch) -> int:
    fill, first, last = stretch
    item = fill.dtype.itemsize
    room = len(space.block) // item
    for start in range(first, last, room):
        stop = min(start + room, last)
        filler.fill(fill, start, stop, space.block)
        use(fill, start, stop, space.block)
    return (last - first) * item
