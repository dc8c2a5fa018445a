"""FSDP2 hands over to DeepSpeed ZeRO-3 inside one job, moments and steps too.

Two processes with gloo on this machine; the losses of the two next steps are compared.
"""

import os
import tempfile

os.environ.update(DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo", LOCAL_SIZE="1")

import deepspeed
import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from reshard import live

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_force_ds_cpu_optimizer": False,
}


class Model(nn.Module):
    """A loss of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(12, 31), nn.Tanh(), nn.Linear(31, 12))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return (self.layers(data) - data).square().mean()


def data(step: int) -> torch.Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(step))


def main(rank: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    deepspeed.init_distributed(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        auto_mpi_discovery=False,
        verbose=False,
    )
    before = fully_shard(Model(seed=1), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(before.parameters(), lr=1e-2)

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = before(data(number))
        loss.backward()
        optimizer.step()
        return loss.item()

    for number in range(3):
        step(number)
    after = Model(seed=2)
    engine, *_ = deepspeed.initialize(
        model=after, model_parameters=after.parameters(), config=CONFIG
    )
    live.move((before, optimizer), engine)
    for number in range(3, 5):
        loss = engine(data(number))
        engine.backward(loss)
        engine.step()
        if abs(loss.item() - step(number)) > 1e-5:
            raise SystemExit("the engine does not go on where FSDP2 was")
    if rank == 0:
        print("DeepSpeed ZeRO-3 goes on with the losses of FSDP2")
    distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(main, (folder,), nprocs=2, start_method="fork")
