"""Real layers of DeepSpeed, built for one tensor-parallel rank without a process group.

A layer asks its group for two numbers only while it is built: how many ranks there are and which
one it is. Here they are given, so that the layer itself cuts its weight and describes it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from reshard.layouts.autotp import ModelNumbers

Built = Callable[[torch.Tensor, "torch.Tensor | None", int, int], nn.Module]
"""`(weight, bias, tp_degree, rank) -> layer`."""

BLOCKS = {
    "bloom": "BloomBlock",
    "glm": "GLMBlock",
    "qwen": "QWenBlock",
    "phi3": "Phi3DecoderLayer",
    "bigcode": "GPTBigCodeBlock",
    "codegen": "CodeGenBlock",
}
"""Kind of fused weight -> class name by which DeepSpeed knows it."""


def real_layer(
    kind: str, numbers: ModelNumbers, *, name: str | None = None, **options: object
) -> Built:
    """Return a function that builds DeepSpeed's layer of class ``kind``."""

    def build(weight: torch.Tensor, bias: torch.Tensor | None, tp: int, rank: int) -> nn.Module:
        layers = importlib.import_module("deepspeed.module_inject.layers")
        meta = importlib.import_module("deepspeed.module_inject.tp_shard").AutoTPMeta(
            num_kv_heads=numbers.kv_heads,
            num_attention_heads=numbers.heads,
            n_embd=numbers.hidden,
            tp_grain_size=numbers.grain,
        )
        arguments: dict[str, Any] = {"tp_meta": meta, "name": name, **options}
        if "fused_module" in options:
            arguments["fused_module"] = block_named(str(options["fused_module"]))
        with as_rank(layers, tp, rank):
            layers.set_autotp_mode(training=True)
            made = getattr(layers, kind)(module_of(weight, bias), object(), **arguments)
        assert isinstance(made, nn.Module)
        return made

    return build


def as_rank(layers: Any, tp: int, rank: int) -> Any:
    """Let every process group look like ``tp`` ranks of which this is ``rank``."""
    return mock.patch.multiple(
        layers,
        dist=SimpleNamespace(get_world_size=lambda *_, **__: tp, get_rank=lambda *_, **__: rank),
        pg_utils=SimpleNamespace(is_parallel=lambda _: tp > 1),
        log_dist_once=lambda *_, **__: None,
    )


def module_of(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    """Return a module with that weight, whatever its dtype."""
    if bias is None and weight.dim() == 2:
        made: nn.Module = nn.Embedding(weight.shape[0], weight.shape[1], _weight=weight)
        made.register_parameter("bias", None)
        return made
    made = nn.Linear(1, 1, bias=bias is not None)
    made.weight = nn.Parameter(weight)
    if bias is not None:
        made.bias = nn.Parameter(bias)
    return made


def block_named(name: str) -> nn.Module:
    """Return a module that prints as a class of that name."""
    block = type(name, (nn.Module,), {})()
    block.attn = SimpleNamespace(split_size=0)
    assert isinstance(block, nn.Module)
    return block


def shard_of(layer: nn.Module, name: str = "weight") -> torch.Tensor:
    """Return what the layer holds."""
    held = getattr(layer, name)
    assert isinstance(held, torch.Tensor)
    return held.detach()


def collected(layer: nn.Module, name: str) -> Mapping[str, Any]:
    """Return the ``universal_checkpoint_info`` of a model with this one layer."""
    layers = importlib.import_module("deepspeed.module_inject.layers")
    model = nn.Module()
    model.add_module(name, layer)
    info = layers.collect_autotp_universal_checkpoint_info(model)
    assert isinstance(info, dict)
    return info
