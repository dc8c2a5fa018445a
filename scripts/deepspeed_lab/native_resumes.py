"""Jobs that load native checkpoints of pipelines and mixtures by DeepSpeed's ordinary loader."""

from __future__ import annotations

from pathlib import Path

from torch import distributed

from scripts.deepspeed_lab import mixtures, pipelines
from scripts.deepspeed_lab.results import Mixed, Piped
from scripts.deepspeed_lab.topologies import MixRecipe, PipeRecipe


def resume_mixture_natively(recipe: MixRecipe, folder: Path, seed: int) -> Mixed:
    """Load what ``latest`` names, read what is then held, and go on for three steps."""
    engine = mixtures._engine(recipe, seed)
    distributed.barrier()
    loaded, _ = engine.load_checkpoint(str(folder))
    if loaded is None:
        raise RuntimeError(f"DeepSpeed found nothing to load in {folder}")
    return mixtures._saved(engine, recipe, None)


def resume_pipeline_natively(recipe: PipeRecipe, folder: Path, seed: int) -> Piped:
    """Load what ``latest`` names, read what is then held, and go on for three steps."""
    engine = pipelines._engine(recipe, seed, load_universal=False)
    distributed.barrier()
    loaded, _ = engine.load_checkpoint(str(folder))
    if loaded is None:
        raise RuntimeError(f"DeepSpeed found nothing to load in {folder}")
    full, untrained = pipelines._held(engine, recipe)
    return Piped(full, untrained, pipelines._run(engine, recipe, range(3, 6)))
