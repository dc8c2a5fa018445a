"""The geometry layer, beside DeepSpeed's planner and DCP's, in one run and on one core.

Theory. Three questions, each answered with the same inputs for all contenders, one after the other,
as medians over rounds:

* What does it cost to prove a map? DeepSpeed's ``validate_coverage`` looks at every element, so it
  is given a small tensor, and its time for the large one is extrapolated.
* What does composing two maps cost, by the kind of layout (``geometry_kinds.py``) and as pieces
  grow? Folding is included; ``verify`` proves the plan from itself alone, and ``both`` is what
  the two take. ``read`` is making columns of piece objects, which maps that were computed do not
  need. Copies are counted before folding.
* How do planners compare at 512 pieces a side, the most that DeepSpeed's accepts?

Times are processor seconds of this process, which is bound to one core: on a quiet machine the
same as those of a clock, on a busy one still like with like.

``python benchmarks/bench_geometry.py`` takes about a minute; ``--largest 7`` adds 10^7 pieces,
most of whose time is making the maps.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
for _folder in ("", "src"):
    sys.path.insert(0, str(Path(__file__).parents[1] / _folder))

import numpy as np  # noqa: E402 - the number of threads is read on import

from benchmarks.geometry_kinds import KINDS  # noqa: E402
from reshard.geometry import (  # noqa: E402
    AffinePiece,
    ParamAffineMap,
    PieceTable,
    compose,
    composition,
)
from reshard.geometry.matching import matched  # noqa: E402

VOCABULARY = (128_256, 16_384)
"""The embedding of a 405-billion-parameter model."""

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
    composition.KEPT.clear()
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


def reread(*maps: ParamAffineMap) -> list[PieceTable]:
    """Make columns of the piece objects of maps."""
    return [PieceTable.of(one.pieces_by_rank) for one in maps]


def bench_kinds(count: int, rounds: int) -> None:
    line(f"composition, {count:,} pieces a side", "compose", "verify", "both", "read", "copies/s")
    times = {}
    for name, make in KINDS.items():
        target, source = make(count)
        for one in (target, source):
            one.validate()
        took = measured(lambda t=target, s=source: composed(t, s), rounds)
        proof = measured(took.result.verify, rounds)
        read = measured(lambda t=target, s=source: reread(t, s), 1)
        times[name] = took.seconds + proof.seconds
        cells = map(shown, (took.seconds, proof.seconds, times[name], read.seconds))
        line(name, *cells, f"{matches(target, source) / took.seconds:,.0f}")
    worst = max(times, key=times.__getitem__)
    print(f"the worst kind is {worst}: {shown(times[worst])}")


def matches(target: ParamAffineMap, source: ParamAffineMap) -> int:
    """Number of copies before any of them are folded."""
    return len(matched(target.table.link, source.table.link).first)


def bench_growth(counts: list[int], rounds: int) -> None:
    line("growth of scattered runs", "compose", "verify", "both", "/ n log n", "peak so far")
    for count in counts:
        target, source = KINDS["scattered runs"](count)
        took = measured(lambda t=target, s=source: composed(t, s), rounds if count < 10**6 else 1)
        proof = measured(took.result.verify, 1)
        both = took.seconds + proof.seconds
        line(
            f"{count:,} pieces a side",
            *map(shown, (took.seconds, proof.seconds, both)),
            f"{both / (count * log2(count)) * 1e9:.0f} ns",
            f"{peak_bytes() / 2**20:,.0f} MiB",
        )


def peak_bytes() -> int:
    """Memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
    parser.add_argument(
        "--largest",
        type=int,
        default=6,
        choices=(5, 6, 7),
        help="growth is shown up to 10 to the power of this many pieces a side; 7 needs 7 GB",
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rounds = max(3, arguments.rounds)
    bench_validation(max(5, rounds))
    print()
    bench_kinds(10**5, rounds)
    print()
    bench_growth([10**power for power in range(4, arguments.largest + 1)], rounds)
    print()
    bench_planners(rounds)


if __name__ == "__main__":
    main()
