"""Conversion at real size, beside `cp -r` and DeepSpeed's converter, in one run.

Theory. The limit of a conversion is moving the bytes once, and `cp -r` is what moving them once
costs on this machine, now. So every round measures all contenders, in an order of its own, on the
same disk with the source in the page cache, and the figures are medians over rounds:

* `cp -r` against `reshard convert --no-fsync` (neither waits for the disk);
* `cp -r` and `sync` of its files against `reshard convert` (both are durable at the end);
* DeepSpeed's `ds_to_universal` with its defaults.

Each runs in a fresh process, start-up included. Memory is the sum of the resident sets of the whole
process tree, sampled a hundred times a second, less that of an idle interpreter. CPU seconds and
the load average of the machine are told beside the times: on a busy machine they say more.

To be fair to all, before each run (1) the file system is synced, so nobody pays for another's dirty
pages; (2) as much memory as the run will fill is touched and freed, because a virtual machine that
gives free memory back to its host makes whoever touches it first pay for that; (3) old outputs are
emptied and set aside rather than removed, because ext4 does not reuse inodes for minutes after they
were freed and searches past them, a millisecond for every file that is created. What remains is how
warm the memory is that the last contender has left, so nobody always follows the same one.

``python benchmarks/bench_convert.py --size quick`` (about 2.4 GB a case) or ``--size full`` (over 4
GB). With ``--native STAGE,DP`` reshard writes a native checkpoint of that topology instead, which
DeepSpeed has no converter for.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
CASES = ("z1dp2", "z2dp4", "z3dp4", "z1tp2dp2")
SIZES = {
    "tiny": (64, 320),
    "small": (448, 8_000),
    "quick": (768, 16_000),
    "full": (1024, 32_000),
    "double": (1536, 32_000),
}
"""Hidden size and vocabulary of the 24-layer model; small is about 1 GB a case, the last three
are 3, 5 and 9."""

SAMPLE_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run: wall and CPU seconds, and peak bytes of the process tree."""

    seconds: float
    cpu: float
    peak: int


def children(pid: int) -> Iterator[int]:
    """A process and all its descendants."""
    yield pid
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in found:
        yield from children(int(child))


def resident(pid: int) -> int:
    """Resident bytes of a process, page cache that it maps not counted."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    wanted = ("RssAnon:", "RssShmem:")
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(wanted))


def environment(root: Path) -> dict[str, str]:
    """Where Python finds this repository, and compiled modules as an installation has them."""
    names = {key: text for key, text in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    names["PYTHONPATH"] = str(HERE.parent / "src")
    names["PYTHONPYCACHEPREFIX"] = str(root / "pycache")
    names["CUDA_VISIBLE_DEVICES"] = ""
    return names


def warmed(root: Path) -> None:
    """Import what will run once, so that nobody compiles modules while it is measured."""
    for module in ("reshard.cli.commands", "deepspeed.checkpoint.ds_to_universal"):
        subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            env=environment(root),
            check=False,
            capture_output=True,
        )


def measure(command: list[str], names: dict[str, str] | None = None) -> Run:
    """Run a command in a process of its own; it must succeed."""
    peak = 0
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        env=names,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    errors: list[bytes] = []
    reader = threading.Thread(target=lambda: errors.append(process.stderr.read()))  # type: ignore[union-attr]
    reader.start()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    while process.poll() is None:
        peak = max(peak, sum(resident(pid) for pid in children(process.pid)))
        time.sleep(SAMPLE_SECONDS)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    reader.join()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors[0].decode()[-3000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(seconds, cpu, peak)


def idle() -> int:
    """Resident bytes of an interpreter that does nothing."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(2)"]) as process:
        time.sleep(1)
        found = resident(process.pid)
        process.kill()
    return found


def contenders(
    source: Path, out: Path, root: Path, native: str | None
) -> dict[str, Callable[[], Run]]:
    """What is measured, by name; each leaves its output in ``out``."""
    names = environment(root)
    reshard = [sys.executable, "-m", "reshard", "convert", str(source), str(out), "--quiet"]
    if native is not None:
        stage, dp = native.split(",")
        reshard += ["--to", "deepspeed", "--stage", stage, "--dp", dp]
    copy = ["cp", "-r", str(source / "step3"), str(out)]
    synced = " ".join([*copy, "&&", "find", str(out), "-type", "f", "-exec", "sync", "{}", "+"])
    theirs = [
        sys.executable,
        "-m",
        "deepspeed.checkpoint.ds_to_universal",
        "--input_folder",
        str(source / "step3"),
        "--output_folder",
        str(out),
    ]
    return {
        "cp -r": lambda: measure(copy),
        "reshard --no-fsync": lambda: measure([*reshard, "--no-fsync"], names),
        "cp -r + sync": lambda: measure(["sh", "-c", synced]),
        "reshard": lambda: measure(reshard, names),
        "DeepSpeed": lambda: measure(theirs, names),
    }


def prepared(case: str, size: str, root: Path) -> Path:
    """The checkpoint of a case, made when it is not there yet, and read into the page cache."""
    folder = root / f"{case}-{size}"
    if not (folder / "latest").exists():
        shutil.rmtree(folder, ignore_errors=True)
        hidden, vocabulary = SIZES[size]
        command = [sys.executable, str(HERE / "make_big.py"), case, str(folder)]
        subprocess.run(
            [*command, "--hidden", str(hidden), "--vocabulary", str(vocabulary)],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    for path in folder.rglob("*.pt"):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 22):
                pass
    return folder


