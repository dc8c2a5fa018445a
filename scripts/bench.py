"""The figures: ``python -m scripts.bench``, or ``make bench``.

Real DeepSpeed trains one step of a Llama and saves it; then the same checkpoint is copied
(``cp -r``), converted by DeepSpeed's converter and converted by reshard, in turns, so that whatever
else the machine does falls on all of them. Times are of whole processes, start-up included, with
the source in the page cache; each figure is the median of the turns. Memory is the peak of the
anonymous memory (page cache aside) of the whole process tree.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scripts.deepspeed_lab.client import ROOT, Lab
from scripts.deepspeed_lab.recipe import TAG, Recipe

BENCH = ROOT / ".bench"
LAYER = {"heads": 16, "kv": 16, "head_dim": 64, "inter": 2816}
PARAMETERS_PER_LAYER = 12_847_104
BYTES_PER_PARAMETER = 14.0
"""bf16 weights, fp32 weights and two moments."""

KINDS: dict[str, Recipe] = {
    "ZeRO-1 dp2": Recipe(model="llama", world=2, stage=1, dtype="bf16"),
    "ZeRO-3 dp2": Recipe(model="llama", world=2, stage=3, dtype="bf16"),
    "ZeRO-1 tp2dp2": Recipe(model="llama", world=4, tp=2, stage=1, dtype="bf16"),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """What one run of one contestant took."""

    seconds: float
    peak: int
    """Bytes of anonymous memory, whole process tree."""


def main() -> None:
    """Make what is missing, run all turns, print a table (and JSON beside the data)."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.4, help="size of each checkpoint")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints for a next run")
    options = parser.parse_args()
    console = Console()
    results: dict[str, dict[str, Figure]] = {}
    for kind in options.kinds:
        source = checkpoint(kind, options.gigabytes)
        results[kind] = turns(source, options.turns)
        console.print(table(kind, source, results[kind]))
    figures = {
        kind: {name: [figure.seconds, figure.peak] for name, figure in row.items()}
        for kind, row in results.items()
    }
    (BENCH / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    if not options.keep:
        shutil.rmtree(BENCH / "checkpoints")


def checkpoint(kind: str, gigabytes: float) -> Path:
    """Return the folder of a checkpoint of this kind and size; train it when it is not there."""
    layers = max(1, round(gigabytes * 1e9 / BYTES_PER_PARAMETER / PARAMETERS_PER_LAYER))
    folder = BENCH / "checkpoints" / f"{kind.replace(' ', '_')}_{layers}"
    if not (folder / "latest").exists():
        base = KINDS[kind]
        recipe = Recipe(
            model=base.model,
            world=base.world,
            tp=base.tp,
            stage=base.stage,
            dtype=base.dtype,
            model_args={**LAYER, "layers": layers},
        )
        with Lab() as lab:
            lab.run("save_large", recipe, folder, world=recipe.world, timeout=1200.0)
    return folder


def turns(source: Path, count: int) -> dict[str, Figure]:
    """Run every contestant ``count`` times, in turns; return the medians."""
    for file in source.rglob("*"):
        if file.is_file():
            file.read_bytes()
    runs: dict[str, list[Figure]] = defaultdict(list)
    for _ in range(count):
        for name, command in contestants(source).items():
            out = BENCH / "out"
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir(parents=True)
            runs[name].append(measure(command(out / f"{TAG}_universal")))
            shutil.rmtree(out)
    return {
        name: Figure(
            statistics.median(figure.seconds for figure in figures),
            round(statistics.median(figure.peak for figure in figures)),
        )
        for name, figures in runs.items()
    }


def contestants(source: Path) -> dict[str, Callable[[Path], Sequence[str]]]:
    """Return what is run, by the name it has in the table."""
    tag = source / TAG
    reshard = [str(Path(sys.executable).with_name("reshard"))]
    theirs = [
        sys.executable,
        "-m",
        "deepspeed.checkpoint.ds_to_universal",
        "--inject_missing_state",
    ]
    idle = "import time; time.sleep(0.2)"
    copy_and_sync = 'cp -r "$0" "$1" && find "$1" -type f -exec sync {} +'
    return {
        "an idle interpreter": lambda _: [sys.executable, "-c", idle],
        "cp -r": lambda out: ["cp", "-r", str(tag), str(out)],
        "cp -r, then sync": lambda out: ["sh", "-c", copy_and_sync, str(tag), str(out)],
        "DeepSpeed ds_to_universal": lambda out: [
            *theirs,
            *("--input_folder", str(tag), "--output_folder", str(out)),
        ],
        "reshard inspect": lambda _: [*reshard, "inspect", str(source)],
        "reshard convert --no-fsync": lambda out: [
            *(*reshard, "convert", str(source), str(out), "--no-fsync", "--quiet")
        ],
        "reshard convert": lambda out: [*reshard, "convert", str(source), str(out), "--quiet"],
    }


def measure(command: Sequence[str]) -> Figure:
    """Run a command to its end; return its time and the peak memory of its process tree."""
    os.sync()
    started = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    ) as process:
        peaks = [0]
        watcher = threading.Thread(target=watch, args=(process, peaks))
        watcher.start()
        _, errors = process.communicate()
        seconds = time.perf_counter() - started
        watcher.join()
    if process.returncode != 0:
        sys.exit(f"error: {' '.join(command)} failed:\n{errors[-2000:]}")
    return Figure(seconds, peaks[0])


def watch(process: subprocess.Popen[str], peaks: list[int]) -> None:
    """Sample the anonymous memory of the process and its descendants until it ends."""
    while process.poll() is None:
        peaks[0] = max(peaks[0], sum(map(anonymous_memory, family(process.pid))))
        time.sleep(0.02)


def family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        texts = [(thread / "children").read_text() for thread in threads]
    except OSError:
        return []
    return [pid, *(one for text in texts for child in text.split() for one in family(int(child)))]


def anonymous_memory(pid: int) -> int:
    """Return the bytes that only this process accounts for: no page cache."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(
        int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem"))
    )


def table(kind: str, source: Path, row: dict[str, Figure]) -> Table:
    """Lay the figures of one checkpoint side by side."""
    files = [file for file in source.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    drawn = Table(title=f"{kind}: {size / 1e9:.2f} GB in {len(files)} files")
    for heading in ("", "seconds", "x cp -r", "peak MB"):
        drawn.add_column(heading, justify="left" if not heading else "right")
    copy = row["cp -r"].seconds
    for name, figure in row.items():
        times = f"{figure.seconds / copy:.2f}" if "idle" not in name else ""
        drawn.add_row(name, f"{figure.seconds:.2f}", times, f"{figure.peak / 1e6:.0f}")
    return drawn


if __name__ == "__main__":
    main()
