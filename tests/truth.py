"""Real checkpoints and, for each, what it truly holds: the cases that tests run over.

    @pytest.mark.parametrize("case", by_name(dense(cases())))
    def test_every_state_is_exact(case: Case) -> None:
        truth = case.truth()

Cases come from three places: ``tests/golden`` (always there), ``$RESHARD_CHECKPOINTS`` (by default
``../shared/checkpoints``) and the folder ``checkpoints_old`` beside that, with checkpoints of older
DeepSpeed versions. The last two may be absent: then there are fewer cases, and no failure.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
CHECKPOINTS = Path(os.environ.get("RESHARD_CHECKPOINTS", ROOT / "../shared/checkpoints")).resolve()
OLD_CHECKPOINTS = CHECKPOINTS.with_name("checkpoints_old")
EXAMPLE = ROOT / "examples" / "llama_tp2dp2_zero1"

States: TypeAlias = dict[str, dict[str, torch.Tensor]]
"""``states[parameter][state]``, full logical tensors, fp32."""


@dataclass(frozen=True, slots=True)
class Truth:
    """What the live engines held when the checkpoint was saved."""

    full: States
    """Every trained parameter: ``fp32`` and each tensor that the optimizer keeps."""
    frozen: dict[str, torch.Tensor]
    """Parameters that are not trained, whole, as fp32."""
    buffers: dict[str, torch.Tensor]
    """Buffers in their own dtype; some are not persistent, so in no file."""
    drift: list[str]
    """Where ranks that should hold the same bytes do not: ``full`` has the lowest rank's copy."""
    steps: frozenset[float]
    """Every ``step`` that the optimizer keeps, over all groups and ranks; mostly one number."""
    param_groups: list[dict[str, Any]] | None
    """The optimizer's parameter groups without their parameters; None where they are not known."""


@dataclass(frozen=True, slots=True)
class Case:
    """One real checkpoint."""

    name: str
    """``golden/…``, ``0.19.8/…`` or an older version: ``0.12.6/…``."""
    folder: Path

    @property
    def path(self) -> Path:
        """The folder that holds ``latest``."""
        return self.folder / "ckpt"

    @property
    def tag(self) -> str:
        """What ``latest`` says."""
        return (self.path / "latest").read_text().strip()

    @property
    def tag_path(self) -> Path:
        """The folder that holds the files."""
        return self.path / self.tag

    @property
    def topology(self) -> dict[str, Any]:
        """How it was trained (``topology.json``)."""
        return _topology(self.folder)

    def truth(self) -> Truth:
        """Return what it holds. Cached: treat the tensors as read-only."""
        return _truth(self.folder)

    @property
    def model(self) -> str:
        """The kind of model: ``odd``, ``llama``, ``megatron``, …."""
        return str(self.topology["model"])

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return int(self.topology["stage"])

    @property
    def world(self) -> int:
        """The number of processes."""
        return int(self.topology["world"])

    @property
    def tp(self) -> int:
        """The tensor-parallel degree."""
        return int(self.topology.get("tp", 1))

    @property
    def dtype(self) -> str:
        """What the model was trained in: ``fp32``, ``bf16`` or ``fp16``."""
        return str(self.topology.get("dtype", "fp32"))

    @property
    def groups(self) -> int:
        """The number of parameter groups."""
        return 2 if self.topology.get("two_groups", True) else 1

    @property
    def is_pipeline(self) -> bool:
        """Whether layers lie on different pipeline stages."""
        return self.model == "pipe"

    @property
    def has_experts(self) -> bool:
        """Whether there are experts, spread over ranks or not."""
        return self.model in ("native_moe", "mixtral", "qwen3moe")

    @property
    def is_zero(self) -> bool:
        """Whether there are optimizer files of ZeRO (not so at stage 0)."""
        return any(self.tag_path.glob("*zero_pp_rank_*_optim_states.pt"))

    @property
    def drifts(self) -> bool:
        """Whether ranks that should hold the same bytes hold different ones."""
        return self.tp > 1 and len(self.truth().drift) > 0

    @property
    def tp_is_described(self) -> bool:
        """Whether the files say how parameters are cut over tensor-parallel ranks.

        AutoTP says so since 0.19; the Megatron-like model has always said it itself.
        """
        return self.tp == 1 or self.version >= (0, 19) or self.model == "megatron"

    @property
    def version(self) -> tuple[int, ...]:
        """The DeepSpeed version that wrote it."""
        return tuple(map(int, self.topology.get("deepspeed_version", "0.19.8").split(".")))

    def __str__(self) -> str:
        return self.name


