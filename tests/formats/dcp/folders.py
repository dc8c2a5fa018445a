"""DCP folders made by stock torch in this process, and an index edited by stock pickle."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from reshard.formats import registry
from reshard.formats.checkpoint import Checkpoint, StoredTensor
from tests.truth import ROOT

GOLDEN = ROOT / "tests" / "formats" / "dcp" / "golden"
SHARED = Path(os.environ.get("RESHARD_DCP", ROOT / "../shared/dcp")).resolve()


class Net(nn.Module):
    """Two parameter groups, a buffer, a frozen parameter, a weight that is stored transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(5)
        self.gate = nn.Parameter(torch.arange(5.0), requires_grad=False)
        self.register_buffer("shift", torch.tensor([1, 2, 3]))
        self.up.weight = nn.Parameter(torch.randn(3, 5).T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(self.up(x))
        return normed * self.gate


def trained(*, lr: float = 0.01) -> tuple[Net, torch.optim.AdamW]:
    """A model and its optimizer after two steps."""
    torch.manual_seed(0)
    net = Net()
    groups = [
        {"params": list(net.up.parameters()), "weight_decay": 0.1},
        {"params": list(net.norm.parameters()), "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    for seed in range(2):
        net(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def state_dicts(
    net: nn.Module, optimizer: torch.optim.Optimizer, *, flattened: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `get_state_dict` gives, optimizer nested or flattened."""
    options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    model = get_model_state_dict(net)
    return dict(model), dict(get_optimizer_state_dict(net, optimizer, options=options))


def save(tree: dict[str, Any], folder: Path) -> Path:
    """Save a tree with stock DCP."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_saver.save(tree, checkpoint_id=str(folder), no_dist=True)
    return folder


def load(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fill a tree with stock DCP."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_loader.load(tree, checkpoint_id=str(folder), no_dist=True)
    return tree


def edit(folder: Path, change: Callable[[Any], None]) -> None:
    """Change `.metadata` by stock pickle."""
    path = folder / ".metadata"
    index = pickle.loads(path.read_bytes())
    change(index)
    path.write_bytes(pickle.dumps(index))


def opened(folder: Path) -> Checkpoint:
    """Open a folder as the faces do."""
    return registry.open_checkpoint(folder)


def elements(tensor: StoredTensor) -> torch.Tensor:
    """The logical tensor, put together by plain reads and the map's own rebuild."""
    shards = {}
    for holder, region in tensor.regions.items():
        raw = Path(region.file).read_bytes()[region.offset : region.offset + region.nbytes]
        shards[holder] = np.frombuffer(raw, dtype=tensor.dtype.numpy())
    return torch.from_numpy(np.array(tensor.map.rebuild(shards)))
