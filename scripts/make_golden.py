"""Make tests/golden and examples with real DeepSpeed: ``python -m scripts.make_golden [NAME ...]``.

Each golden case is a folder with

``ckpt/``
    the checkpoint as DeepSpeed wrote it, ``latest`` included;
``truth.pt``
    full logical tensors of every state, read out of the live engines (keys: ``full``, ``frozen``,
    ``frozen_by_tp``, ``buffers``, ``drift``, ``opt_steps``, ``param_groups``);
``topology.json``
    the recipe, the losses of steps 0 to 2, and ``next_losses``: those of steps 3 to 5.

The example is one more checkpoint, alone.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.deepspeed_lab.client import ROOT, Lab
from scripts.deepspeed_lab.recipe import Recipe

if TYPE_CHECKING:
    from scripts.deepspeed_lab.results import Trained

SEED = 42
GOLDEN = ROOT / "tests" / "golden"
EXAMPLE = ROOT / "examples" / "llama_tp2dp2_zero1"

ODD = Recipe(model="odd", world=2, stage=1)
LLAMA = Recipe(model="llama", world=4, tp=2, stage=1)
UNEVEN = {"heads": 6, "kv": 3, "inter": 21}
SGD = ("SGD", {"lr": 0.1, "momentum": 0.9})
OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}

CASES: dict[str, Recipe] = {
    "odd_z0_dp2_fp32": replace(ODD, stage=0),
    "odd_z0_dp2_bf16": replace(ODD, stage=0, dtype="bf16"),
    "odd_z1_dp2_fp32": ODD,
    "odd_z1_dp2_unused": replace(ODD, model_args={"unused": True}),
    "odd_z1_dp2_sgdm": replace(ODD, optimizer=SGD),
    "odd_z1_dp2_bf16opt": replace(
        ODD, dtype="bf16", config={"data_types": {"grad_accum_dtype": "fp32"}}
    ),
    "odd_z2_dp2_bf16": replace(ODD, stage=2, dtype="bf16"),
    "odd_z2_dp2_round_robin": replace(ODD, stage=2, zero={"round_robin_gradients": True}),
    "odd_z3_dp2_one_group": replace(ODD, stage=3, two_groups=False),
    "odd_z3_dp2_sub_groups": replace(ODD, stage=3, zero={"sub_group_size": 200}),
    "odd_z3_dp4_bf16": replace(ODD, stage=3, world=4, dtype="bf16"),
    "odd_z3_dp2_offload": replace(ODD, stage=3, dtype="bf16", zero=OFFLOAD),
    "odd_z3_dp2_sgdm": replace(ODD, stage=3, optimizer=SGD),
    "llama_z0_tp2_bf16": replace(LLAMA, stage=0, world=2, dtype="bf16"),
    "llama_z1_tp2dp2_fp32": LLAMA,
    "llama_z2_tp2dp2_bf16": replace(LLAMA, stage=2, dtype="bf16"),
    "llama_z3_tp2dp2_fp32": replace(LLAMA, stage=3, two_groups=False),
    "llama_z1_tp2_uneven": replace(LLAMA, world=2, model_args=UNEVEN),
    "llama_z1_tp4_empty_shards": replace(LLAMA, tp=4),
    "llama_z1_tp2_tied_bias": replace(LLAMA, world=2, model_args={"tie": True, "bias": True}),
    "llama_z1_tp2_frozen": replace(LLAMA, world=2, freeze="embed_tokens|q_proj"),
    "llama_z3_tp2dp2_frozen": replace(
        LLAMA, stage=3, two_groups=False, freeze="embed_tokens|q_proj"
    ),
}

EXAMPLE_RECIPE = replace(LLAMA, dtype="bf16", model_args={"layers": 2, "inter": 14})
"""So wide that a row-parallel weight, layers.0.self_attn.o_proj, lies across two partitions."""


def main(names: list[str]) -> None:
    """Make the named cases, or all of them and the example."""
    with Lab() as lab:
        for name in names or [*CASES, EXAMPLE.name]:
            if name == EXAMPLE.name:
                make_example(lab)
            else:
                make_case(lab, name, CASES[name])


def make_case(lab: Lab, name: str, recipe: Recipe) -> None:
    """Train one case and keep it."""
    case = GOLDEN / name
    shutil.rmtree(case, ignore_errors=True)
    trained = train(lab, recipe, case / "ckpt")
    save_truth(trained, case / "truth.pt")
    topology: dict[str, Any] = {
        "name": name,
        **recipe.to_topology(),
        **trained.versions,
        "losses_before": trained.losses_before,
        "next_losses": trained.next_losses,
        "engine_optimizer": trained.engine_optimizer,
    }
    (case / "topology.json").write_text(json.dumps(topology, indent=1) + "\n")
    print(f"{name}: {size(case):,} bytes, drift: {trained.held.drift or 'none'}")


def make_example(lab: Lab) -> None:
    """Train the example; keep the text that stands beside it."""
    for old in EXAMPLE.glob("step*"):
        shutil.rmtree(old)
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch) / "ckpt"
        train(lab, EXAMPLE_RECIPE, fresh)
        shutil.copytree(fresh, EXAMPLE, dirs_exist_ok=True)
    print(f"{EXAMPLE.name}: {size(EXAMPLE):,} bytes")


def train(lab: Lab, recipe: Recipe, folder: Path) -> Trained:
    """Train and save, without the helper scripts that DeepSpeed leaves beside a checkpoint."""
    trained: Trained = lab.run("train", recipe, folder, SEED, world=recipe.world)
    for script in folder.glob("*.py"):
        script.unlink()
    return trained


def save_truth(trained: Trained, file: Path) -> None:
    """Keep what the engines held."""
    import torch

    held = trained.held
    truth = {
        "full": held.full,
        "frozen": held.frozen,
        "frozen_by_tp": held.frozen_by_tp,
        "buffers": held.buffers,
        "drift": held.drift,
        "opt_steps": held.steps,
        "param_groups": held.groups,
    }
    torch.save(truth, file)


def size(folder: Path) -> int:
    """Return the bytes of all files under the folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
    main(sys.argv[1:])
