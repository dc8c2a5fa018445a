"""Real-size DeepSpeed checkpoints, in the file form of DeepSpeed 0.19.8, without training anything.

Theory. What a converter costs depends on shapes, on how they are cut, and on how many files there
are, not on the values. So a 24-layer llama-like model is laid out by the rules of
`stage_1_and_2.py` and `stage3.py` (flat groups, partitions, slice mappings, AutoTP metadata) with
values from a random tile, and saved by `torch.save` with DeepSpeed's own classes in the pickle. Two
groups, as with weight decay: matrices, and norms.

Run as a script: ``python benchmarks/make_big.py z1dp2 FOLDER --hidden 1024``.
"""

from __future__ import annotations

import argparse
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

LAYERS = 24
VERSION = "0.19.8"


@dataclass(frozen=True, slots=True)
class Case:
    """A topology: ZeRO stage, data-parallel and tensor-parallel degree."""

    stage: int
    dp: int
    tp: int = 1


CASES = {
    "z1dp2": Case(1, 2),
    "z2dp4": Case(2, 4),
    "z3dp4": Case(3, 4),
    "z1tp2dp2": Case(1, 2, 2),
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """Name, full shape, and the axis that tensor parallelism cuts (None: replicated)."""

    name: str
    shape: tuple[int, ...]
    axis: int | None

    def shard(self, tp: int) -> tuple[int, ...]:
        """Shape of one tensor-parallel shard."""
        if self.axis is None or tp == 1:
            return self.shape
        return tuple(n // tp if k == self.axis else n for k, n in enumerate(self.shape))


def parameters(hidden: int, vocabulary: int) -> Iterator[Parameter]:
    """Every parameter of a llama-like model, in module order."""
    inner, keys = hidden * 11 // 4, hidden // 4
    yield Parameter("model.embed_tokens.weight", (vocabulary, hidden), None)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        yield Parameter(f"{at}.self_attn.q_proj.weight", (hidden, hidden), 0)
        yield Parameter(f"{at}.self_attn.k_proj.weight", (keys, hidden), 0)
        yield Parameter(f"{at}.self_attn.v_proj.weight", (keys, hidden), 0)
        yield Parameter(f"{at}.self_attn.o_proj.weight", (hidden, hidden), 1)
        yield Parameter(f"{at}.self_attn.q_norm.weight", (hidden // 16,), None)
        yield Parameter(f"{at}.self_attn.k_norm.weight", (hidden // 16,), None)
        yield Parameter(f"{at}.mlp.gate_proj.weight", (inner, hidden), 0)
        yield Parameter(f"{at}.mlp.up_proj.weight", (inner, hidden), 0)
        yield Parameter(f"{at}.mlp.down_proj.weight", (hidden, inner), 1)
        yield Parameter(f"{at}.input_layernorm.weight", (hidden,), None)
        yield Parameter(f"{at}.post_attention_layernorm.weight", (hidden,), None)
    yield Parameter("model.norm.weight", (hidden,), None)
    yield Parameter("lm_head.weight", (vocabulary, hidden), 0)


class Values:
    """Random values without the cost of drawing billions of them: ranges of one tile."""

    def __init__(self) -> None:
        self._tile = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0))

    def flat(self, seed: int, numel: int) -> torch.Tensor:
        """``numel`` float32 values that depend on ``seed``."""
        start = seed * 7919 % (1 << 20)
        tile = self._tile[start : start + numel]
        rows = -(-numel // len(tile))
        return (tile if rows == 1 else tile.repeat(rows)[:numel]) * (1.0 + seed / 64)


def group_options(number: int, weight_decay: float) -> dict[str, object]:
    """The options of one parameter group, as AdamW keeps them."""
    return {
        "weight_decay": weight_decay,
        "lr": 1e-4,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
        "params": [number],
    }


def shard_values(
    values: Values, parameter: Parameter, case: Case, tp: int, state: int
) -> torch.Tensor:
    """The flat shard of one parameter state on one tensor-parallel rank."""
    numel = math.prod(parameter.shape)
    full = values.flat(hash_of(parameter.name) + state, numel).view(parameter.shape)
    if parameter.axis is None or case.tp == 1:
        return full.reshape(-1)
    return full.chunk(case.tp, parameter.axis)[tp].reshape(-1)


def hash_of(name: str) -> int:
    """A small number that depends on a name, the same in every process."""
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(name)) % 997


def base_model_state(
    case: Case, groups: list[list[Parameter]], config: dict[str, object]
) -> dict[str, object]:
    """What a model-state file holds besides the weights."""
    shapes = [
        OrderedDict((p.name, torch.Size(p.shard(case.tp))) for p in group) for group in groups
    ]
    state: dict[str, object] = {
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": OrderedDict() if case.stage == 3 else None,
        "shared_params": {},
        "frozen_param_fragments": OrderedDict() if case.stage == 3 else None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": 3,
        "global_samples": 12,
        "dp_world_size": case.dp,
        "mp_world_size": case.tp,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": case.tp},
        "ds_config": config,
        "ds_version": VERSION,
        "iteration": 3,
    }
    if case.tp > 1 or case.stage < 3:
        state["universal_checkpoint_info"] = tensor_parallel_info(
            case, [p for g in groups for p in g]
        )
    return state


def tensor_parallel_info(case: Case, every: list[Parameter]) -> dict[str, object]:
    """AutoTP's metadata, with the affine maps that DeepSpeed 0.19.8 writes."""

    def patterns(test: object) -> list[str]:
        return ["^" + p.name.replace(".", "\\.") + "$" for p in every if test(p)]  # type: ignore[operator]

    return {
        "universal_checkpoint_version": 0.4,
        "parameter_with_row_parallelism_patterns": patterns(lambda p: p.axis == 1),
        "tp_replicated_parameter_patterns": patterns(lambda p: p.axis is None),
        "vocabulary_parameter_patterns": [],
        "parameter_with_sub_params": [],
        "autotp_unsupported_parameter_patterns": {},
        "affine_map": {
            "version": 1,
            "params": {
                "^" + p.name.replace(".", "\\.") + "$": affine_entry(p, case.tp) for p in every
            },
        },
    }


def affine_entry(parameter: Parameter, tp: int) -> dict[str, object]:
    """The map of one parameter over the tensor-parallel ranks."""
    strides = row_major(parameter.shape)
    shard = parameter.shard(tp)
    ranks = {}
    for rank in range(tp):
        start = (
            0 if parameter.axis is None else rank * shard[parameter.axis] * strides[parameter.axis]
        )
        piece = {
            "shape": list(shard),
            "source": [start, list(strides)],
            "dest": [0, list(row_major(shard))],
            "locations": list(range(tp)) if parameter.axis is None else [rank],
        }
        ranks[rank] = {"shard_shape": list(shard), "pieces": [piece]}
    return {"logical_shape": list(parameter.shape), "ranks": ranks}


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense tensor."""
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))


def write_zero12(
    folder: Path,
    case: Case,
    groups: list[list[Parameter]],
    values: Values,
    config: dict[str, object],
) -> None:
    """Model and optimizer files of ZeRO-1 and ZeRO-2."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    for tp in range(case.tp):
        module = OrderedDict(
            (p.name, shard_values(values, p, case, tp, 0).to(torch.bfloat16).view(p.shard(case.tp)))
            for group in groups
            for p in group
        )
        state = {"module": module, **base_model_state(case, groups, config)}
        torch.save(state, folder / f"mp_rank_{tp:02d}_model_states.pt")
        del module, state
        flats = [
            [
                padded(
                    torch.cat([shard_values(values, p, case, tp, s) for p in group]), 2 * case.dp
                )
                for group in groups
            ]
            for s in range(3)
        ]
        for dp in range(case.dp):
            parts = [[flat.chunk(case.dp)[dp].clone() for flat in flats[s]] for s in range(3)]
            osd = {
                "loss_scaler": LossScaler(scale=1.0),
                "dynamic_loss_scale": False,
                "overflow": False,
                "clip_grad": 0.0,
                "base_optimizer_state": {
                    "state": {
                        g: {
                            "step": torch.tensor(3.0),
                            "exp_avg": parts[1][g],
                            "exp_avg_sq": parts[2][g],
                        }
                        for g in range(len(groups))
                    },
                    "param_groups": [group_options(0, 0.1), group_options(1, 0.0)],
                },
                "single_partition_of_fp32_groups": parts[0],
                "zero_stage": ZeroStageEnum(case.stage),
                "group_paddings": [
                    flats[0][g].numel() - sum(math.prod(p.shard(case.tp)) for p in group)
                    if dp == case.dp - 1
                    else 0
                    for g, group in enumerate(groups)
                ],
                "param_alignment_paddings": [[0] * len(group) for group in groups],
                "partition_count": [case.dp] * len(groups),
                "ds_version": VERSION,
                "param_slice_mappings": [
                    slice_mapping(group, case, dp, flats[0][g].numel() // case.dp, fragment_address)
                    for g, group in enumerate(groups)
                ],
            }
            content = {"optimizer_state_dict": osd, "ds_config": config, "ds_version": VERSION}
            torch.save(content, folder / f"zero_pp_rank_{dp}_mp_rank_{tp:02d}_optim_states.pt")


def padded(flat: torch.Tensor, multiple: int) -> torch.Tensor:
    """A flat tensor with zeros up to a multiple."""
    short = -flat.numel() % multiple
    return torch.cat([flat, flat.new_zeros(short)]) if short else flat


def slice_mapping(
    group: list[Parameter], case: Case, dp: int, size: int, address: type
) -> OrderedDict[str, object]:
    """Which part of which parameter a partition holds, and where in it."""
    low, high, at = dp * size, (dp + 1) * size, 0
    mapping: OrderedDict[str, object] = OrderedDict()
    for parameter in group:
        stop = at + math.prod(parameter.shard(case.tp))
        if at < high and stop > low:
            begin = max(at, low)
            mapping[parameter.name] = address(numel=min(stop, high) - begin, start=begin - low)
        at = stop
    return mapping


def write_zero3(
    folder: Path,
    case: Case,
    groups: list[list[Parameter]],
    values: Values,
    config: dict[str, object],
) -> None:
    """Model and optimizer files of ZeRO-3."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    for dp in range(case.dp):
        module = OrderedDict(
            (p.name, torch.empty(0, dtype=torch.bfloat16)) for group in groups for p in group
        )
        state = {"module": module, **base_model_state(case, groups, config)}
        torch.save(state, folder / f"zero_pp_rank_{dp}_mp_rank_00_model_states.pt")
        parts = [
            [
                torch.cat(
                    [
                        padded(shard_values(values, p, case, 0, s), case.dp).chunk(case.dp)[dp]
                        for p in group
                    ]
                )
                for group in groups
            ]
            for s in range(3)
        ]
        osd = {
            "zero_stage": ZeroStageEnum(3),
            "loss_scaler": LossScaler(scale=1.0),
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": case.dp,
            "optimizer_state_dict": {
                "state": {
                    g: {
                        "step": torch.tensor(3.0),
                        "exp_avg": parts[1][g],
                        "exp_avg_sq": parts[2][g],
                    }
                    for g in range(len(groups))
                },
                "param_groups": [group_options(0, 0.1), group_options(1, 0.0)],
            },
            "fp32_flat_groups": parts[0],
        }
        content = {"optimizer_state_dict": osd, "ds_config": config, "ds_version": VERSION}
        torch.save(content, folder / f"zero_pp_rank_{dp}_mp_rank_00_optim_states.pt")


def make(name: str, root: Path, hidden: int, vocabulary: int) -> None:
    """Write one checkpoint to ``root/step3``, with ``root/latest``."""
    case = CASES[name]
    folder = root / "step3"
    folder.mkdir(parents=True)
    every = list(parameters(hidden, vocabulary))
    groups = [[p for p in every if len(p.shape) > 1], [p for p in every if len(p.shape) == 1]]
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": case.stage},
        "bf16": {"enabled": True},
    }
    write = write_zero3 if case.stage == 3 else write_zero12
    write(folder, case, groups, Values(), config)
    (root / "latest").write_text("step3")


def main() -> None:
    """Write the checkpoint that the command line names."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("case", choices=sorted(CASES))
    options.add_argument("folder", type=Path)
    options.add_argument("--hidden", type=int, default=1024)
    options.add_argument("--vocabulary", type=int, default=32000)
    chosen = options.parse_args()
    make(chosen.case, chosen.folder, chosen.hidden, chosen.vocabulary)


if __name__ == "__main__":
    main()
