"""PyTorch's distributed checkpoints at real size, beside `dcp_to_torch_save` and `cp -r`.

Theory. What users of DCP have today for taking a checkpoint elsewhere is `dcp_to_torch_save` of
``torch.distributed.checkpoint.format_utils``: one process reads the whole tree into memory and
saves it as one file. Nothing that exists takes a DeepSpeed checkpoint with its moments to DCP, so
that direction stands beside `cp -r` alone. Contenders:

* out of DCP: `dcp_to_torch_save`, `reshard convert` to universal, `cp -r`;
* into DCP: `reshard convert --to dcp` of a ZeRO-1 checkpoint of the same model, `cp -r`.

The DCP folder is saved by stock torch, from four gloo processes with tensors sharded along dim 0,
as FSDP2 has them. How things are measured, and what is done to be fair, is as in `bench_convert`.

``python -m benchmarks.bench_dcp --size quick --repeat 3``
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.bench_convert import (
    SIZES,
    Run,
    cleared,
    environment,
    idle,
    measure,
    prepared,
    touched,
)

HERE = Path(__file__).parent
WORLD = 4
_TO_TORCH = (
    "import sys; from torch.distributed.checkpoint.format_utils import dcp_to_torch_save; "
    "dcp_to_torch_save(sys.argv[1], sys.argv[2])"
)


# --------------------------------------------------------------------------- a checkpoint of torch


def save_rank(folder: Path, meeting: Path, rank: int, hidden: int, vocabulary: int) -> None:
    """Be one rank of a run that saves model and optimizer."""
    import torch
    from torch import distributed
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from benchmarks.make_big import Values, group_options, parameters

    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD
    )
    mesh, values = init_device_mesh("cpu", (WORLD,)), Values()

    def sharded(seed: int, shape: tuple[int, ...]) -> Any:
        full = values.flat(seed, torch.Size(shape).numel()).view(shape)
        return distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)

    model, states = {}, {}
    for seed, parameter in enumerate(parameters(hidden, vocabulary)):
        name, shape = parameter.name, parameter.shape
        model[name] = sharded(seed, shape)
        states[name] = {
            "step": torch.tensor(3.0),
            "exp_avg": sharded(seed + 1, shape),
            "exp_avg_sq": sharded(seed + 2, shape),
        }
    group = {**group_options(0, 0.1), "params": list(model)}
    tree = {"model": model, "optim": {"state": states, "param_groups": [group]}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_saver.save(tree, checkpoint_id=str(folder))
    distributed.barrier()


def saved(size: str, root: Path) -> Path:
    """A DCP folder, made when it is not there yet, and read into the page cache."""
    folder = root / f"dcp-{size}"
    if not (folder / ".metadata").exists():
        shutil.rmtree(folder, ignore_errors=True)
        meeting = root / "meeting"
        meeting.unlink(missing_ok=True)
        hidden, vocabulary = SIZES[size]
        ranks = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.bench_dcp", "--save-rank", str(rank)),
                    *(str(folder), str(meeting), str(hidden), str(vocabulary)),
                ],
                cwd=HERE.parent,
            )
            for rank in range(WORLD)
        ]
        if any(process.wait() for process in ranks):
            raise SystemExit("the DCP folder could not be made")
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 22):
                pass
    return folder


# --------------------------------------------------------------------------- contenders


def contenders(size: str, root: Path, out: Path) -> dict[str, Callable[[], Run]]:
    """What is measured, by name; each leaves its output in ``out``."""
    names = environment(root)
    dcp, native = saved(size, root), prepared("z1dp2", size, root)
    reshard = [sys.executable, "-m", "reshard", "convert", "--quiet", "--no-fsync"]

    def to_torch() -> Run:
        out.mkdir()
        return measure([sys.executable, "-c", _TO_TORCH, str(dcp), str(out / "all.pt")], names)

    return {
        "DCP: cp -r": lambda: measure(["cp", "-r", str(dcp), str(out)]),
        "DCP: dcp_to_torch_save": to_torch,
        "DCP → universal, reshard": lambda: measure([*reshard, str(dcp), str(out)], names),
        "ZeRO-1: cp -r": lambda: measure(["cp", "-r", str(native / "step3"), str(out)]),
        "ZeRO-1 → DCP, reshard": lambda: measure(
            [*reshard, str(native), str(out), "--to", "dcp"], names
        ),
    }


def rounds(size: str, root: Path, repeat: int) -> dict[str, list[Run]]:
    """All contenders, several times round."""
    out, spent = root / "out" / "converted", root / "spent"
    out.parent.mkdir(exist_ok=True)
    runs = contenders(size, root, out)
    nbytes = sum(path.stat().st_size for path in saved(size, root).iterdir())
    found: dict[str, list[Run]] = {name: [] for name in runs}
    for _ in range(repeat):
        for name, run in runs.items():
            cleared(out, spent)
            touched(nbytes + (1 << 30))
            found[name].append(run())
    cleared(out, spent)
    return found


def main() -> None:
    """Measure what the command line asks for."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--size", choices=sorted(SIZES), default="quick")
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--root", type=Path, default=HERE.parent / "build" / "bench")
    options.add_argument("--json", type=Path, help="write all figures there")
    chosen = options.parse_args()
    chosen.root.mkdir(parents=True, exist_ok=True)
    base = idle()
    found = rounds(chosen.size, chosen.root, chosen.repeat)
    for name, runs in found.items():
        seconds = statistics.median(run.seconds for run in runs)
        peak = max(run.peak for run in runs) - base
        print(f"{name:26}  {seconds:6.2f} s  {max(peak, 0) / 1e6:6.0f} MB", flush=True)
    shutil.rmtree(chosen.root / "spent", ignore_errors=True)
    if chosen.json:
        figures = {n: [(run.seconds, run.peak - base) for run in r] for n, r in found.items()}
        chosen.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--save-rank"]:
        at, folder, meeting, hidden, vocabulary = sys.argv[2:]
        save_rank(Path(folder), Path(meeting), int(at), int(hidden), int(vocabulary))
    else:
        main()
