"""The jobs that ranks run in the tests of :mod:`reshard.live`."""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardOf
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from reshard import AffinePiece, ParamAffineMap, ReshardError, TransferError, UsageError, live
from reshard.layouts import contiguous_split_map, replicated_map
from reshard.live.transport import GroupTransport, Parcel
from tests.properties.strategies import a_map

DTYPES = ("float32", "bfloat16", "float64", "uint8", "bool", "complex64", "float8_e4m3fn", "int64")


@dataclass(frozen=True)
class Drawn:
    """Random maps of some tensors over random ranks of a group, from a seed."""

    seed: int
    world: int

    @functools.cache  # noqa: B019 - few, and as long as the tests
    def maps(self) -> dict[tuple[str, str], tuple[str, ParamAffineMap, ParamAffineMap]]:
        """Element type, source and target map of each tensor, over ranks of the group."""
        rnd = Random(self.seed)
        sides = [sorted(rnd.sample(range(self.world), rnd.randint(1, self.world))) for _ in "st"]
        found = {}
        for number in range(rnd.randint(1, 4)):
            total = rnd.choice([1, 7, 24, 36, 48, 60])
            one, other = (_over(a_map(rnd, total, len(side)), side) for side in sides)
            other = ParamAffineMap(one.logical_shape, other.shard_shapes, other.pieces_by_rank)
            state = rnd.choice(["fp32", "exp_avg", "momentum"])
            found[f"t{number}", state] = (rnd.choice(DTYPES), one, other)
        return found

    def shards(self, key: tuple[str, str]) -> dict[int, torch.Tensor]:
        """Random bits of the full tensor, cut by the source map."""
        dtype, source, _ = self.maps()[key]
        made = torch.Generator().manual_seed(self.seed * 8 + int(key[0][1:]))
        item = getattr(torch, dtype).itemsize
        high = 2 if dtype == "bool" else 256
        full = torch.randint(0, high, (source.numel * item,), generator=made, dtype=torch.uint8)
        whole = full.view(getattr(torch, dtype)).reshape(source.logical_shape)
        return {rank: source.extract(whole, rank) for rank in source.ranks}


def _over(one: ParamAffineMap, ranks: Sequence[int]) -> ParamAffineMap:
    """The map with its ranks renamed."""
    name = dict(enumerate(ranks))
    return ParamAffineMap(
        one.logical_shape,
        {name[rank]: shape for rank, shape in one.shard_shapes.items()},
        {
            name[rank]: [piece.held_by(name[r] for r in piece.locations) for piece in pieces]
            for rank, pieces in one.pieces_by_rank.items()
        },
    )


def states_of(drawn: Drawn, rank: int) -> tuple[live.LiveState, live.LiveState]:
    """What a rank has and wants."""
    sides: tuple[list[live.Shard], list[live.Shard]] = ([], [])
    for (name, state), (dtype, source, target) in drawn.maps().items():
        if rank in source.ranks:
            held = drawn.shards((name, state))[rank]
            sides[0].append(live.shard_of(name, state, source, rank, held))
        if rank in target.ranks:
            room = torch.zeros(target.shard_shapes[rank], dtype=getattr(torch, dtype))
            sides[1].append(live.shard_of(name, state, target, rank, room))
    return live.LiveState(tuple(sides[0])), live.LiveState(tuple(sides[1]))


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def move_drawn(seeds: Sequence[int], budget: int) -> list[dict[str, Any]]:
    """Move random states by random maps; what arrived, and what plan and process say was sent."""
    world, rank = distributed.get_world_size(), distributed.get_rank()
    answers = []
    for seed in seeds:
        source, target = states_of(Drawn(seed, world), rank)
        before = [bits(shard.tensor) for shard in source.shards]
        done = live.move(source, target, budget=budget)
        if [bits(shard.tensor) for shard in source.shards] != before:
            raise AssertionError("the source was written to")
        answers.append(
            {
                "shards": {shard.key: bits(shard.tensor) for shard in target.shards},
                "sent": done.sent_bytes,
                "plan": done.plan.sent_by_rank.get(rank, 0),
                "least": done.plan.decision.least_bytes,
                "busiest": (
                    max(done.plan.sent_by_rank.values(), default=0),
                    done.plan.decision.least_busiest,
                ),
                "rounds": (done.plan.rounds, done.plan.largest_degree),
                "digest": hashlib.sha256(done.plan.digest().encode()).hexdigest(),
            }
        )
    return answers


