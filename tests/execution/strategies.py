"""Random layouts: everything that a map may do, small enough to index element by element."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st

from reshard.geometry import AffinePiece, ParamAffineMap, locate


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """Shapes of up to three axes, empty ones among them."""
    return tuple(draw(st.lists(st.integers(0, 7), max_size=3)))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense tensor."""
    return tuple(int(np.prod(shape[k + 1 :], dtype=np.int64)) for k in range(len(shape)))


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> ParamAffineMap:
    """A cut of the tensor into boxes, handed to ranks, each stored dense, transposed or padded.

    Some boxes are held by several ranks, and a rank may hold several boxes with gaps between.
    """
    boxes = [((0,) * len(shape), shape)]
    for axis in range(len(shape)):
        cuts = sorted(draw(st.sets(st.integers(1, max(shape[axis] - 1, 1)), max_size=2)))
        edges = [0, *(cut for cut in cuts if cut < shape[axis]), shape[axis]]
        boxes = [
            (
                (*first[:axis], low, *first[axis + 1 :]),
                (*extents[:axis], high - low, *extents[axis + 1 :]),
            )
            for first, extents in boxes
            for low, high in itertools.pairwise(edges)
        ]
    ranks = draw(st.integers(1, 4))
    pieces: dict[int, list[AffinePiece]] = {rank: [] for rank in range(ranks)}
    sizes = dict.fromkeys(range(ranks), 0)
    strides = row_major(shape)
    for first, extents in boxes:
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=2)):
            order = draw(st.permutations(range(len(shape))))
            dest, step = [0] * len(shape), 1
            for axis in order:
                dest[axis] = step
                step *= max(extents[axis], 1)
            offset = sum(a * b for a, b in zip(first, strides, strict=True))
            pieces[rank].append(
                AffinePiece(extents, offset, strides, sizes[rank], tuple(dest), (rank,))
            )
            sizes[rank] += int(np.prod(extents, dtype=np.int64))
    return locate(shape, {rank: (sizes[rank],) for rank in range(ranks)}, pieces)


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[ParamAffineMap, ParamAffineMap]:
    """A source and a target layout of one tensor."""
    shape = draw(shapes())
    return draw(layouts(shape)), draw(layouts(shape))
