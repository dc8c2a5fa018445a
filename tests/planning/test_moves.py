"""Moves against index arrays: ordering keeps the copies, cutting takes exactly a range."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.planning.moves import Move, cut, ordered

Copies = list[tuple[int, int]]


def copies(move: Move) -> Copies:
    """`(target, source)` of every element, one by one."""
    found = []
    for index in itertools.product(*(range(extent) for extent in move.shape)):
        source = sum(i * s for i, s in zip(index, move.source_strides, strict=True))
        target = sum(i * s for i, s in zip(index, move.target_strides, strict=True))
        found.append((move.target_offset + target, move.source_offset + source))
    return found


@st.composite
def any_copies(draw: st.DrawFn) -> Move:
    """A copy of up to four axes whose target elements are distinct."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    targets, step = [0] * len(shape), draw(st.integers(1, 3))
    for axis in order:
        targets[axis] = step
        step *= max(shape[axis], 1) + draw(st.integers(0, 2))
    sources = tuple(draw(st.integers(0, 20)) for _ in shape)
    offsets = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    return Move(shape, 0, offsets[0], sources, offsets[1], tuple(targets))


@st.composite
def interleaved(draw: st.DrawFn) -> Move:
    """Two axes whose target steps are coprime, so that rows run into each other."""
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    return Move((rows, columns), 0, 0, (10, 3), draw(st.integers(0, 5)), (2, 3))


@settings(deadline=None)
@given(any_copies())
def test_ordering_keeps_every_copy(move: Move) -> None:
    found = [pair for part in ordered(move) for pair in copies(part)]
    assert sorted(found) == sorted(copies(move))


@settings(deadline=None)
@given(any_copies() | interleaved())
def test_ordered_moves_ascend_in_the_target(move: Move) -> None:
    for part in ordered(move):
        targets = [target for target, _ in copies(part)]
        assert targets == sorted(set(targets))
        assert part.target_stop == targets[-1] + 1


@settings(deadline=None)
@given(any_copies() | interleaved(), st.integers(0, 120), st.integers(0, 120))
def test_cutting_takes_exactly_the_range(move: Move, start: int, length: int) -> None:
    stop = start + length
    for part in ordered(move):
        pieces = list(cut(part, start, stop))
        found = [pair for piece in pieces for pair in copies(piece)]
        assert found == [(t, s) for t, s in copies(part) if start <= t < stop]
        assert len(pieces) <= max(2 * len(part.shape) - 1, 1)


@settings(deadline=None)
@given(any_copies(), st.integers(0, 60))
def test_two_cuts_join_to_the_whole(move: Move, middle: int) -> None:
    for part in ordered(move):
        ends = (*cut(part, 0, middle), *cut(part, middle, part.target_stop))
        assert [pair for piece in ends for pair in copies(piece)] == copies(part)


def test_a_dense_matrix_becomes_one_line() -> None:
    (line,) = ordered(Move((3, 1, 4), 2, 5, (4, 99, 1), 7, (4, 77, 1), 2.0))
    assert line == Move((12,), 2, 5, (1,), 7, (1,), 2.0)


def test_a_transpose_keeps_two_axes_in_target_order() -> None:
    (move,) = ordered(Move((3, 4), 0, 0, (4, 1), 0, (1, 3)))
    assert (move.shape, move.source_strides, move.target_strides) == ((4, 3), (1, 4), (3, 1))


def test_offsets_beyond_two_to_the_forty_are_exact() -> None:
    far = 1 << 45
    move = Move((1 << 20, 1 << 20), 0, 0, (1 << 21, 1), far, (1 << 21, 1))
    (part,) = cut(move, far + (1 << 21) * 77 + 5, far + (1 << 21) * 77 + 9)
    assert (part.source_offset, part.shape) == ((1 << 21) * 77 + 5, (4,))
