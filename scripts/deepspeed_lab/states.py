"""What live engines hold, as full logical tensors: the truth that files are compared with.

Theory. Every rank reports *fragments*: where a one-dimensional run of values lies in its shard of a
parameter. They are read from the optimizer's flat partitions at the offsets that the optimizer
itself uses, for each of the three optimizers DeepSpeed has (ZeRO-1/2, BF16_Optimizer, ZeRO-3);
without ZeRO every parameter is a partition of its own. Fragments of the data-parallel ranks make a
shard. Shards of the tensor-parallel ranks make the full tensor through a *probed* layout: the uncut
model is filled with ``arange``, AutoTP cuts it, and each shard then says which elements it holds.
Neither DeepSpeed's metadata nor reshard is asked.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from torch import distributed

from scripts.deepspeed_lab.engine import make_engine, tp_rank
from scripts.deepspeed_lab.models import VOCAB, build_model
from scripts.deepspeed_lab.recipe import Recipe
from scripts.deepspeed_lab.results import Held, States


@dataclass(frozen=True, slots=True)
class Fragment:
    """A run of one state of one parameter, as one rank holds it."""

    name: str
    state: str
    start: int
    """Where the run starts in the flattened shard."""
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class RankReport:
    """All that one rank says."""

    rank: int
    tp: int
    shapes: dict[str, tuple[int, ...]]
    """The shape of this rank's shard of every parameter."""
    fragments: list[Fragment]
    frozen: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    steps: list[float]
    """``step`` of every flat partition that keeps one, in the optimizer's order."""
    groups: list[dict[str, Any]]
    """The optimizer's parameter groups without their parameters."""


@dataclass(slots=True)
class TensorParallelLayout:
    """Which elements of an uncut parameter each tensor-parallel rank holds, in shard order."""

    index: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    shape: dict[str, tuple[int, ...]] = field(default_factory=dict)


# ------------------------------------------------------------------------------- on every rank


