"""Our tiny models: small enough to keep their checkpoints in the repository, odd enough to bite.

Every model takes ``input_ids`` and ``labels`` and returns its loss, or an object with ``loss``.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from scripts.deepspeed_lab.recipe import Recipe

VOCAB = 97
"""A prime, so that no degree divides it."""

SEQUENCE = 8
"""Tokens of a row."""


class Odd(nn.Module):
    """Everything that a flat partition can trip over.

    Odd numbers of elements, a tied pair, a frozen parameter, a persistent and a non-persistent
    buffer, a one-element parameter and, if asked for, one that never gets a gradient.
    """

    def __init__(self, width: int = 7, hidden: int = 9, *, unused: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.up = nn.Linear(width, hidden)
        self.gate = nn.Parameter(torch.randn(hidden), requires_grad=False)
        self.down = nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor([1.1]))
        self.register_buffer("shift", torch.randn(width))
        self.register_buffer("ones", torch.ones(width), persistent=False)
        self.unused = nn.Linear(width, 3) if unused else None

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.embed(input_ids)
        shift = self.get_buffer("shift").to(x.dtype) * self.get_buffer("ones").to(x.dtype)
        x = self.norm(x + self.down(functional.gelu(self.up(x)) * self.gate) + shift)
        logits = self.head(x) * self.scale
        return functional.cross_entropy(logits.float().view(-1, VOCAB), labels.view(-1))


def llama(
    *,
    heads: int = 4,
    kv: int = 2,
    head_dim: int = 4,
    inter: int = 22,
    layers: int = 1,
    tie: bool = False,
    bias: bool = False,
) -> nn.Module:
    """Return a Hugging Face Llama, which AutoTP knows how to cut."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=head_dim,
        intermediate_size=inter,
        num_hidden_layers=layers,
        vocab_size=VOCAB,
        max_position_embeddings=32,
        tie_word_embeddings=tie,
        attention_bias=bias,
        mlp_bias=bias,
        attn_implementation="eager",
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


class _Rows(nn.Module):
    """Some rows of a linear layer that somebody else owns, as a layer of their own."""

    def __init__(self, owner: nn.Linear, rows: torch.Tensor) -> None:
        super().__init__()
        self.owner = [owner]
        """In a list, so that the owner's parameter is not this module's too."""
        self.rows = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what these rows make of the input."""
        return functional.linear(x, self.owner[0].weight[self.rows])


def fused_llama(*, heads: int = 4, kv: int = 2, head_dim: int = 4, **others: int) -> nn.Module:
    """Return the same Llama with one matrix for query, key and value, as Megatron keeps it.

    Its rows are, for each key/value head: those of the query heads that share it, its own, and its
    value's. The layer stands where the query's stood, so parameters keep their order.
    """
    model = llama(heads=heads, kv=kv, head_dim=head_dim, **others)  # type: ignore[arg-type]
    share = heads // kv * head_dim
    period = share + 2 * head_dim
    starts = torch.arange(kv)[:, None] * period
    rows = {
        "q_proj": (starts + torch.arange(share)).flatten(),
        "k_proj": (starts + share + torch.arange(head_dim)).flatten(),
        "v_proj": (starts + share + head_dim + torch.arange(head_dim)).flatten(),
    }
    for attention in [
        module for name, module in model.named_modules() if name.endswith("self_attn")
    ]:
        fused = nn.Linear(heads * head_dim, kv * period, bias=False)
        others_there = {
            name: child for name, child in attention.named_children() if name not in rows
        }
        for name in [*rows, *others_there]:
            delattr(attention, name)
        attention.linear_qkv = fused
        for name, index in rows.items():
            setattr(attention, name, _Rows(fused, index))
        for name, child in others_there.items():
            setattr(attention, name, child)
    return model


MODELS: dict[str, Callable[..., nn.Module]] = {
    "odd": Odd,
    "llama": llama,
    "fused_llama": fused_llama,
}


def build_model(recipe: Recipe, *, seed: int, mpu: object = None) -> nn.Module:
    """Build the recipe's model, ours or that of the file it names, with weights of ``seed``."""
    torch.manual_seed(seed)
    if recipe.models_file is None:
        model = MODELS[recipe.model](**recipe.model_args)
    else:
        model = _foreign_model(recipe, recipe.models_file, seed, mpu)
    for name, parameter in model.named_parameters():
        if recipe.freeze and re.search(recipe.freeze, name):
            parameter.requires_grad = False
    return model


_FOREIGN_CLASSES = {"plain": "Plain", "muon": "MuonNet", "yuan": "YuanForCausalLM"}


def _foreign_model(recipe: Recipe, file: Path, seed: int, mpu: object) -> nn.Module:
    module = load_module(file)
    build: Callable[..., nn.Module]
    if recipe.hand_cut:
        build = functools.partial(module.MegatronLike, mpu, seed=seed)
    else:
        build = getattr(module, _FOREIGN_CLASSES.get(recipe.model, recipe.model))
    return build(**recipe.model_args)


def load_module(file: Path) -> ModuleType:
    """Import one Python file from where it lies."""
    spec = importlib.util.spec_from_file_location(f"lab_models_{abs(hash(file))}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {file}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
