"""Refinement: cutting blocks of several ranks until each part is held by one set of ranks.

Theory. P5 wants every element of a piece to be held by the same ranks. Blocks of one address
space overlap; we read them in a grid (:mod:`reshard.geometry.grid`), where they are boxes, find
the boxes that overlap, and cut each at the borders of the others. A cell of that cut lies wholly
inside or outside every other box, so the ranks that hold it are those of the boxes around it.
Boxes with equal bounds are one *class*; when no two classes overlap, which is the rule in real
layouts, nothing needs cutting at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.errors import UnsupportedError
from reshard.geometry.grid import Box, Grid, cells, overlap
from reshard.geometry.links import Link, make_link

Bounds = tuple[tuple[int, ...], tuple[int, ...]]


class Part(NamedTuple):
    """A block that is inside one given link, and the owners of all links that cover it."""

    link: Link
    owners: frozenset[int]


class Arrangement:
    """How some links of one address space overlap.

    Parameters
    ----------
    links
        Non-empty links.
    owners
        The owner of each, same length.
    """

    __slots__ = ("_classes", "_crossing", "_grid", "_links", "_owners")

    def __init__(self, links: Sequence[Link], owners: Sequence[int]) -> None:
        self._links = links
        self._owners = owners
        self._grid = Grid.of(links)
        self._classes: dict[Bounds, set[int]] = {}
        boxes: dict[Bounds, Box] = {}
        for link, owner in zip(links, owners, strict=True):
            for box in self._grid.boxes(link):
                self._classes.setdefault((box.lo, box.hi), set()).add(owner)
                boxes[box.lo, box.hi] = box
        self._crossing = _crossing(list(boxes.values()))

    @property
    def disjoint(self) -> bool:
        """Whether any two boxes are either equal or disjoint."""
        return not self._crossing

    @property
    def exclusive(self) -> bool:
        """Whether every class of boxes has one owner."""
        return all(len(owners) == 1 for owners in self._classes.values())

    def volume(self) -> int:
        """Return the number of addresses that the links cover together."""
        total = 0
        order = {bounds: i for i, bounds in enumerate(self._classes)}
        for bounds, i in order.items():
            earlier = [b for b in self._crossing.get(bounds, ()) if order[b.lo, b.hi] < i]
            for cell in cells(Box(*bounds, 0, (0,) * len(bounds[0])), earlier):
                if not any(overlap(other, cell) for other in earlier):
                    total += cell.volume
        return total

    def parts(self, index: int) -> list[Part]:
        """Return the link ``index`` as parts that each lie in one set of owners."""
        boxes = list(self._grid.boxes(self._links[index]))
        whole = self._common_owners(boxes)
        if whole is not None:
            return [Part(self._links[index], whole)]
        # Boxes leave out repetitions (near stride 0); each part repeats like the whole link.
        still = [dim for dim in self._links[index].dims if dim[1] == 0]
        found = []
        for box in boxes:
            for cell in self._cells(box):
                near, far, dims = self._grid.link(cell)
                link = make_link(near, far, (*dims, *still))
                found.append(Part(link, self._cell_owners(box, cell)))
        return found

    def _common_owners(self, boxes: Iterable[Box]) -> frozenset[int] | None:
        kinds = set()
        for box in boxes:
            if (box.lo, box.hi) in self._crossing:
                return None
            kinds.add(frozenset(self._classes[box.lo, box.hi]))
        return kinds.pop() if len(kinds) == 1 else None

    def _cells(self, box: Box) -> Iterable[Box]:
        around = self._crossing.get((box.lo, box.hi))
        return cells(box, around) if around else (box,)

    def _cell_owners(self, box: Box, cell: Box) -> frozenset[int]:
        owners = set(self._classes[box.lo, box.hi])
        for other in self._crossing.get((box.lo, box.hi), ()):
            if overlap(other, cell):
                owners |= self._classes[other.lo, other.hi]
        return frozenset(owners)


def _crossing(boxes: list[Box]) -> dict[Bounds, list[Box]]:
    """Return, for each box that overlaps others, those others."""
    found: dict[Bounds, list[Box]] = {}
    if len(boxes) < 2:
        return found
    lo, hi = _bounds(boxes)
    for index, box in enumerate(boxes):
        hits = np.flatnonzero(((lo < hi[index]) & (hi > lo[index])).all(axis=1))
        if len(hits) > 1:
            found[box.lo, box.hi] = [boxes[i] for i in hits.tolist() if i != index]
    return found


def _bounds(boxes: list[Box]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    try:
        return (
            np.array([box.lo for box in boxes], dtype=np.int64),
            np.array([box.hi for box in boxes], dtype=np.int64),
        )
    except OverflowError:
        raise UnsupportedError("addresses beyond 2^63") from None


def overlapping(links: Sequence[Link]) -> bool:
    """Tell whether some address is named twice, by two links or by one."""
    return len(layers(links)) > 1


def layers(links: Sequence[Link]) -> list[list[Link]]:
    """Return the links as lists that each name an address at most once.

    The first list has, for every address, the first link that names it; the next one the second,
    and so on.

    >>> [first, second] = layers([Link(0, 0, ((4, 1, 1),)), Link(2, 9, ((4, 1, 1),))])
    >>> first
    [Link(near=0, far=0, dims=((2, 1, 1),)), Link(near=2, far=2, dims=((2, 1, 1),)), \
Link(near=4, far=11, dims=((2, 1, 1),))]
    >>> second
    [Link(near=2, far=9, dims=((2, 1, 1),))]
    """
    if _apart(links):
        return [list(links)]
    simple = [part for link in links for part in _unfolded(link)]
    arrangement = Arrangement(simple, range(len(simple)))
    if arrangement.disjoint and arrangement.exclusive:
        return [list(links)]
    found: list[list[Link]] = [[]]
    for index in range(len(simple)):
        for part in arrangement.parts(index):
            depth = sum(owner < index for owner in part.owners)
            while len(found) <= depth:
                found.append([])
            found[depth].append(part.link)
    return found


def _apart(links: Sequence[Link]) -> bool:
    """Tell whether the links are plainly disjoint: their spans are, and none folds on itself."""
    stop = -1
    for link in sorted(links):
        if link.near < stop or _folding_dim(link) is not None:
            return False
        stop = link.near_stop
    return True


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
