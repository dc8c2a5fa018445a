"""Checkpoints of fused experts, written here, for any placement: what no runtime makes yet.

Theory. DeepSpeed places experts evenly and in order; the descriptor can say much more. So these
files are written by the rules of the format (facts of ``stage_1_and_2.py``, ``stage3.py`` and
``engine.py``) with plain torch, for any placement, degree and order of ranks. Every expert, weight,
layer and state has values of its own, so that nothing can be mistaken for anything else. Nothing of
reshard is used.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

STATES = ("fp32", "exp_avg", "exp_avg_sq")
TAILS = {"w1": (3, 2), "w2": (2, 3), "w3": (3, 2)}
DENSE = (5,)

Full: TypeAlias = dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Mixture:
    """Fused experts, spread over ranks.

    Parameters
    ----------
    placement
        For every EP rank its experts, in order.
    edp
        Ranks with the same experts.
    stage
        ZeRO stage, 1 to 3.
    data_first
        ``use_data_before_expert_parallelism``.
    layers
        Number of layers.
    """

    placement: tuple[tuple[int, ...], ...]
    edp: int = 1
    stage: int = 1
    data_first: bool = False
    layers: int = 2

    @property
    def num_experts(self) -> int:
        return 1 + max(expert for held in self.placement for expert in held)

    @property
    def ep(self) -> int:
        return len(self.placement)

    @property
    def dp(self) -> int:
        return self.ep * self.edp

    def place(self, rank: int) -> tuple[int, int]:
        """Return EP rank and expert-data-parallel rank of a data-parallel rank."""
        if self.data_first:
            return divmod(rank, self.edp)
        edp_rank, ep_rank = divmod(rank, self.ep)
        return ep_rank, edp_rank

    def names(self) -> Iterator[str]:
        for layer in range(self.layers):
            for weight in TAILS:
                yield f"model.layers.{layer}.mlp.experts.{weight}"

    def full(self) -> Full:
        """Return every parameter whole, with values of its own in every element."""
        values: Full = {}
        for number, name in enumerate(self.names()):
            shape = (self.num_experts, *TAILS[name[-2:]])
            values[name] = _values(number, shape)
        values["dense.weight"] = _values(90, DENSE)
        return values


def _values(number: int, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    count = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    return {state: 1000.0 * number + 300.0 * i + count for i, state in enumerate(STATES)}


# ----------------------------------------------------------------------------------- the metadata


def descriptor(mixture: Mixture) -> dict[str, Any]:
    ranks = [{"rank": r, "experts": list(held)} for r, held in enumerate(mixture.placement)]
    return {
        "version": 1,
        "num_experts": mixture.num_experts,
        "ep_size": mixture.ep,
        "ranks": ranks,
    }


def entries(mixture: Mixture, rank: int) -> list[dict[str, Any]]:
    """Return ``ds_autoep_layers`` as a rank writes it."""
    ep_rank, edp_rank = mixture.place(rank)
    return [
        {
            "moe_layer_id": layer,
            "module_path": f"model.layers.{layer}.mlp",
            "num_experts": mixture.num_experts,
            "num_local_experts": len(mixture.placement[ep_rank]),
            "ep_size": mixture.ep,
            "expert_placement": descriptor(mixture),
            "expert_key_prefix": f"model.layers.{layer}.mlp.experts",
            "checkpoint_format": "zero3_partitioned" if mixture.stage == 3 else "per_expert_files",
            "checkpoint_format_version": 1 if mixture.stage == 3 else None,
            "ep_group_name": f"ep_size_{mixture.ep}",
            "ep_rank": ep_rank,
            "expert_data_parallel_rank": edp_rank,
            "expert_data_parallel_world_size": mixture.edp,
        }
        for layer in range(mixture.layers)
    ]


def _model_states(mixture: Mixture, rank: int) -> dict[str, Any]:
    ep_rank, _ = mixture.place(rank)
    held = len(mixture.placement[ep_rank])
    experts = OrderedDict(
        (name, torch.Size((held, *TAILS[name[-2:]]))) for name in mixture.names() if held
    )
    dense = OrderedDict({"dense.weight": torch.Size(DENSE)})
    return {
        "module": OrderedDict(),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [dense, experts] if held else [dense],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": None,
        "global_steps": 3,
        "global_samples": 12,
        "skipped_steps": 0,
        "dp_world_size": mixture.dp,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {"use_data_before_expert_parallelism": mixture.data_first},
        "ds_version": "0.19.8",
        "num_experts": [mixture.num_experts] * mixture.layers,
        "ds_autoep_layers": entries(mixture, rank),
    }


# ------------------------------------------------------------------------------ the flat buffers


def _flat(tensors: list[torch.Tensor], ranks: int) -> tuple[torch.Tensor, int]:
    """Lay tensors end to end, padded to a multiple of twice the ranks; return the padding too."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    padding = -len(flat) % (2 * ranks)
    return torch.cat([flat, torch.zeros(padding)]), padding