# ------------------------------------------------------------------------------------- faults


@dataclass(frozen=True)
class Faulty:
    """A process group in which something happens to one rank's sends."""

    inner: GroupTransport
    culprit: int
    at: int
    what: str
    posted: list[int]

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def device(self) -> torch.device:
        return self.inner.device

    def gather(self, said: bytes) -> list[bytes]:
        return self.inner.gather(said)

    def post(self, receives: Sequence[Parcel], sends: Sequence[Parcel]) -> Callable[[], None]:
        self.posted.append(len(sends))
        if self.rank == self.culprit and len(self.posted) == self.at:
            if self.what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "hang":
                time.sleep(8)
            sends = [(peer, payload.clone()) for peer, payload in sends]
            if self.what == "flip":
                sends[0][1][3] ^= 16
            if self.what == "exchange":
                sends[0][1].copy_(sends[0][1].roll(1))
        return self.inner.post(receives, sends)


def rows_to_columns(rank: int, world: int, size: int = 64) -> tuple[live.LiveState, live.LiveState]:
    """A matrix of which every rank has some rows and wants some columns, and one that all have."""
    height = [size] * world
    rows = contiguous_split_map((size * world, size * world), height, 0)
    columns = contiguous_split_map((size * world, size * world), height, 1)
    have = torch.arange(size * size * world, dtype=torch.float32) + rank * size * size * world
    source = live.shard_of("w", "fp32", rows, rank, have.view(size, size * world))
    target = live.shard_of("w", "fp32", columns, rank, torch.zeros(size * world, size))
    return live.LiveState((source,), {"step": 7}), live.LiveState((target,))


def columns_arrived(target: live.LiveState) -> bool:
    """Whether the columns are those of the matrix."""
    world, rank = distributed.get_world_size(), distributed.get_rank()
    (shard,) = target.shards
    size = shard.tensor.shape[1]
    full = torch.arange((size * world) ** 2, dtype=torch.float32).view(size * world, -1)
    return torch.equal(shard.tensor, full[:, rank * size : (rank + 1) * size])


def move_faulty(what: str, culprit: int, at: int, budget: int, timeout: float) -> dict[str, Any]:
    """Move rows to columns while something happens; what each rank that lives raised."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    source, target = rows_to_columns(rank, world)
    before = bits(source.shards[0].tensor)
    inner = GroupTransport(distributed.group.WORLD, timeout)
    began = time.monotonic()
    error = ""
    try:
        live.move(source, target, group=Faulty(inner, culprit, at, what, []), budget=budget)
    except TransferError as raised:
        error = str(raised)
    return {
        "error": error,
        "intact": bits(source.shards[0].tensor) == before,
        "arrived": columns_arrived(target),
        "seconds": time.monotonic() - began,
    }


def move_contradicting(case: str) -> dict[str, Any]:  # noqa: C901 - a list of cases
    """Move rows to columns where one rank says or asks something else."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    source, target = rows_to_columns(rank, world)
    untouched = bits(target.shards[0].tensor)
    options: dict[str, Any] = {}
    odd = rank == 1
    (have,), (want,) = source.shards, target.shards
    if case == "shape" and odd:
        taller = contiguous_split_map((64 * world, 65 * world), [64] * world, 0)
        have = live.shard_of("w", "fp32", taller, rank, torch.zeros(64, 65 * world))
    elif case == "dtype" and odd:
        have = replace(have, tensor=have.tensor.double())
    elif case == "budget" and odd:
        options["budget"] = 4096
    elif case == "plan":
        # every element is on the rank itself and on another, so that there is a choice
        have = replace(have, map=replicated_map((64 * world, 64 * world), 1), tensor=full(world))
        options["choose"] = lambda held, _: held[-1] if odd else held[0]
    elif case == "value" and odd:
        source = replace(source, values={"step": 8})
    elif case == "missing" and odd:
        source = replace(source, shards=())
    elif case == "wide" and odd:
        have = replace(have, map=have.map.narrow(1, 0, 10))
    elif case == "state":
        kept = replace(have, state="momentum"), replace(have, state="exp_avg")
        source = replace(source, shards=(have, *kept))
        want = replace(want, state="exp_avg")
    elif case == "name":
        want = replace(want, name="v")
    elif case == "rounding":
        want = replace(want, tensor=want.tensor.bfloat16())
    elif case == "shared" and odd:
        want = replace(want, tensor=have.tensor.view(want.tensor.shape))
    elif case == "unplain" and odd:
        source = replace(source, values={"step": torch.zeros(())})
    elif case == "scaled":
        half = [AffinePiece((4,), 0, (1,), 0, (1,), (0,), 1 / (1 + n)) for n in (0, 1)]
        maps = [ParamAffineMap((4,), {0: (4,)}, {0: [one]}) for one in half]
        have = live.Shard("w", "exp_avg", maps[0], torch.ones(4))
        want = live.Shard("w", "exp_avg", maps[1], torch.ones(4))
    elif case == "nothing" and odd:
        return _raised(lambda: live.move(object(), target), target, untouched)
    if len(source.shards) == 1:
        source = replace(source, shards=(have,))
    target = replace(target, shards=(want,))
    untouched = bits(want.tensor)
    return _raised(lambda: live.move(source, target, **options), target, untouched)


