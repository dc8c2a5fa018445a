"""Pipelines with experts, DeepSpeed's own layers or AutoEP's: training, resuming, what they hold.

Theory. Each stage counts its layers with experts anew, and has expert-parallel groups of its own.
DeepSpeed saves such a pipeline as it saves any mixture of experts: the weights of a stage are in
its model-state file, and there are no files of layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import distributed, nn

from scripts.deepspeed_lab import mixtures
from scripts.deepspeed_lab.native_mixture import EXPERTS, WIDTH, Pair, let_gloo_gather_tokens
from scripts.deepspeed_lab.pipelines import _run, piped, settings
from scripts.deepspeed_lab.recipe import TAG
from scripts.deepspeed_lab.results import Mixed
from scripts.deepspeed_lab.topologies import MixRecipe, PipeRecipe


class ExpertBlock(nn.Module):
    """A norm, and experts beside the residual; their balance is not trained."""

    def __init__(self, ep: int, *, experts: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.norm = nn.LayerNorm(WIDTH)
        self.moe = MoE(
            WIDTH,
            Pair(),
            num_experts=experts,
            ep_size=ep,
            capacity_factor=4.0,
            min_capacity=0,
            use_rts=False,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        y: torch.Tensor = self.moe(self.norm(x))[0]
        return x + y


class MixtralBlock(nn.Module):
    """A norm, and a mixture of experts of transformers beside the residual, which AutoEP finds."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = MixtralSparseMoeBlock(config)
        for parameter in self.mlp.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        y = self.mlp(self.norm(x))
        total: torch.Tensor = x + (y[0] if isinstance(y, tuple) else y)
        return total


def _mixtral() -> Any:
    from transformers import MixtralConfig

    config = MixtralConfig(
        hidden_size=WIDTH, intermediate_size=10, num_local_experts=EXPERTS, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    return config


def _engine(recipe: PipeRecipe, seed: int) -> Any:
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from deepspeed.pipe import LayerSpec

    torch.manual_seed(seed)
    let_gloo_gather_tokens()
    mixtral = _mixtral() if recipe.auto else None
    first, second, last = (
        LayerSpec(MixtralBlock, mixtral)
        if recipe.auto
        else LayerSpec(ExpertBlock, recipe.ep, experts=experts)
        for experts in (EXPERTS, 2 * EXPERTS, EXPERTS)
    )
    model = piped([first, second, LayerSpec(nn.Linear, WIDTH, WIDTH), last], recipe, seed)
    if recipe.tp > 1:
        model.universal_checkpoint_info = {
            "universal_checkpoint_version": 0.2,
            "tp_replicated_parameter_patterns": [r".*"],
        }
    config = settings(recipe)
    arguments: dict[str, Any] = {}
    if recipe.auto:
        model.config = mixtral
        config["expert_parallel"] = {
            "enabled": True,
            "autoep_size": recipe.ep,
            "use_grouped_mm": False,
            "preset_model": "mixtral",
            "moe_layer_pattern": r"\d+\.mlp",
        }
    else:
        arguments["model_parameters"] = split_params_into_different_moe_groups_for_optimizer(
            {"params": list(model.parameters()), "name": "parameters"}
        )
    engine, *_ = deepspeed.initialize(model=model, config=config, **arguments)
    return engine


def train_expert_pipeline(recipe: PipeRecipe, folder: Path, seed: int) -> Mixed:
    """Train three steps, save, and go on for three."""
    engine = _engine(recipe, seed)
    _run(engine, recipe, range(3))
    full, weights = mixtures._held(engine, _mixture(recipe))
    engine.save_checkpoint(str(folder), tag=TAG, client_state={"iteration": 3})
    distributed.barrier()
    return Mixed(full, weights, _run(engine, recipe, range(3, 6)))


def resume_expert_pipeline_natively(recipe: PipeRecipe, folder: Path, seed: int) -> Mixed:
    """Load what ``latest`` names, read what is then held, and go on for three steps."""
    engine = _engine(recipe, seed)
    distributed.barrier()
    loaded, _ = engine.load_checkpoint(str(folder))
    if loaded is None:
        raise RuntimeError(f"DeepSpeed found nothing to load in {folder}")
    full, weights = mixtures._held(engine, _mixture(recipe))
    return Mixed(full, weights, _run(engine, recipe, range(3, 6)))


def _mixture(recipe: PipeRecipe) -> MixRecipe:
    return MixRecipe(recipe.world, recipe.ep, recipe.tp, native=not recipe.auto)
