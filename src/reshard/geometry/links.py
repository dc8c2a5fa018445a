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

from collections.abc import Iterable
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

    >>> rows = Link(8, 0, ((8, 1, 1),))              # elements 8 … 15 of F
    >>> column = Link(1, 0, ((4, 4, 1),))            # elements 1, 5, 9, 13 of F
    >>> meet(rows, column)
    [Meeting(near=9, first=1, second=2, dims=((2, 4, 4, 1),))]
    """
    found: list[Meeting] = []
    p_dims, q_dims, still = p.dims, q.dims, ()
    if (p_dims and p_dims[-1][1] == 0) or (q_dims and q_dims[-1][1] == 0):
        # A near stride of 0 names one near element many times: every copy meets all the same.
        still = tuple((n, 0, f, 0) for n, s, f in p_dims if s == 0)
        still += tuple((n, 0, 0, f) for n, s, f in q_dims if s == 0)
        p_dims = tuple([dim for dim in p_dims if dim[1]])
        q_dims = tuple([dim for dim in q_dims if dim[1]])
    _Meet(found, False).run(p.near, p.far, p_dims, q.near, q.far, q_dims, still)
    return found


class _Meet:
    """The recursion of :func:`meet`; ``flip`` tells that the two links changed places."""

    __slots__ = ("found", "flip", "other")

    def __init__(self, found: list[Meeting], flip: bool, other: _Meet | None = None) -> None:
        self.found = found
        self.flip = flip
        self.other = other or _Meet(found, not flip, self)

    def emit(self, near: int, a: int, b: int, dims: tuple[MeetingDim, ...]) -> None:
        self.found.append(Meeting(near, b, a, dims) if self.flip else Meeting(near, a, b, dims))

    def dim(self, n: int, s: int, f: int, g: int) -> MeetingDim:
        return (n, s, g, f) if self.flip else (n, s, f, g)

    def run(
        self,
        a: int,
        far_a: int,
        p: tuple[LinkDim, ...],
        b: int,
        far_b: int,
        q: tuple[LinkDim, ...],
        done: tuple[MeetingDim, ...],
    ) -> None:
        """Meet the block ``p`` at ``a`` with the block ``q`` at ``b``."""
        p_span = q_span = 0
        for n, s, _ in p:
            p_span += (n - 1) * s
        for n, s, _ in q:
            q_span += (n - 1) * s
        if a > b + q_span or b > a + p_span:
            return
        if not p and not q:
            self.emit(a, far_a, far_b, done)
        elif (p[0][1] if p else 0) < (q[0][1] if q else 0):
            self.other.run(b, far_b, q, a, far_a, p, done)
        elif len(q) == 1 and self._inside(a, far_a, p, p_span, b, far_b, q[0], done):
            return
        elif q and q[0][0] * q[0][1] > p[0][1] > q[0][1] and p[0][1] % q[0][1] == 0:
            self._cut(a, far_a, p, b, far_b, q, done)
        else:
            self._solve(a, far_a, p, p_span, b, far_b, q, q_span, done)

    def _inside(
        self,
        a: int,
        far_a: int,
        p: tuple[LinkDim, ...],
        p_span: int,
        b: int,
        far_b: int,
        run: LinkDim,
        done: tuple[MeetingDim, ...],
    ) -> bool:
        """Finish where ``p`` steps through the one run of ``q``; False where it does not."""
        n, t, g = run
        for dim in p:
            if dim[1] % t:
                return False
        if (a - b) % t:
            return True
        stop = b + (n - 1) * t
        if not (b <= a and a + p_span <= stop):
            return bool(p) and self._edges(a, far_a, p, p_span, b, far_b, run, done)
        dims = tuple([self.dim(m, s, f, s // t * g) for m, s, f in p])
        self.emit(a, far_a, far_b + (a - b) // t * g, done + dims)
        return True

    def _edges(
        self,
        a: int,
        far_a: int,
        p: tuple[LinkDim, ...],
        p_span: int,
        b: int,
        far_b: int,
        run: LinkDim,
        done: tuple[MeetingDim, ...],
    ) -> bool:
        """Meet the outermost rows of ``p`` that lie inside a run as one block, the others alone."""
        n, s, f = p[0]
        rest = p_span - (n - 1) * s
        stop = b + (run[0] - 1) * run[1]
        low, high = max(0, -((a - b) // s)), min(n - 1, (stop - rest - a) // s)
        first, last = max(0, -((a + rest - b) // s)), min(n - 1, (stop - a) // s)
        if high < low:
            if last - first == n - 1:
                return False
            low = high = first
        parts = [(i, i) for i in range(first, low)]
        parts.append((low, high))
        parts += [(i, i) for i in range(high + 1, last + 1)]
        for i, k in parts:
            inner = ((k - i + 1, s, f), *p[1:]) if k > i else p[1:]
            self.run(a + i * s, far_a + i * f, inner, b, far_b, (run,), done)
        return True

    def _cut(
        self,
        a: int,
        far_a: int,
        p: tuple[LinkDim, ...],
        b: int,
        far_b: int,
        q: tuple[LinkDim, ...],
        done: tuple[MeetingDim, ...],
    ) -> None:
        """Cut the outermost run of ``q`` at the borders of the outermost blocks of ``p``."""
        s = p[0][1]
        n, t, g = q[0]
        inner = q[1:]
        period = s // t
        rest = (b - a) % s
        head = 0 if rest < t else min(n, -((rest - s) // t))
        blocks, tail = divmod(n - head, period)
        if head:
            self._part(a, far_a, p, b, far_b, ((head, t, g), *inner), done)
        if blocks:
            at = b + head * t, far_b + head * g
            dims = ((period, t, g), *inner)
            if blocks > 1:
                dims = ((blocks, s, period * g), *dims)
            self._part(a, far_a, p, *at, dims, done)
        if tail:
            skip = head + blocks * period
            self._part(a, far_a, p, b + skip * t, far_b + skip * g, ((tail, t, g), *inner), done)

    def _part(
        self,
        a: int,
        far_a: int,
        p: tuple[LinkDim, ...],
        b: int,
        far_b: int,
        q: tuple[LinkDim, ...],
        done: tuple[MeetingDim, ...],
    ) -> None:
        self.run(a, far_a, p, b, far_b, q[1:] if q[0][0] == 1 else q, done)

    def _solve(
        self,
        a: int,
        far_a: int,
        p: tuple[LinkDim, ...],
        p_span: int,
        b: int,
        far_b: int,
        q: tuple[LinkDim, ...],
        q_span: int,
        done: tuple[MeetingDim, ...],
    ) -> None:
        """Pair the outermost dimensions, or walk the outermost of ``p`` where that is shorter."""
        n, s, f = p[0]
        p_rest = p_span - (n - 1) * s
        first = max(0, -((a + p_rest - b) // s))
        last = min(n - 1, (b + q_span - a) // s)
        if q:
            m, t, g = q[0]
            q_rest = q_span - (m - 1) * t
            step = gcd(s, t)
            if (p_rest + q_rest) // step <= last - first:
                low = -((a + p_rest - b) // step)
                for v in range(low, (b - a + q_rest) // step + 1):
                    hit = _progression(n, s // step, m, t // step, v)
                    if hit:
                        i, k, count = hit
                        more = done
                        if count > 1:
                            dim = self.dim(count, s // step * t, t // step * f, s // step * g)
                            more = (*done, dim)
                        self.run(
                            a + i * s, far_a + i * f, p[1:], b + k * t, far_b + k * g, q[1:], more
                        )
                return
        for i in range(first, last + 1):
            self.run(a + i * s, far_a + i * f, p[1:], b, far_b, q, done)


def _progression(n: int, s: int, m: int, t: int, v: int) -> tuple[int, int, int] | None:
    """Solve ``i·s − k·t = v`` with ``0 ≤ i < n``, ``0 ≤ k < m``, ``s`` and ``t`` coprime.

    Returns the first ``i``, its ``k`` and the number of solutions; they are ``t`` apart in ``i``
    and ``s`` apart in ``k``.
    """
    low = max(0, -(-v // s))
    high = min(n - 1, (v + (m - 1) * t) // s)
    if t > 1:
        low += (v * pow(s, -1, t) - low) % t
    if low > high:
        return None
    return low, (low * s - v) // t, (high - low) // t + 1
