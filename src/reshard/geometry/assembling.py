"""Assembling: from matched blocks to the segments of a plan.

Theory. A match of a target and a source piece is a copy between their ranks. Copies are grouped
by pair of ranks and by scale, and each group is folded for itself: a target shard interleaves
blocks of several sources, so the runs that stack are rarely neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from reshard.errors import CompositionError, InvalidMapError, count_text
from reshard.geometry.affine_map import ParamAffineMap, folded_map
from reshard.geometry.disjointness import names_once
from reshard.geometry.folding import fold_table
from reshard.geometry.holes import holes_of
from reshard.geometry.index_math import numel
from reshard.geometry.layers import table_layers
from reshard.geometry.matching import Matches
from reshard.geometry.ordering import Ints, classes_of, order_by, places_of, starts_of
from reshard.geometry.piece_table import PieceTable
from reshard.geometry.plan import TransferPlan
from reshard.geometry.segments import SegmentTable
from reshard.geometry.tables import concatenated

Shapes = Mapping[int, tuple[int, ...]]
"""Shard shape of every rank."""


def check_are_maps(target: object, source: object) -> None:
    """Refuse what is no map.

    Raises
    ------
    CompositionError
        When one of the two is something else.
    """
    for side, one in (("target", target), ("source", source)):
        if not isinstance(one, ParamAffineMap):
            raise CompositionError(
                f"the {side} is no map", expected="a ParamAffineMap", found=repr(one)[:80]
            )


def check_sizes(target: ParamAffineMap, source: ParamAffineMap) -> None:
    """Refuse two maps of tensors of different sizes.

    Raises
    ------
    CompositionError
        When the numbers of elements differ.
    """
    if target.numel != source.numel:
        raise CompositionError(
            "the maps describe tensors of different sizes",
            expected=f"{count_text(target.numel, 'element')} {target.logical_shape}",
            found=f"{count_text(source.numel, 'element')} {source.logical_shape}",
            next_step="narrow one of them to what they share",
        )


def check_sound(one: ParamAffineMap, side: str, *, partial: bool = True) -> None:
    """Refuse a map from which no plan could be proved; one that was proved before costs nothing.

    Of a map that is not ``partial`` every element must be in some shard, too (P1).

    Raises
    ------
    CompositionError
        When it writes an element of a shard twice.
    InvalidMapError
        When it breaks another property: its locations do not name who holds an element (P5), say,
        so that a plan would read twice what it lacks elsewhere.
    """
    try:
        one.validate(partial=partial)
    except InvalidMapError as error:
        if error.broken == "write-once":
            raise CompositionError(
                f"the {side} map writes an element of a shard twice",
                next_step=f"validate the {side}",
            ) from error
        raise InvalidMapError(
            f"the {side} map is not valid",
            broken=error.broken,
            ranks=error.ranks,
            piece=error.piece,
            offset=error.offset,
            next_step=f"validate the {side}, which says more",
        ) from error


def layers_of(source: ParamAffineMap) -> list[PieceTable]:
    """Return the pieces as tables in each of which no rank holds an element twice.

    The first has, of whatever a rank holds, the first place; the others what that leaves out.
    Which place is the first must not depend on how the map is spelled, so the form of its runs is
    asked where it matters.
    """
    table = source.table
    if names_once(table.link, table.rank):
        return [table]
    turned = source.table.turned()
    table = folded_map(source.logical_shape, source.shard_shapes, turned, by_runs=True).table
    link, rows, depth = table_layers(table.link, table.rank)
    layers = []
    for level in range(int(depth.max(initial=0)) + 1):
        at = np.flatnonzero(depth == level)
        cut = table.take(rows[at])
        layers.append(
            PieceTable(cut.rank, cut.index, link.take(at), cut.scale, cut.place, cut.holders)
        )
    return layers


def segments_of(target: PieceTable, source: PieceTable, found: Matches) -> SegmentTable:
    """Return matches as folded segments, one group for each pair of ranks and scale."""
    to, of = target.rank[found.first], source.rank[found.second]
    scale = target.scale[found.first] / source.scale[found.second]
    return folded_segments(SegmentTable(found.link, of, to, scale))


def folded_segments(segments: SegmentTable) -> SegmentTable:
    """Return segments in canonical form."""
    group, lead = pairs_of(segments)
    link, group = fold_table(segments.link, group)
    rows = lead[group]
    return SegmentTable(
        link, segments.source_rank[rows], segments.target_rank[rows], segments.scale[rows]
    )


def pairs_of(segments: SegmentTable) -> tuple[Ints, Ints]:
    """Return a number for the pair of ranks and the scale of each segment, and a row of each."""
    kind = places_of(segments.scale.view(np.int64))[0]
    order, label = classes_of([segments.target_rank, segments.source_rank, kind])
    group = np.empty(len(order), np.int64)
    group[order] = label
    return group, order[starts_of(label)]


def appended(tables: list[SegmentTable]) -> SegmentTable:
    """Return the rows of several tables one after the other."""
    return SegmentTable(
        concatenated([table.link for table in tables]),
        np.concatenate([table.source_rank for table in tables]),
        np.concatenate([table.target_rank for table in tables]),
        np.concatenate([table.scale for table in tables]),
    )


def joined(tables: list[SegmentTable]) -> SegmentTable:
    """Return the rows of several tables in the order of a plan."""
    rows = appended(tables)
    return rows.take(order_by([rows.target_rank, rows.link.near, rows.source_rank]))


def filled(target: ParamAffineMap, source: ParamAffineMap, segments: SegmentTable) -> TransferPlan:
    """Return the plan of some segments between two maps; what they leave open is named."""
    return closed(source.shard_shapes, target.shard_shapes, segments)


def closed(source_shapes: Shapes, target_shapes: Shapes, segments: SegmentTable) -> TransferPlan:
    """Return the plan of some segments; the target elements that they leave open are named."""
    segments = joined([segments])
    written = segments.numel_by_target()
    unfilled = {}
    for rank, shape in target_shapes.items():
        size = numel(shape)
        if written.get(rank, 0) < size:
            mine = np.flatnonzero(segments.target_rank == rank)
            unfilled[rank] = holes_of(segments.link.take(mine), size)
    return TransferPlan.from_table(source_shapes, target_shapes, segments, unfilled)
