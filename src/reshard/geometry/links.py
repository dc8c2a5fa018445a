"""Links: a piece seen from the space where it meets others, and the meeting of two of them.

Theory. A piece joins two address spaces. To compose two pieces we look at both from the space
that they share, the *near* one, and keep what each says about its own *far* space. A link is::

    near(i) = near + Σ i_j·s_j          far(i) = far + Σ i_j·f_j          0 ≤ i_j < n_j

with dims ``(n_j, s_j, f_j)``, extents above 1, sorted by near stride, largest first. To *meet*
``p`` and ``q`` is to find all pairs ``(i, k)`` with ``near_p(i) = near_q(k)``; the answer is again
a list of strided blocks, each with an offset and strides in three spaces (near, far of ``p``, far
of ``q``).

Method, outermost dimension first, exact for any strides:

* equal or incommensurable strides ``s``, ``t``: ``i·s − k·t`` can only take the multiples of
  ``g = gcd(s, t)`` that the inner dimensions can make up for, a handful; for each of them the
  solutions ``(i, k)`` are one progression (Chinese remainder theorem) of near stride ``lcm(s, t)``,
  which becomes a dimension of the answer, and the inner dimensions meet recursively;
* a run of small stride that crosses several blocks of a larger stride is cut at the borders of
  those blocks into head, body and tail, and the body gets one more dimension. This is how a flat
  range of an N-dimensional block becomes at most 2N−1 blocks.

Cost depends on the numbers of dimensions and of results, never on extents. Integers are Python's,
so nothing overflows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import gcd
from typing import NamedTuple

from reshard.geometry.piece import AffinePiece

LinkDim = tuple[int, int, int]
"""Extent, near stride, far stride."""
MeetingDim = tuple[int, int, int, int]
"""Extent, near stride, far stride of the first link, far stride of the second."""


class Link(NamedTuple):
    """A strided block of the near space, and where each of its elements is in the far space."""

    near: int
    far: int
    dims: tuple[LinkDim, ...]

    @property
    def near_stop(self) -> int:
        """One past the largest near offset."""
        return self.near + 1 + sum([(n - 1) * s for n, s, _ in self.dims])


class Meeting(NamedTuple):
    """A block that two links share: its place in the near space and in both far spaces."""

    near: int
    first: int
    second: int
    dims: tuple[MeetingDim, ...]


def _outermost(dim: LinkDim) -> tuple[int, int]:
    return (-dim[1], -dim[2])


def make_link(near: int, far: int, dims: Iterable[LinkDim]) -> Link:
    """Return a link with unit dimensions dropped and the others sorted and merged.

    >>> make_link(0, 5, [(1, 9, 9), (4, 1, 2), (3, 4, 8)])
    Link(near=0, far=5, dims=((12, 1, 2),))
    """
    kept = [dim for dim in dims if dim[0] != 1]
    if len(kept) > 1:
        kept.sort(key=_outermost)
        kept = _coalesced(kept)
    return Link(near, far, tuple(kept))


def _coalesced(dims: list[LinkDim]) -> list[LinkDim]:
    merged = [dims[0]]
    for n, s, f in dims[1:]:
        outer_n, outer_s, outer_f = merged[-1]
        if outer_s == n * s and outer_f == n * f:
            merged[-1] = (outer_n * n, s, f)
        else:
            merged.append((n, s, f))
    return merged


def from_source(piece: AffinePiece) -> Link:
    """See a piece from the logical tensor: near is ``F``, far the shard."""
    return make_link(
        piece.source_offset,
        piece.dest_offset,
        zip(piece.shape, piece.source_strides, piece.dest_strides, strict=True),
    )


def from_dest(piece: AffinePiece) -> Link:
    """See a piece from the shard: near is the shard, far ``F``."""
    return make_link(
        piece.dest_offset,
        piece.source_offset,
        zip(piece.shape, piece.dest_strides, piece.source_strides, strict=True),
    )


def meet(p: Link, q: Link) -> list[Meeting]:
    """Return the blocks that two non-empty links share, as a list without repetitions.

    >>> rows = Link(8, 0, ((8, 1, 1),))  # elements 8 … 15 of F
    >>> column = Link(1, 0, ((4, 4, 1),))  # elements 1, 5, 9, 13 of F
    >>> meet(rows, column)
    [Meeting(near=9, first=1, second=2, dims=((2, 4, 4, 1),))]
    """
    found: list[Meeting] = []
    p_dims, q_dims = p.dims, q.dims
    still: tuple[MeetingDim, ...] = ()
    if (p_dims and p_dims[-1][1] == 0) or (q_dims and q_dims[-1][1] == 0):
        # A near stride of 0 names one near element many times: every copy meets all the same.
        still = tuple([(n, 0, f, 0) for n, s, f in p_dims if s == 0])
        still += tuple([(n, 0, 0, f) for n, s, f in q_dims if s == 0])
        p_dims = tuple([dim for dim in p_dims if dim[1]])
        q_dims = tuple([dim for dim in q_dims if dim[1]])
    _Meet(found).run((p.near, p.far, p_dims), (q.near, q.far, q_dims), still)
    return found


_Side = tuple[int, int, tuple[LinkDim, ...]]
"""A link, or part of one, as a bare tuple: near, far, dims."""
_Done = tuple[MeetingDim, ...]


class _Meet:
    """The recursion of :func:`meet`; ``flip`` tells that the two links changed places."""

    __slots__ = ("flip", "found", "other")

    def __init__(self, found: list[Meeting], other: _Meet | None = None) -> None:
        self.found = found
        self.flip = other is not None
        self.other: _Meet = other or _Meet(found, self)

    def run(self, p: _Side, q: _Side, done: _Done) -> None:
        """Meet two blocks, given the dimensions of the answer that are known already."""
        a, far_a, p_dims = p
        b, far_b, q_dims = q
        if a > b + _reach(q_dims) or b > a + _reach(p_dims):
            return
        if not p_dims and not q_dims:
            self._emit(a, far_a, far_b, done)
            return
        s, t = (dims[0][1] if dims else 0 for dims in (p_dims, q_dims))
        if s < t:
            self.other.run(q, p, done)
        elif len(q_dims) == 1 and self._inside(p, q, done):
            return
        elif q_dims and q_dims[0][0] * t > s > t and s % t == 0:
            self._cut(p, q, done)
        else:
            self._solve(p, q, done)

    def _emit(self, near: int, a: int, b: int, dims: _Done) -> None:
        self.found.append(Meeting(near, b, a, dims) if self.flip else Meeting(near, a, b, dims))

    def _dim(self, n: int, s: int, f: int, g: int) -> MeetingDim:
        return (n, s, g, f) if self.flip else (n, s, f, g)

    def _inside(self, p: _Side, q: _Side, done: _Done) -> bool:
        """Finish where ``p`` steps through the one run of ``q``; False where it does not."""
        a, far_a, dims = p
        b, far_b, ((n, t, g),) = q
        for dim in dims:
            if dim[1] % t:
                return False
        if (a - b) % t:
            return True
        if not (b <= a and a + _reach(dims) <= b + (n - 1) * t):
            return bool(dims) and self._edges(p, q, done)
        made = tuple([self._dim(m, s, f, s // t * g) for m, s, f in dims])
        self._emit(a, far_a, far_b + (a - b) // t * g, done + made)
        return True

    def _edges(self, p: _Side, q: _Side, done: _Done) -> bool:
        """Meet the outermost rows of ``p`` that lie inside a run as one block, the others alone."""
        a, _, ((n, s, _), *inner) = p
        b, _, ((m, t, _),) = q
        rest, stop = _reach(tuple(inner)), b + (m - 1) * t
        low, high = max(0, -((a - b) // s)), min(n - 1, (stop - rest - a) // s)
        first, last = max(0, -((a + rest - b) // s)), min(n - 1, (stop - a) // s)
        if high < low:
            if last - first == n - 1:
                return False
            low = high = first
        blocks = [(i, i) for i in range(first, low)]
        blocks.append((low, high))
        blocks += [(i, i) for i in range(high + 1, last + 1)]
        for i, k in blocks:
            self.run(_steps(p, i, k - i + 1), q, done)
        return True

    def _cut(self, p: _Side, q: _Side, done: _Done) -> None:
        """Cut the outermost run of ``q`` at the borders of the outermost blocks of ``p``."""
        s, (n, t, g) = p[2][0][1], q[2][0]
        period = s // t
        rest = (q[0] - p[0]) % s
        head = 0 if rest < t else min(n, -((rest - s) // t))
        blocks, tail = divmod(n - head, period)
        if head:
            self.run(p, _steps(q, 0, head), done)
        if blocks > 1:
            near, far, dims = _steps(q, head, period)
            self.run(p, (near, far, ((blocks, s, period * g), *dims)), done)
        elif blocks:
            self.run(p, _steps(q, head, period), done)
        if tail:
            self.run(p, _steps(q, head + blocks * period, tail), done)

    def _solve(self, p: _Side, q: _Side, done: _Done) -> None:
        """Pair the outermost dimensions, or walk the outermost of ``p`` where that is shorter."""
        a, far_a, ((n, s, f), *p_inner) = p
        b, far_b, q_dims = q
        p_rest = _reach(tuple(p_inner))
        first = max(0, -((a + p_rest - b) // s))
        last = min(n - 1, (b + _reach(q_dims) - a) // s)
        if q_dims:
            m, t, g = q_dims[0]
            q_rest = _reach(q_dims[1:])
            step = gcd(s, t)
            if (p_rest + q_rest) // step <= last - first:
                values = range(-((a + p_rest - b) // step), (b - a + q_rest) // step + 1)
                for i, k, count in _progressions((n, s // step), (m, t // step), values):
                    made = (self._dim(count, s // step * t, t // step * f, s // step * g),)
                    self.run(
                        (a + i * s, far_a + i * f, tuple(p_inner)),
                        (b + k * t, far_b + k * g, q_dims[1:]),
                        done + made if count > 1 else done,
                    )
                return
        for i in range(first, last + 1):
            self.run((a + i * s, far_a + i * f, tuple(p_inner)), q, done)


def _reach(dims: tuple[LinkDim, ...]) -> int:
    """Return the distance from the first to the last near address of a block."""
    reach = 0
    for n, s, _ in dims:
        reach += (n - 1) * s
    return reach


def _steps(side: _Side, first: int, count: int) -> _Side:
    """Return some steps of the outermost dimension of a block."""
    near, far, ((_, s, f), *inner) = side
    dims = ((count, s, f), *inner) if count > 1 else tuple(inner)
    return near + first * s, far + first * f, dims


def _progressions(
    p: tuple[int, int], q: tuple[int, int], values: range
) -> Iterator[tuple[int, int, int]]:
    """Solve ``i·s − k·t = v`` for each value, ``0 ≤ i < n``, ``0 ≤ k < m``, s and t coprime.

    Yields the first ``i``, its ``k`` and the number of solutions, for values that have any; they
    are ``t`` apart in ``i`` and ``s`` apart in ``k``.
    """
    (n, s), (m, t) = p, q
    inverse = pow(s, -1, t) if t > 1 else 0
    for v in values:
        low = max(0, -(-v // s))
        high = min(n - 1, (v + (m - 1) * t) // s)
        low += (v * inverse - low) % t
        if low <= high:
            yield low, (low * s - v) // t, (high - low) // t + 1
