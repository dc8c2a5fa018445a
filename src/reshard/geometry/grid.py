"""The grid: a mixed-radix reading of one address space in which strided blocks are boxes.

Theory. Choose strides ``1 = c_0 | c_1 | … | c_{K-1}``, each dividing the next. Every address has
one digit per stride, ``x_k = (a // c_k) mod (c_{k+1} / c_k)``; the last digit is unbounded. A
block whose strides are among the ``c_k`` and which never carries from one digit into the next is
a *box*, a product of digit intervals; for boxes, intersection, difference and overlap are
comparisons of bounds. Any other block is cut: a run that carries into head, body and tail, a
stride that is not in the chain into its single steps. A good chain makes the last case rare, so
:func:`Grid.of` prefers the strides that would cost the most steps.

A :class:`Box` also keeps the far side of the link that it was cut from, which is affine in the
digits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

from reshard.geometry.links import Link, LinkDim, make_link


class Box(NamedTuple):
    """Digit intervals ``[lo_k, hi_k)``, innermost digit first, and the far side of the corner."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]
    far: int
    far_strides: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of addresses in the box."""
        count = 1
        for lo, hi in zip(self.lo, self.hi, strict=True):
            count *= hi - lo
        return count


class Grid:
    """A chain of strides, each dividing the next, the first being 1.

    >>> grid = Grid.of([Link(4, 0, ((3, 16, 8), (8, 1, 1)))])
    >>> grid.strides
    (1, 16)
    >>> list(grid.boxes(Link(4, 0, ((3, 16, 8), (8, 1, 1)))))
    [Box(lo=(4, 0), hi=(12, 3), far=0, far_strides=(1, 8))]
    """

    __slots__ = ("strides",)

    def __init__(self, strides: tuple[int, ...]) -> None:
        self.strides = strides

    @classmethod
    def of(cls, links: Iterable[Link]) -> Grid:
        """Return a grid that suits the given links."""
        weight: Counter[int] = Counter()
        for link in links:
            for n, s, _ in link.dims:
                if s > 1:
                    weight[s] += n
        chain = [1]
        for stride, _ in sorted(weight.items(), key=lambda item: (-item[1], -item[0])):
            if all(stride % c == 0 or c % stride == 0 for c in chain):
                chain.append(stride)
        return cls(tuple(sorted(chain)))

    def boxes(self, link: Link) -> Iterator[Box]:
        """Yield the boxes of a non-empty link. Repetitions (near stride 0) are yielded once."""
        axes: list[tuple[int, int]] = [(1, 0)] * len(self.strides)
        walked: list[LinkDim] = []
        for n, s, f in link.dims:
            if s == 0:
                continue
            axis = self._axis(s)
            if axis is None or axes[axis][0] > 1:
                walked.append((n, s, f))
            else:
                axes[axis] = (n, f)
        for steps in product(*[range(n) for n, _, _ in walked]):
            near = link.near + sum(i * dim[1] for i, dim in zip(steps, walked, strict=True))
            far = link.far + sum(i * dim[2] for i, dim in zip(steps, walked, strict=True))
            yield from self._settled(near, far, tuple(axes), 0)

    def _axis(self, stride: int) -> int | None:
        try:
            return self.strides.index(stride)
        except ValueError:
            return None

    def _settled(
        self, near: int, far: int, axes: tuple[tuple[int, int], ...], axis: int
    ) -> Iterator[Box]:
        """Cut what carries out of digit ``axis``, then go on with the next digit."""
        if axis == len(self.strides) - 1:
            yield self._box(near, far, axes)
            return
        n, f = axes[axis]
        stride, above = self.strides[axis], self.strides[axis + 1]
        radix = above // stride
        lo = near // stride % radix
        if lo + n <= radix:
            yield from self._settled(near, far, axes, axis + 1)
            return
        head = (radix - lo) % radix
        blocks, tail = divmod(n - head, radix)
        done = 0
        for count, repeat in ((head, 1), (radix, blocks), (tail, 1)):
            if count and repeat:
                at = near + done * stride, far + done * f
                here = (*axes[:axis], (count, f), *axes[axis + 1 :])
                yield from self._repeated(*at, here, axis, repeat)
            done += count * repeat

    def _repeated(
        self, near: int, far: int, axes: tuple[tuple[int, int], ...], axis: int, repeat: int
    ) -> Iterator[Box]:
        """Go on with a run that fills ``repeat`` whole blocks of the next digit."""
        above, jump = self.strides[axis + 1], axes[axis][0] * axes[axis][1]
        if repeat > 1 and axes[axis + 1][0] == 1:
            axes = (*axes[: axis + 1], (repeat, jump), *axes[axis + 2 :])
            repeat = 1
        for i in range(repeat):
            yield from self._settled(near + i * above, far + i * jump, axes, axis + 1)

    def _box(self, near: int, far: int, axes: tuple[tuple[int, int], ...]) -> Box:
        lo, hi = [], []
        for axis, (n, _) in enumerate(axes):
            digit = near // self.strides[axis]
            if axis + 1 < len(axes):
                digit %= self.strides[axis + 1] // self.strides[axis]
            lo.append(digit)
            hi.append(digit + n)
        return Box(tuple(lo), tuple(hi), far, tuple([f for _, f in axes]))

    def link(self, box: Box) -> Link:
        """Return a box as a link again."""
        near = sum(lo * c for lo, c in zip(box.lo, self.strides, strict=True))
        dims = zip(
            [hi - lo for lo, hi in zip(box.lo, box.hi, strict=True)],
            self.strides,
            box.far_strides,
            strict=True,
        )
        return make_link(near, box.far, dims)


def overlap(a: Box, b: Box) -> bool:
    """Tell whether two boxes of one grid share an address."""
    return all(
        x < v and u < y for x, y, u, v in zip(a.lo, a.hi, b.lo, b.hi, strict=True)
    )


def cells(box: Box, others: Iterable[Box]) -> Iterator[Box]:
    """Cut a box at all borders of the boxes that overlap it, into cells none of them crosses."""
    cuts = []
    for axis, (lo, hi) in enumerate(zip(box.lo, box.hi, strict=True)):
        borders = {lo, hi}
        for other in others:
            borders.update(b for b in (other.lo[axis], other.hi[axis]) if lo < b < hi)
        ordered = sorted(borders)
        cuts.append(list(zip(ordered, ordered[1:], strict=False)))
    for cell in product(*reversed(cuts)):
        lo, hi = zip(*reversed(cell), strict=True)
        yield part(box, lo, hi)


def part(box: Box, lo: tuple[int, ...], hi: tuple[int, ...]) -> Box:
    """Return the part of a box inside given bounds, which lie within its own."""
    skip = sum((x - o) * f for x, o, f in zip(lo, box.lo, box.far_strides, strict=True))
    return Box(lo, hi, box.far + skip, box.far_strides)