def cleared(out: Path, spent: Path) -> None:
    """Take the last output away and let the disk come to rest; see "fair" above."""
    if out.exists():
        for path in out.rglob("*"):
            if path.is_file():
                os.truncate(path, 0)
        spent.mkdir(exist_ok=True)
        out.rename(spent / str(len(list(spent.iterdir()))))
    for pointer in ("latest_universal", "latest"):
        (out.parent / pointer).unlink(missing_ok=True)
    os.sync()


def touched(nbytes: int) -> None:
    """Use so much memory once, in a process of its own; see "fair" above."""
    code = f"import numpy; numpy.ones({nbytes // 8})"
    subprocess.run([sys.executable, "-c", code], check=True)


def rounds(
    case: str, size: str, root: Path, repeat: int, names: list[str], native: str | None
) -> dict[str, list[Run]]:
    """All contenders, several times round, each time in another order (the same in every run)."""
    source = prepared(case, size, root)
    out, spent = root / "out" / "step3_universal", root / "spent"
    out.parent.mkdir(exist_ok=True)
    size_bytes = sum(path.stat().st_size for path in source.rglob("*.pt"))
    found: dict[str, list[Run]] = {name: [] for name in names}
    every = contenders(source, out, root, native)
    for number in range(repeat):
        for name in random.Random(number).sample(names, len(names)):
            cleared(out, spent)
            touched(size_bytes + (1 << 30))
            found[name].append(every[name]())
    cleared(out, spent)
    return found


def summary(case: str, source: Path, found: dict[str, list[Run]], base: int) -> dict[str, object]:
    """Medians, ratios and peaks of one case."""
    seconds = {name: statistics.median(r.seconds for r in runs) for name, runs in found.items()}
    cpu = {name: statistics.median(r.cpu for r in runs) for name, runs in found.items()}
    peaks = {name: max(r.peak for r in runs) - base for name, runs in found.items()}

    def ratio(over: str, under: str) -> float | None:
        return seconds[over] / seconds[under] if over in seconds and under in seconds else None

    return {
        "case": case,
        "load_average": os.getloadavg()[1],
        "source_bytes": sum(path.stat().st_size for path in source.rglob("*.pt")),
        "seconds": seconds,
        "cpu_seconds": cpu,
        "all_seconds": {name: [run.seconds for run in runs] for name, runs in found.items()},
        "peak_bytes_above_idle": peaks,
        "no_fsync_over_cp": ratio("reshard --no-fsync", "cp -r"),
        "durable_over_cp_sync": ratio("reshard", "cp -r + sync"),
        "deepspeed_over_reshard": ratio("DeepSpeed", "reshard"),
        "deepspeed_over_no_fsync": ratio("DeepSpeed", "reshard --no-fsync"),
    }


def line(found: dict[str, object]) -> str:
    """One case for a reader."""
    seconds, peaks = found["seconds"], found["peak_bytes_above_idle"]
    cpu = found["cpu_seconds"]
    parts = [
        f"{name} {seconds[name]:.2f} s "  # type: ignore[index]
        f"(CPU {cpu[name]:.2f} s, {max(peaks[name], 0) / 1e6:.0f} MB)"  # type: ignore[index]
        for name in seconds  # type: ignore[attr-defined]
    ]
    ratios = [
        f"{word} {found[key]:.2f}"
        for key, word in (
            ("no_fsync_over_cp", "no-fsync / cp"),
            ("durable_over_cp_sync", "durable / cp+sync"),
            ("deepspeed_over_reshard", "DeepSpeed / durable"),
            ("deepspeed_over_no_fsync", "DeepSpeed / no-fsync"),
        )
        if found[key] is not None
    ]
    size = int(found["source_bytes"]) / 1e9  # type: ignore[call-overload]
    load = f"load {found['load_average']:.1f}"
    return f"{found['case']} {size:.2f} GB: {', '.join(parts)}; {', '.join(ratios)}; {load}"


def main() -> None:
    """Measure what the command line asks for."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--size", choices=sorted(SIZES), default="quick")
    options.add_argument("--case", choices=CASES, action="append")
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--root", type=Path, default=HERE.parent / "build" / "bench")
    options.add_argument("--without", action="append", default=[], help="leave a contender out")
    options.add_argument("--native", metavar="STAGE,DP", help="write natively for this topology")
    options.add_argument("--json", type=Path, help="write all figures there")
    chosen = options.parse_args()
    without = [*chosen.without, *(["DeepSpeed"] if chosen.native else [])]
    chosen.root.mkdir(parents=True, exist_ok=True)
    warmed(chosen.root)
    base = idle()
    results = []
    for case in chosen.case or CASES:
        source = prepared(case, chosen.size, chosen.root)
        every = contenders(source, source, chosen.root, chosen.native)
        names = [name for name in every if name not in without]
        found = rounds(case, chosen.size, chosen.root, chosen.repeat, names, chosen.native)
        results.append({"size": chosen.size, **summary(case, source, found, base)})
        print(line(results[-1]), flush=True)
    shutil.rmtree(chosen.root / "spent", ignore_errors=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
