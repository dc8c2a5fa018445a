"""Folding: the canonical form of a set of links, as few and as large as merging makes them.

Theory. A set of links with distinct near addresses is the graph of a function. The same graph can
be cut into links in many ways; folding brings them together again, in N dimensions:

* two links that differ in one extent and continue each other along it become one;
* equal links at constant distance in both spaces become one link with one more dimension.

Both run over links in near order until nothing changes. What may not be merged (another holder,
scale, pair of ranks) is kept apart by the caller, who folds each group for itself; grouping
before folding is what lets a stack of blocks that alternate between holders fold at all.
"""

from __future__ import annotations

from collections.abc import Iterable

from reshard.geometry.links import Link, LinkDim, make_link


def fold(links: Iterable[Link]) -> list[Link]:
    """Merge links with distinct near addresses as far as they go, in near order.

    >>> fold([Link(0, 0, ((4, 1, 1),)), Link(16, 8, ((4, 1, 1),)), Link(4, 4, ((4, 1, 1),))])
    [Link(near=0, far=0, dims=((8, 1, 1),)), Link(near=16, far=8, dims=((4, 1, 1),))]
    >>> fold([Link(0, 0, ((4, 1, 1),)), Link(16, 4, ((4, 1, 1),)), Link(32, 8, ((4, 1, 1),))])
    [Link(near=0, far=0, dims=((3, 16, 4), (4, 1, 1)))]
    """
    folded = sorted(links)
    while len(folded) > 1:
        before = len(folded)
        folded = _stacked(_joined(folded))
        if len(folded) == before:
            break
    return folded


def _joined(links: list[Link]) -> list[Link]:
    """Join links that continue each other along one dimension, until none does."""
    starts = {link.near: link for link in links}
    waiting = sorted(links, reverse=True)
    while waiting:
        link = waiting.pop()
        if starts.get(link.near) is not link:
            continue
        longer = _continued(link, starts)
        if longer is not None:
            del starts[link.near]
            for gone in longer[1:]:
                starts.pop(gone.near, None)
            starts[longer[0].near] = longer[0]
            waiting.append(longer[0])
    return sorted(starts.values())


def _continued(link: Link, starts: dict[int, Link]) -> tuple[Link, Link] | None:
    """Return the union with a neighbour along some dimension, and that neighbour."""
    for index, (n, s, f) in enumerate(link.dims):
        rest = link.dims[:index] + link.dims[index + 1 :]
        after = starts.get(link.near + n * s)
        if after is not None and after.far == link.far + n * f:
            count = _extent_beside(after.dims, rest, index, s, f)
            if count:
                dims = (*rest, (n + count, s, f))
                return make_link(link.near, link.far, dims), after
        before = starts.get(link.near - s)
        if before is not None and before.far == link.far - f and before.dims == rest:
            return make_link(before.near, before.far, (*rest, (n + 1, s, f))), before
    return None


def _extent_beside(
    dims: tuple[LinkDim, ...], rest: tuple[LinkDim, ...], index: int, s: int, f: int
) -> int:
    """Return the extent along ``(s, f)`` of a block whose other dimensions are ``rest``, or 0."""
    if dims == rest:
        return 1
    if len(dims) == len(rest) + 1 and dims[index][1:] == (s, f):
        if dims[:index] + dims[index + 1 :] == rest:
            return dims[index][0]
    return 0


def _stacked(links: list[Link]) -> list[Link]:
    """Turn runs of equal links at constant distance into one link with one more dimension."""
    groups: dict[tuple[LinkDim, ...], list[Link]] = {}
    for link in links:
        groups.setdefault(link.dims, []).append(link)
    stacked: list[Link] = []
    for dims, group in groups.items():
        start = 0
        while start < len(group):
            count, s, f = _run(group, start)
            first = group[start]
            if count > 1:
                first = make_link(first.near, first.far, ((count, s, f), *dims))
            stacked.append(first)
            start += count
    return sorted(stacked)


def _run(group: list[Link], start: int) -> tuple[int, int, int]:
    """Return how many links from ``start`` on are evenly spaced, and the two distances."""
    if start + 1 == len(group) or group[start + 1].far < group[start].far:
        return 1, 0, 0
    s = group[start + 1].near - group[start].near
    f = group[start + 1].far - group[start].far
    stop = start + 2
    while stop < len(group) and (
        group[stop].near - group[stop - 1].near == s and group[stop].far - group[stop - 1].far == f
    ):
        stop += 1
    return stop - start, s, f
