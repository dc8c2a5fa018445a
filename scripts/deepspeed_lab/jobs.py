"""The jobs: functions that all workers of a job run together, and that rank 0 answers for."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from torch import distributed

from scripts.deepspeed_lab.engine import make_engine, run_steps
from scripts.deepspeed_lab.expert_pipelines import (
    resume_expert_pipeline_natively,
    train_expert_pipeline,
)
from scripts.deepspeed_lab.fsdp import resume_fsdp, train_fsdp
from scripts.deepspeed_lab.handover import hand_over, take_from_disk
from scripts.deepspeed_lab.mixtures import resume_mixture, train_mixture
from scripts.deepspeed_lab.native_resumes import (
    resume_mixture_natively,
    resume_pipeline_natively,
)
from scripts.deepspeed_lab.pipelines import resume_pipeline, train_pipeline
from scripts.deepspeed_lab.recipe import TAG, Recipe
from scripts.deepspeed_lab.results import Resumed, Trained
from scripts.deepspeed_lab.states import held_by_all, probe_layout
from scripts.deepspeed_lab.trainer import run_trainer

__all__ = [
    "convert_with_deepspeed",
    "hand_over",
    "hang",
    "resume",
    "resume_expert_pipeline_natively",
    "resume_fsdp",
    "resume_mixture",
    "resume_mixture_natively",
    "resume_pipeline",
    "resume_pipeline_natively",
    "run_trainer",
    "save_large",
    "take_from_disk",
    "train",
    "train_expert_pipeline",
    "train_fsdp",
    "train_mixture",
    "train_pipeline",
]


def train(recipe: Recipe, folder: Path, seed: int) -> Trained:
    """Train three steps, save under ``folder``, read the truth, train three more."""
    layout = probe_layout(recipe)
    engine = make_engine(recipe, seed=seed)
    before = run_steps(engine, recipe, range(3))
    held = held_by_all(engine, recipe, layout)
    client: dict[str, Any] = {"iteration": 3}
    if recipe.hand_cut:
        client["universal_checkpoint_info"] = engine.module.universal_checkpoint_info()
    engine.save_checkpoint(
        str(folder),
        tag=TAG,
        client_state=client,
        exclude_frozen_parameters=recipe.excludes_frozen,
    )
    distributed.barrier()
    return Trained(
        held=held,
        losses_before=before,
        next_losses=run_steps(engine, recipe, range(3, 6)),
        engine_optimizer=type(engine.optimizer).__name__,
        versions={"deepspeed_version": deepspeed.__version__, "torch_version": torch.__version__},
    )


def resume(
    recipe: Recipe,
    folder: Path,
    tag: str | None,
    seed: int,
    universal: bool,  # noqa: FBT001
) -> Resumed:
    """Load ``folder/tag`` into a fresh engine, read what it then holds, train three steps."""
    layout = probe_layout(recipe)
    engine = make_engine(recipe, seed=seed, load_universal=universal)
    distributed.barrier()
    loaded, client_state = engine.load_checkpoint(
        str(folder), tag=tag, load_module_strict=not recipe.excludes_frozen
    )
    if loaded is None:
        raise RuntimeError(f"DeepSpeed found nothing to load in {folder}/{tag}")
    held, global_steps = held_by_all(engine, recipe, layout), engine.global_steps
    return Resumed(
        held=held,
        losses=run_steps(engine, recipe, range(3, 6)),
        global_steps=global_steps,
        client_state={key: client_state[key] for key in ("iteration",) if key in client_state},
    )


def convert_with_deepspeed(source: Path, destination: Path, inject: bool, strict: bool) -> None:  # noqa: FBT001
    """Run DeepSpeed's own converter, in this process."""
    from deepspeed.checkpoint.ds_to_universal import main

    main(
        SimpleNamespace(
            input_folder=str(source),
            output_folder=str(destination),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=strict,
            inject_missing_state=inject,
        )
    )


def weights_by_zero_to_fp32(folder: Path) -> dict[str, torch.Tensor]:
    """Gather the weights of a checkpoint as ``zero_to_fp32.py`` does."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    return {name: tensor.clone() for name, tensor in found.items()}


def hang() -> None:
    """Never answer; the watchdog must end it."""
    while True:
        time.sleep(1)


def save_large(recipe: Recipe, folder: Path) -> None:
    """Train one step and save, for the bench: nothing is gathered, so any size will do."""
    engine = make_engine(recipe, seed=0)
    run_steps(engine, recipe, range(1))
    engine.save_checkpoint(str(folder), tag=TAG)