# ------------------------------------------------------------------------------------- selection


@functools.cache
def cases() -> tuple[Case, ...]:
    """Return every case there is, ordered by name within each place."""
    return (*_under(GOLDEN, "golden"), *_under(CHECKPOINTS, "0.19.8"), *_old_cases())


def dense(among: Iterable[Case] = ()) -> list[Case]:
    """Keep what step 1 converts: ZeRO, no experts, no pipeline, cuts described, replicas equal."""
    return [
        case
        for case in among or cases()
        if case.is_zero
        and not (case.is_pipeline or case.has_experts)
        and case.tp_is_described
        and not case.drifts
    ]


def golden() -> list[Case]:
    """Return the cases that are always there."""
    return [case for case in cases() if case.name.startswith("golden/")]


def with_experts(among: Iterable[Case] = ()) -> list[Case]:
    """Keep the cases with experts."""
    return [case for case in among or cases() if case.has_experts]


def with_pipeline(among: Iterable[Case] = ()) -> list[Case]:
    """Keep the cases with pipeline stages."""
    return [case for case in among or cases() if case.is_pipeline]


def with_undescribed_cuts(among: Iterable[Case] = ()) -> list[Case]:
    """Keep the tensor-parallel cases whose files do not say how parameters are cut."""
    return [case for case in among or cases() if not case.tp_is_described]


def with_drift(among: Iterable[Case] = ()) -> list[Case]:
    """Keep the cases whose replicas differ."""
    return [case for case in among or cases() if case.drifts]


def without_zero(among: Iterable[Case] = ()) -> list[Case]:
    """Keep the cases without optimizer files of ZeRO."""
    return [case for case in among or cases() if not case.is_zero]


def case_named(name: str) -> Case:
    """Return one case; skips the calling test when that place does not exist here."""
    found = [case for case in cases() if case.name == name]
    if found:
        return found[0]
    label, *_ = name.split("/")
    place = {"golden": GOLDEN, "0.19.8": CHECKPOINTS}.get(label, OLD_CHECKPOINTS)
    if place.is_dir():
        raise LookupError(f"no case {name} under {place}")
    pytest.skip(f"needs {place} (see RESHARD_CHECKPOINTS)")


def by_name(among: Iterable[Case]) -> list[Any]:
    """Return the cases as parameters of a test, each with its name as id."""
    return [pytest.param(case, id=case.name) for case in among]


def _under(place: Path, label: str) -> Iterator[Case]:
    for file in sorted(place.glob("*/topology.json")):
        yield Case(f"{label}/{file.parent.name}", file.parent)


def _old_cases() -> Iterator[Case]:
    for version in sorted(OLD_CHECKPOINTS.glob("[0-9]*.*")):
        yield from _under(version, version.name)


# ----------------------------------------------------------------------------------------- truth


@functools.cache
def _topology(folder: Path) -> dict[str, Any]:
    topology: dict[str, Any] = json.loads((folder / "topology.json").read_text())
    return topology


@functools.lru_cache(maxsize=16)
def _truth(folder: Path) -> Truth:
    kept = torch.load(folder / "truth.pt", weights_only=True)
    return Truth(
        full=kept["full"],
        frozen=_whole_frozen(folder, kept),
        buffers=kept["buffers"],
        drift=list(kept["drift"]),
        steps=_steps(folder, kept),
        param_groups=kept.get("param_groups"),
    )


def _steps(folder: Path, kept: dict[str, Any]) -> frozenset[float]:
    """Read the steps: ``[rank][partition]`` here, ``[rank][0][partition]`` in older ones."""
    ranks = kept.get("opt_steps")
    if ranks is None:
        keeps_none = "optim.SGD" in (_topology(folder).get("client_opt") or "")
        return frozenset() if keeps_none else frozenset({3.0})
    lists = [rank[0] if isinstance(rank, tuple) else rank for rank in ranks]
    return frozenset(step for steps in lists for step in steps)


def _whole_frozen(folder: Path, kept: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Join frozen shards by the probed ``layout.pt``; golden truth has them whole already."""
    frozen: dict[str, torch.Tensor] = dict(kept["frozen"])
    if not frozen or not (folder / "layout.pt").exists():
        return frozen
    layout = torch.load(folder / "layout.pt", weights_only=True)
    for name in frozen:
        shape = layout[0][name]["full_shape"]
        whole = torch.full((math.prod(shape),), math.nan)
        for tp, cut in layout.items():
            whole[cut[name]["index"]] = kept["frozen_by_tp"][tp][name].flatten()
        frozen[name] = whole.view(shape)
    return frozen
