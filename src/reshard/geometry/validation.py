"""Validation: the properties that make a map usable, proved from its pieces alone.

Theory. A map is sound when

* (bounds) no piece reaches outside ``F`` or outside its shard;
* (write-once) every element of a shard is written by exactly one piece;
* (P1) every element of ``F`` is held by some rank;
* (P3) no piece adds several elements of ``F`` into one of the shard: its dest side is injective;
* (P5) every element of a piece is held by exactly the ranks of its ``locations``, all by the
  same scale.

All of them are statements about overlaps and volumes of strided blocks, decided in a grid
(:mod:`reshard.geometry.grid`), exactly, without looking at single elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.errors import InvalidMapError
from reshard.geometry.grid import Box, Grid
from reshard.geometry.index_math import numel
from reshard.geometry.links import Link, from_dest, from_source, meet
from reshard.geometry.piece import AffinePiece
from reshard.geometry.refinement import Arrangement

Pieces = Mapping[int, Sequence[AffinePiece]]
Shapes = Mapping[int, tuple[int, ...]]


def check_bounds(total: int, shapes: Shapes, pieces: Pieces, parameter: str | None) -> None:
    """Refuse a piece that reaches outside ``F`` or its shard.

    Raises
    ------
    InvalidMapError
        ``broken="bounds"``.
    """
    for rank, owned in pieces.items():
        shard = numel(shapes[rank])
        for index, piece in enumerate(owned):
            sides = (("F", piece.source_stop, total), ("its shard", piece.dest_stop, shard))
            for name, stop, size in sides:
                if piece.numel and stop > size:
                    raise InvalidMapError(
                        f"a piece reaches outside {name}: {piece}",
                        broken="bounds",
                        ranks=(rank,),
                        piece=index,
                        offset=stop - 1,
                        parameter=parameter,
                        expected=f"offsets below {size}",
                    )


def check_written_once(
    shapes: Shapes, pieces: Pieces, parameter: str | None, *, partial: bool
) -> None:
    """Refuse a shard with an element that two pieces write, or (unless ``partial``) none writes.

    Raises
    ------
    InvalidMapError
        ``broken="P3"`` for a piece that folds on itself, ``"write-once"`` otherwise.
    """
    for rank, owned in pieces.items():
        links = {i: from_dest(piece) for i, piece in enumerate(owned) if piece.numel}
        for index, link in links.items():
            offset = _folded_at(link)
            if offset is not None:
                raise InvalidMapError(
                    f"several elements of F go to one of the shard: {owned[index]}",
                    broken="P3",
                    ranks=(rank,),
                    piece=index,
                    offset=offset,
                    parameter=parameter,
                )
        shard = numel(shapes[rank])
        written = sum(piece.numel for piece in owned)
        twice = _first_shared(links)
        if twice is not None:
            offset, index = twice
            raise InvalidMapError(
                f"an element of the shard is written twice, last by {owned[index]}",
                broken="write-once",
                ranks=(rank,),
                piece=index,
                offset=offset,
                parameter=parameter,
                expected=f"{shard} elements once each",
            )
        if written < shard and not partial:
            raise InvalidMapError(
                "an element of the shard is written by no piece",
                broken="write-once",
                ranks=(rank,),
                offset=gaps(links.values(), shard)[0].start,
                parameter=parameter,
                expected=shard,
                found=written,
            )


def _folded_at(link: Link) -> int | None:
    """Return a near address that the link names twice, if there is one."""
    reach = 1
    for n, s, _ in reversed(link.dims):
        if s < reach:
            break
        reach += (n - 1) * s
    else:
        return None
    size = numel([n for n, _, _ in link.dims])
    shared = meet(Link(link.near, 0, link.dims), link)
    if sum(numel([n for n, *_ in part.dims]) for part in shared) == size:
        return None
    boxes = list(Grid.of([link]).boxes(link))
    seen = [make for make in boxes]
    return _first_overlap_of(Grid.of([link]), seen, link)


def _first_overlap_of(grid: Grid, boxes: list[Box], link: Link) -> int:
    if len(boxes) == 1:
        return link.near
    first = _first_shared({i: grid.link(box) for i, box in enumerate(boxes)})
    return link.near if first is None else first[0]


def _first_shared(links: Mapping[int, Link]) -> tuple[int, int] | None:
    """Return the lowest near address that two links share, and the later of the two."""
    ordered = sorted(links.items(), key=lambda item: item[1].near)
    if all(len(link.dims) == 0 or link.dims[-1][1] == 1 == len(link.dims) for _, link in ordered):
        stop = -1
        for index, link in ordered:
            if link.near < stop:
                return link.near, index
            stop = max(stop, link.near_stop)
        return None
    if len(ordered) < 2:
        return None
    arrangement = Arrangement([link for _, link in ordered], [index for index, _ in ordered])
    best: tuple[int, int] | None = None
    for position in range(len(ordered)):
        for part in arrangement.parts(position):
            if len(part.owners) > 1 and (best is None or part.link.near < best[0]):
                best = part.link.near, max(part.owners)
    return best


def gaps(links: object, total: int) -> list[range]:
    """Return the addresses of ``[0, total)`` that no link covers, as maximal ranges, ascending."""
    runs = sorted(_runs(links))
    holes = []
    cursor = 0
    for start, stop in runs:
        if start > cursor:
            holes.append(range(cursor, start))
        cursor = max(cursor, stop)
    if cursor < total:
        holes.append(range(cursor, total))
    return holes


def holes(links: Sequence[Link], total: int) -> list[range]:
    """Return the same as :func:`gaps`, at once when the links are found to cover everything."""
    if links and Arrangement(links, [0] * len(links)).volume() == total:
        return []
    return gaps(links, total)


def _runs(links: object) -> list[tuple[int, int]]:
    runs = []
    for link in links:  # type: ignore[attr-defined]
        inner = 1
        dims = list(link.dims)
        if dims and dims[-1][1] == 1:
            inner = dims.pop()[0]
        starts = [link.near]
        for n, s, _ in dims:
            starts = [start + i * s for start in starts for i in range(n)]
        runs.extend((start, start + inner) for start in starts)
    return runs


def check_holders(
    total: int, pieces: Pieces, parameter: str | None, *, partial: bool
) -> None:
    """Refuse locations that are not exactly the ranks that hold a piece, and holes in ``F``.

    Raises
    ------
    InvalidMapError
        ``broken="P5"`` or ``broken="P1"``.
    """
    listed = [
        (rank, index, piece)
        for rank, owned in pieces.items()
        for index, piece in enumerate(owned)
        if piece.numel
    ]
    links = [from_source(piece) for _, _, piece in listed]
    arrangement = Arrangement(links, [rank for rank, _, _ in listed])
    for position, (rank, index, piece) in enumerate(listed):
        for part in arrangement.parts(position):
            if part.owners != frozenset(piece.locations):
                raise InvalidMapError(
                    f"an element is not held by exactly the locations of {piece}",
                    broken="P5",
                    ranks=(rank,),
                    piece=index,
                    offset=part.link.near,
                    parameter=parameter,
                    expected=list(piece.locations),
                    found=sorted(part.owners),
                )
    check_scales(listed, links, parameter)
    if not partial and arrangement.volume() < total:
        open_ranges = gaps(links, total)
        raise InvalidMapError(
            "an element of F is held by no rank",
            broken="P1",
            offset=open_ranges[0].start,
            parameter=parameter,
            expected=f"{total} elements",
            found=total - sum(map(len, open_ranges)),
        )


def check_scales(
    listed: Sequence[tuple[int, int, AffinePiece]], links: Sequence[Link], parameter: str | None
) -> None:
    """Refuse two pieces that hold one element by different scales.

    Raises
    ------
    InvalidMapError
        ``broken="P5"``.
    """
    scales = sorted({piece.scale for _, _, piece in listed})
    if len(scales) < 2:
        return
    owners = [scales.index(piece.scale) for _, _, piece in listed]
    arrangement = Arrangement(links, owners)
    for position, (rank, index, piece) in enumerate(listed):
        for part in arrangement.parts(position):
            if len(part.owners) > 1:
                raise InvalidMapError(
                    f"an element is held by several scales, one of them by {piece}",
                    broken="P5",
                    ranks=(rank,),
                    piece=index,
                    offset=part.link.near,
                    parameter=parameter,
                    found=[scales[i] for i in sorted(part.owners)],
                )