def report(engine: Any, recipe: Recipe) -> RankReport:
    """Read what this rank holds; no collective but the gathering of frozen ZeRO-3 parameters."""
    parameters = dict(engine.module.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    optimizer = engine.optimizer
    frozen = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            partitioned = [parameter] if hasattr(parameter, "ds_id") else []
            with deepspeed.zero.GatheredParameters(partitioned):
                frozen[name] = parameter.detach().float().clone()
    flats = [flat for flat, _ in _runs_of_partitions(optimizer)]
    inner = _torch_optimizer(optimizer)
    steps = [float(inner.state[flat].get("step", math.nan)) for flat in flats]
    return RankReport(
        rank=distributed.get_rank(),
        tp=tp_rank(recipe),
        shapes={name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in parameters.items()},
        fragments=list(_fragments(optimizer, names)),
        frozen=frozen,
        buffers={name: buffer.detach().clone() for name, buffer in engine.module.named_buffers()},
        steps=[step for step in steps if not math.isnan(step)],
        groups=[
            {key: value for key, value in group.items() if key != "params"}
            for group in inner.param_groups
        ],
    )


def _torch_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that ZeRO wraps, or without ZeRO the engine's own."""
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer


@dataclass(frozen=True, slots=True)
class _Run:
    """Part of a parameter: ``flat[at : at + length]`` is ``shard[start : start + length]``."""

    parameter: torch.Tensor
    start: int
    at: int
    length: int


def _fragments(optimizer: Any, names: Mapping[int, str]) -> Iterator[Fragment]:
    for flat, runs in _runs_of_partitions(optimizer):
        kept = _torch_optimizer(optimizer).state[flat]
        states = {"fp32": flat} | {
            state: value
            for state, value in kept.items()
            if torch.is_tensor(value) and value.shape == flat.shape and value.dim() > 0
        }
        for run in runs:
            for state, values in states.items():
                part = values.detach().flatten()[run.at : run.at + run.length].float().clone()
                yield Fragment(names[id(run.parameter)], state, run.start, part)


def _runs_of_partitions(optimizer: Any) -> Iterator[tuple[Any, list[_Run]]]:
    """Yield every flat fp32 partition of this rank, with what lies where in it."""
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            for member in group["params"]:
                yield member, [_Run(member, 0, 0, member.numel())]
    elif hasattr(optimizer, "fp32_groups"):  # half precision without ZeRO: a master a parameter
        for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for member, master in zip(group, masters, strict=True):
                yield master, [_Run(member, 0, 0, member.numel())]
    elif hasattr(optimizer, "fp32_partitioned_groups_flat"):
        yield from _zero3_runs(optimizer)
    elif hasattr(optimizer, "round_robin_bit16_groups"):
        for index, flat in enumerate(optimizer.single_partition_of_fp32_groups):
            members = optimizer.round_robin_bit16_groups[index]
            offsets = optimizer.round_robin_bit16_offsets[index]
            group = optimizer.real_dp_process_group[index]
            yield flat, _cut(flat, members, offsets, distributed.get_rank(group))
    else:
        for index, flat in enumerate(optimizer.fp32_groups_flat_partition):
            members = optimizer.bf16_groups[index]
            sizes = [member.numel() for member in members]
            offsets = [sum(sizes[:i]) for i in range(len(sizes))]
            group = optimizer.real_dp_process_group[index]
            yield flat, _cut(flat, members, offsets, distributed.get_rank(group))


def _cut(flat: Any, members: Sequence[Any], offsets: Sequence[int], rank: int) -> list[_Run]:
    """Return what of the group's members lies in the rank's partition."""
    low = rank * flat.numel()
    runs = []
    for member, offset in zip(members, offsets, strict=True):
        first = max(offset, low)
        length = min(offset + member.numel(), low + flat.numel()) - first
        if length > 0:
            runs.append(_Run(member, first - offset, first - low, length))
    return runs


def _zero3_runs(optimizer: Any) -> Iterator[tuple[Any, list[_Run]]]:
    for flat, members in zip(
        optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True
    ):
        runs = []
        for member in members:
            _, at, size = optimizer.grad_position[optimizer.get_param_id(member)]
            start = size * optimizer._get_param_partition_rank(member)
            length = min(size, member.ds_numel - start)
            if length > 0:
                runs.append(_Run(member, start, at, length))
        yield flat, runs


def probe_layout(recipe: Recipe) -> TensorParallelLayout | None:
    """Let AutoTP cut an ``arange`` model, all ranks together; return what each rank holds."""
    if recipe.tp == 1 or recipe.hand_cut:
        return None
    plain = Recipe(
        model=recipe.model,
        model_args=recipe.model_args,
        models_file=recipe.models_file,
        world=recipe.world,
        tp=recipe.tp,
        stage=0,
        two_groups=False,
        config=recipe.config,
    )
    model = build_model(plain, seed=1)
    layout = TensorParallelLayout()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            layout.shape[name] = tuple(parameter.shape)
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
    engine = make_engine(plain, seed=1, model=model)
    mine = {name: p.detach().flatten().long() for name, p in engine.module.named_parameters()}
    for rank, indices in _gather((tp_rank(recipe), mine)):
        layout.index |= {(name, rank): index for name, index in indices.items()}
    return layout


def _gather(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, value)
    return everyone


# ---------------------------------------------------------------------------------- assembling


def held_by_all(engine: Any, recipe: Recipe, layout: TensorParallelLayout | None) -> Held:
    """Assemble what all ranks hold, on every rank."""
    reports: list[RankReport] = _gather(report(engine, recipe))
    drift: list[str] = []
    shards = _shards(reports, drift)
    states: dict[tuple[str, str], dict[int, torch.Tensor]] = defaultdict(dict)
    for (tp, name, state), values in shards.items():
        states[name, state][tp] = values
    full: States = {name: {} for name in reports[0].shapes}
    for (name, state), by_tp in states.items():
        full[name][state] = _join(name, by_tp, recipe, layout, drift, state)
    frozen_by_tp = {one.tp: one.frozen for one in reversed(reports)}
    frozen = {
        name: _join(
            name,
            {tp: held[name] for tp, held in frozen_by_tp.items()},
            recipe,
            layout,
            drift,
            "frozen",
        )
        for name in reports[0].frozen
    }
    return Held(
        full={name: held for name, held in full.items() if held},
        frozen=frozen,
        frozen_by_tp=frozen_by_tp,
        buffers=reports[0].buffers,
        drift=drift,
        steps=[one.steps for one in reports],
        groups=reports[0].groups,
    )


def _shards(
    reports: Sequence[RankReport], drift: list[str]
) -> dict[tuple[int, str, str], torch.Tensor]:
    """Join the fragments of the data-parallel ranks; every element must be held."""
    shards: dict[tuple[int, str, str], torch.Tensor] = {}
    written: dict[tuple[int, str, str], torch.Tensor] = {}
    for one in reports:
        for piece in one.fragments:
            key = (one.tp, piece.name, piece.state)
            size = math.prod(one.shapes[piece.name])
            values = shards.setdefault(key, torch.zeros(size))
            done = written.setdefault(key, torch.zeros(size, dtype=torch.bool))
            where = slice(piece.start, piece.start + piece.values.numel())
            old = values[where][done[where]]
            if not torch.equal(old, piece.values[done[where]]):
                drift.append(
                    f"{piece.name}/{piece.state}: data-parallel ranks of tp {one.tp} differ"
                )
            values[where] = torch.where(done[where], values[where], piece.values)
            done[where] = True
    for (tp, name, state), done in written.items():
        if not bool(done.all()):
            raise RuntimeError(f"{name}/{state}: tp {tp} holds only part of its shard")
    shapes = {(one.tp, name): shape for one in reports for name, shape in one.shapes.items()}
    return {key: values.view(shapes[key[0], key[1]]) for key, values in shards.items()}


def _join(
    name: str,
    by_tp: Mapping[int, torch.Tensor],
    recipe: Recipe,
    layout: TensorParallelLayout | None,
    drift: list[str],
    state: str,
) -> torch.Tensor:
    """Join the shards of the tensor-parallel ranks."""
    if recipe.hand_cut:
        return join_megatron(name, [by_tp[tp] for tp in sorted(by_tp)])
    if layout is None:
        return by_tp[0]
    full = torch.zeros(math.prod(layout.shape[name]))
    done = torch.zeros(full.shape, dtype=torch.bool)
    for tp in sorted(by_tp):
        index, values = layout.index[name, tp], by_tp[tp].flatten()
        seen = done[index]
        if not torch.equal(full[index][seen], values[seen]):
            drift.append(f"{name}/{state}: tensor-parallel replicas differ")
        full[index] = torch.where(seen, full[index], values)
        done[index] = True
    if not bool(done.all()):
        raise RuntimeError(f"{name}/{state}: no tensor-parallel rank holds some elements")
    return full.view(layout.shape[name])


def join_megatron(name: str, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join the shards of the hand-cut Megatron-like model, by the name of the parameter."""
    if "word_embeddings" in name:
        return torch.cat(list(shards))[:VOCAB]
    if name in ("attn.dense.weight", "mlp.dense_4h_to_h.weight"):
        return torch.cat(list(shards), dim=1)
    for part, blocks in (("query_key_value", 3), ("dense_h_to_4h", 2)):
        if part in name:
            cut = [shard.chunk(blocks) for shard in shards]
            return torch.cat([shard[block] for block in range(blocks) for shard in cut])
    return shards[0]
