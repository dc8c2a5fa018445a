"""Layers: links cut so that each layer names every address at most once.

Theory. A shard may hold an element of ``F`` at several places. Who reads it needs one of them, who
compares replicas needs all. The links are cut at each other's borders
(:class:`~reshard.geometry.refinement.Arrangement`); a part that is in several links has a place in
the order of these, and parts of equal place make up one layer. A link that folds on itself is taken
apart first.
"""

from __future__ import annotations

import numpy as np

from reshard.geometry.disjointness import names_once
from reshard.geometry.links import Link
from reshard.geometry.ordering import Ints
from reshard.geometry.refinement import Arrangement
from reshard.geometry.tables import LinkTable


def table_layers(table: LinkTable, spaces: Ints) -> tuple[LinkTable, Ints, Ints]:
    """Cut links so that those of equal depth name each address of a space at most once.

    Depth 0 has, for every address, the first link that names it; depth 1 the second, and so on.

    Returns
    -------
    tuple
        The parts, the row that each is of, and its depth.

    Examples
    --------
    >>> table = LinkTable.of([Link(0, 0, ((4, 1, 1),)), Link(2, 9, ((4, 1, 1),))])
    >>> parts, row, depth = table_layers(table, np.array([0, 0]))
    >>> parts.near.tolist(), row.tolist(), depth.tolist()
    ([0, 2, 2, 4], [0, 0, 1, 1], [0, 0, 1, 0])
    """
    rows = np.arange(len(table))
    depth = np.zeros(len(table), np.int64)
    if names_once(table, spaces):
        return table, rows, depth
    parted = [_unfolded(link) for link in table.links()]
    rows = np.repeat(rows, [len(links) for links in parted])
    simple = LinkTable.of([link for links in parted for link in links])
    parts, of, owners = Arrangement(simple, np.arange(len(simple)), spaces[rows]).parts()
    # The owners of a part ascend; the depth is how many come before its own row.
    earlier = np.repeat(of, owners.counts) > owners.items
    depth = np.bincount(np.repeat(np.arange(len(of)), owners.counts), earlier, len(of))
    return parts, rows[of], depth.astype(np.int64)


def _folding_dim(link: Link) -> int | None:
    """Return a dimension that steps by less than the ones inside it reach, if there is one."""
    reach = 1
    for index in range(len(link.dims) - 1, -1, -1):
        n, s, _ = link.dims[index]
        if s < reach:
            return index
        reach += (n - 1) * s
    return None


def _unfolded(link: Link) -> list[Link]:
    """Cut a link into ones whose dimensions are nested, which name no address twice."""
    index = _folding_dim(link)
    if index is None:
        return [link]
    n, s, f = link.dims[index]
    rest = link.dims[:index] + link.dims[index + 1 :]
    return [
        part
        for i in range(n)
        for part in _unfolded(Link(link.near + i * s, link.far + i * f, rest))
    ]
