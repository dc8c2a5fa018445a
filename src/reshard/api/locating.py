"""Questions to the map of one stored tensor: which bytes of which file hold what.

Theory. Element `k` of a holder's shard starts at byte `region.offset + k * itemsize` of its file,
and a piece is a strided block of the shard, so a piece is a strided block of the file. One element
of the logical tensor is found by solving `source_offset + Σ i_a * source_stride_a = offset` for the
index `i` of each piece, the largest stride first; what the smaller ones can still add bounds every
choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reshard.api.selection import suggest, suggest_state
from reshard.errors import UsageError
from reshard.formats.checkpoint import Checkpoint, StoredTensor
from reshard.geometry import AffinePiece

MASTER = "fp32"
"""The state that holds the weights themselves, in every format."""


@dataclass(frozen=True, slots=True)
class PieceRange:
    """Where one piece of a holder's shard lies in a file."""

    holder: int
    """Who holds it."""
    index: int
    piece: AffinePiece
    """The piece, and its index in the holder's list."""
    file: str
    """The file of that holder."""
    start: int
    stop: int
    """First byte, and the byte after the last, from the beginning of the file."""
    run_nbytes: int
    """Bytes that lie together."""
    runs: int
    """Number of such runs between `start` and `stop`."""


@dataclass(frozen=True, slots=True)
class ElementLocation:
    """One stored copy of an element: its holder, and `nbytes` bytes at `offset` of a file."""

    holder: int
    file: str
    offset: int
    nbytes: int
    scale: float


def find_tensor(checkpoint: Checkpoint, name: str, state: str | None = None) -> StoredTensor:
    """Return one state of one parameter; a tied name means its owner.

    Parameters
    ----------
    checkpoint
        Where to look.
    name
        Name of the parameter.
    state
        Which state; by default ``fp32``, or the first where there is none.

    Raises
    ------
    UsageError
        There is no such parameter or state; the text names the closest.
    """
    owner = checkpoint.aliases.get(name, name)
    held = {tensor.state: tensor for tensor in checkpoint.states_of(owner)}
    if not held:
        known = (*checkpoint.names, *checkpoint.aliases)
        raise UsageError("no such parameter", parameter=name, next_step=suggest(name, known))
    if state is None:
        return held.get(MASTER) or next(iter(held.values()))
    if state not in held:
        raise UsageError(
            "no such state",
            parameter=name,
            state=state,
            expected=f"one of {', '.join(held)}",
            next_step=suggest_state(state, held),
        )
    return held[state]


def states_in_order(states: Iterable[str]) -> tuple[str, ...]:
    """Return each state once: the weights first, then as they come.

    Examples
    --------
    >>> states_in_order(["exp_avg", "exp_avg_sq", "fp32", "exp_avg"])
    ('fp32', 'exp_avg', 'exp_avg_sq')
    """
    return tuple(sorted(dict.fromkeys(states), key=lambda state: state != MASTER))


def piece_ranges(tensor: StoredTensor) -> tuple[PieceRange, ...]:
    """Return where every piece of a stored tensor lies in the files, holder by holder."""
    return tuple(
        _piece_range(tensor, holder, index, piece)
        for holder in sorted(tensor.regions)
        for index, piece in enumerate(tensor.map.pieces_by_rank[holder])
    )


def _piece_range(tensor: StoredTensor, holder: int, index: int, piece: AffinePiece) -> PieceRange:
    region, itemsize = tensor.regions[holder], tensor.dtype.itemsize
    run, runs = 1, 1
    for extent, stride in zip(reversed(piece.shape), reversed(piece.dest_strides), strict=True):
        if runs == 1 and (stride == run or extent == 1):
            run *= extent
        else:
            runs *= extent
    last = sum((n - 1) * s for n, s in zip(piece.shape, piece.dest_strides, strict=True))
    start = region.offset + piece.dest_offset * itemsize
    nbytes = (last + 1) * itemsize if run * runs else 0
    return PieceRange(
        holder,
        index,
        piece,
        region.file,
        start,
        start + nbytes,
        run_nbytes=run * itemsize,
        runs=runs,
    )


def element_location(tensor: StoredTensor, index: Sequence[int]) -> tuple[ElementLocation, ...]:
    """Return every stored copy of one element of a tensor.

    Parameters
    ----------
    tensor
        The stored tensor.
    index
        Index of the element in the logical tensor.

    Raises
    ------
    UsageError
        The index does not fit the shape.
    """
    if len(index) != len(tensor.shape) or any(
        not 0 <= i < n for i, n in zip(index, tensor.shape, strict=True)
    ):
        raise UsageError(
            "the index is outside the tensor",
            parameter=tensor.name,
            expected=f"an index into {list(tensor.shape)}",
            found=list(index),
        )
    offset = 0
    for position, extent in zip(index, tensor.shape, strict=True):
        offset = offset * extent + position
    size = tensor.dtype.itemsize
    return tuple(
        ElementLocation(holder, region.file, region.offset + at * size, size, piece.scale)
        for holder, region in sorted(tensor.regions.items())
        for piece in tensor.map.pieces_by_rank[holder]
        if (at := shard_offset(piece, offset)) is not None
    )


def shard_offset(piece: AffinePiece, offset: int) -> int | None:
    """Return where in the shard a piece puts an element of the full tensor, None if nowhere."""
    axes = sorted(
        zip(piece.source_strides, piece.dest_strides, piece.shape, strict=True), reverse=True
    )
    reach = [0] * (len(axes) + 1)
    for position in reversed(range(len(axes))):
        stride, _, extent = axes[position]
        reach[position] = reach[position + 1] + stride * (extent - 1)

    def descend(position: int, rest: int, at: int) -> int | None:
        if position == len(axes):
            return at if rest == 0 else None
        stride, dest, extent = axes[position]
        least = max(0, -(-(rest - reach[position + 1]) // stride)) if stride else 0
        most = min(extent - 1, rest // stride if stride else 0)
        for step in range(least, most + 1):
            found = descend(position + 1, rest - step * stride, at + step * dest)
            if found is not None:
                return found
        return None

    if 0 in piece.shape or not 0 <= offset - piece.source_offset <= reach[0]:
        return None
    return descend(0, offset - piece.source_offset, piece.dest_offset)
