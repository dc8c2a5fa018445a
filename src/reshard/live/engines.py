"""DeepSpeed engines as states: ZeRO's flat buffers are maps like any other.

Theory. Under ZeRO a rank holds stretches of parameters, one after the other in flat fp32 buffers:
its part of a whole group laid end to end (stages 1 and 2), or its part of every parameter (stage
3). A stretch ``shard[start : start + n]`` at ``flat[at : at + n]`` is a piece; where tensor or
expert parallelism cut the parameter before, the map of that cut comes before it and the two nest.
The masters are what is moved; when they have arrived the engine rounds them to the weights it
computes with, by its own means.

DeepSpeed is never imported: an engine that is handed in is met by what it can do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from reshard.errors import UnsupportedError
from reshard.geometry import AffinePiece, ParamAffineMap, nest
from reshard.live.deciding import WEIGHTS
from reshard.live.settings import plain_settings, take_settings, told_settings
from reshard.live.states import LiveState, Shard
from reshard.live.trainers import OPTIMIZER, make_states, trainer_state

ENGINE = "engine"
"""Key of an engine's counters, scheduler and loss scale."""
COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Part of a parameter in a flat buffer: ``flat[at : at + length]`` is from ``start`` on."""

    name: str
    start: int
    at: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """A flat buffer of masters, the parameters of its group, and what of them lies in it here."""

    buffer: torch.Tensor
    names: tuple[str, ...]
    stretches: tuple[Stretch, ...]


def is_engine(thing: object) -> bool:
    """Whether it is a DeepSpeed engine, or walks like one."""
    return all(hasattr(thing, name) for name in ("module", "optimizer", "zero_optimization_stage"))


def engine_state(
    engine: Any, *, maps: Mapping[str, ParamAffineMap] | None = None, fresh: bool = False
) -> LiveState:
    """Return the state of a DeepSpeed engine.

    Parameters
    ----------
    engine
        Of ZeRO-1, 2 or 3, or without ZeRO in fp32.
    maps
        Of parameters that tensor or expert parallelism cut: from the logical tensor to this rank's
        shard, whose rank is 0.
    fresh
        Let an optimizer that has not stepped make its states first, as a target needs them.

    Raises
    ------
    UnsupportedError
        When its buffers are not in memory, or are of a kind that is not known here, or a cut is
        not described.
    """
    stage, cut = int(engine.zero_optimization_stage()), dict(maps or {})
    _refuse_undescribed(engine, cut)
    if stage == 0:
        return _without_zero(engine, fresh=fresh)
    parameters = dict(engine.module.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    flats = _zero3_flats(engine.optimizer, names) if stage == 3 else _flats(engine.optimizer, names)
    shapes = {n: tuple(getattr(p, "ds_shape", p.shape)) for n, p in parameters.items()}
    inner = engine.optimizer.optimizer
    if fresh:
        _make_states(flats, inner)
    shards = [
        Shard(one.name, state, _map_of(shapes[one.name], one, cut.get(one.name)), part)
        for flat in flats
        for state, values in _states(flat.buffer, inner).items()
        for one in flat.stretches
        for part in [values.detach().view(-1)[one.at : one.at + one.length]]
    ]
    trained = {name for flat in flats for name in flat.names}
    shards += _beside(engine.module, trained, shapes, cut)

    def accept(told: Mapping[str, Any]) -> None:
        if OPTIMIZER in told:
            take_settings(told[OPTIMIZER], _members(flats, inner))
        _take_counters(engine, told.get(ENGINE, {}))
        _refresh(engine.optimizer, stage)

    values = {OPTIMIZER: told_settings(_members(flats, inner)), ENGINE: _counters(engine)}
    return LiveState(tuple(shards), values, accept)


def _refuse_undescribed(engine: Any, maps: Mapping[str, ParamAffineMap]) -> None:
    if getattr(engine.optimizer, "swap_optimizer", False):
        raise UnsupportedError(
            "the optimizer's buffers are on NVMe",
            next_step="move from a checkpoint, or offload to the CPU",
        )
    degree = getattr(engine, "autotp_size", lambda: 0)()
    model_parallel = getattr(engine, "mp_world_size", 1) or 1
    for name, parameter in engine.module.named_parameters():
        cut_by_experts = getattr(parameter, "allreduce", True) is False
        cut_by_tensor = max(int(degree), int(model_parallel)) > 1
        if (cut_by_experts or cut_by_tensor) and name not in maps:
            raise UnsupportedError(
                "how a parameter is cut over tensor or expert ranks is not described",
                parameter=name,
                next_step="give its map, and those of the others: engine_state(engine, maps=…)",
            )


def _without_zero(engine: Any, *, fresh: bool) -> LiveState:
    if not isinstance(engine.optimizer, torch.optim.Optimizer):
        raise UnsupportedError(
            "the masters of half precision without ZeRO are not described",
            found=type(engine.optimizer).__name__,
            next_step="use ZeRO-1, which holds the same values",
        )
    state = trainer_state(engine.module, engine.optimizer, fresh=fresh)

    def accept(told: Mapping[str, Any]) -> None:
        state.accept(told)
        _take_counters(engine, told.get(ENGINE, {}))

    return LiveState(state.shards, {**state.values, ENGINE: _counters(engine)}, accept)


def _flats(optimizer: Any, names: Mapping[int, str]) -> list[Flat]:
    """Return the buffers of stages 1 and 2, and of bf16 with fp32 gradients."""
    buffers = getattr(optimizer, "single_partition_of_fp32_groups", None)
    groups = getattr(optimizer, "bit16_groups", None)
    if buffers is None:
        buffers = getattr(optimizer, "fp32_groups_flat_partition", None)
        groups = getattr(optimizer, "bf16_groups", None)
    if buffers is None or groups is None:
        raise UnsupportedError(
            "an optimizer of DeepSpeed whose buffers are not known here",
            found=type(optimizer).__name__,
            next_step="save a checkpoint and move from there",
        )
    found = []
    for buffer, members in zip(buffers, groups, strict=True):
        linked = [(names[id(p)], getattr(p, "_hp_mapping", None)) for p in members]
        stretches = [
            Stretch(
                name,
                link.lp_fragment_address.start,
                link.hp_fragment_address.start,
                link.hp_fragment_address.numel,
            )
            for name, link in linked
            if link is not None
        ]
        found.append(Flat(buffer, tuple([name for name, _ in linked]), tuple(stretches)))
    return found


def _zero3_flats(optimizer: Any, names: Mapping[int, str]) -> list[Flat]:
    found = []
    for buffer, members in zip(
        optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True
    ):
        if buffer is None:
            raise UnsupportedError(
                "the optimizer's buffers are on NVMe", next_step="move from a checkpoint"
            )
        stretches = []
        for member in members:
            _, at, size = optimizer.grad_position[optimizer.get_param_id(member)]
            start = int(size) * distributed.get_rank(member.ds_process_group)
            length = min(int(size), member.ds_numel - start)
            if length > 0:
                stretches.append(Stretch(names[id(member)], start, int(at), length))
        found.append(Flat(buffer, tuple([names[id(m)] for m in members]), tuple(stretches)))
    return found


def _make_states(flats: Sequence[Flat], inner: Any) -> None:
    """Have the optimizer make the states of buffers that have none; stage 3 lists one at a time."""
    missing = [flat for flat in flats if not inner.state.get(flat.buffer)]
    members = [list(group["params"]) for group in inner.param_groups]
    for flat in missing:
        for group in inner.param_groups:
            group["params"] = []
        inner.param_groups[_group_number(flat, flats, members)]["params"] = [flat.buffer]
        make_states(inner)
    for group, params in zip(inner.param_groups, members, strict=True):
        group["params"] = params


def _group_number(flat: Flat, flats: Sequence[Flat], members: Sequence[Sequence[Any]]) -> int:
    """Return the group of a buffer; stage 3 puts it there only while that one is stepped."""
    for number, params in enumerate(members):
        if any(param is flat.buffer for param in params):
            return number
    return min(flats.index(flat), len(members) - 1)


def _states(buffer: torch.Tensor, inner: Any) -> dict[str, torch.Tensor]:
    """Return a buffer of masters and the buffers that the optimizer keeps in its form."""
    kept = {
        state: value
        for state, value in inner.state.get(buffer, {}).items()
        if isinstance(value, torch.Tensor) and value.numel() == buffer.numel() and value.dim()
    }
    return {WEIGHTS: buffer, **kept}


def _beside(
    module: Any,
    trained: set[str],
    shapes: Mapping[str, tuple[int, ...]],
    maps: Mapping[str, ParamAffineMap],
) -> Iterator[Shard]:
    """Yield what the optimizer has not: frozen parameters and persistent buffers."""
    kept = module.state_dict().keys()
    for name, one in (*module.named_parameters(), *module.named_buffers()):
        if name in trained or name not in kept:
            continue
        if hasattr(one, "ds_tensor"):
            part = one.ds_tensor.detach().view(-1)
            start = part.numel() * distributed.get_rank(one.ds_process_group)
            length = min(part.numel(), one.ds_numel - start)
            if length > 0:
                whole = Stretch(name, start, 0, length)
                yield Shard(
                    name, WEIGHTS, _map_of(shapes[name], whole, maps.get(name)), part[:length]
                )
        else:
            shape = tuple(one.shape)
            whole = Stretch(name, 0, 0, one.numel())
            yield Shard(name, WEIGHTS, _map_of(shape, whole, maps.get(name)), one.detach())


def _map_of(shape: tuple[int, ...], stretch: Stretch, cut: ParamAffineMap | None) -> ParamAffineMap:
    """Return the map from the logical tensor to a stretch of the rank's shard."""
    length = (stretch.length,)
    piece = AffinePiece(length, stretch.start, (1,), 0, (1,), (0,))
    inner = ParamAffineMap(shape, {0: length}, {0: [piece]})
    return inner if cut is None else nest(cut, {0: inner})


