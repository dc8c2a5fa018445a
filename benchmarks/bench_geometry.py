"""The geometry layer, beside DeepSpeed's planner and DCP's, in one run and on one core.

Theory. Three questions, each answered with the same inputs for all contenders, one after the other,
as medians over rounds:

* What does it cost to prove a map? DeepSpeed's ``validate_coverage`` looks at every element, so it
  is given a small tensor, and its time for the large one is extrapolated.
* What does composing two maps cost, as pieces grow? Folding and proof are included; ``verify``
  proves the plan once more, and ``read`` is making columns of piece objects, which maps that were
  computed do not need. The maps are vectors cut at random places and dealt out over 8 ranks at
  random (nothing folds: the worst case), and cyclic blocks against contiguous ones (all folds).
* How do planners compare at 512 pieces a side, the most that DeepSpeed's accepts?

Times are processor seconds of this process, which is bound to one core: on a quiet machine the
same as those of a clock, on a busy one still like with like.

``python benchmarks/bench_geometry.py`` takes under a minute; ``--full`` adds 10^6 and 10^7 pieces.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np  # noqa: E402 - the number of threads is read on import

from reshard.geometry import (  # noqa: E402
    AffinePiece,
    LinkTable,
    ParamAffineMap,
    PieceTable,
    compose,
    composition,
)

VOCABULARY = (128_256, 16_384)
"""The embedding of a 405-billion-parameter model."""

RANKS = 8
Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of the median round, and what the last round returned."""

    seconds: float
    result: Any


def measured(run: Run, rounds: int) -> Measured:
    """Run something a few times."""
    seconds, result = [], None
    for _ in range(rounds):
        started = time.process_time()
        result = run()
        seconds.append(time.process_time() - started)
    return Measured(statistics.median(seconds), result)


def composed(target: ParamAffineMap, source: ParamAffineMap) -> Any:
    """Compose without the memory of earlier rounds."""
    composition._compose.cache_clear()
    return compose(target, source)


def line(*cells: object) -> None:
    print("  ".join(f"{cell!s:>{width}}" for cell, width in zip(cells, WIDTHS, strict=False)))


WIDTHS = (46, 11, 11, 11, 11, 11)