def _partition(tensors: list[torch.Tensor], ranks: int, rank: int) -> tuple[torch.Tensor, int]:
    """Return a rank's partition of ZeRO-1/2, and how much of it is padding."""
    flat, padding = _flat(tensors, ranks)
    size = len(flat) // ranks
    own = min(size, max(0, padding - (ranks - 1 - rank) * size))
    return flat[rank * size : (rank + 1) * size].clone(), own


def _blocks(tensors: list[torch.Tensor], ranks: int, rank: int) -> torch.Tensor:
    """Return a rank's buffer of ZeRO-3: its block of every tensor."""
    blocks = []
    for tensor in tensors:
        size = -(-tensor.numel() // ranks)
        padded = torch.zeros(size * ranks)
        padded[: tensor.numel()] = tensor.flatten()
        blocks.append(padded[rank * size : (rank + 1) * size])
    return torch.cat(blocks)


def _groups(mixture: Mixture, rank: int) -> list[tuple[dict[str, list[torch.Tensor]], int, int]]:
    """Return for every group of a rank its tensors by state, its ranks, and its place in them."""
    full = mixture.full()
    ep_rank, edp_rank = mixture.place(rank)
    held = list(mixture.placement[ep_rank])
    dense = {state: [full["dense.weight"][state]] for state in STATES}
    local = {s: [full[name][s][held] for name in mixture.names()] for s in STATES}
    return [(dense, mixture.dp, rank), (local, mixture.edp, edp_rank)]


def _torch_optimizer(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Two parameter groups; without experts the second owns no sub-group of ZeRO-3."""
    owned = [[0], [1] if len(states) > 1 else []]
    return {
        "state": dict(enumerate(states)),
        "param_groups": [
            {"lr": 0.01, "name": name, "params": params}
            for name, params in zip(("dense-params", "experts"), owned, strict=True)
        ],
    }


def _zero12(mixture: Mixture, rank: int) -> dict[str, Any]:
    masters, states, paddings, counts = [], [], [], []
    for tensors, ranks, place in _groups(mixture, rank):
        parts = {state: _partition(tensors[state], ranks, place) for state in STATES}
        own = parts["fp32"][1]
        masters.append(parts["fp32"][0][: len(parts["fp32"][0]) - own].clone())
        moments = {state: parts[state][0] for state in STATES[1:]}
        states.append({"step": torch.tensor(3.0), **moments})
        paddings.append(own)
        counts.append(ranks)
    return {
        "base_optimizer_state": _torch_optimizer(states),
        "single_partition_of_fp32_groups": masters,
        "zero_stage": mixture.stage,
        "group_paddings": paddings,
        "partition_count": counts,
        "ds_version": "0.19.8",
    }


def _zero3(mixture: Mixture, rank: int) -> dict[str, Any]:
    masters, states, declared = [], [], []
    for number, (tensors, ranks, place) in enumerate(_groups(mixture, rank)):
        if not any(tensor.numel() for tensor in tensors["fp32"]):
            continue
        buffers = {state: _blocks(tensors[state], ranks, place) for state in STATES}
        masters.append(buffers.pop("fp32"))
        states.append({"step": torch.tensor(3.0), **buffers})
        family = "autoep_expert" if number else "replicated"
        declared.append(
            {
                "sub_group": number,
                "partition_count": ranks,
                "partition_rank": place,
                "families": [family],
            }
        )
    return {
        "zero_stage": 3,
        "partition_count": mixture.dp,
        "optimizer_state_dict": _torch_optimizer(states),
        "fp32_flat_groups": masters,
        "ds_zero_partition_groups": declared,
    }


# -------------------------------------------------------------------------------------- the files


def write(mixture: Mixture, folder: Path) -> Path:
    """Write the checkpoint into ``folder``, which becomes a tag folder; return it."""
    folder.mkdir(parents=True)
    for rank in range(mixture.dp):
        zero3 = mixture.stage == 3
        body = _zero3(mixture, rank) if zero3 else _zero12(mixture, rank)
        kept = {"optimizer_state_dict": body, "ds_version": "0.19.8"}
        torch.save(kept, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if zero3:
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            torch.save(_model_states(mixture, rank), folder / name)
    if mixture.stage < 3:
        torch.save(_model_states(mixture, 0), folder / "mp_rank_00_model_states.pt")
        _write_expert_files(mixture, folder)
    return folder


def _write_expert_files(mixture: Mixture, folder: Path) -> None:
    full = mixture.full()
    for layer in range(mixture.layers):
        for expert in range(mixture.num_experts):
            prefix = f"model.layers.{layer}.mlp.experts"
            tensors = {
                f"{prefix}.{weight}.{expert}": full[f"{prefix}.{weight}"]["fp32"][expert].clone()
                for weight in TAILS
            }
            torch.save(tensors, folder / expert_file(layer, expert))


def expert_file(layer: int, expert: int, mp: int = 0) -> str:
    return f"layer_{layer}_expert_{expert}_mp_rank_{mp:02d}_model_states.pt"