def _members(
    flats: Sequence[Flat], inner: Any
) -> Iterator[tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]]:
    members = [list(group["params"]) for group in inner.param_groups]
    for flat in flats:
        group = inner.param_groups[_group_number(flat, flats, members)]
        yield flat.names, group, inner.state.get(flat.buffer, {})


def _counters(engine: Any) -> dict[str, object]:
    scheduler = getattr(engine, "lr_scheduler", None)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {
        "counters": {name: getattr(engine, name) for name in COUNTERS if hasattr(engine, name)},
        "scheduler": None if scheduler is None else plain_settings(scheduler.state_dict()),
        "scaler": {
            key: value
            for key, value in vars(scaler).items()
            if getattr(scaler, "dynamic", False) and isinstance(value, (bool, int, float))
        }
        if scaler is not None
        else {},
    }


def _take_counters(engine: Any, told: Mapping[str, Any]) -> None:
    for name, value in told.get("counters", {}).items():
        setattr(engine, name, value)
    scheduler = getattr(engine, "lr_scheduler", None)
    if scheduler is not None and told.get("scheduler") is not None:
        scheduler.load_state_dict({**scheduler.state_dict(), **told["scheduler"]})
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    for key, value in told.get("scaler", {}).items():
        if getattr(scaler, "dynamic", False) and hasattr(scaler, key):
            setattr(scaler, key, value)


def _refresh(optimizer: Any, stage: int) -> None:
    """Have the engine round its masters to the weights that it computes with."""
    if stage != 3:
        optimizer.update_lp_params()
        return
    persistent = optimizer.persistent_parameters
    if persistent:
        persistent[0].partition(persistent)
    for number in range(len(optimizer.fp32_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)  # noqa: SLF001
    if persistent:
        persistent[0].all_gather(persistent)
