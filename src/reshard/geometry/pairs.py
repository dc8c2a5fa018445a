"""Pairs: how links overlap that no grid reads well, told by meeting them two by two.

Theory. In a grid (:mod:`reshard.geometry.grid`) strides that do not divide one another have to be
walked, step by step. Where that is long, two links are met instead, by the Chinese remainder
theorem (:func:`reshard.geometry.links.meet`), which costs the same whatever their extents are. Only
links whose spans touch can share anything.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.index_math import numel
from reshard.geometry.joins import overlaps_among
from reshard.geometry.links import Link, meet
from reshard.geometry.ordering import Ints
from reshard.geometry.tables import LinkTable


def touching_pairs(table: LinkTable, spaces: Ints) -> tuple[Ints, Ints]:
    """Return the pairs of rows, each once, whose spans in a space overlap."""
    return overlaps_among(table.near[:, None], table.near_stop()[:, None], spaces)


def shared_count(one: Link, other: Link) -> int:
    """Return the number of pairs of elements of two links that have one near address.

    >>> shared_count(Link(0, 0, ((4, 3, 1),)), Link(0, 0, ((9, 2, 1),)))
    2
    """
    return sum(numel([n for n, *_ in part.dims]) for part in meet(one, other))


def folds_on_itself(link: Link) -> bool:
    """Tell whether a link names an address twice."""
    return shared_count(link, link) > numel([n for n, _, _ in link.dims])


def some_share(table: LinkTable, pairs: tuple[Ints, Ints], folding: NDArray[np.bool_]) -> bool:
    """Tell whether a pair of rows shares an address, or one of the marked rows names one twice."""
    links = table.links()
    if any(folds_on_itself(links[row]) for row in np.flatnonzero(folding).tolist()):
        return True
    return any(
        meet(links[i], links[j]) for i, j in zip(pairs[0].tolist(), pairs[1].tolist(), strict=True)
    )
