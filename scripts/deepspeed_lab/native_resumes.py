"""Jobs that load native checkpoints of mixtures of experts by DeepSpeed's ordinary loader."""

from __future__ import annotations

from pathlib import Path

from torch import distributed

from scripts.deepspeed_lab import mixtures
from scripts.deepspeed_lab.results import Mixed
from scripts.deepspeed_lab.topologies import MixRecipe


def resume_mixture_natively(recipe: MixRecipe, folder: Path, seed: int) -> Mixed:
    """Load what ``latest`` names, read what is then held, and go on for three steps."""
    engine = mixtures._engine(recipe, seed)
    distributed.barrier()
    loaded, _ = engine.load_checkpoint(str(folder))
    if loaded is None:
        raise RuntimeError(f"DeepSpeed found nothing to load in {folder}")
    return mixtures._saved(engine, recipe, None)
