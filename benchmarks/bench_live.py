"""A live transfer beside a raw exchange of the same bytes, ``DTensor.redistribute`` and DCP.

Every rank of a group has columns of some matrices and wants rows, with gloo on this machine. The
contenders take turns in one run, several times over, and the medians are compared. The raw exchange
sends the same number of bytes between the same pairs out of buffers that lie ready and into such
ones: nothing is planned, packed, proved or put in place.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from reshard import live

ROWS, COLUMNS = 2048, 1024


class Bench:
    """One rank: its tensors, and the contenders."""

    def __init__(self, rank: int, world: int, tensors: int, folder: Path) -> None:
        self.rank, self.world, self.folder = rank, world, folder
        self.mesh = init_device_mesh("cpu", (world,))
        made = torch.Generator().manual_seed(1)
        self.full = [torch.randn(ROWS, COLUMNS, generator=made) for _ in range(tensors)]
        self.have = {
            f"t{i}": distribute_tensor(one, self.mesh, [Shard(1)], src_data_rank=None)
            for i, one in enumerate(self.full)
        }
        self.want = {f"t{i}": self._room(one) for i, one in enumerate(self.full)}
        share = ROWS * COLUMNS * 4 * tensors // world // world
        others = [peer for peer in range(world) if peer != rank]
        self.planned = live.plan(self.have, self.want)
        self.moved: dict[str, Any] = {}
        self.out = {peer: torch.ones(share, dtype=torch.uint8) for peer in others}
        self.into = {peer: torch.empty(share, dtype=torch.uint8) for peer in others}

    def _room(self, full: torch.Tensor) -> DTensor:
        rows = full.chunk(self.world)[self.rank]
        return DTensor.from_local(torch.zeros_like(rows), self.mesh, [Shard(0)], run_check=False)

    def raw(self) -> None:
        """Send as many bytes between the same pairs, and nothing else."""
        ops = [distributed.P2POp(distributed.irecv, t, peer) for peer, t in self.into.items()]
        ops += [distributed.P2POp(distributed.isend, t, peer) for peer, t in self.out.items()]
        for work in distributed.batch_isend_irecv(ops):
            work.wait()

    def move(self) -> None:
        """All of ``reshard.live.move``: survey, plan, agreement, exchange, proof."""
        live.move(self.have, self.want)

    def again(self) -> None:
        """The exchange alone, by a plan that is there: as often as a trainer updates an engine."""
        self.planned.run()

    def redistribute(self) -> None:
        """``DTensor.redistribute``, tensor by tensor."""
        for name, tensor in self.have.items():
            self.moved[name] = tensor.redistribute(placements=[Shard(0)])

    def dcp(self) -> None:
        """``dcp.save`` into the page cache and ``dcp.load`` from there."""
        state_dict_saver.save(self.have, checkpoint_id=str(self.folder))  # type: ignore[arg-type]
        state_dict_loader.load(self.want, checkpoint_id=str(self.folder))  # type: ignore[arg-type]

    def check(self) -> None:
        """All arrived."""
        for name, tensor in self.want.items():
            rows = self.full[int(name[1:])].chunk(self.world)[self.rank]
            if not torch.equal(tensor.to_local(), rows):
                raise SystemExit(f"{name} is wrong")
            tensor.to_local().zero_()


def measured(call: Callable[[], None]) -> float:
    distributed.barrier()
    began = time.perf_counter()
    call()
    distributed.barrier()
    return time.perf_counter() - began


def be_rank(rank: int, world: int, tensors: int, turns: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world
    )
    bench = Bench(rank, world, tensors, Path(folder) / "dcp")
    calls = {
        "raw P2P of the same bytes": bench.raw,
        "reshard.live.move": bench.move,
        "the same, planned before": bench.again,
        "DTensor.redistribute": bench.redistribute,
        "dcp.save + dcp.load": bench.dcp,
    }
    took: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            seconds = measured(call)
            if call in (bench.move, bench.again, bench.dcp):
                bench.check()
            if turn:  # the first turn warms up
                took[name].append(seconds)
    if rank == 0:
        report(took, world, tensors)
    distributed.destroy_process_group()


def report(took: dict[str, list[float]], world: int, tensors: int) -> None:
    total = ROWS * COLUMNS * 4 * tensors
    print(f"{world} ranks, {tensors} matrices of {ROWS} × {COLUMNS} fp32, {total / 1e6:.0f} MB,")
    print("columns → rows; medians of turns in one run:")
    middle = {name: statistics.median(times) for name, times in took.items()}
    raw = middle["raw P2P of the same bytes"]
    for name, seconds in middle.items():
        least = min(took[name])
        print(f"  {name:28} {seconds:7.3f} s (least {least:.3f})  {seconds / raw:5.2f} × raw")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--tensors", type=int, default=12)
    parser.add_argument("--turns", type=int, default=9)
    asked = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(
            be_rank, (asked.world, asked.tensors, asked.turns, folder), nprocs=asked.world
        )
        shutil.rmtree(Path(folder) / "dcp", ignore_errors=True)


if __name__ == "__main__":
    main()
