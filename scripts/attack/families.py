"""Honest checkpoints of every kind, each with the same one of another run and of a later step.

The other run and the later step are made of the honest files by torch alone: every floating-point
tensor doubled, in all files alike, which keeps every relation that real files have (a 16-bit weight
is still its master rounded); for the later step every counter and step two further as well.
"""

from __future__ import annotations

import os
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.attack.edits import load, places, save
from scripts.attack.room import link_tree

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
COUNTERS = {"global_steps", "global_samples", "step", "last_batch_iteration", "iteration"}
UNIVERSAL: tuple[str, ...] = ("--to", "universal")


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of checkpoint.

    Parameters
    ----------
    name
        What the table calls it.
    cases
        Where an honest one lies; the first that exists counts.
    made_by
        Options of the conversion that makes it of that case, where it is not the case itself.
    bare
        Whether the manifest is taken away.
    targets
        What it is converted to, mostly the first.
    """

    name: str
    cases: tuple[str, ...]
    made_by: tuple[str, ...] = ()
    bare: bool = False
    targets: tuple[tuple[str, ...], ...] = (UNIVERSAL,)

    @property
    def inner(self) -> str:
        """The folder in which it lies, where no pointer file leads there."""
        return "x" if self.made_by and self.made_by != UNIVERSAL else ""

    def case(self) -> Path | None:
        """The folder of the case, or None where it is not there."""
        shared = os.environ.get("RESHARD_CHECKPOINTS", str(ROOT / "../shared/checkpoints"))
        for case in self.cases:
            for place in (Path(shared), Path(shared).parent, GOLDEN):
                if (place / case / "ckpt").is_dir():
                    return place / case
        return None


def _native(stage: int, dp: int) -> tuple[str, ...]:
    return ("--to", "deepspeed", "--stage", str(stage), "--dp", str(dp))


FAMILIES = (
    Family("ZeRO-0", ("plain_z0_dp2_fp32", "odd_z0_dp2_fp32")),
    Family("ZeRO-1", ("plain_z1_dp2_bf16", "odd_z1_dp2_fp32"), targets=(UNIVERSAL, _native(3, 3))),
    Family("ZeRO-2", ("llama_z2_dp2_fp32", "odd_z2_dp2_bf16"), targets=(UNIVERSAL, _native(1, 1))),
    Family("ZeRO-3", ("plain_z3_dp2_bf16", "odd_z3_dp4_bf16"), targets=(UNIVERSAL, _native(1, 2))),
    Family("ZeRO-3, sub-groups", ("plain_subgroup_z3_dp2", "odd_z3_dp2_sub_groups")),
    Family("ZeRO-3, scheduler", ("plain_sched_z3_dp2", "odd_z3_dp2_one_group")),
    Family("AutoTP, ZeRO-1", ("llama_tp2dp2_z1_bf16", "llama_z1_tp2dp2_fp32")),
    Family("AutoTP, ZeRO-3", ("llama_tp2dp2_z3_fp32", "llama_z3_tp2dp2_fp32")),
    Family("TP by patterns", ("megatron_tp2dp2_z1_fp32",)),
    Family("pipeline", ("pipe_pp2dp2_z1_bf16",)),
    Family("pipeline, tied", ("pipe_pp2dp1_tied_z1_fp32",)),
    Family("AutoEP, ZeRO-1", ("mixtral_ep2_z1_fp32",)),
    Family("AutoEP, ZeRO-3", ("mixtral_ep2_z3_fp32",)),
    Family("native MoE", ("native_moe_ep2_z1_fp32",)),
    Family("frozen", ("llama_tp2_frozen_z1_fp32", "llama_z1_tp2_frozen")),
    Family("tied", ("llama_tp2_tied_z1_fp32", "llama_z1_tp2_tied_bias")),
    Family("SGD", ("plain_sgdm_z1_dp2", "odd_z1_dp2_sgdm")),
    Family("universal", ("plain_z1_dp2_fp32", "odd_z1_dp2_fp32"), UNIVERSAL),
    Family("universal, bare", ("plain_z3_dp2_fp32", "odd_z3_dp2_one_group"), UNIVERSAL, bare=True),
    Family("DCP", ("dcp/fsdp2tp2",)),
    Family("DCP, written", ("plain_z1_dp2_bf16", "odd_z1_dp2_fp32"), ("--to", "dcp")),
    Family(
        "safetensors",
        ("plain_z1_dp2_fp32", "odd_z1_dp2_fp32"),
        ("--to", "safetensors", "--max-shard-size", "3kB"),
        bare=True,
        targets=(("--to", "safetensors"),),
    ),
    Family(
        "safetensors, manifest",
        ("llama_z3_dp2_fp32", "odd_z3_dp2_one_group"),
        ("--to", "safetensors"),
        targets=(("--to", "safetensors"),),
    ),
)


@dataclass(frozen=True, slots=True)
class Honest:
    """A family that lies ready."""

    family: Family
    folder: Path
    others: dict[str, Path]
    results: tuple[Path, ...]
    """What each of the targets is made into, from the honest folder."""


def make_other(source: Path, destination: Path, *, later: bool) -> None:
    """Make the checkpoint of another run, or of a later step, of the same kind."""
    shutil.copytree(source, destination)
    for path in sorted(destination.rglob("*.pt")):
        root = load(path)
        _double(root)
        if later:
            _advance(root)
        save(path, root)


def _double(root: Any) -> None:
    done = set()
    for place in places(root):
        tensor = place.value
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            continue
        storage = tensor.untyped_storage()
        if place.key == "step" or storage.data_ptr() in done or not storage.size():
            continue
        done.add(storage.data_ptr())
        whole = torch.empty(0, dtype=tensor.dtype).set_(storage)
        whole.mul_(2)


def _advance(root: Any) -> None:
    for place in places(root):
        if place.key in COUNTERS and isinstance(place.value, int | float | torch.Tensor):
            place.put(place.value + 2)


def differences(result: Path, honest: Path) -> list[str]:
    """Name what a result holds otherwise than the honest one; bytes first, then values."""
    names = {
        p.relative_to(t).as_posix() for t in (result, honest) for p in t.rglob("*.*") if p.is_file()
    }
    names = {name for name in names if not name.endswith("reshard_manifest.json")}
    differing = []
    for name in sorted(names):
        mine, its = result / name, honest / name
        if not mine.is_file() or not its.is_file():
            differing.append(f"{name}: {'gone' if its.is_file() else 'new'}")
        elif mine.read_bytes() != its.read_bytes():
            differing += [f"{name}{inner}" for inner in _inner(mine, its)]
    return differing


def _inner(mine: Path, its: Path) -> list[str]:
    if mine.suffix != ".pt":
        return [""]
    values = [
        {str(place): place.value for place in places({"": load(path)})} for path in (mine, its)
    ]
    return [
        f":{name}"
        for name in sorted({*values[0], *values[1]})
        if not _same(values[0].get(name), values[1].get(name))
    ]


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return torch.equal(
            one.contiguous().flatten().view(torch.uint8) if one.dim() else one.reshape(1),
            other.contiguous().flatten().view(torch.uint8) if other.dim() else other.reshape(1),
        )
    if isinstance(one, dict | list):
        return len(one) == len(other)  # what is inside has places of its own
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)  # NaN is NaN, -0.0 is not 0.0
    if isinstance(one, int | str | bytes | tuple | torch.Size | None):
        return bool(one == other)
    return True


def contradicts_truth(universal: Path, case: Path) -> list[str]:
    """Hold an honest universal folder against what the live engines held."""
    truth = torch.load(case / "truth.pt", weights_only=False)
    if "full" not in truth:
        return []
    wrong = []
    for name, states in truth["full"].items():
        if ".deepspeed_experts." in name:
            continue  # numbered by expert-parallel rank there: tests/formats/test_experts.py
        for state, tensor in states.items():
            file = universal / "zero" / name / f"{state}.pt"
            found = load(file)["param"].float() if file.exists() else None
            if found is None or not torch.equal(found, tensor.float()):
                wrong.append(f"{name}/{state}")
    return wrong


def prepare(family: Family, cache: Path, convert: Any) -> Honest | None:
    """Lay a family out: honest, of another run, of a later step, and what they give."""
    case = family.case()
    if case is None:
        return None
    home = cache / family.name.replace(" ", "_").replace(",", "")
    folders = {"honest": home / "honest", "run": home / "run", "step": home / "step"}
    if not home.exists():
        for which, folder in folders.items():
            native = folder if not family.made_by else home / f"native_{which}"
            if which == "honest":
                link_tree(case / "ckpt", native)
            else:
                make_other(case / "ckpt", native, later=which == "step")
            if family.made_by:
                convert(native, folder / "x", *family.made_by)
                if family.bare:
                    (folder / "x" / "reshard_manifest.json").unlink()
        for at, target in enumerate(family.targets):
            convert(folders["honest"] / family.inner, home / f"result{at}" / "x", *target)
        if family.targets[0] == UNIVERSAL and not family.made_by:
            wrong = contradicts_truth(home / "result0" / "x", case)
            if wrong:
                raise RuntimeError(f"{family.name}: the honest folder gives wrong {wrong[:3]}")
    others = {} if family.cases[0].startswith("dcp/") else {k: folders[k] for k in ("run", "step")}
    results = tuple(home / f"result{at}" for at in range(len(family.targets)))
    return Honest(family, folders["honest"], others, results)
