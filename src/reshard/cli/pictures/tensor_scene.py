"""The picture of one stored tensor: the full tensor, and the shards of its holders beside it.

Theory. On the left the whole tensor `F` as a sheet, every element in the colour of who holds it; a
block that several hold is drawn once, hatched. On the right the shard of each holder in the same
colour, and its file. What a shard holds beyond the tensor is padding; what nobody holds shows
through in red. What is held and cannot be drawn (too many pieces, too irregular ones) stays grey,
and the picture says how much that is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.cli.pictures.bands import Sheet, sheet_of
from reshard.cli.pictures.colours import holder_colours
from reshard.cli.pictures.scene import (
    Group,
    Line,
    Mark,
    Rect,
    Scene,
    Text,
    clipped,
    text_width,
)
from reshard.cli.pictures.sheets import Block, Box, Placed, place
from reshard.cli.text import visible
from reshard.cli.units import counted, format_bytes, format_count, format_shape
from reshard.geometry.holes import holes_of
from reshard.geometry.notation import ranks_text

if TYPE_CHECKING:
    from reshard.formats.checkpoint import StoredTensor
    from reshard.geometry import AffinePiece

MOST_SHARDS = 64
"""Shards that are drawn one by one."""

MOST_PIECES = 5000
"""Pieces that are drawn on one sheet."""

_MARGIN = 28.0
_TOP = 108.0
_TOP_ALONE = 24.0
_AXIS = 64.0
_SIDE = 420.0
_LEAST_SIDE = 190.0
_GAP = 56.0
_SHARDS_WIDTH = 640.0
_ROOMY = 16
_LEAST_SHARD = (90.0, 28.0)
_LEAST_SEAMED = 6.0


@dataclass(frozen=True, slots=True)
class _Piece:
    """One piece of one holder."""

    holder: int
    index: int
    piece: AffinePiece

    @property
    def is_replica(self) -> bool:
        return len(self.piece.locations) > 1

    @property
    def is_drawn_in_full(self) -> bool:
        """Of the holders of one block, the first draws it."""
        return self.holder == self.piece.locations[0]


def tensor_scene(tensor: StoredTensor, context: str = "", *, headed: bool = True) -> Scene:
    """Draw a stored tensor.

    Parameters
    ----------
    tensor
        What to draw.
    context
        Where it is from, in words.
    headed
        Whether name and facts stand above it; on a page they stand there already.
    """
    return _Drawing(tensor, context, headed=headed).scene()


class _Drawing:
    """One picture in the making."""

    def __init__(self, tensor: StoredTensor, context: str, *, headed: bool) -> None:
        self.tensor = tensor
        self.context = context
        self.headed = headed
        self.margin = _MARGIN if headed else 2.0
        self.top = _TOP if headed else _TOP_ALONE
        self.holders = sorted(tensor.map.shard_shapes)
        self.colour = {holder: index for index, holder in enumerate(self.holders)}
        self.pieces = {
            holder: [
                _Piece(holder, index, piece)
                for index, piece in enumerate(tensor.map.pieces_by_rank[holder])
            ]
            for holder in self.holders
        }
        self.sheet = sheet_of(tensor.shape)
        self.box = _fitted(self.sheet, self.margin + _AXIS, self.top + 18, _SIDE, _SIDE)
        self.shards_x = self.box.x + max(_LEAST_SIDE, self.box.width) + _GAP
        self.width = self.shards_x + _SHARDS_WIDTH + self.margin
        self.notes: list[str] = []
        self.holes = holes_of(tensor.map.table.link, tensor.map.numel).numel

    def scene(self) -> Scene:
        """Draw everything."""
        full, full_bottom = self._full_tensor()
        shards, shards_bottom = self._shards()
        key, bottom = self._key(max(full_bottom, shards_bottom) + 26)
        name = f"{visible(self.tensor.name)} · {visible(self.tensor.state)}"
        return Scene(
            self.width,
            bottom + self.margin - 8,
            f"Map of {name}",
            self._description(),
            (*(self._header(name) if self.headed else ()), *full, *shards, *key),
            holder_colours(len(self.holders)),
        )

    def _description(self) -> str:
        tensor = self.tensor
        return (
            f"The tensor of shape {format_shape(tensor.shape)} ({tensor.dtype}) on the left, "
            f"coloured by the {counted(len(self.holders), 'holder')} of its elements; "
            "the shard of each holder on the right."
        )

    def _header(self, name: str) -> Iterator[Group]:
        tensor = self.tensor
        pieces = sum(map(len, self.pieces.values()))
        facts = " · ".join(
            (
                f"{format_shape(tensor.shape)} {tensor.dtype}, {format_bytes(tensor.nbytes)}",
                visible(self.context),
                f"{counted(pieces, 'piece')} over {counted(len(self.holders), 'holder')}",
            )
        )
        origin = f"map from: {visible(tensor.provenance)}"
        room = self.width - 2 * self.margin
        yield Group(
            (
                Text(self.margin, 36, clipped(name, room, 18), 18, bold=True),
                Text(self.margin, 58, clipped(facts, room, 12.5), 12.5, "muted"),
                Text(self.margin, 76, clipped(origin, room, 12.5), 12.5, "muted"),
            ),
            kind="header",
        )

    # ----- the full tensor

    def _full_tensor(self) -> tuple[list[Group], float]:
        sheet, box = self.sheet, self.box
        groups = [
            Group(tuple(self._axes(sheet, box)), kind="axes"),
            self._background(box),
        ]
        owned = [piece for h in self.holders for piece in self.pieces[h] if piece.is_drawn_in_full]
        owned = self._drawable(owned, "of F")
        placed = place([_source(piece.piece) for piece in owned], sheet, box)
        self._note(placed)
        labels: list[Text] = []
        for index, piece in enumerate(owned):
            rects = self._rects(placed, index, piece)
            groups.append(Group(rects, self._told(piece), "piece", self.colour[piece.holder]))
        for index, piece in enumerate(owned):
            labels += self._labels(piece, placed.blocks[index] or (), ranks=True)
        groups.append(Group((*_frame(box), *labels), kind="labels"))
        return groups, box.y + box.height + 18

    def _background(self, box: Box) -> Group:
        """What shows where no piece is drawn."""
        if self.holes:
            return Group((_filled(box, "missing"),), "held by nobody", kind="sheet")
        return Group((_filled(box, "padding"),), "not drawn" if self.tensor.numel else "", "sheet")

    def _drawable(self, pieces: list[_Piece], what: str) -> list[_Piece]:
        """As many pieces as a browser draws with ease."""
        if len(pieces) <= MOST_PIECES:
            return pieces
        told = f"{format_count(MOST_PIECES)} of {format_count(len(pieces))}"
        self.notes.append(f"Not all is drawn: the first {told} pieces {what}")
        return pieces[:MOST_PIECES]

    def _axes(self, sheet: Sheet, box: Box) -> Iterator[Mark]:
        shape, split = self.tensor.shape, sheet.split
        yield Text(self.margin, self.top, "Full tensor F", 13, bold=True)
        yield Text(box.x, box.y - 5, "0", 10.5, "muted")
        yield Text(
            box.x + box.width, box.y - 5, format_count(sheet.columns), 10.5, "muted", anchor="end"
        )
        below = box.y + box.height
        if split:
            yield Text(box.x - 6, box.y + 9, "0", 10.5, "muted", anchor="end")
            yield Text(box.x - 6, below, format_count(sheet.rows), 10.5, "muted", anchor="end")
        rows = f"rows: {_dims(0, split)} · " if split else ""
        said = f"{rows}columns: {_dims(split, len(shape))}" if shape else "one element"
        if split and abs(box.width * sheet.rows / (box.height * max(1, sheet.columns)) - 1) > 0.01:
            said += ", stretched"
        yield Text(box.x, below + 16, said, 11, "muted")

    def _rects(self, placed: Placed, index: int, piece: _Piece) -> tuple[Rect, ...]:
        """The rectangles of a piece; bands of one of several pieces stand apart."""
        several = len(self.pieces[piece.holder]) > 1
        return tuple(
            Rect(
                *place_,
                f"h{self.colour[piece.holder]}",
                hatched=piece.is_replica,
                edge="paper" if several and min(place_[2:]) >= _LEAST_SEAMED else "",
            )
            for place_ in placed.blocks[index] or ()
        )

    def _labels(
        self, piece: _Piece, rects: Sequence[tuple[float, float, float, float]], *, ranks: bool
    ) -> Iterator[Text]:
        """Holders and number of a piece on its rectangles, where there is room."""
        several = len(self.pieces[piece.holder]) > 1
        holders = ranks_text(piece.piece.locations) if ranks else ""
        number = f"piece {piece.index}" if several else ""
        short = "" if ranks or not several else str(piece.index)
        for said in (f"{holders} · {number}" if holders and number else "", holders, number, short):
            fitting = [r for r in rects if r[3] >= 12 and r[2] >= text_width(said, 11) + 6]
            if said and fitting:
                listed = fitting if several else [max(fitting, key=lambda r: r[2] * r[3])]
                for x, y, width, height in listed:
                    yield Text(x + width / 2, y + height / 2 + 4, said, 11, anchor="middle")
                return

    def _told(self, piece: _Piece) -> str:
        region = self.tensor.regions[piece.holder]
        others = [rank for rank in piece.piece.locations if rank != piece.holder]
        shared = f"; also on {ranks_text(others)}" if others else ""
        return visible(
            f"holder {piece.holder}, piece {piece.index}: {piece.piece}; "
            f"{counted(piece.piece.numel, 'element')}{shared}; {Path(region.file).name}"
        )

    # ----- the shards

    def _shards(self) -> tuple[list[Group], float]:
        shown = self.holders[:MOST_SHARDS]
        roomy = len(shown) <= _ROOMY
        columns = 1 if roomy else 2
        height = self._row_height(shown) if roomy else 18.0
        a_column = -(-len(shown) // columns)
        width = _SHARDS_WIDTH / columns
        title = "Shard of each holder"
        if len(shown) < len(self.holders):
            title += f" (the first {len(shown)} of {format_count(len(self.holders))})"
        groups = [Group((Text(self.shards_x, self.top, title, 13, bold=True),), kind="header")]
        for number, holder in enumerate(shown):
            column, row = divmod(number, a_column)
            x, y = self.shards_x + column * width, self.top + 18 + row * height
            groups += self._shard(holder, Box(x, y, width - 12, height), roomy=roomy)
        return groups, self.top + 18 + a_column * height

    def _row_height(self, shown: Sequence[int]) -> float:
        """Room for matrices where there are few of them."""
        flat = all(sheet_of(self.tensor.map.shard_shapes[holder]).rows == 1 for holder in shown)
        return 38.0 if flat else max(38.0, min(120.0, _SIDE / len(shown)))

    def _shard(self, holder: int, row: Box, *, roomy: bool) -> Iterator[Group]:
        shape = self.tensor.map.shard_shapes[holder]
        colour = self.colour[holder]
        sheet = sheet_of(shape)
        chip = 40.0 if roomy else 34.0
        room_width, room_height = (230.0, row.height - 8) if roomy else (110.0, 12.0)
        box = self._shard_box(sheet, row.x + chip + 8, row.y + 2, room_width, room_height)
        yield Group(
            (
                Rect(row.x, row.y + 2, chip, 16 if roomy else 14, f"h{colour}"),
                Text(row.x + chip / 2, row.y + 14, str(holder), 11, anchor="middle", bold=True),
            ),
            f"holder {holder}: {visible(Path(self.tensor.regions[holder].file).name)}",
            "holder",
            colour,
        )
        pieces = self._drawable(self.pieces[holder], f"of holder {holder}")
        placed = place([_dest(piece.piece) for piece in pieces], sheet, box)
        self._note(placed)
        if _numel(shape) > sum(piece.piece.numel for piece in self.pieces[holder]):
            yield Group((_filled(box, "padding"),), "padding", "padding", colour)
        for index, piece in enumerate(pieces):
            rects = self._rects(placed, index, piece)
            labels = self._labels(piece, placed.blocks[index] or (), ranks=False)
            yield Group((*rects, *labels), self._told(piece), "shard", colour)
        yield Group(
            (
                *_frame(box),
                *self._facts(
                    holder, row, chip + 24 + self._widest(room_width, room_height), roomy=roomy
                ),
            )
        )

    def _shard_box(self, sheet: Sheet, x: float, y: float, width: float, height: float) -> Box:
        """A bar as long as the shard is large; a matrix nearly in its proportions; to one scale."""
        shapes = [sheet_of(shape) for shape in self.tensor.map.shard_shapes.values()]
        if all(other.rows == 1 for other in shapes) or height < 20:
            largest = max((other.rows * other.columns for other in shapes), default=1) or 1
            share = sheet.rows * sheet.columns / largest
            return Box(x, y, max(2.0, width * share), min(height, 16.0))
        across = sheet.columns / (max(other.columns for other in shapes) or 1)
        down = sheet.rows / (max(other.rows for other in shapes) or 1)
        scale = min(width * across / max(1, sheet.columns), height * down / max(1, sheet.rows))
        return Box(
            x,
            y,
            max(sheet.columns * scale, _LEAST_SHARD[0] * across),
            max(sheet.rows * scale, _LEAST_SHARD[1] * down),
        )

    def _widest(self, width: float, height: float) -> float:
        shapes = self.tensor.map.shard_shapes.values()
        boxes = (self._shard_box(sheet_of(shape), 0, 0, width, height) for shape in shapes)
        return max((box.width for box in boxes), default=0.0)

    def _facts(self, holder: int, row: Box, x: float, *, roomy: bool) -> Iterator[Text]:
        shape = self.tensor.map.shard_shapes[holder]
        held = sum(piece.piece.numel for piece in self.pieces[holder])
        share = f"{100 * held / self.tensor.numel:.3g} %" if self.tensor.numel else "-"
        pieces = counted(len(self.pieces[holder]), "piece")
        left, room = row.x + x, row.width - x
        if not roomy:
            yield Text(left, row.y + 13, clipped(f"{format_shape(shape)} · {share}", room, 11), 11)
            return
        said = f"{format_shape(shape)} · {share} of F · {pieces}"
        file = visible(Path(self.tensor.regions[holder].file).name)
        yield Text(left, row.y + 14, clipped(said, room, 12), 12)
        yield Text(left, row.y + 29, clipped(file, room, 10, mono=True), 10, "muted", mono=True)

    # ----- the key

    def _key(self, top: float) -> tuple[list[Group], float]:
        entries = [
            (Rect(self.margin, 0, 22, 13, paint, hatched=hatched), said)
            for paint, hatched, said in self._key_entries()
        ]
        groups = [
            Group((Line(self.margin, top - 14, self.width - self.margin, top - 14),), kind="rule")
        ]
        y = top
        for swatch, said in entries:
            drawn = Rect(swatch.x, y, 22, 13, swatch.paint, hatched=swatch.hatched)
            groups.append(Group((drawn, Text(self.margin + 32, y + 11, said, 12)), kind="key"))
            y += 20
        for note in dict.fromkeys(self.notes):
            groups.append(Group((Text(self.margin, y + 11, f"{note}.", 12, "muted"),), kind="note"))
            y += 20
        return groups, y

    def _key_entries(self) -> Iterator[tuple[str, bool, str]]:
        yield (
            "h0",
            False,
            (
                "a colour is a holder: whoever stores one shard (a rank, in its file); "
                "its pieces have the same colour in F and in the shard"
            ),
        )
        pieces = [piece for held in self.pieces.values() for piece in held]
        shared = {piece.piece.locations for piece in pieces if piece.is_replica}
        if shared:
            listed = [ranks_text(ranks) for ranks in sorted(shared)[:4]]
            more = f" and {counted(len(shared) - 4, 'more set')}" if len(shared) > 4 else ""
            said = f"hatched: replicas, the same elements on holders {' | '.join(listed)}{more}"
            yield f"h{self.colour[min(min(ranks) for ranks in shared)]}", True, said
        stored = sum(_numel(shape) for shape in self.tensor.map.shard_shapes.values())
        padding = stored - sum(piece.piece.numel for piece in pieces)
        if padding:
            said = f"padding: {counted(padding, 'element')} of shards that are no part of F"
            yield "padding", False, said
        if self.holes:
            yield "missing", False, f"{counted(self.holes, 'element')} of F that nobody holds"

    def _note(self, placed: Placed) -> None:
        self.notes.extend(placed.notes)


def _source(piece: AffinePiece) -> Block:
    return piece.shape, piece.source_offset, piece.source_strides


def _dest(piece: AffinePiece) -> Block:
    return piece.shape, piece.dest_offset, piece.dest_strides


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _dims(start: int, stop: int) -> str:
    return f"dim {start}" if stop - start == 1 else f"dims {start}-{stop - 1}"


def _fitted(sheet: Sheet, x: float, y: float, width: float, height: float) -> Box:
    """The largest box of the sheet's proportions, but never thinner than can be read."""
    scale = min(width / max(1, sheet.columns), height / max(1, sheet.rows))
    least = _LEAST_SIDE
    return Box(
        x,
        y,
        min(width, max(least, sheet.columns * scale)),
        44.0 if sheet.rows == 1 else min(height, max(least, sheet.rows * scale)),
    )


def _filled(box: Box, paint: str) -> Rect:
    return Rect(box.x, box.y, box.width, box.height, paint)


def _frame(box: Box) -> Iterator[Line]:
    right, bottom = box.x + box.width, box.y + box.height
    yield Line(box.x, box.y, right, box.y, "frame")
    yield Line(box.x, bottom, right, bottom, "frame")
    yield Line(box.x, box.y, box.x, bottom, "frame")
    yield Line(right, box.y, right, bottom, "frame")
