"""Matching: all blocks that two sets of links share in their near space.

Theory. Few links are matched pair by pair with :func:`reshard.geometry.links.meet`. Many are read
in a grid, where almost all of them are boxes; overlapping pairs of boxes come from one join
(:mod:`reshard.geometry.joins`), and a pair's common block is a comparison of bounds. Links that
are irregular in the grid (steps without a common measure, diagonals) are walked, one step at a
time, or met pair by pair with those whose spans they touch, whichever is less work. All ways are
exact; what none of them does in bounded time and memory is refused before it is begun.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.errors import UnsupportedError
from reshard.geometry.grid import MOST_BOXES, BoxTable, Grid
from reshard.geometry.joins import overlapping_pairs, pair_count
from reshard.geometry.links import Link, make_link, meet
from reshard.geometry.ordering import BATCH, Ints, beside, rows_of
from reshard.geometry.tables import LinkTable, concatenated

FEW_PAIRS = 48
"""Up to so many pairs are matched one by one."""
BOXES_A_MEETING = 32
"""Meeting two links takes as long as walking and joining so many boxes."""
MOST_MEETINGS = 1 << 21
"""More pairs of links are not met one by one: they would take many seconds, and memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Matches:
    """Blocks that pairs of links share."""

    link: LinkTable
    """Each block seen from the far sides: near is the far space of the first link, far that of
    the second."""
    first: Ints
    second: Ints
    """The rows of the two tables that it is of."""

    def take(self, index: Ints) -> Matches:
        """Return some of the blocks."""
        return Matches(self.link.take(index), self.first[index], self.second[index])


def matched(
    first: LinkTable,
    second: LinkTable,
    first_key: Ints | None = None,
    second_key: Ints | None = None,
) -> Matches:
    """Return every block that a link of ``first`` and one of ``second`` share.

    Parameters
    ----------
    first, second
        Links in normal form, none empty. Repetitions (near stride 0) of the first are kept,
        those of the second are met once.
    first_key, second_key
        Only links of equal key are matched.
    """
    if len(first) * len(second) <= FEW_PAIRS:
        i, j = _touching(first, second, first_key, second_key)
        return _met(first, second, i, j)
    grid = Grid.of([first, second])
    a, a_odd = grid.regular_boxes(first)
    b, b_odd = grid.regular_boxes(second)
    if (len(a_odd) or len(b_odd)) and _are_walked(grid, first, second):
        a, b, a_odd, b_odd = grid.boxes(first), grid.boxes(second), a_odd[:0], b_odd[:0]
    a_key = None if first_key is None else first_key[a.row]
    b_key = None if second_key is None else second_key[b.row]
    i, j = overlapping_pairs(a.lo, a.hi, b.lo, b.hi, a_key, b_key)
    cuts = range(0, max(len(i), 1), BATCH)
    found = [_shared(first, a, b, i[at : at + BATCH], j[at : at + BATCH]) for at in cuts]
    if len(a_odd) or len(b_odd):
        i, j = _touching(first, second, first_key, second_key)
        odd = np.isin(i, a_odd) | np.isin(j, b_odd)
        found.append(_met(first, second, i[odd], j[odd]))
    return Matches(
        concatenated([part.link for part in found]),
        np.concatenate([part.first for part in found]),
        np.concatenate([part.second for part in found]),
    )


def _are_walked(grid: Grid, first: LinkTable, second: LinkTable) -> bool:
    """Whether irregular links are walked, and not met in pairs.

    Raises
    ------
    UnsupportedError
        When both would be too much.
    """
    walks = float(grid.walks(first).sum() + grid.walks(second).sum())
    meetings = pair_count(first.near, first.near_stop(), second.near, second.near_stop())
    if walks <= min(MOST_BOXES, BOXES_A_MEETING * meetings):
        return True
    if meetings > MOST_MEETINGS:
        raise UnsupportedError(
            "the strides of these pieces have too little in common",
            expected=f"at most {MOST_MEETINGS} pairs of pieces that touch, or {MOST_BOXES} blocks",
            found=f"{meetings} pairs, {walks:.3g} blocks",
            next_step="cut the maps at common borders, or go by way of a layout between them",
        )
    return False


def _touching(
    first: LinkTable, second: LinkTable, first_key: Ints | None, second_key: Ints | None
) -> tuple[Ints, Ints]:
    """Return the pairs whose spans in the near space overlap."""
    return overlapping_pairs(
        first.near[:, None],
        first.near_stop()[:, None],
        second.near[:, None],
        second.near_stop()[:, None],
        first_key,
        second_key,
    )


def _shared(first: LinkTable, a: BoxTable, b: BoxTable, i: Ints, j: Ints) -> Matches:
    """Return the common blocks of pairs of boxes."""
    lo = np.maximum(rows_of(a.lo, i), rows_of(b.lo, j))
    extent = (np.minimum(rows_of(a.hi, i), rows_of(b.hi, j)) - lo)[:, ::-1]
    # Outermost digit first, as links nearly always have it.
    steps = rows_of(a.far_stride[:, ::-1], i), rows_of(b.far_stride[:, ::-1], j)
    link = LinkTable(a.far_at(i, lo), b.far_at(j, lo), extent, *steps)
    row = a.row[i]
    still = (first.extent > 1) & (first.near_stride == 0)
    columns = np.flatnonzero(still.any(axis=0))
    if len(columns):
        repeats = rows_of(np.where(still, first.extent, 1)[:, columns], row)
        again = rows_of(first.far_stride[:, columns], row)
        link = LinkTable(
            link.near,
            link.far,
            beside(link.extent, repeats),
            beside(link.near_stride, again),
            beside(link.far_stride, np.zeros_like(again)),
        )
    return Matches(link, row, b.row[j])


def _met(first: LinkTable, second: LinkTable, i: Ints, j: Ints) -> Matches:
    """Return the common blocks of pairs of links, one pair after the other."""
    firsts, seconds = first.links(), second.links()
    # What a link repeats in the near space is met once on the second side.
    seconds = [Link(near, far, tuple([d for d in dims if d[1]])) for near, far, dims in seconds]
    links, of_first, of_second = [], [], []
    for p, q in zip(i.tolist(), j.tolist(), strict=True):
        for part in meet(firsts[p], seconds[q]):
            links.append(
                make_link(part.first, part.second, [(n, f, g) for n, _, f, g in part.dims])
            )
            of_first.append(p)
            of_second.append(q)
    return Matches(LinkTable.of(links), np.array(of_first, np.int64), np.array(of_second, np.int64))
