"""What jobs answer: plain values, so that reading an answer imports no DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

States: TypeAlias = dict[str, dict[str, torch.Tensor]]
"""``states[parameter][state]``."""


@dataclass(frozen=True, slots=True)
class Held:
    """What all ranks of a run together hold."""

    full: States
    """Full logical tensors, without padding."""
    frozen: dict[str, torch.Tensor]
    frozen_by_tp: dict[int, dict[str, torch.Tensor]]
    buffers: dict[str, torch.Tensor]
    drift: list[str]
    """Where ranks that should hold the same disagree; ``full`` then has the lowest rank's copy."""
    steps: list[list[float]]
    """For each rank, ``step`` of every flat partition that keeps one, in the optimizer's order."""
    groups: list[dict[str, Any]]
    """The optimizer's parameter groups without their parameters."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A run that was saved after three steps and then went on for three more."""

    held: Held
    losses_before: list[float]
    next_losses: list[float]
    engine_optimizer: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run that loaded a checkpoint and went on for three steps."""

    held: Held
    losses: list[float]
    global_steps: int
    client_state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sharded:
    """What an FSDP2 run held when it was saved or had loaded, and its next three losses."""

    full: States
    """Full states of every trained parameter."""
    model: dict[str, torch.Tensor]
    """Everything in the model's state dict: frozen parameters, buffers and tied names as well."""
    losses: list[float]


@dataclass(frozen=True, slots=True)
class Piped:
    """What a pipeline held when it was saved or had loaded, and its next three losses."""

    full: States
    untrained: dict[str, torch.Tensor]
    """Frozen parameters and buffers."""
    losses: list[float]


@dataclass(frozen=True, slots=True)
class Mixed:
    """What a mixture of experts held when it was saved or had loaded, and its next losses."""

    full: States
    """Experts whole: fused ones ``[num_experts, ...]``, native ones under their global number."""
    weights: dict[str, torch.Tensor]
    """The weights of the model itself, whole, as fp32."""
    losses: list[float]


@dataclass(frozen=True, slots=True)
class Coached:
    """A run of ``transformers.Trainer``: its log, a number a step, and what the engines held."""

    held: Held
    """When the first folder was saved, or when one had been loaded."""
    losses: list[float]
    rates: list[float]
    epochs: list[float]