def shown(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


# ------------------------------------------------------------------------------ validation


def split(shape: tuple[int, int], ranks: int, dim: int) -> ParamAffineMap:
    """A matrix cut evenly along one dim."""
    rows, columns = shape
    cut = (rows // ranks, columns) if dim == 0 else (rows, columns // ranks)
    step = cut[0] * columns if dim == 0 else cut[1]
    pieces = {
        r: [AffinePiece(cut, step * r, (columns, 1), 0, (cut[1], 1), (r,))] for r in range(ranks)
    }
    return ParamAffineMap(shape, dict.fromkeys(range(ranks), cut), pieces)


def bench_validation(rounds: int) -> None:
    line("validation over 64 ranks", "time", "elements")
    total = VOCABULARY[0] * VOCABULARY[1]
    for dim, name in enumerate(("rows", "columns")):
        took = measured(lambda d=dim: split(VOCABULARY, 64, d).validate(), rounds)
        line(f"reshard, {name} of 128256×16384", shown(took.seconds), f"{total:.1e}")
    affine = importlib.import_module("deepspeed.checkpoint.affine")
    small = affine.contiguous_split_map((128, 128), [2] * 64, 1)
    theirs = measured(small.validate_coverage, 3)
    line("DeepSpeed validate_coverage, 128×128", shown(theirs.seconds), f"{128 * 128:.1e}")
    hours = theirs.seconds / 128**2 * total / 3600
    line("  … at its time an element, 128256×16384", f"{hours:.1f} h", f"{total:.1e}")


# ------------------------------------------------------------------------------ composition


def scattered(count: int, seed: int) -> ParamAffineMap:
    """A vector in ``count`` runs of random lengths, dealt out over ranks at random."""
    rng = np.random.default_rng(seed)
    cuts = np.unique(rng.integers(1, 64 * count, count + count // 8))
    cuts = np.sort(rng.choice(cuts, count - 1, replace=False))
    start = np.concatenate([[0], cuts])
    length = np.diff(np.append(start, 64 * count))
    return dealt(start, length, rng.integers(0, RANKS, count))


def dealt(start: Any, length: Any, rank: Any) -> ParamAffineMap:
    """The map of runs of a vector, each laid behind those that its rank already has."""
    count = len(start)
    order = np.argsort(rank, kind="stable")
    placed = np.cumsum(length[order]) - length[order]
    sizes = np.bincount(rank, length, RANKS).astype(np.int64)
    dest = np.empty(count, np.int64)
    dest[order] = placed - np.repeat(np.cumsum(sizes) - sizes, np.bincount(rank, minlength=RANKS))
    ones = np.ones((count, 1), np.int64)
    link = LinkTable(start, dest, length.reshape(-1, 1), ones, ones)
    table = PieceTable(
        rank.astype(np.int64),
        np.arange(count),
        link,
        np.ones(count),
        rank.astype(np.int64),
        tuple((r,) for r in range(RANKS)),
    )
    shapes = {r: (int(sizes[r]),) for r in range(RANKS)}
    return ParamAffineMap.from_table((int(length.sum()),), shapes, table)


def cyclic(count: int) -> ParamAffineMap:
    """Blocks of 64 elements, dealt out in turn."""
    start = np.arange(count) * 64
    return dealt(start, np.full(count, 64), np.arange(count) % RANKS)


def contiguous(count: int) -> ParamAffineMap:
    """The same blocks, each rank the next ones."""
    start = np.arange(count) * 64
    return dealt(start, np.full(count, 64), np.arange(count) * RANKS // count)


def reread(*maps: ParamAffineMap) -> list[PieceTable]:
    """Make columns of the piece objects of maps."""
    return [PieceTable.of(one.pieces_by_rank) for one in maps]


def bench_composition(counts: list[int], rounds: int) -> None:
    line("composition over 8 ranks", "compose", "verify", "read", "segments", "pieces/s")
    for count in counts:
        for name, target, source in (
            ("scattered → scattered", scattered(count, 1), scattered(count, 2)),
            ("cyclic → contiguous", contiguous(count), cyclic(count)),
        ):
            target.validate()
            took = measured(lambda t=target, s=source: composed(t, s), rounds)
            proof = measured(took.result.verify, rounds)
            read = measured(lambda t=target, s=source: reread(t, s), 3) if count <= 10**5 else None
            line(
                f"{name}, {count:,} pieces a side",
                shown(took.seconds),
                shown(proof.seconds),
                shown(read.seconds) if read else "",
                f"{len(took.result):,}",
                f"{2 * count / took.seconds:,.0f}",
            )


# ------------------------------------------------------------------------------ planners


def uneven(count: int, total: int, seed: int) -> list[int]:
    """Sizes of ``count`` parts."""
    cuts = np.sort(
        np.random.default_rng(seed).choice(np.arange(1, total), count - 1, replace=False)
    )
    return np.diff(np.concatenate([[0], cuts, [total]])).tolist()  # type: ignore[no-any-return]


def planners(shape: tuple[int, int], sizes: list[list[int]]) -> Iterator[tuple[str, Run]]:
    """The same change of layout, as each planner is asked for it."""
    affine = importlib.import_module("deepspeed.checkpoint.affine")
    transfer = importlib.import_module("deepspeed.checkpoint.affine_transfer")
    target, source = (affine.contiguous_split_map(shape, each, 0) for each in sizes)
    ours = [ParamAffineMap.from_dict(each.to_dict()) for each in (target, source)]
    yield "reshard compose", lambda: composed(*ours)
    yield "DeepSpeed plan_transfer", lambda: transfer.plan_transfer(target, source).segments
    yield "DCP create_read_items", dcp_planner(shape, sizes)


def dcp_planner(shape: tuple[int, int], sizes: list[list[int]]) -> Run:
    import torch

    helpers = importlib.import_module("torch.distributed.checkpoint.planner_helpers")
    metadata = importlib.import_module("torch.distributed.checkpoint.metadata")
    target, source = (
        [
            metadata.ChunkStorageMetadata(torch.Size((at, 0)), torch.Size((size, shape[1])))
            for at, size in zip(np.cumsum([0, *each[:-1]]).tolist(), each, strict=True)
        ]
        for each in sizes
    )
    saved = metadata.TensorStorageMetadata(
        metadata.TensorProperties(torch.float32), torch.Size(shape), source
    )
    return lambda: helpers.create_read_items_for_chunk_list("w", saved, target)


def bench_planners(rounds: int) -> None:
    shape = (8192, 64)
    sizes = [uneven(512, shape[0], seed) for seed in (1, 2)]
    line("512 pieces a side, row splits", "time", "times ours", "copies")
    first: float | None = None
    for name, run in planners(shape, sizes):
        took = measured(run, rounds if "DeepSpeed" not in name else 3)
        first = first or took.seconds
        line(name, shown(took.seconds), f"{took.seconds / first:.0f}×", len(took.result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--full", action="store_true", help="also 10^6 and 10^7 pieces a side")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rounds = max(3, arguments.rounds)
    bench_validation(max(5, rounds))
    print()
    bench_composition([10**4, 10**5, *([10**6, 10**7] if arguments.full else [])], rounds)
    print()
    bench_planners(rounds)


if __name__ == "__main__":
    main()
