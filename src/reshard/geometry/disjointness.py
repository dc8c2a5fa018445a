"""Disjointness: whether links name every address at most once, exactly.

Theory. Most links are apart for a plain reason: their spans touch no other. The others come in
*clusters* of touching spans, which know nothing of each other. Few of them are met two by two;
many are read in grids, one for each cluster (:mod:`reshard.geometry.grid`), where they are boxes,
and joined. What a grid would have to walk for long is met in pairs (:mod:`reshard.geometry.pairs`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.grid import MOST_BOXES, Grid
from reshard.geometry.joins import FEW_PAIRS_PER_BOX, overlaps_among
from reshard.geometry.links import Link, meet
from reshard.geometry.ordering import BATCH, Ints, batches, groups_of
from reshard.geometry.pairs import some_share, touching_pairs
from reshard.geometry.tables import LinkTable, clusters, folding_rows, outermost_expanded

FEW_LINKS = 12
"""So few links are compared pair by pair."""
FEW_STEPS = 8
"""Outermost dimensions of at most so many steps are expanded to tell whether links are apart,"""
FEW_WALKS = 8
"""So many boxes for each link are always walked;"""
BOXES_A_MEETING = 64
"""more are, too, where meeting two links would take longer than walking so many boxes."""
SPARSE = 4
"""where they step by more than so many times what is inside them."""


def names_once(table: LinkTable, spaces: Ints | None = None) -> bool:
    """Tell whether links name no address of a space twice; exact.

    Links whose spans touch no other span are plain. A long step of few blocks makes a span
    long for no reason, so those are expanded first. What still touches is read in grids, one for
    each cluster of touching spans.

    >>> names_once(LinkTable.of([Link(0, 0, ((3, 4, 1),)), Link(1, 0, ((3, 4, 1),))]))
    True
    >>> names_once(LinkTable.of([Link(0, 0, ((3, 4, 1),)), Link(4, 0, ((3, 3, 1),))]))
    False
    """
    space = np.zeros(len(table), np.int64) if spaces is None else spaces
    table, space = _crowded(table, space)
    if len(table) <= BATCH:
        return _apart(table, space)
    return all(_apart(table.take(rows).trimmed(), space[rows]) for rows in batches(space))


def _crowded(table: LinkTable, space: Ints) -> tuple[LinkTable, Ints]:
    """Return the links that share their cluster or fold on themselves, and the clusters."""
    cluster, crowded = clusters(table, space)
    rows = np.flatnonzero(crowded)
    return table.take(rows), cluster[rows]


def _apart(table: LinkTable, space: Ints) -> bool:
    """Tell whether crowded links share no address of their cluster."""
    while len(table):
        if not table.dims:  # single elements, some at one place
            return False
        if len(table) <= FEW_LINKS and not len(folding_rows(table)):
            return _none_meet(table.links(), space.tolist())
        if _few_share(space):
            return _apart_in_grids(table, space)
        steps = np.where(_sparse(table), table.extent[:, 0], 1)
        if steps.sum() > 2 * len(table) + FEW_STEPS or (steps == 1).all():
            return _apart_in_grids(table, space)
        again, table = outermost_expanded(table, steps)
        table, space = _crowded(table, space[again])
    return True


def _apart_in_grids(table: LinkTable, space: Ints) -> bool:
    """Tell whether links share no address of their space, each space in a grid of its own.

    What the grid would have to walk for long is met with whatever it touches.
    """
    if table.repeats():
        return False
    # Spaces without a link have no number.
    space = (np.cumsum(np.bincount(space) > 0) - 1)[space]
    grid = Grid.of([table], space)
    walks = grid.walks(table, space)
    if walks.sum() > FEW_WALKS * len(table):
        pairs = touching_pairs(table, space)
        odd = walks > 1
        mixed = odd[pairs[0]] | odd[pairs[1]]
        if walks.sum() > min(MOST_BOXES, BOXES_A_MEETING * int(mixed.sum() + odd.sum())):
            if some_share(table, (pairs[0][mixed], pairs[1][mixed]), odd):
                return False
            rows = np.flatnonzero(~odd)
            table, space = table.take(rows), space[rows]
    boxes = grid.boxes(table, space)
    lo, key = boxes.lo, space[boxes.row]
    if not len(boxes):
        return True
    _, label = groups_of([key, *lo.T])
    return int(label[-1]) + 1 == len(boxes) and not len(overlaps_among(lo, boxes.hi, key)[0])


def _few_share(space: Ints) -> bool:
    """Tell whether the links of each space are so few that all pairs may be looked at."""
    sizes = np.bincount(space)
    return int((sizes * (sizes - 1) // 2).sum()) <= FEW_PAIRS_PER_BOX * len(space)


def _sparse(table: LinkTable) -> NDArray[np.bool_]:
    """Mark rows whose outermost dimension is a few steps over much more than lies inside it."""
    inside = ((table.extent[:, 1:] - 1) * table.near_stride[:, 1:]).sum(axis=1) + 1
    few = (table.extent[:, 0] > 1) & (table.extent[:, 0] <= FEW_STEPS)
    return np.asarray(few & (table.near_stride[:, 0] > SPARSE * inside))


def _none_meet(links: list[Link], spaces: list[int]) -> bool:
    """Tell whether no two links of one space share an address, by looking at each pair."""
    return not any(
        spaces[i] == spaces[k] and meet(links[i], links[k])
        for i in range(len(links))
        for k in range(i)
    )
