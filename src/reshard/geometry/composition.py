"""Composition: ``M_t ∘ M_s⁻¹``, from the shards of one layout to those of another.

Theory. Both maps describe the same ``F``. A source piece and a target piece share blocks of ``F``
(:func:`reshard.geometry.matching.matched`); such a block, seen from both shards, is a copy. ``F``
itself is never made. Three things keep the result small and sure:

* of the holders of an element only one is read: the replica policy picks it per set of
  locations, and P5 makes that set exact;
* what a source rank holds twice is read once;
* copies are grouped by pair of ranks and scale before they are folded.

Every plan is proved from its maps: where the target writes each shard element once and what is
read of the source names each element once, the copies do too; what they leave open is counted and
named. :meth:`~reshard.geometry.TransferPlan.verify` proves the same from the plan alone.
Geometrically equal pairs of maps, such as those of
the layers of a model, are planned once.
"""

from __future__ import annotations

import numpy as np

from reshard.errors import CompositionError
from reshard.geometry.affine_map import ParamAffineMap, folded_map
from reshard.geometry.assembling import (
    appended,
    check_are_maps,
    check_sizes,
    check_sound,
    filled,
    folded_segments,
    joined,
    layers_of,
    pairs_of,
    segments_of,
)
from reshard.geometry.balancing import compose_balanced
from reshard.geometry.holes import holes_text
from reshard.geometry.kept import Kept
from reshard.geometry.map_value import MANY_PIECES
from reshard.geometry.matching import Matches, matched
from reshard.geometry.ordering import Ints, order_by
from reshard.geometry.piece_table import PieceTable
from reshard.geometry.plan import TransferPlan
from reshard.geometry.refinement import Arrangement
from reshard.geometry.replicas import Choose, balanced, lowest_rank
from reshard.geometry.segments import SegmentTable
from reshard.geometry.tables import concatenated

WORTH = 8
"""Maps are folded before they are composed when that makes them so many times smaller;"""
KEPT: Kept[tuple[ParamAffineMap, ParamAffineMap, Choose], TransferPlan] = Kept(16 << 20)
"""Plans of pairs of maps that were composed before, with these; ``KEPT.clear()`` forgets them."""
PIECE_NBYTES = 800
"""What a piece of a map takes, as an object and in columns."""
SAMPLES, SAMPLE = 4, MANY_PIECES // 2
"""so many stretches of so many pieces, neighbours in a shard, are tried first."""


def compose(
    target: ParamAffineMap,
    source: ParamAffineMap,
    *,
    choose: Choose = lowest_rank,
    partial: bool = False,
) -> TransferPlan:
    """Return the copies that fill the target shards from the source shards.

    Parameters
    ----------
    target, source
        Valid maps of the same logical tensor (or views of it: only the number of elements must
        agree).
    choose
        Replica policy ``(locations, target_rank) -> source rank``; hashable. With
        :func:`~reshard.geometry.balanced` the busiest source rank gives as little as it can.
    partial
        Accept target elements that have no source, which are then named by ``plan.unfilled``, and
        a target that has not all of ``F``.

    Raises
    ------
    CompositionError
        When one of the two is no map, the logical tensors differ in size, the policy answers with
        a rank that does not hold the element, a map writes an element of a shard twice, or (unless
        ``partial``) a target element has no source.
    InvalidMapError
        When one of the two is no valid map otherwise, or (unless ``partial``) the target has not
        all of ``F``; ``broken`` names the property.

    Examples
    --------
    >>> from reshard.geometry import AffinePiece, ParamAffineMap
    >>> def rows(*heights):
    ...     at = [4 * sum(heights[:r]) for r in range(len(heights))]
    ...     piece = [
    ...         AffinePiece((n, 4), a, (4, 1), 0, (4, 1), [r])
    ...         for r, (n, a) in enumerate(zip(heights, at))
    ...     ]
    ...     return ParamAffineMap(
    ...         (sum(heights), 4),
    ...         {r: (n, 4) for r, n in enumerate(heights)},
    ...         {r: [p] for r, p in enumerate(piece)},
    ...     )
    >>> print(compose(rows(2, 4), rows(3, 3)))
    3 segments, 24 elements
      0[0 + 8×1] → 0[0 + 8×1]
      0[8 + 4×1] → 1[0 + 4×1]
      1[0 + 12×1] → 1[4 + 12×1]
    """
    check_are_maps(target, source)
    check_sizes(target, source)
    check_sound(target, "target", partial=partial)
    plan = _compose(target, source, choose)
    if plan.holes and not partial:
        rank, holes = next(iter(plan.holes.items()))
        raise CompositionError(
            "target elements have no source",
            rank=rank,
            found=holes_text(holes),
            next_step="compose with partial=True to accept that",
        )
    return plan


def _compose(target: ParamAffineMap, source: ParamAffineMap, choose: Choose) -> TransferPlan:
    key = target, source, choose
    plan = KEPT.get(key)
    if plan is None:
        plan = _composed(target, source, choose)
        pieces = len(target.table) + len(source.table)
        KEPT.keep(key, plan, PIECE_NBYTES * pieces + plan.table.link.nbytes)
    return plan


