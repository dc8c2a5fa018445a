"""``python -m scripts.fuzz_geometry --count N --seed S``: so many cases, one law each.

A case is its seed and its number, so ``--only NUMBER`` has the same one again, with the traceback.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat

from scripts.fuzz_geometry.laws import LAWS

BATCH = 500


def law_of(seed: int, number: int) -> tuple[str, str | None]:
    """Try one case; return its law, and what went wrong."""
    rng = random.Random(f"{seed}.{number}")
    law = rng.choice(LAWS)
    try:
        law(rng)
    except Exception:  # noqa: BLE001 - whatever goes wrong is what is looked for
        return law.__name__, traceback.format_exc()
    return law.__name__, None


def batch(seed: int, numbers: range) -> tuple[Counter[str], dict[int, str]]:
    """Try some cases; return how many of each law, and what went wrong by number."""
    tried: Counter[str] = Counter()
    wrong = {}
    for number in numbers:
        law, failure = law_of(seed, number)
        tried[law] += 1
        if failure is not None:
            wrong[number] = failure
    return tried, wrong


def main() -> int:
    """Try the cases that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m scripts.fuzz_geometry", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="how many cases")
    parser.add_argument("--seed", type=int, default=1, help="the same cases again")
    parser.add_argument("--only", type=int, help="one case by its number")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if options.only is not None:
        law, failure = law_of(options.seed, options.only)
        print(f"case {options.only}, {law}: {failure or 'as the oracle says'}")
        return int(failure is not None)
    start = time.monotonic()
    cuts = [range(at, min(at + BATCH, options.count)) for at in range(0, options.count, BATCH)]
    tried: Counter[str] = Counter()
    wrong: dict[int, str] = {}
    with ProcessPoolExecutor(options.processes) as pool:
        for more, failures in pool.map(batch, repeat(options.seed), cuts):
            tried.update(more)
            wrong.update(failures)
            for number, failure in failures.items():
                print(f"case {number}: {failure}", flush=True)
    for law, count in sorted(tried.items()):
        print(f"{count:8} {law}")
    print(
        f"{tried.total():8} cases in {time.monotonic() - start:.0f} s, {len(wrong)} wrong: "
        f"{sorted(wrong)[:20]}"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
