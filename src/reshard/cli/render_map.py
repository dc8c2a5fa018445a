"""The report of ``reshard map``.

Theory. A piece is written in the notation of :mod:`reshard.geometry.notation`: the block of the
full tensor `F`, an arrow, the block of the holder's shard, and who holds these elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from reshard.cli.blocks import Block, fields, lines, table
from reshard.cli.render_inspect import shown_path
from reshard.cli.units import counted, format_count, format_shape
from reshard.geometry.notation import NOTATION

if TYPE_CHECKING:
    from reshard.api import PieceRange
    from reshard.formats.checkpoint import Checkpoint, StoredTensor


def map_blocks(
    checkpoint: Checkpoint, tensor: StoredTensor, ranges: Sequence[PieceRange] | None
) -> Iterator[Block]:
    """Give the blocks of the map of one tensor; `ranges` adds the bytes of the files."""
    yield _header(checkpoint, tensor)
    yield _holders(checkpoint, tensor)
    yield _pieces(tensor)
    yield lines("", (f"read {NOTATION}",))
    if ranges is not None:
        yield _ranges(checkpoint, ranges)


def _header(checkpoint: Checkpoint, tensor: StoredTensor) -> Block:
    pieces = sum(map(len, tensor.map.pieces_by_rank.values()))
    return fields(
        "tensor",
        (
            ("name", tensor.name),
            ("state", tensor.state),
            ("shape", format_shape(tensor.shape)),
            ("dtype", tensor.dtype),
            ("role", tensor.role.value),
            ("saved under", f"{checkpoint.format}, {checkpoint.topology}"),
            ("map", f"{counted(pieces, 'piece')} over {counted(len(tensor.regions), 'holder')}"),
            ("from", tensor.provenance),
        ),
    )


def _holders(checkpoint: Checkpoint, tensor: StoredTensor) -> Block:
    return table(
        "holders",
        "holder shard >pieces >bytes file",
        (
            (
                holder,
                format_shape(tensor.map.shard_shapes[holder]),
                len(tensor.map.pieces_by_rank[holder]),
                format_count(region.nbytes),
                shown_path(region.file, checkpoint),
            )
            for holder, region in sorted(tensor.regions.items())
        ),
    )


def _pieces(tensor: StoredTensor) -> Block:
    return table(
        "pieces",
        "holder piece",
        (
            (holder, piece)
            for holder in sorted(tensor.regions)
            for piece in tensor.map.pieces_by_rank[holder]
        ),
    )


def _ranges(checkpoint: Checkpoint, ranges: Sequence[PieceRange]) -> Block:
    return table(
        "bytes",
        "holder file >start >stop >runs piece",
        (
            (
                range_.holder,
                shown_path(range_.file, checkpoint),
                range_.start,
                range_.stop,
                f"{range_.runs}×{range_.run_nbytes}",
                range_.piece,
            )
            for range_ in ranges
        ),
    )
