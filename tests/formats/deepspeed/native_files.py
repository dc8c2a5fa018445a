"""Native mixtures of experts as old DeepSpeed wrote them, for any version's mappings.

Theory. Before 0.19 the model-state file of a mixture of experts listed no ``param_shapes``; before
0.14.5 the mappings of expert groups were cut by the data-parallel degree. Both are written here, by
reshard's own archive writer, because the mappings are objects of a class of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reshard.formats.dtypes import DTYPES
from reshard.formats.torch_archive import FragmentAddress, NewTensor, write_archive
from tests.formats.deepspeed.mixture_files import STATES, Full, Mixture, expert_file
from tests.formats.deepspeed.mixture_files import _partition as partition

SUFFIXES = {"up.weight": (3, 2), "up.bias": (3,), "down.weight": (2, 3)}
MARK = "moe.deepspeed_moe.experts.deepspeed_experts."


@dataclass(frozen=True, slots=True)
class Native:
    """A native mixture: ``ep`` ranks with ``local`` experts each, ``edp`` replicas of each."""

    ep: int = 2
    edp: int = 2
    local: int = 2
    true_mappings: bool = True
    groups: int = 1
    """Into how many parameter groups the experts are split."""

    @property
    def dp(self) -> int:
        return self.ep * self.edp

    def full(self) -> Full:
        values: Full = {"dense.weight": _values(90, (7,))}
        for expert in range(self.ep * self.local):
            for number, (suffix, shape) in enumerate(SUFFIXES.items()):
                values[f"{MARK}{expert}.{suffix}"] = _values(10 * expert + number, shape)
        return values


def _values(number: int, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    return {state: 100.0 * number + 30.0 * i + count for i, state in enumerate(STATES)}


def write_native(native: Native, folder: Path) -> Path:
    """Write the checkpoint into ``folder``, which becomes a tag folder; return it."""
    folder.mkdir(parents=True)
    full = native.full()
    model = {
        "module": {"dense.weight": full["dense.weight"]["fp32"]},
        "global_steps": 3,
        "skipped_steps": 0,
        "dp_world_size": native.dp,
        "mp_world_size": 1,
        "num_experts": [native.ep * native.local],
    }
    _save(folder / "mp_rank_00_model_states.pt", model)
    for expert in range(native.ep * native.local):
        names = [f"{MARK}{expert}.{suffix}" for suffix in SUFFIXES]
        _save(folder / expert_file(0, expert), {name: full[name]["fp32"] for name in names})
    for rank in range(native.dp):
        kept = {"optimizer_state_dict": _body(native, rank), "ds_config": {}}
        _save(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", kept)
        _save(folder / f"expp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer": None})
    return folder


def _body(native: Native, rank: int) -> dict[str, Any]:
    full = native.full()
    ep_rank, edp_rank = Mixture(((0,),) * native.ep, edp=native.edp).place(rank)
    names = [f"{n}.{suffix}" for n in range(native.local) for suffix in SUFFIXES]
    shares = [names[start :: native.groups] for start in range(native.groups)]
    first = ep_rank * native.local
    groups = [(["dense.weight"], ["dense.weight"], native.dp, rank, native.dp)]
    for share in shares:
        known = [f"{MARK}{first + int(n.split('.')[0])}.{n.split('.', 1)[1]}" for n in share]
        said = native.edp if native.true_mappings else native.dp
        groups.append(([f"{MARK}{n}" for n in share], known, native.edp, edp_rank, said))
    masters, states, paddings, mappings = [], {}, [], []
    for number, (local, known, ranks, place, said) in enumerate(groups):
        parts = {s: partition([full[name][s] for name in known], ranks, place) for s in STATES}
        flat, own = parts["fp32"]
        masters.append(flat[: len(flat) - own])
        states[number] = {"step": 4, **{s: parts[s][0] for s in STATES[1:]}}
        paddings.append(own)
        sizes = [full[name]["fp32"].numel() for name in known]
        mappings.append(_mapping(local, sizes, ranks, place, said))
    return {
        "base_optimizer_state": {
            "state": states,
            "param_groups": [
                {"lr": 0.1, "params": [n]}
                | ({"moe": True, "name": f"ep_size_{native.ep}"} if n else {})
                for n in range(len(groups))
            ],
        },
        "single_partition_of_fp32_groups": masters,
        "zero_stage": 1,
        "group_paddings": paddings,
        "partition_count": [ranks for _, _, ranks, _, _ in groups],
        "param_slice_mappings": mappings,
    }


def _mapping(
    names: Sequence[str], sizes: Sequence[int], ranks: int, place: int, said: int
) -> dict[str, FragmentAddress]:
    """Cut by ``said`` ranks, which is wrong when ``ranks`` hold the buffer."""
    total = sum(sizes) + -sum(sizes) % (2 * ranks)
    size = total // said
    low, mapping, start = place * size, {}, 0
    for name, count in zip(names, sizes, strict=True):
        first, last = max(start, low), min(start + count, low + size)
        if first < last:
            mapping[name] = FragmentAddress.of(last - first, first - low)
        start += count
    return mapping


def _save(path: Path, content: object) -> None:
    write_archive(str(path), _stored(content))


def _stored(value: object) -> object:
    if isinstance(value, torch.Tensor):
        data = value.contiguous().numpy().tobytes()
        return NewTensor(DTYPES["float32"], tuple(value.shape), data=data)
    if isinstance(value, dict):
        return {key: _stored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_stored(item) for item in value]
    return value
