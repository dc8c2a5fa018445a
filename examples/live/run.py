"""A running job: four FSDP2 trainers feed an engine of two ranks, shrink to three, and grow again.

Six processes with gloo on this machine: ranks 0 to 3 train, ranks 4 and 5 serve.
"""

import os
import tempfile

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from reshard import live

WIDTH = 12


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 31), nn.Tanh(), nn.Linear(31, WIDTH))


class Trainer:
    """FSDP2 with Adam on some ranks; the others hold nothing."""

    def __init__(self, ranks: list[int], seed: int) -> None:
        mesh = DeviceMesh("cpu", ranks)  # all processes make it, those of `ranks` are in it
        self.held = None
        if distributed.get_rank() in ranks:
            torch.manual_seed(seed)
            self.model = fully_shard(model(), mesh=mesh)
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
            self.held = (self.model, self.optimizer)

    def step(self, number: int) -> float:
        """Every rank takes the whole batch, so that losses are the same on any number of ranks."""
        data = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        loss = (self.model(data) - data).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def engine(ranks: list[int]) -> dict[str, torch.Tensor] | None:
    """Empty bf16 weights, each cut by rows over the engine's ranks."""
    mesh = DeviceMesh("cpu", ranks)
    if distributed.get_rank() not in ranks:
        return None
    return {
        name: distribute_tensor(torch.empty_like(t, dtype=torch.bfloat16), mesh, [Shard(0)])
        for name, t in model().named_parameters()
    }


def main(rank: int, folder: str) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=6
    )
    four = Trainer([0, 1, 2, 3], seed=1)
    served = engine([4, 5])
    losses = [four.step(n) for n in range(3)] if four.held else []

    # Weights only, rounded to bf16; planned once, and run as often as the trainer has stepped.
    weights = live.state_of(four.held).only(states=["fp32"])
    update = live.plan(live.LiveState(weights.shards), served, rounding=True)
    update.run()
    losses += [four.step(3)] if four.held else []
    update.run()
    if rank == 0:
        print(update.explain())

    # A rank leaves: weights, moments, steps and settings go to the three that stay, and back.
    three = Trainer([0, 1, 2], seed=2)
    live.move(four.held, three.held)
    fewer = [three.step(n) for n in (4, 5)] if three.held else []
    again = Trainer([0, 1, 2, 3], seed=3)
    live.move(three.held, again.held)
    more = [again.step(n) for n in (6, 7)] if again.held else []

    if four.held and three.held:  # what would have been
        expected = [four.step(n) for n in (4, 5, 6, 7)]
        if not torch.allclose(torch.tensor(fewer + more), torch.tensor(expected), atol=1e-6):
            raise SystemExit(f"{fewer + more} instead of {expected}")
    elif four.held:
        for n in (4, 5, 6, 7):
            four.step(n)
    if rank == 0:
        print("4 → 3 → 4 ranks: the losses are those of the run that was never interrupted")
    distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(main, (folder,), nprocs=6, start_method="fork")