def full(world: int) -> torch.Tensor:
    """The whole matrix."""
    return torch.arange((64 * world) ** 2, dtype=torch.float32).view(64 * world, -1)


def _raised(call: Callable[[], object], target: live.LiveState, untouched: bytes) -> dict[str, Any]:
    error, kind = "", ""
    try:
        call()
    except ReshardError as raised:
        error, kind = str(raised), type(raised).__name__
    return {
        "error": error,
        "kind": kind,
        "untouched": bits(target.shards[0].tensor) == untouched,
    }


# ------------------------------------------------------------------------------------ tensors


def placed(mesh_shape: tuple[int, ...]) -> list[str]:
    """DTensors of a mesh in every placement, uneven too, whose map is not what they hold."""
    mesh = init_device_mesh("cpu", mesh_shape)
    choices = [Replicate(), ShardOf(0), ShardOf(1), ShardOf(-1)]
    wrong = []
    for shape in ((8, 6), (7, 5), (3, 2), (1, 4)):
        full = torch.arange(shape[0] * shape[1]).view(shape)
        for placements in itertools.product(choices, repeat=len(mesh_shape)):
            one = distribute_tensor(full, mesh, placements, src_data_rank=None)
            wrong += _misread(one, full)
    return wrong


def placed_by_fsdp(dp: int, tp: int) -> list[str]:
    """Parameters of layers under tensor parallelism and FSDP2 whose map is not what they hold."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    wrong = []
    for rows in (2, 3, 7, 8, 9, 11, 13):
        for style in (ColwiseParallel, RowwiseParallel):
            layer = torch.nn.Linear(6, rows)
            model = torch.nn.Sequential(layer)
            full = torch.arange(rows * 6, dtype=torch.float32).view(rows, 6)
            with torch.no_grad():
                layer.weight.copy_(full)
            parallelize_module(model, mesh["tp"], {"0": style()})
            fully_shard(model, mesh=mesh["dp"])
            wrong += _misread(layer.weight, full)
    return wrong


def _misread(one: torch.Tensor, full: torch.Tensor) -> list[str]:
    (shard,) = live.tensor_shards("w", "fp32", one)
    if torch.equal(shard.map.extract(full, 0), shard.tensor):
        return []
    return [f"{one.placements} of {tuple(full.shape)}"]  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------- memory


def resident(kind: str) -> int:
    """Bytes that this process has in memory (``VmRSS``), or had at most (``VmHWM``)."""
    with open("/proc/self/status") as status:  # noqa: PTH123 - a file of the kernel
        line = next(line for line in status if line.startswith(kind))
    return int(line.split()[1]) * 1024


def _return_what_is_freed() -> None:
    """Have glibc give freed tensors back to the system at once, so that what is alive shows."""
    libc, mmap_threshold = ctypes.CDLL(None), -3
    libc.mallopt(mmap_threshold, 1 << 16)
    gc.collect()
    libc.malloc_trim(0)


def move_releasing(tensors: int, mib: int, release: bool, budget: int) -> dict[str, Any]:
    """Move matrices from rows to columns; the peak of this process against the promise."""
    _return_what_is_freed()
    rank, world = distributed.get_rank(), distributed.get_world_size()
    side = int((mib << 18) ** 0.5) // world * world
    sides: tuple[list[live.Shard], list[live.Shard]] = ([], [])
    for number in range(tensors):
        for dim, shards in enumerate(sides):
            cut = contiguous_split_map((side, side), [side // world] * world, dim)
            room = torch.empty(cut.shard_shapes[rank])
            if dim == 0:
                room.fill_(number * world + rank)
            else:
                room.untyped_storage().resize_(0)
            shards.append(live.shard_of(f"t{number}", "fp32", cut, rank, room))
    source, target = (live.LiveState(tuple(shards)) for shards in sides)
    held = sum(shard.tensor.numel() * 4 for shard in source.shards)
    planned = live.plan(source, target, release=release, budget=budget)
    planned_for = resident("VmRSS") - held
    Path("/proc/self/clear_refs").write_text("5")
    planned.run()
    width = side // world
    right = all(
        bool((shard.tensor.view(world, width, width)[peer] == number * world + peer).all())
        for number, shard in enumerate(target.shards)
        for peer in range(world)
    )
    return {
        "right": right,
        "peak": resident("VmHWM") - planned_for,
        "promised": planned.peaks[rank],
        "held": held,
        "freed": sum(shard.tensor.untyped_storage().nbytes() for shard in source.shards) == 0,
    }


# ------------------------------------------------------------------------------------ choices


def replicas_to_rows(cost: str, itemsizes: Sequence[str]) -> dict[str, Any]:
    """From matrices that the first three ranks have whole to rows on all; what was decided."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    sides: tuple[list[live.Shard], list[live.Shard]] = ([], [])
    right = []
    for number, dtype in enumerate(itemsizes):
        shape = (world * (7 + number), 33)
        kind = getattr(torch, dtype)
        whole = torch.arange(shape[0] * shape[1]).view(shape).to(kind)
        if rank < 3:
            held = live.Shard(f"t{number}", "fp32", replicated_map(shape, 1), whole)
            sides[0].append(held)
        rows = contiguous_split_map(shape, [7 + number] * world, 0)
        room = torch.zeros(rows.shard_shapes[rank], dtype=kind)
        sides[1].append(live.shard_of(f"t{number}", "fp32", rows, rank, room))
        right.append(whole[rank * (7 + number) : (rank + 1) * (7 + number)])
    options: dict[str, Any] = {}
    if cost == "near":  # neighbours are near: rank 2 is so to all that have nothing
        options["cost"] = lambda source, target: abs(source - target)
    if cost == "mine":
        options["choose"] = lambda held, to: to if to in held else 1
    done = live.move(live.LiveState(tuple(sides[0])), live.LiveState(tuple(sides[1])), **options)
    return {
        "right": all(torch.equal(s.tensor, t) for s, t in zip(sides[1], right, strict=True)),
        "sent": done.plan.sent_by_rank,
        "least": done.plan.decision.least_bytes,
        "busiest": done.plan.decision.least_busiest,
        "said": done.explain(),
    }


