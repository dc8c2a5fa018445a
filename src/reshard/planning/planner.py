"""Planning: a source checkpoint and a target become a plan.

Theory. For every fill of the target: find its tensor in the source, take the route of the two maps
from the book, and look up where the shards of the holders lie. What cannot be done exactly is
refused here, before a byte is read: a tensor that the source does not have, another element type,
target elements that no source holds, an optimizer state under a scale, a region that its file or
its map does not match.

The cost is one dictionary look-up a fill and one tuple of places, so a model of 10,000 tensors over
64 ranks is planned in about a second.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from math import prod

from reshard.errors import CheckpointError, InternalError, ScaledStateError, UsageError, count_text
from reshard.formats.checkpoint import Checkpoint, Region, Role, StoredTensor, TensorKey
from reshard.formats.dtypes import DType
from reshard.formats.target import Fill, OutputFile, Slot, Target
from reshard.geometry import ParamAffineMap
from reshard.planning.plan import (
    Origin,
    Place,
    Plan,
    PlannedFile,
    PlannedFill,
    PlannedSlot,
    PlannedSource,
    Route,
)
from reshard.planning.routes import RouteBook, identity_map, missing

POLICIES = ("refuse", "first", "mean")
SCALABLE_STATE = "fp32"
"""The one state that may be scaled: the parameter itself."""


def plan(checkpoint: Checkpoint, target: Target, *, replicas: str = "refuse") -> Plan:
    """Plan how a target is filled from a checkpoint.

    Parameters
    ----------
    checkpoint
        The source.
    target
        The output, as a writer laid it out.
    replicas
        What to do where ranks that should hold the same bytes differ: ``"refuse"``, ``"first"``
        (keep the lowest rank's) or ``"mean"``.

    Returns
    -------
    Plan
        Pure data; equal inputs give equal plans.

    Raises
    ------
    UsageError
        An unknown policy.
    CheckpointError
        The target needs what the source does not have.
    ScaledStateError
        An optimizer state would have to be scaled.
    """
    if replicas not in POLICIES:
        raise UsageError("unknown replica policy", expected=", ".join(POLICIES), found=replicas)
    sources = SourceTable(checkpoint)
    planner = _Planner(checkpoint, sources)
    files = tuple(planner.file(file) for file in target.files)
    return Plan(
        format=target.format,
        sources=sources.files(),
        files=files,
        pointer=target.pointer,
        replicas=replicas,
        origin=origin_of(checkpoint),
        notes=target.notes,
        topology=target.topology,
        copied=() if replicas == "refuse" else planner.copied(),
    )


def origin_of(checkpoint: Checkpoint) -> Origin:
    """What a plan says about where it came from."""
    versions = tuple(sorted((str(key), str(text)) for key, text in checkpoint.versions.items()))
    return Origin(checkpoint.format, str(checkpoint.topology), versions)


class SourceTable:
    """The files of a checkpoint, numbered; places of regions in them.

    Parameters
    ----------
    checkpoint
        Whose files.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._root = checkpoint.path
        self._sizes: dict[str, int] = {file.path: file.nbytes for file in checkpoint.files}
        self._stamps = {file.path: file.stamp for file in checkpoint.files}
        self._numbers = {path: number for number, path in enumerate(self._sizes)}

    def place(self, region: Region, tensor: StoredTensor, holder: int) -> Place:
        """Where a holder's shard starts; the region must fit its file and hold its shard."""
        number = self._numbers.get(region.file)
        if number is None:
            raise InternalError(
                "a region names a file that is not listed with the checkpoint",
                file=region.file,
                parameter=tensor.name,
            )
        needed = prod(tensor.map.shard_shapes[holder]) * tensor.dtype.itemsize
        if region.nbytes < needed or region.offset + needed > self._sizes[region.file]:
            raise CheckpointError(
                "a file is too short for the shard it should hold",
                file=region.file,
                rank=holder,
                parameter=tensor.name,
                state=tensor.state,
                expected=f"{count_text(needed, 'byte')} from byte {region.offset}",
                found=f"a region of {count_text(region.nbytes, 'byte')} in a file of "
                f"{self._sizes[region.file]}",
            )
        return Place(number, region.offset)

    def files(self) -> tuple[PlannedSource, ...]:
        """All files, by number."""
        return tuple(
            PlannedSource(path, self._name(path), nbytes, self._stamps[path])
            for path, nbytes in self._sizes.items()
        )

    def _name(self, path: str) -> str:
        return os.path.relpath(path, self._root).replace(os.sep, "/")


def identity_fill(
    tensor: StoredTensor, table: SourceTable, book: RouteBook, dtype: DType | None = None
) -> PlannedFill:
    """The fill of a buffer that is the logical tensor itself, row-major.

    Parameters
    ----------
    tensor
        What fills it.
    table, book
        Places and routes.
    dtype
        Element type of the buffer, to which elements are rounded; None for the tensor's own.
    """
    return shard_fill(tensor, identity_map(tensor.shape), table, book, dtype)


def shard_fill(
    tensor: StoredTensor,
    shard: ParamAffineMap,
    table: SourceTable,
    book: RouteBook,
    dtype: DType | None = None,
) -> PlannedFill:
    """The fill of a buffer that is one shard of the logical tensor, row-major.

    Parameters
    ----------
    tensor
        What fills it.
    shard
        The map from the logical tensor to the buffer, whose only rank is 0.
    table, book, dtype
        As for :func:`identity_fill`.
    """
    route = book.route(shard, tensor.map, 0)
    places = tuple(table.place(tensor.regions[h], tensor, h) for h in route.holders)
    wanted = dtype or tensor.dtype
    stored = tensor.dtype if wanted != tensor.dtype else None
    nbytes = route.numel * wanted.itemsize
    return PlannedFill(tensor.key, wanted, shard.shard_shapes[0], 0, nbytes, route, places, stored)


class _Planner:
    """Turns the files of a target into planned ones."""

    def __init__(self, checkpoint: Checkpoint, sources: SourceTable) -> None:
        self._checkpoint = checkpoint
        self._sources = sources
        self._book = RouteBook()
        self._copied: set[TensorKey] = set()

    def copied(self) -> tuple[PlannedFill, ...]:
        """The tensors of all fills so far that have copies, each as a whole."""
        tensors = (self._checkpoint.tensors[key] for key in sorted(self._copied))
        return tuple(identity_fill(tensor, self._sources, self._book) for tensor in tensors)

    def file(self, file: OutputFile) -> PlannedFile:
        slots = tuple(self._slot(file, slot) for slot in file.slots)
        return PlannedFile(file.path, file.size, file.literals, slots)

    def _slot(self, file: OutputFile, slot: Slot) -> PlannedSlot:
        fills = sorted((self._fill(fill) for fill in slot.fills), key=lambda fill: fill.offset)
        at = 0
        for fill in fills:
            if fill.offset < at or fill.offset + fill.nbytes > slot.nbytes:
                raise InternalError(
                    "fills overlap or leave their slot", file=file.path, parameter=fill.key[0]
                )
            at = fill.offset + fill.nbytes
        return PlannedSlot(slot.offset, slot.nbytes, tuple(fills), slot.crc_offsets)

    def _fill(self, fill: Fill) -> PlannedFill:
        tensor = self._tensor(fill)
        route = self._book.route(fill.map, tensor.map, fill.rank)
        _check(fill, tensor, route)
        if route.checks:
            self._copied.add(tensor.key)
        places = tuple(
            self._sources.place(tensor.regions[holder], tensor, holder) for holder in route.holders
        )
        return PlannedFill(
            fill.key,
            fill.dtype,
            fill.map.shard_shapes[fill.rank],
            fill.offset,
            route.numel * fill.dtype.itemsize,
            route,
            places,
            tensor.dtype if tensor.dtype != fill.dtype else None,
        )

    def _tensor(self, fill: Fill) -> StoredTensor:
        tensor = self._checkpoint.tensors.get(fill.key)
        name, state = fill.key
        if tensor is None:
            raise CheckpointError(
                "the output needs a tensor that the source does not have",
                parameter=name,
                state=state,
            )
        rounds = fill.cast and tensor.dtype.is_floating and fill.dtype.is_floating
        if tensor.dtype != fill.dtype and not rounds:
            raise CheckpointError(
                "the output needs another element type than the source has",
                parameter=name,
                state=state,
                expected=fill.dtype,
                found=tensor.dtype,
            )
        return tensor


def _check(fill: Fill, tensor: StoredTensor, route: Route) -> None:
    name, state = fill.key
    holes = missing(route)
    if holes:
        raise CheckpointError(
            "the source does not hold every element that the output needs",
            parameter=name,
            state=state,
            expected=count_text(route.numel, "element"),
            found=f"{route.numel - holes}",
        )
    scaled = any(move.scale != 1.0 for move in (*route.moves, *route.checks))
    if scaled and state != SCALABLE_STATE and tensor.role is Role.PARAMETER:
        raise ScaledStateError(
            "an optimizer state is held under a scale, and would need other hyperparameters",
            parameter=name,
            state=state,
            next_step="resume under the topology it was saved with, or leave the state out",
        )


def filtered(whole: Plan, keep: Callable[[PlannedFile], bool]) -> Plan:
    """The part of a plan that makes some of its files.

    Parameters
    ----------
    whole
        A plan.
    keep
        Which files.
    """
    return replace(whole, files=tuple(file for file in whole.files if keep(file)))
