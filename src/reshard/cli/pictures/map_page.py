"""The page of ``reshard map --html``: the picture, and every piece and file in tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reshard.cli.pictures.page import Cell, facts, node, page, section, table
from reshard.cli.pictures.svg import svg_element
from reshard.cli.pictures.tensor_scene import tensor_scene
from reshard.cli.units import counted, format_bytes, format_count, format_shape
from reshard.geometry.notation import NOTATION

if TYPE_CHECKING:
    from collections.abc import Sequence
    from xml.etree import ElementTree as ET

    from reshard.api import PieceRange
    from reshard.formats.checkpoint import Checkpoint, StoredTensor


def map_page(checkpoint: Checkpoint, tensor: StoredTensor, ranges: Sequence[PieceRange]) -> str:
    """Return the page of one stored tensor: its facts, its picture, its pieces."""
    pieces = sum(map(len, tensor.map.pieces_by_rank.values()))
    return page(
        f"{tensor.name} · {tensor.state}",
        f"{checkpoint.path} · {checkpoint.format}, {checkpoint.topology}",
        facts(
            (
                ("shape", format_shape(tensor.shape)),
                ("element type", tensor.dtype),
                ("size", format_bytes(tensor.nbytes)),
                ("role", tensor.role.value),
                ("map", f"{counted(pieces, 'piece')}, {counted(len(tensor.regions), 'holder')}"),
                ("map from", tensor.provenance),
            )
        ),
        node("section", svg_element(tensor_scene(tensor, headed=False)), klass="picture"),
        section("Pieces", _pieces(ranges), note=NOTATION),
    )


def _pieces(ranges: Sequence[PieceRange]) -> ET.Element:
    return table(
        ("holder", ">elements", "piece", "file", ">first byte", ">byte after", ">runs"),
        (
            (
                Cell(str(part.holder), part.holder),
                Cell(format_count(part.piece.numel), part.piece.numel),
                node("code", str(part.piece)),
                Path(part.file).name,
                Cell(format_count(part.start), part.start),
                Cell(format_count(part.stop), part.stop),
                Cell(f"{format_count(part.runs)} × {format_bytes(part.run_nbytes)}", part.runs),
            )
            for part in ranges
        ),
        filtered=True,
    )
