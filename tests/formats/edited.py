"""Real checkpoints with another ``universal_checkpoint_info``, written by torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

from reshard.execution import execute
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.deepspeed.reader import open_deepspeed
from reshard.formats.folders import resolve_folder
from reshard.formats.stated_layouts import StatedLayouts, read_stated_layouts
from reshard.formats.universal.writer import lay_out_universal
from reshard.planning import plan
from tests.truth import Case

Info: TypeAlias = dict[str, Any]

OWN = Path(__file__).parents[1] / "layouts" / "golden"
"""Real checkpoints of layouts that the llamas of ``tests/golden`` do not have."""

LLAMA = """
[layouts]
'model\\.embed_tokens\\.weight' = "replicated"
'.*norm\\.weight' = "replicated"
'.*\\.(q|k|v|gate|up)_proj\\.(weight|bias)' = "column_parallel"
'.*\\.(o|down)_proj\\.weight' = "row_parallel"
"""
"""How AutoTP cuts a Llama, but for what it does with the head and with biases."""


def own(name: str) -> Case:
    """Return one of :data:`OWN`."""
    return Case(f"layouts/{name}", OWN / name)


def with_info(case: Case, folder: Path, edit: Callable[[Info], Info | None]) -> Path:
    """Copy a checkpoint and let ``edit`` change its info; None takes the key away."""
    tag = folder / case.tag
    shutil.copytree(case.tag_path, tag)
    # An edited folder is no longer what reshard wrote, where it was that.
    (tag / "reshard_manifest.json").unlink(missing_ok=True)
    for file in model_files(tag):
        content = torch.load(file, weights_only=False)
        edited = edit(dict(content.get("universal_checkpoint_info") or {}))
        content.pop("universal_checkpoint_info", None)
        if edited is not None:
            content["universal_checkpoint_info"] = edited
        torch.save(content, file)
    return tag


def model_files(tag: Path) -> list[Path]:
    """Return the model-state files of all ranks, not those of single experts or layers."""
    return sorted([*tag.glob("mp_rank_*"), *tag.glob("zero_pp_rank_*_model_states.pt")])


def without_map(info: Info) -> Info:
    """Leave the old keys alone."""
    return {key: value for key, value in info.items() if key != "affine_map"}


def nothing(_info: Info) -> None:
    """Take the info away."""


def stated(folder: Path, text: str) -> StatedLayouts:
    """Read layouts that are written as TOML."""
    file = folder / "layouts.toml"
    file.write_text(text)
    return read_stated_layouts(file)


def opened(tag: Path, layouts: StatedLayouts | None = None) -> Checkpoint:
    """Open a checkpoint."""
    return open_deepspeed(resolve_folder(tag), layouts)


def converted(checkpoint: Checkpoint, destination: Path, *, replicas: str = "refuse") -> Path:
    """Write a checkpoint as a universal folder."""
    target = lay_out_universal(checkpoint, tag=destination.name)
    job = plan(checkpoint, target, replicas=replicas)
    execute(job, destination, workers=1, max_memory=16 << 20, fsync=False)
    return destination


def wrong_states(case: Case, universal: Path) -> list[str]:
    """Name every state that is not what the engines held."""
    wrong = []
    for name, states in case.truth().full.items():
        for state, tensor in states.items():
            file = universal / "zero" / name / f"{state}.pt"
            found = torch.load(file, weights_only=False)["param"] if file.exists() else None
            if found is None or found.shape != tensor.shape:
                wrong.append(f"{name}/{state}: {None if found is None else tuple(found.shape)}")
            elif not torch.equal(
                found.float().contiguous().view(torch.int32), tensor.contiguous().view(torch.int32)
            ):
                wrong.append(f"{name}/{state}: values")
    return wrong
