"""Random cuts of small tensors, and random spellings of a cut in pieces.

Theory. A cut is drawn by what it does to an array of offsets: the words of real layouts (split,
gathered, cyclic, transposed, replicated, flattened and dealt out) and chance. A spelling takes a
start, goes on by a random step as long as the elements follow evenly, does so again with the whole
stretch, and writes the block down with its dims in random order: so the same cut is spelled in many
ways, none of which knows where it came from.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from scripts.fuzz_geometry.dense import Cut, Ints, Shape, Spelled, Spelling

FACTORS = (1.0, 0.5, 0.25, 2.0, -4.0)
"""Powers of two: what they scale is exact."""
Label = tuple[tuple[int, ...], float]


def draw_shape(rng: random.Random, most: int = 72) -> Shape:
    """Draw the shape of a tensor; now and then it is empty, or has no dims."""
    shape = [rng.choice((1, 2, 3, 4, 5, 6, 8, 12)) for _ in range(rng.randrange(5))]
    while math.prod(shape) > most:
        shape.remove(max(shape))
    if shape and rng.random() < 0.03:
        shape[rng.randrange(len(shape))] = 0
    return tuple(shape)


def draw_cut(
    rng: random.Random, shape: Shape, *, partial: bool = False, scaled: bool = False
) -> Cut:
    """Draw a cut of `F`; a partial one may leave out elements of `F` and of shards."""
    full = np.arange(math.prod(shape)).reshape(shape)
    ranks = rng.sample(range(7), rng.randint(1, 5))
    if rng.random() < 0.1:
        ranks = [rank * 1000 for rank in ranks]
    shards = rng.choice(WORDS)(rng, full, len(ranks))
    if rng.random() < 0.25:
        shards = _flattened(rng, shards)
    if partial:
        shards = [_torn(rng, index) for index in shards]
    factors = np.ones(full.size)
    if scaled:
        ends = sorted(rng.randrange(full.size + 1) for _ in range(rng.randrange(4)))
        for start in ends:
            factors[start:] = rng.choice(FACTORS)
    return Cut(shape, dict(zip(ranks, shards, strict=True)), factors)


# ------------------------------------------------------------------------------------ words

Word = Callable[[random.Random, Ints, int], list[Ints]]


def _dim(rng: random.Random, full: Ints) -> tuple[Ints, int]:
    """Give a dim to cut; what has none is a row."""
    full = full if full.ndim else full.reshape(1)
    return full, rng.randrange(full.ndim)


def _split(rng: random.Random, full: Ints, ranks: int) -> list[Ints]:
    full, dim = _dim(rng, full)
    ends = sorted(rng.randrange(full.shape[dim] + 1) for _ in range(ranks - 1))
    return list(np.split(full, ends, dim))


def _replicated(_rng: random.Random, full: Ints, ranks: int) -> list[Ints]:
    return [full] * ranks


def _segmented(rng: random.Random, full: Ints, ranks: int) -> list[Ints]:
    full, dim = _dim(rng, full)
    ends = sorted(rng.randrange(full.shape[dim] + 1) for _ in range(rng.randrange(1, 4)))
    parts: list[list[Ints]] = [[] for _ in range(ranks)]
    for block in np.split(full, ends, dim):
        cuts = [block] * ranks
        if rng.random() < 0.6:
            cuts = np.array_split(block, ranks, dim)
        for part, one in zip(parts, cuts, strict=True):
            part.append(one)
    return [np.concatenate(part, dim) for part in parts]


def _gathered(rng: random.Random, full: Ints, ranks: int) -> list[Ints]:
    full, dim = _dim(rng, full)
    extent = full.shape[dim]
    block = rng.choice([n for n in range(1, extent + 1) if extent % n == 0] or [1])
    numbers = list(range(extent // block))
    rng.shuffle(numbers)
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for number in numbers:
        for rank in rng.sample(range(ranks), rng.choice([1, 1, 1, min(2, ranks), ranks])):
            dealt[rank] += [number] * rng.choice((1, 1, 1, 1, 2))  # twice in one shard, too
    for mine in dealt:
        if rng.random() < 0.5:
            rng.shuffle(mine)
    rows = [[n * block + i for n in mine for i in range(block)] for mine in dealt]
    return [full.take(np.array(mine, np.int64), dim) for mine in rows]


def _cyclic(rng: random.Random, full: Ints, ranks: int) -> list[Ints]:
    full, dim = _dim(rng, full)
    return [full.take(range(rank, full.shape[dim], ranks), dim) for rank in range(ranks)]


def _transposed(rng: random.Random, full: Ints, ranks: int) -> list[Ints]:
    axes = rng.sample(range(full.ndim), full.ndim)
    return [
        part.transpose(axes) if part.ndim == len(axes) else part
        for part in _split(rng, full, ranks)
    ]


def _scrambled(rng: random.Random, full: Ints, ranks: int) -> list[Ints]:
    order = np.array(rng.sample(range(full.size), full.size), np.int64)
    return list(np.array_split(order, ranks))


WORDS: tuple[Word, ...] = (
    _split,
    _replicated,
    _segmented,
    _gathered,
    _gathered,
    _cyclic,
    _transposed,
    _scrambled,
)


def _flattened(rng: random.Random, shards: Sequence[Ints]) -> list[Ints]:
    """Lay shards end to end, in blocks out of order, and deal the buffer out (ZeRO)."""
    flat = np.concatenate([index.reshape(-1) for index in shards])
    ends = sorted(rng.randrange(flat.size + 1) for _ in range(rng.randrange(3)))
    blocks = np.split(flat, ends)
    rng.shuffle(blocks)
    flat = np.concatenate(blocks)
    ends = sorted(rng.randrange(flat.size + 1) for _ in range(len(shards) - 1))
    return list(np.split(flat, ends))


def _torn(rng: random.Random, index: Ints) -> Ints:
    """Take elements out of a shard, or put padding behind it."""
    flat = index.reshape(-1).copy()
    if rng.random() < 0.5 and flat.size:
        start, stop = sorted((rng.randrange(flat.size + 1), rng.randrange(flat.size + 1)))
        flat[start:stop] = -1
    if rng.random() < 0.3:
        return np.append(flat, [-1] * rng.randint(1, 4))
    return flat.reshape(index.shape)


# ------------------------------------------------------------------------------------ spellings


def spell(rng: random.Random, cut: Cut) -> Spelling:
    """Write a cut down in random pieces."""
    holders = cut.holders()
    pieces = {}
    for rank, index in cut.shards.items():
        flat = index.reshape(-1).tolist()
        labels = [
            None if offset < 0 else (holders[offset], float(cut.factors[offset])) for offset in flat
        ]
        mine = list(_pieces(rng, flat, labels))
        if rng.random() < 0.1:
            mine.append(Spelled(((2, 0), 1, (1, 1), 3, (1, 1)), (rank,), 1.0))
        rng.shuffle(mine)
        pieces[rank] = tuple(mine)
    return Spelling(cut.shape, {r: index.shape for r, index in cut.shards.items()}, pieces)


def _pieces(
    rng: random.Random, flat: Sequence[int], labels: Sequence[Label | None]
) -> list[Spelled]:
    todo = {at for at, label in enumerate(labels) if label is not None}
    longest = rng.choice((1, 3, 100, 100))
    found = []
    while todo:
        start = min(todo) if rng.random() < 0.7 else rng.choice(sorted(todo))
        block, dims = [start], []
        label = labels[start]
        for _ in range(rng.randint(1, 3)):
            to = rng.choice((1, 1, len(block), len(block), rng.randint(1, 12)))
            count, of = _goes_on(flat, labels, todo, block, to)
            count = min(count, rng.randint(1, longest))
            if count > 1:
                dims.append((count, of, to))
                block = [at + k * to for k in range(count) for at in block]
        if rng.random() < 0.1:
            dims.append((1, rng.randrange(5), rng.randrange(5)))
        rng.shuffle(dims)
        shape, of_strides, to_strides = zip(*dims, strict=True) if dims else ((), (), ())
        assert label is not None
        found.append(Spelled((shape, flat[start], of_strides, start, to_strides), *label))
        todo.difference_update(block)
    return found


def _goes_on(
    flat: Sequence[int],
    labels: Sequence[Label | None],
    todo: set[int],
    block: Sequence[int],
    to: int,
) -> tuple[int, int]:
    """How often a block repeats every `to` elements of the shard, and how far apart in `F`."""
    start = block[0]
    if start + to not in todo:
        return 1, 0
    of = flat[start + to] - flat[start]
    if of < 0:
        return 1, 0
    taken = set(block)
    count = 1
    while True:
        moved = [at + count * to for at in block]
        even = all(
            at in todo
            and at not in taken
            and labels[at] == labels[start]
            and flat[at] == flat[at - count * to] + count * of
            for at in moved
        )
        if not even:
            return count, of
        taken.update(moved)
        count += 1


def in_elements(cut: Cut) -> Spelling:
    """Write a cut down with a piece for each element."""
    pieces: dict[int, list[Spelled]] = {rank: [] for rank in cut.shards}
    for (rank, at), (offset, holders, factor) in sorted(cut.relation().items()):
        pieces[rank].append(Spelled(((), offset, (), at, ()), holders, factor))
    shapes = {rank: index.shape for rank, index in cut.shards.items()}
    return Spelling(cut.shape, shapes, {rank: tuple(mine) for rank, mine in pieces.items()})


def tamper(rng: random.Random, spelling: Spelling) -> Spelling:
    """Change one thing about a spelling; it may stay valid by chance."""
    pieces = {rank: list(mine) for rank, mine in spelling.pieces.items()}
    full = [rank for rank, mine in pieces.items() if mine]
    if not full:
        return spelling
    rank = rng.choice(full)
    number = rng.randrange(len(pieces[rank]))
    old = pieces[rank][number]
    shape, of, of_strides, to, to_strides = old.block
    what = rng.randrange(8)
    if what == 0:
        del pieces[rank][number]
    elif what == 1:
        pieces[rank].append(old)
    elif what == 2:
        pieces[rank][number] = replace(old, scale=rng.choice(FACTORS))
    elif what == 3:
        others = set(old.locations) ^ {rng.choice([*spelling.shards, 6])}
        pieces[rank][number] = replace(old, locations=tuple(sorted(others)) or (rank,))
    elif what == 4:
        moved = max(0, of + rng.choice((-3, -1, 1, 2)))
        pieces[rank][number] = replace(old, block=(shape, moved, of_strides, to, to_strides))
    elif what == 5:
        moved = max(0, to + rng.choice((-3, -1, 1, 2)))
        pieces[rank][number] = replace(old, block=(shape, of, of_strides, moved, to_strides))
    elif what == 6 and shape:
        dim = rng.randrange(len(shape))
        longer = (*shape[:dim], max(0, shape[dim] + rng.choice((-1, 1))), *shape[dim + 1 :])
        pieces[rank][number] = replace(old, block=(longer, of, of_strides, to, to_strides))
    elif shape:
        dim = rng.randrange(len(shape))
        step = max(0, of_strides[dim] + rng.choice((-1, 1)))
        bent = (*of_strides[:dim], step, *of_strides[dim + 1 :])
        pieces[rank][number] = replace(old, block=(shape, of, bent, to, to_strides))
    return Spelling(spelling.shape, spelling.shards, {r: tuple(p) for r, p in pieces.items()})
