"""The survey: what all ranks say they hold and want, put together.

Theory. Every rank describes its own shards; all descriptions are gathered, and every rank puts the
same ones together in the same way. A map over the group's ranks follows (the ranks that list an
element are its holders, exactly), and so does every refusal: ranks that contradict each other in a
shape, an element type or a value are told on all ranks alike, before a byte has moved.

Models repeat their layers, so maps are told once each and shards by number, and maps of many ranks
are put together once for all tensors that are cut alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.errors import TransferError
from reshard.geometry import ParamAffineMap, locate
from reshard.live.agreement import together
from reshard.live.states import LiveState, TensorKey
from reshard.live.transport import Transport

Told = Mapping[str, Any]
"""What one rank says, read back."""


@dataclass(frozen=True, slots=True)
class Spread:
    """One state of one parameter over the ranks of one side."""

    dtype: str
    map: ParamAffineMap


@dataclass(frozen=True, slots=True)
class Survey:
    """What the group holds and wants."""

    source: Mapping[TensorKey, Spread]
    target: Mapping[TensorKey, Spread]
    """Every tensor of each side."""
    values: Mapping[str, object]
    """What the source's ranks say that is no tensor."""


def survey(
    transport: Transport,
    state: Callable[[], tuple[LiveState, LiveState]],
    settings: Mapping[str, object],
) -> tuple[LiveState, LiveState, Survey]:
    """Tell what this rank has and wants, hear the others, and put all together.

    Parameters
    ----------
    transport
        The group.
    state
        Makes this rank's two states; what it raises is told to all ranks.
    settings
        What all ranks must have been called with alike.

    Raises
    ------
    TransferError
        The same on all ranks: one of them refused, or they contradict each other.
    """
    mine: list[tuple[LiveState, LiveState]] = []

    def say() -> dict[str, object]:
        mine.append(state())
        source, target = mine[0]
        return {"settings": settings, "source": _told(source), "target": _told(target)}

    everyone: list[Told] = together(transport, say)
    _agree_on_settings([one["settings"] for one in everyone])
    source, target = (
        _put_together([one[side] for one in everyone]) for side in ("source", "target")
    )
    values = _agreed_values([one["source"]["values"] for one in everyone])
    return *mine[0], Survey(source, target, values)


def _told(state: LiveState) -> dict[str, object]:
    numbers: dict[ParamAffineMap, int] = {}
    shards = [
        (*shard.key, shard.dtype, numbers.setdefault(shard.in_memory(), len(numbers)))
        for shard in state.shards
    ]
    maps = [one.to_dict() for one in numbers]
    return {"maps": maps, "shards": shards, "values": dict(state.values)}


def _agree_on_settings(told: Sequence[Mapping[str, object]]) -> None:
    for rank, settings in enumerate(told):
        for name, value in settings.items():
            if value != told[0][name]:
                raise TransferError(
                    f"ranks were called with different settings: {name}",
                    rank=rank,
                    expected=f"{told[0][name]}, as rank 0",
                    found=value,
                    next_step="call with the same on all ranks",
                )


def _agreed_values(told: Sequence[Mapping[str, object]]) -> dict[str, object]:
    agreed: dict[str, object] = {}
    first: dict[str, int] = {}
    for rank, values in enumerate(told):
        for key, value in values.items():
            if key not in agreed:
                agreed[key], first[key] = value, rank
            elif repr(agreed[key]) != repr(value):  # a NaN is not equal to itself
                raise TransferError(
                    f"source ranks disagree on a value: {key}",
                    rank=rank,
                    expected=f"{agreed[key]!r}, as rank {first[key]}",
                    found=repr(value),
                    next_step="these ranks are not of one run, or not at one step",
                )
    return agreed


def _put_together(told: Sequence[Told]) -> dict[TensorKey, Spread]:
    """Return every tensor of one side over the ranks that told of it."""
    maps: dict[ParamAffineMap, ParamAffineMap] = {}  # equal maps of all ranks are one object
    held: dict[TensorKey, dict[int, ParamAffineMap]] = {}
    dtypes: dict[TensorKey, tuple[str, int]] = {}
    for rank, one in enumerate(told):
        own = [ParamAffineMap.from_dict(entry) for entry in one["maps"]]
        own = [maps.setdefault(each, each) for each in own]
        for name, state, dtype, number in one["shards"]:
            by_rank = held.setdefault((name, state), {})
            _check_alike((name, state), rank, (dtype, own[number]), dtypes, by_rank)
            by_rank[rank] = own[number]
    joined: dict[tuple[tuple[int, int], ...], ParamAffineMap] = {}
    found = {}
    for key, by_rank in held.items():
        alike = tuple((rank, id(one)) for rank, one in by_rank.items())
        if alike not in joined:
            joined[alike] = _joined(key, by_rank)
        found[key] = Spread(dtypes[key][0], joined[alike])
    return found


def _check_alike(
    key: TensorKey,
    rank: int,
    told: tuple[str, ParamAffineMap],
    dtypes: dict[TensorKey, tuple[str, int]],
    by_rank: Mapping[int, ParamAffineMap],
) -> None:
    dtype, one = told
    known, first = dtypes.setdefault(key, (dtype, rank))
    for what, expected, found in (
        ("element type", known, dtype),
        ("shape", by_rank.get(first, one).logical_shape, one.logical_shape),
    ):
        if expected != found:
            raise TransferError(
                f"ranks disagree on the {what} of a tensor",
                rank=rank,
                parameter=key[0],
                state=key[1],
                expected=f"{expected}, as rank {first}",
                found=found,
                next_step="build the model alike on all ranks of a side",
            )


def _joined(key: TensorKey, by_rank: Mapping[int, ParamAffineMap]) -> ParamAffineMap:
    shape = next(iter(by_rank.values())).logical_shape
    shapes = {rank: one.shard_shapes[0] for rank, one in by_rank.items()}
    pieces = {
        rank: [piece.held_by((rank,)) for piece in one.pieces_by_rank[0]]
        for rank, one in by_rank.items()
    }
    whole = locate(shape, shapes, pieces)
    whole.validate(key[0], partial=True)
    return whole
