"""Equality: whether two lists of pieces say the same of every element, however they are cut.

Theory. A valid map names each element of a shard once, so within a rank it is a function from
offsets of the shard to offsets of ``F``, with locations and a scale beside them. Two such functions
are equal when they are defined on equally many offsets, all of these are shared, and on every
shared block (:func:`reshard.geometry.matching.matched`) both have the same offset and strides
in ``F``. That is a comparison of pieces with pieces: its cost follows their number, and it does not
rely on the canonical form, which is unique only up to a number of runs
(:mod:`reshard.geometry.folding`).
"""

from __future__ import annotations

import numpy as np

from reshard.geometry.disjointness import names_once
from reshard.geometry.matching import matched
from reshard.geometry.ordering import Ints, classes_of, grouped_sums
from reshard.geometry.piece_table import PieceTable


def writes_once(table: PieceTable) -> bool:
    """Tell whether the pieces of each rank write no element of its shard twice."""
    return names_once(table.link.turned().normalised(), table.rank)


def same_elements(one: PieceTable, other: PieceTable) -> bool:
    """Tell whether pieces that write each element once say the same as others that do."""
    mine, theirs = np.split(_kinds(one, other), [len(one)])
    if grouped_sums(mine, one.link.numel()) != grouped_sums(theirs, other.link.numel()):
        return False
    first, second = one.link.turned().normalised(), other.link.turned().normalised()
    found = matched(first, second, mine, theirs).link
    steps_alike = (found.near_stride == found.far_stride) | (found.extent == 1)
    alike = (found.near == found.far) & steps_alike.all(axis=1)
    return bool(alike.all()) and int(found.numel().sum()) == int(one.link.numel().sum())


def _kinds(one: PieceTable, other: PieceTable) -> Ints:
    """Number the rank, locations and scale of each piece of two tables, alike in both."""
    sets: dict[tuple[int, ...], int] = {}
    place = [
        np.array([sets.setdefault(ranks, len(sets)) for ranks in table.holders], np.int64)[
            table.place
        ]
        for table in (one, other)
    ]
    scale = np.concatenate([one.scale, other.scale]).view(np.int64)
    rank = np.concatenate([one.rank, other.rank])
    order, label = classes_of([rank, np.concatenate(place), scale])
    kind = np.empty(len(order), np.int64)
    kind[order] = label
    return kind
