"""``transformers.Trainer`` over DeepSpeed: the run that most checkpoint folders come from.

Theory. The trainer saves a folder of its own, ``checkpoint-3``, with DeepSpeed's tag folder inside,
and goes on from one by ``train(resume_from_checkpoint=...)``. Nothing of it is replaced here: its
configuration says ``auto`` where people let it, its scheduler and sampler are its own. What the
engines hold is read by a callback, when a folder was saved and when one has been loaded.

On a machine without GPUs accelerate finds no backend for several processes of DeepSpeed, unless the
process state is configured before (``use_configured_state``); so it is, for gloo. And bf16 is
refused without a GPU, which DeepSpeed's CPU accelerator has; that question is answered with yes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, training_args

from scripts.deepspeed_lab.models import SEQUENCE, VOCAB, llama
from scripts.deepspeed_lab.recipe import Recipe
from scripts.deepspeed_lab.results import Coached, Held
from scripts.deepspeed_lab.states import held_by_all
from scripts.deepspeed_lab.topologies import TrainerRecipe

ROWS, STEPS, SAVED = 12, 6, 3
DEEPSPEED_ADAMW = {
    "type": "AdamW",
    "params": {
        "lr": "auto",
        "betas": "auto",
        "eps": "auto",
        "weight_decay": "auto",
        "torch_adam": True,
    },
}


def run_trainer(recipe: TrainerRecipe, folder: Path, seed: int, resume: Path | None) -> Coached:
    """Train six steps into ``folder``, saving every third, or go on from ``resume``."""
    torch.manual_seed(seed)
    arguments = _arguments(recipe, folder)
    trainer = Trainer(model=llama(layers=2), args=arguments, train_dataset=_rows())
    witness = _Witness(trainer, recipe, resumes=resume is not None)
    trainer.add_callback(witness)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Coached(
        held=witness.held[0],
        losses=[entry["loss"] for entry in logs],
        rates=[entry["learning_rate"] for entry in logs],
        epochs=[entry["epoch"] for entry in logs],
    )


class _Witness(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Reads what the engines hold: after loading, or when the first folder was saved."""

    def __init__(self, trainer: Any, recipe: TrainerRecipe, *, resumes: bool) -> None:
        self.trainer, self.resumes = trainer, resumes
        self.recipe = Recipe(model="llama", world=recipe.world, stage=recipe.stage)
        self.held: list[Held] = []

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Look, where a folder has just been loaded."""
        if self.resumes:
            self._look()

    def on_save(self, *_: object, **__: object) -> None:
        """Look, where a folder has just been saved."""
        if not self.resumes and not self.held:
            self._look()

    def _look(self) -> None:
        self.held.append(held_by_all(self.trainer.deepspeed, self.recipe, None))


def _arguments(recipe: TrainerRecipe, folder: Path) -> Any:
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    if recipe.dtype == "bf16":
        training_args.is_torch_bf16_gpu_available = lambda: True
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS // recipe.world,
        max_steps=STEPS,
        learning_rate=1e-2,
        weight_decay=0.1,
        warmup_steps=2,
        lr_scheduler_type="cosine",
        optim="adamw_torch",
        save_strategy="steps",
        save_steps=SAVED,
        logging_steps=1,
        deepspeed=_configuration(recipe),
        bf16=recipe.dtype == "bf16",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to=[],
        accelerator_config={"use_configured_state": True},
    )


def _configuration(recipe: TrainerRecipe) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": recipe.stage,
            "stage3_gather_16bit_weights_on_model_save": recipe.stage == 3,
        },
    }
    if recipe.trainers_optimizer:
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    else:
        config["optimizer"] = DEEPSPEED_ADAMW
    return config


def _rows() -> list[dict[str, torch.Tensor]]:
    """Five steps an epoch: the run that was saved and goes on comes to the end of one."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, VOCAB, (5 * ROWS, SEQUENCE), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]
