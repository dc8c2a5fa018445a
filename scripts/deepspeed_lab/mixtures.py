"""Mixtures of experts: AutoEP on a tiny Mixtral, and native DeepSpeed MoE.

Theory. The truth is read out of the live engines, as for dense models: fragments of the flat
partitions at the optimizer's own offsets. An expert's name is local to its expert-parallel (EP)
rank, so fragments of experts are joined EP rank by EP rank, and the EP ranks by what each module
says of itself: fused experts one after the other, native ones under their global number.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import groups
from torch import distributed, nn

from scripts.deepspeed_lab.engine import MegatronGrid, batch
from scripts.deepspeed_lab.models import VOCAB
from scripts.deepspeed_lab.native_mixture import (
    EXPERTS,
    NativeMixture,
    is_cut,
    let_gloo_gather_tokens,
)
from scripts.deepspeed_lab.recipe import BASE_CONFIG, GLOBAL_BATCH, TAG
from scripts.deepspeed_lab.results import Mixed, States
from scripts.deepspeed_lab.states import _fragments as fragments_of
from scripts.deepspeed_lab.topologies import MixRecipe

_NATIVE = "deepspeed_moe.experts.deepspeed_experts."

_CUT_ATTENTION = {
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*self_attn\.(q|k|v)_proj\.weight$"], "partition_type": "column"},
            {"patterns": [r".*self_attn\.o_proj\.weight$"], "partition_type": "row"},
        ],
    }
}


# ------------------------------------------------------------------------------------- the model


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=1,
        vocab_size=VOCAB,
        intermediate_size=10,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        attn_implementation="eager",
        use_cache=False,
    )
    model: nn.Module = MixtralForCausalLM(config)
    return model


def _engine(recipe: MixRecipe, seed: int, *, load_universal: bool = False) -> Any:
    torch.manual_seed(seed)
    config: dict[str, Any] = {
        **BASE_CONFIG,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // recipe.dp,
        "zero_optimization": {
            "stage": recipe.stage,
            "round_robin_gradients": recipe.round_robin,
        },
        "use_data_before_expert_parallelism": recipe.data_first,
    }
    if recipe.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if load_universal:
        config["checkpoint"] = {"load_universal": True}
    arguments: dict[str, Any] = {}
    if recipe.native:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        let_gloo_gather_tokens()
        mpu = MegatronGrid(recipe.tp) if recipe.tp > 1 else None
        model: nn.Module = NativeMixture(recipe, mpu)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        arguments["mpu"] = mpu
        arguments["model_parameters"] = split_params_into_different_moe_groups_for_optimizer(
            {"params": trained, "name": "parameters"}
        )
    else:
        model = _mixtral()
        if recipe.frozen:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not name.endswith("experts.down_proj"))
            arguments["model_parameters"] = [p for p in model.parameters() if p.requires_grad]
        config["expert_parallel"] = {
            "enabled": True,
            "autoep_size": recipe.ep,
            "use_grouped_mm": False,
            "preset_model": "mixtral",
        }
        if recipe.tp > 1:
            config["tensor_parallel"] = {"autotp_size": recipe.tp, **_CUT_ATTENTION}
    engine, *_ = deepspeed.initialize(model=model, config=config, **arguments)
    return engine


def _run(engine: Any, recipe: MixRecipe, steps: range) -> list[float]:
    rank = distributed.get_rank() // recipe.tp
    losses = []
    for step in steps:
        input_ids, labels = batch(step, rank, recipe.dp)
        output = engine(input_ids=input_ids, labels=labels)
        loss = output if torch.is_tensor(output) else output.loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().reshape(1).clone()
        distributed.all_reduce(mean)
        losses.append(mean.item() / recipe.world)
    return losses


# -------------------------------------------------------------------------------------- the jobs


def train_mixture(recipe: MixRecipe, folder: Path, seed: int) -> Mixed:
    """Train three steps, save, and go on for three."""
    engine = _engine(recipe, seed)
    _run(engine, recipe, range(3))
    return _saved(engine, recipe, folder)


def resume_mixture(
    recipe: MixRecipe,
    folder: Path,
    tag: str | None,
    seed: int,
    options: dict[str, bool],
    save: Path | None,
) -> Mixed:
    """Load a universal folder, save what was loaded if asked, and go on for three steps.

    ``options`` are of ``load_checkpoint``: ``load_module_only``, ``load_optimizer_states``.
    """
    engine = _engine(recipe, seed, load_universal=True)
    distributed.barrier()
    loaded, _ = engine.load_checkpoint(str(folder), tag=tag, **options)
    if loaded is None:
        raise RuntimeError(f"DeepSpeed found nothing to load in {folder}/{tag}")
    return _saved(engine, recipe, save)


def _saved(engine: Any, recipe: MixRecipe, folder: Path | None) -> Mixed:
    full, weights = _held(engine, recipe)
    if folder is not None:
        engine.save_checkpoint(str(folder), tag=TAG, client_state={"iteration": 3})
    distributed.barrier()
    return Mixed(full, weights, _run(engine, recipe, range(3, 6)))


# ------------------------------------------------------------------------------ what is held


@dataclass(frozen=True, slots=True)
class _Report:
    tp: int
    cut: bool
    """Whether tensor ranks have parts of native experts."""
    ep_ranks: dict[str, tuple[int, int]]
    """Prefix of the names of experts -> EP rank of this process, experts on it."""
    shapes: dict[str, tuple[int, ...]]
    runs: list[tuple[str, str, int, torch.Tensor]]


def _held(engine: Any, recipe: MixRecipe) -> tuple[States, dict[str, torch.Tensor]]:
    parameters = dict(engine.module.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    runs = [(f.name, f.state, f.start, f.values) for f in fragments_of(engine.optimizer, names)]
    for name, parameter in parameters.items():
        partitioned = [parameter] if hasattr(parameter, "ds_id") else []
        with deepspeed.zero.GatheredParameters(partitioned):
            runs.append((name, "weight", 0, parameter.detach().float().flatten().clone()))
    mine = _Report(
        tp=distributed.get_rank() % recipe.tp,
        cut=recipe.cut_experts,
        ep_ranks=_ep_ranks(engine.module),
        shapes={name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in parameters.items()},
        runs=runs,
    )
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, mine)
    states = _join(everyone)
    weights = {name: held.pop("weight") for name, held in states.items()}
    return states, weights


def _ep_ranks(module: nn.Module) -> dict[str, tuple[int, int]]:
    found = {}
    for name, child in module.named_modules():
        if type(child).__name__ == "AutoEPMoELayer":
            found[f"{name}.experts."] = (child.ep_rank, child.num_local_experts)
        elif type(child).__name__ == "MoE":
            rank = groups._get_expert_parallel_rank(child.expert_group_name)
            found[f"{name}.{_NATIVE}"] = (rank, child.num_local_experts)
    return found


def _join(reports: list[_Report]) -> States:
    shards: dict[tuple[str, str], dict[tuple[int, int], torch.Tensor]] = defaultdict(dict)
    for one in reports:
        for name, state, start, values in one.runs:
            known, key = _key(name, one)
            shape = one.shapes[name]
            shard = shards[known, state].setdefault(key, torch.full(shape, torch.nan))
            flat = shard.view(-1)[start : start + values.numel()]
            if not bool((flat.isnan() | (flat == values)).all()):
                raise RuntimeError(f"{name}/{state}: replicas differ")
            flat.copy_(values)
    full: States = defaultdict(dict)
    for (name, state), held in shards.items():
        parts = [held[key] for key in sorted(held)]
        if any(bool(part.isnan().any()) for part in parts):
            raise RuntimeError(f"{name}/{state}: some elements are held by no rank")
        full[name][state] = _cat(name, parts, cut=reports[0].cut)
    return dict(full)


def _key(name: str, one: _Report) -> tuple[str, tuple[int, int]]:
    """The name that is the same on all ranks, and which shard of it this is."""
    for prefix, (ep_rank, local) in one.ep_ranks.items():
        if name.startswith(prefix) and prefix.endswith(_NATIVE):
            number, _, rest = name.removeprefix(prefix).partition(".")
            return f"{prefix}{ep_rank * local + int(number)}.{rest}", (0, one.tp if one.cut else 0)
        if name.startswith(prefix):
            return name, (ep_rank, 0)
    return name, (0, one.tp)


def _cat(name: str, parts: list[torch.Tensor], *, cut: bool) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    if is_cut(name, cut_experts=cut):
        return torch.cat(parts, 1 if name.endswith("down.weight") else 0)
    fused = ".experts." in name and _NATIVE not in name
    if fused or any(word in name for word in ("q_proj", "k_proj", "v_proj")):
        return torch.cat(parts, 0)
    if "o_proj" in name:
        return torch.cat(parts, 1)
    if not all(torch.equal(part, parts[0]) for part in parts):
        raise RuntimeError(f"{name}: replicas on tensor ranks differ")
    return parts[0]
