"""Weights for serving out of ZeRO shards: reshard beside DeepSpeed's ``zero_to_fp32.py``.

Theory. Both are given the same checkpoint and make a Hugging Face folder of it, each in a fresh
process, start-up included, one after the other in every round, with the source in the page cache
and fairness as in `bench_convert`; figures are medians over rounds. Masters in fp32 are compared
with masters in fp32; the folder in the trained type, which is half as large, is reshard's default
and shown beside them. Afterwards every tensor of the two fp32 folders is compared, and what one of
them lacks is listed.

``python benchmarks/bench_export.py --size quick``
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from bench_convert import (
    CASES,
    HERE,
    SIZES,
    Run,
    cleared,
    environment,
    idle,
    measure,
    prepared,
    touched,
    warmed,
)

THEIRS = "zero_to_fp32 --safe_serialization"
OURS = "reshard --dtype fp32"


def contenders(source: Path, out: Path, root: Path) -> dict[str, Callable[[], Run]]:
    """What is measured, by name; each leaves its output in ``out``."""
    names = environment(root)
    ours = [sys.executable, "-m", "reshard", "convert", str(source), str(out), "--quiet"]
    ours += ["--to", "safetensors"]
    theirs = [sys.executable, "-m", "deepspeed.utils.zero_to_fp32", str(source), str(out)]
    return {
        THEIRS: lambda: measure([*theirs, "--safe_serialization"], names),
        "zero_to_fp32 (pickles)": lambda: measure(theirs, names),
        OURS: lambda: measure([*ours, "--dtype", "fp32"], names),
        f"{OURS} --no-fsync": lambda: measure([*ours, "--dtype", "fp32", "--no-fsync"], names),
        "reshard (trained type)": lambda: measure(ours, names),
    }


def rounds(source: Path, root: Path, repeat: int) -> dict[str, list[Run]]:
    """All contenders, several times round; the two fp32 folders of the last round are kept."""
    out, spent = root / "out" / "hf", root / "spent"
    out.parent.mkdir(exist_ok=True)
    nbytes = sum(path.stat().st_size for path in source.rglob("*.pt"))
    found: dict[str, list[Run]] = {}
    for turn in range(repeat):
        for name, run in contenders(source, out, root).items():
            cleared(out, spent)
            touched(nbytes)
            found.setdefault(name, []).append(run())
            if turn == repeat - 1 and name in (THEIRS, OURS):
                out.rename(root / f"kept-{name.split()[0]}")
    cleared(out, spent)
    return found


def compared(root: Path) -> str:
    """What the two folders hold, tensor by tensor."""
    from safetensors import safe_open

    def held(folder: Path) -> dict[str, Path]:
        return {
            name: path
            for path in sorted(folder.glob("*.safetensors"))
            for name in safe_open(path, "pt").keys()  # noqa: SIM118 - no mapping
        }

    theirs, ours = (held(root / f"kept-{word}") for word in ("zero_to_fp32", "reshard"))
    shared = sorted(theirs.keys() & ours.keys())
    equal = 0
    for name in shared:
        left, right = (safe_open(side[name], "pt").get_tensor(name) for side in (theirs, ours))
        equal += left.dtype == right.dtype and bool((left == right).all())
    lacks = [
        f"{word} lacks {', '.join(sorted(names)) or 'nothing'}"
        for word, names in (
            ("zero_to_fp32", ours.keys() - theirs.keys()),
            ("reshard", theirs.keys() - ours.keys()),
        )
    ]
    return f"{equal} of {len(shared)} tensors equal; {'; '.join(lacks)}"


def main() -> None:
    """Measure what the command line asks for."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--size", choices=sorted(SIZES), default="quick")
    options.add_argument("--case", choices=CASES, action="append")
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--root", type=Path, default=HERE.parent / "build" / "bench")
    chosen = options.parse_args()
    chosen.root.mkdir(parents=True, exist_ok=True)
    warmed(chosen.root)
    base = idle()
    for case in chosen.case or ("z3dp4",):
        source = prepared(case, chosen.size, chosen.root)
        nbytes = sum(path.stat().st_size for path in source.rglob("*.pt"))
        print(f"{case}, {nbytes / 1e9:.2f} GB, medians of {chosen.repeat}", flush=True)
        for name, runs in rounds(source, chosen.root, chosen.repeat).items():
            seconds = statistics.median(run.seconds for run in runs)
            peak = max(run.peak for run in runs) - base
            print(f"  {name}: {seconds:.1f} s, {peak / 1e6:.0f} MB", flush=True)
        print(f"  {compared(chosen.root)}", flush=True)
        for word in ("zero_to_fp32", "reshard"):
            shutil.rmtree(chosen.root / f"kept-{word}", ignore_errors=True)
    shutil.rmtree(chosen.root / "spent", ignore_errors=True)


if __name__ == "__main__":
    main()
