"""What is trained, and how it is spread: one value, the same for training and for resuming.

A recipe is what ``topology.json`` beside a checkpoint says. The same keys are used by our golden
data and by the checkpoints under ``$RESHARD_CHECKPOINTS``, so one reader serves both.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

GLOBAL_BATCH = 4
"""Rows of every step, over all data-parallel ranks, where a recipe does not say otherwise."""

TAG = "step3"
"""Checkpoints are saved after three steps."""

BASE_CONFIG: dict[str, Any] = {
    "gradient_accumulation_steps": 1,
    "steps_per_print": 10**9,
    "wall_clock_breakdown": False,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
"""Keys of the DeepSpeed configuration that no recipe changes."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model, a topology and a configuration.

    Examples
    --------
    >>> recipe = Recipe(model="odd", world=4, tp=2, stage=1)
    >>> recipe.dp, recipe.spread(world=2, tp=1, stage=3).dp
    (2, 2)
    """

    model: str
    world: int
    stage: int
    tp: int = 1
    dtype: str = "fp32"
    model_args: Mapping[str, Any] = field(default_factory=dict)
    two_groups: bool = True
    """Whether matrices and vectors are separate parameter groups (with and without decay)."""
    own_groups: bool = False
    """Whether DeepSpeed makes the parameter groups itself (Muon)."""
    freeze: str | None = None
    """Parameters whose name this expression finds are not trained."""
    excludes_frozen: bool = False
    """Whether they are left out of checkpoints, as adapters are saved."""
    optimizer: tuple[str, Mapping[str, Any]] | None = None
    """A class of torch.optim and its arguments, instead of the AdamW of the configuration."""
    zero: Mapping[str, Any] = field(default_factory=dict)
    """More keys of ``zero_optimization``."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """More keys of the DeepSpeed configuration."""
    models_file: Path | None = None
    """Where the model is defined; None: in :mod:`scripts.deepspeed_lab.models`."""
    rows: int = GLOBAL_BATCH
    """Rows of every step. The run is the same at every data-parallel degree that divides them."""

    @property
    def dp(self) -> int:
        """The data-parallel degree."""
        return self.world // self.tp

    @property
    def hand_cut(self) -> bool:
        """Whether the model cuts itself, Megatron's way, instead of being cut by AutoTP."""
        return self.model == "megatron"

    def spread(
        self,
        *,
        world: int | None = None,
        tp: int | None = None,
        stage: int | None = None,
        dtype: str | None = None,
        zero: Mapping[str, Any] | None = None,
    ) -> Recipe:
        """Return the same run under another topology, with none of the source's ZeRO options."""
        return replace(
            self,
            world=self.world if world is None else world,
            tp=self.tp if tp is None else tp,
            stage=self.stage if stage is None else stage,
            dtype=self.dtype if dtype is None else dtype,
            zero={} if zero is None else zero,
        )

    def deepspeed_config(self, *, load_universal: bool = False) -> dict[str, Any]:
        """Return the configuration that ``deepspeed.initialize`` takes."""
        config = copy.deepcopy({**BASE_CONFIG, **self.config})
        config["train_micro_batch_size_per_gpu"] = self.rows // self.dp
        config["zero_optimization"] = {"stage": self.stage, **self.zero}
        if self.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        if self.dtype == "fp16":
            config["fp16"] = {"enabled": True, "initial_scale_power": 8}
        if self.tp > 1 and not self.hand_cut:
            config["tensor_parallel"] = {
                **config.get("tensor_parallel", {}),
                "autotp_size": self.tp,
            }
        else:
            config.pop("tensor_parallel", None)
        if self.optimizer is not None:
            del config["optimizer"]
        if load_universal:
            config["checkpoint"] = {"load_universal": True}
        return config

    def to_topology(self) -> dict[str, Any]:
        """Return the recipe as ``topology.json`` keeps it."""
        optimizer = None
        if self.optimizer is not None:
            arguments = "".join(f", {key}={value!r}" for key, value in self.optimizer[1].items())
            optimizer = f"lambda pg: torch.optim.{self.optimizer[0]}(pg{arguments})"
        return {
            "model": self.model,
            "model_args": dict(self.model_args),
            "world": self.world,
            "dp": self.dp,
            "tp": self.tp,
            "pp": 1,
            "ep": 1,
            "stage": self.stage,
            "dtype": self.dtype,
            "two_groups": self.two_groups,
            "freeze": self.freeze,
            "client_opt": optimizer,
            "zero": dict(self.zero),
            "ds_config": self.deepspeed_config(),
        }

    @classmethod
    def from_topology(
        cls, topology: Mapping[str, Any], *, models_file: Path | None = None
    ) -> Recipe:
        """Read the recipe back from ``topology.json``."""
        varying = {"zero_optimization", "bf16", "fp16", "checkpoint"}
        batch = {"train_batch_size", "train_micro_batch_size_per_gpu"}
        config = dict(topology["ds_config"])
        return cls(
            model=topology["model"],
            world=topology["world"],
            stage=topology["stage"],
            tp=topology.get("tp", 1),
            dtype=topology.get("dtype", "fp32"),
            model_args=topology.get("model_args", {}),
            two_groups=topology.get("two_groups", True),
            own_groups=topology.get("no_mp", False),
            freeze=topology.get("freeze"),
            optimizer=_parse_optimizer(topology.get("client_opt")),
            zero=topology.get("zero", {}),
            config={key: config[key] for key in config if key not in varying | batch},
            models_file=models_file,
        )


def _parse_optimizer(text: str | None) -> tuple[str, dict[str, Any]] | None:
    """Read ``lambda pg: torch.optim.SGD(pg, lr=0.1)`` without running it."""
    if text is None:
        return None
    found = re.fullmatch(r"lambda pg: torch\.optim\.(\w+)\(pg(?:, (.*))?\)", text)
    if found is None:
        raise ValueError(f"not an optimizer of torch.optim: {text}")
    call = ast.parse(f"f({found[2] or ''})", mode="eval").body
    if not isinstance(call, ast.Call):
        raise TypeError(f"not a call: {text}")
    return found[1], {str(pair.arg): ast.literal_eval(pair.value) for pair in call.keywords}
