"""What a page takes for granted: a model, an optimizer, a checkpoint that lacks something.

Theory. A page shows the lines that matter. What a reader has already, and the tests have not, is
made by one of these functions, named in a comment above the block::

    <!-- setup: model and optimizer of runs/8/dcp -->

The words after ``of`` are a path in the folder of the page. What a function returns are names that
the Python of the page may use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import reshard
from reshard.formats.checkpoint import Checkpoint
from tests.formats.edited import nothing, with_info
from tests.truth import case_named

Names = Mapping[str, object]


class Node(torch.nn.Module):
    """A module that is nothing but its parameters and children."""

    def put(self, path: str, tensor: torch.Tensor) -> None:
        """Register a parameter under a dotted name."""
        head, _, rest = path.partition(".")
        if not rest:
            self.register_parameter(head, torch.nn.Parameter(tensor))
            return
        if head not in self._modules:
            self.add_module(head, Node())
        child = self._modules[head]
        assert isinstance(child, Node)
        child.put(rest, tensor)


def model_and_optimizer(folder: Path) -> Names:
    """Make a model of zeros with the parameters of a checkpoint, and its AdamW in two groups."""
    checkpoint: Checkpoint = reshard.open_checkpoint(folder)
    model = Node()
    for name in checkpoint.names:
        model.put(name, torch.zeros(checkpoint.tensors[name, "fp32"].shape))
    decayed = [tensor for tensor in model.parameters() if tensor.dim() > 1]
    others = [tensor for tensor in model.parameters() if tensor.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return {"model": model, "optimizer": torch.optim.AdamW(groups, lr=0.5)}


def without_layouts(folder: Path) -> Names:
    """Lay out a tensor-parallel checkpoint that does not say how it was cut."""
    with_info(case_named("golden/llama_z1_tp2dp2_fp32"), folder, nothing)
    (folder / "latest").write_text("step3")
    return {}


SETUPS: Mapping[str, Callable[[Path], Names]] = {
    "model and optimizer": model_and_optimizer,
    "no layouts stated": without_layouts,
}
"""Name -> what makes it."""
