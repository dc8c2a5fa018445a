"""A model with two of DeepSpeed's own MoE layers, cut by tensor parallelism where it is wanted.

Theory. Between the layers is a pair of matrices that is cut as Megatron cuts it, up by rows and
down by columns. Experts are the same pair. By default every expert is whole on one rank, and the
expert-parallel groups run over all tensor ranks; with ``enable_expert_tensor_parallelism`` each
tensor rank has expert-parallel groups of its own, and a part of every expert.
"""

from __future__ import annotations

import re
from typing import Any

import deepspeed
import torch
from torch import distributed, nn
from torch.nn import functional

from scripts.deepspeed_lab.models import VOCAB
from scripts.deepspeed_lab.pipelines import _copied, _cut, _summed
from scripts.deepspeed_lab.topologies import MixRecipe

EXPERTS = 4
WIDTH, HIDDEN = 6, 12


class Pair(nn.Module):
    """Up and down again; over tensor ranks, each has a part of what is hidden."""

    def __init__(self, mpu: Any = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.group = None if mpu is None else mpu.get_tensor_model_parallel_group()
        if mpu is not None:
            tp, part = mpu.tp, mpu.tp_rank
            self.up.weight = _cut(self.up.weight.chunk(tp, 0)[part])
            self.up.bias = _cut(self.up.bias.chunk(tp, 0)[part])
            self.down.weight = _cut(self.down.weight.chunk(tp, 1)[part])

    def __deepcopy__(self, memo: Any) -> Pair:
        """Copies of an expert share its process group, which cannot be copied."""
        new: Pair = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        nn.Module.__init__(new)
        new.group = self.group
        for name, child in (("up", self.up), ("down", self.down)):
            copied = nn.Linear(child.in_features, child.out_features)
            copied.weight = nn.Parameter(child.weight.detach().clone(), child.weight.requires_grad)
            copied.bias = nn.Parameter(child.bias.detach().clone(), child.bias.requires_grad)
            for key in ("model_parallel", "tensor_model_parallel"):
                for old, fresh in ((child.weight, copied.weight), (child.bias, copied.bias)):
                    if hasattr(old, key):
                        setattr(fresh, key, True)
            setattr(new, name, copied)
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        hidden = functional.gelu(self.up(_copied(x, self.group)))
        return _summed(functional.linear(hidden, self.down.weight), self.group) + self.down.bias


class NativeMixture(nn.Module):
    """Two native layers with different experts, the second with a residual branch."""

    def __init__(self, recipe: MixRecipe, mpu: Any = None) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        gate: dict[str, Any] = {
            "ep_size": recipe.ep,
            "k": 1,
            "capacity_factor": 4.0,
            "min_capacity": 0,
            "use_rts": False,
            "noisy_gate_policy": None,
            "enable_expert_tensor_parallelism": recipe.cut_experts,
        }
        inner = mpu if recipe.cut_experts else None
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.first = MoE(WIDTH, Pair(inner), num_experts=EXPERTS, **gate)
        self.between = Pair(mpu)
        deep = nn.Sequential(nn.LayerNorm(WIDTH), Pair(inner))
        self.second = MoE(WIDTH, deep, num_experts=2 * EXPERTS, use_residual=True, **gate)
        self.head = nn.Linear(WIDTH, VOCAB)
        if recipe.frozen:
            self._freeze()
        if mpu is not None:
            self.universal_checkpoint_info = universal_info(cut_experts=recipe.cut_experts)

    def _freeze(self) -> None:
        """Freeze a matrix of the first layer's experts, which are all equal if nobody trains them.

        DeepSpeed gives ranks with the same experts the values of the first of them.
        """
        seed = 100 * torch.initial_seed() + distributed.get_rank()
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.first.named_parameters():
            if name.endswith("down.weight"):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.requires_grad = False
                parameter.add_(noise)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # noqa: D102
        x = self.embed(input_ids)
        y, first, _ = self.first(x)
        x = self.between(x + y)
        y, second, _ = self.second(x)
        logits = self.head(x + y).float().view(-1, VOCAB)
        loss = functional.cross_entropy(logits, labels.view(-1))
        total: torch.Tensor = loss + 0.01 * (first + second)
        return total


def let_gloo_gather_tokens() -> None:
    """Have DeepSpeed gather tokens over tensor ranks by flat buffers, which is all gloo takes.

    ``moe/mappings.py`` gathers a tensor of three dimensions into a flat one; NCCL does not mind.
    """
    from deepspeed.moe import mappings

    gather = mappings._gather_tokens

    def flat(tokens: torch.Tensor, dim: int = 0) -> torch.Tensor:
        whole = deepspeed.comm.all_gather_into_tensor

        def into_flat(output: torch.Tensor, tensor: torch.Tensor, group: Any = None) -> Any:
            return whole(output, tensor.flatten(), group=group)

        deepspeed.comm.all_gather_into_tensor = into_flat
        try:
            gathered: torch.Tensor = gather(tokens, dim)
        finally:
            deepspeed.comm.all_gather_into_tensor = whole
        return gathered

    mappings._gather_tokens = flat


def is_cut(name: str, *, cut_experts: bool) -> bool:
    """Whether tensor ranks have parts of a parameter, rows but for the weight of `down`."""
    owner = r"(between|.*deepspeed_experts.*|second\.mlp\.1)" if cut_experts else "between"
    return re.fullmatch(rf"{owner}\.(up\.\w+|down\.weight)", name) is not None


def universal_info(*, cut_experts: bool) -> dict[str, Any]:
    """What the model says about its cuts, Megatron's way."""
    cut = r"between\." if not cut_experts else r"(between|.*deepspeed_experts.*|second\.mlp\.1)\."
    return {
        "universal_checkpoint_version": 0.2,
        "tp_replicated_parameter_patterns": [rf"^(?!{cut}(up\.|down\.weight)).*"],
        "parameter_with_row_parallelism_patterns": [rf"^{cut}down\.weight"],
    }