def rounded_and_narrowed() -> dict[str, Any]:
    """A padded fp32 table to another padding in bf16."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    made = torch.Generator().manual_seed(3)
    full = torch.randn(11, 5, generator=made)
    padded = torch.cat([full, torch.full((world * 4 - 11, 5), torch.nan)])
    rows = contiguous_split_map((world * 4, 5), [4] * world, 0)
    have = live.shard_of("embed", "fp32", rows, rank, padded[rank * 4 : rank * 4 + 4].clone())
    want = live.Shard(
        "embed", "fp32", replicated_map((13, 5), 1), torch.full((13, 5), 9.0, dtype=torch.bfloat16)
    )
    live.move(
        live.LiveState((have,)).narrowed("embed", 0, 11),
        live.LiveState((want,)).narrowed("embed", 0, 11),
        rounding=True,
    )
    return {
        "rows": torch.equal(want.tensor[:11], full.bfloat16()),
        "padding": bool((want.tensor[11:] == 9).all()),
    }


def run_again() -> list[bool]:
    """One plan, two runs, and what the source became in between; a value forbids it."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    source, target = rows_to_columns(rank, world)
    planned = live.plan(replace(source, values={}), target)
    planned.run()
    good = [columns_arrived(target)]
    source.shards[0].tensor.add_(1)
    planned.run()
    target.shards[0].tensor.sub_(1)
    good.append(columns_arrived(target))
    with_step = live.plan(source, target)
    with_step.run()
    try:
        with_step.run()
    except UsageError as error:
        good.append("cannot be run again" in str(error))
    return good