def _composed(target: ParamAffineMap, source: ParamAffineMap, choose: Choose) -> TransferPlan:
    check_sound(source, "source")
    if choose is balanced:
        return compose_balanced(target, source)
    chosen = _chosen(_folded(target), layers_of(_folded(source))[0], choose)
    return filled(target, source, chosen)


def _folded(one: ParamAffineMap) -> ParamAffineMap:
    """Return a map of many pieces in canonical form where that has far fewer."""
    if len(one.table) <= MANY_PIECES or not _folds(one):
        return one
    folded = one.canonical()
    return folded if len(folded.table) * WORTH <= len(one.table) else one


def _folds(one: ParamAffineMap) -> bool:
    """Guess, from some stretches of pieces, whether folding makes a map far smaller."""
    table = one.table
    order = order_by([table.rank, table.place, table.link.far])
    starts = np.linspace(0, len(order) - SAMPLE, SAMPLES).astype(np.int64)
    rows = order[np.unique(starts[:, None] + np.arange(SAMPLE))]
    part = folded_map(one.logical_shape, one.shard_shapes, table.take(rows).turned())
    return len(part.table) * WORTH <= len(rows)


def _chosen(target: ParamAffineMap, source: PieceTable, choose: Choose) -> SegmentTable:
    chosen = _Choices(source, target.ranks, choose)
    found = chosen.kept(target.table, matched(target.table.link, chosen.table.link))
    return segments_of(target.table, chosen.table, found)


def alternates(target: ParamAffineMap, source: ParamAffineMap, plan: TransferPlan) -> TransferPlan:
    """Return every copy that could have been made and that ``plan`` does not make.

    For each target element: one copy from each other holder, and from each other place of the
    same holder's shard. An executor compares them with what the plan wrote to prove P2 in the
    same pass. Segments have the form of a plan's; target elements repeat over holders, so the
    result does not :meth:`~TransferPlan.verify`.
    """
    check_sizes(target, source)
    copies = [
        segments_of(target.table, held, matched(target.table.link, held.link))
        for held in layers_of(source)
    ]
    found = [_without(copies[0], plan.table), *copies[1:]]
    return TransferPlan.from_table(source.shard_shapes, target.shard_shapes, joined(found), {})


class _Choices:
    """What a replica policy answers: ``table`` has the source pieces that anybody reads."""

    __slots__ = ("_answers", "_targets", "table")

    def __init__(self, source: PieceTable, targets: tuple[int, ...], choose: Choose) -> None:
        holders = source.holders
        first = np.array([ranks[0] for ranks in holders], np.int64)
        self._targets = np.array(targets, np.int64)
        self._answers: dict[int, Ints] = {}
        read = source.rank == first[source.place] if len(holders) else source.rank == -1
        if choose is not lowest_rank:
            for place, ranks in enumerate(holders):
                if len(ranks) > 1:
                    answers = np.array([_ask(choose, ranks, t) for t in targets], np.int64)
                    self._answers[place] = answers
                    mine = source.place == place
                    read[mine] = np.isin(source.rank[mine], answers)
        self.table = source.take(np.flatnonzero(read))

    def kept(self, target: PieceTable, found: Matches) -> Matches:
        """Return the matches that the policy allows."""
        if not self._answers:
            return found
        place, rank = self.table.place[found.second], self.table.rank[found.second]
        slot = np.searchsorted(self._targets, target.rank[found.first])
        keep = np.ones(len(place), bool)
        for one, answers in self._answers.items():
            mine = np.flatnonzero(place == one)
            keep[mine] = answers[slot[mine]] == rank[mine]
        return found.take(np.flatnonzero(keep))


def _ask(choose: Choose, locations: tuple[int, ...], rank: int) -> int:
    answer = choose(locations, rank)
    if answer not in locations:
        raise CompositionError(
            "the replica policy chose a rank that does not hold the element",
            rank=answer,
            expected=list(locations),
        )
    return answer


def _without(copies: SegmentTable, taken: SegmentTable) -> SegmentTable:
    """Return the parts of some copies that a plan does not already make."""
    both, _ = pairs_of(appended([copies, taken]))
    pair, made = both[: len(copies)], both[len(copies) :]
    touched = np.isin(pair, made)
    kept = copies.take(np.flatnonzero(~touched))
    rows = np.flatnonzero(touched)
    if not len(rows):
        return kept
    mine = copies.take(rows)
    link = concatenated([mine.link, taken.link]).normalised()
    owners = np.repeat([0, 1], [len(mine), len(taken)])
    arrangement = Arrangement(link, owners, np.concatenate([pair[rows], made]))
    parts, row, sets = arrangement.parts(np.arange(len(mine)))
    alone = np.flatnonzero(sets.counts == 1)
    left = mine.take(row[alone])
    cut = SegmentTable(parts.take(alone), left.source_rank, left.target_rank, left.scale)
    return joined([kept, folded_segments(cut)])
