"""Writing `universal_checkpoint_info`: maps become the entry that DeepSpeed stores and reads.

Theory. A framework that cuts parameters in its own way needs to say so once, when it saves. It
traces its partition functions (`reshard.trace_map`) and stores what :func:`deepspeed_info` makes of
the maps; any reader of maps, DeepSpeed 0.19.8's converter among them, then puts the parameters
together without knowing the layout.

The entry is additive (specification §6.3): where an old key can say the same as a map, it says it
too (replicated, split along dim 1; concatenation on dim 0 is the default), so that readers from
before maps join those parameters rightly. What no old key can say is in the map alone.

Plain numbers, texts, lists and dictionaries only. One exact pattern a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from reshard.errors import LayoutError, UsageError
from reshard.formats.deepspeed.key_lowering import Branch
from reshard.formats.patterns import exact
from reshard.geometry import ParamAffineMap, maps_to_document
from reshard.layouts.from_shards import concatenated, replicated

__all__ = ["INFO_VERSION", "deepspeed_info", "exact"]

INFO_VERSION = 0.4
"""The version that DeepSpeed 0.19.8 states beside maps."""


def deepspeed_info(
    maps: Mapping[str, ParamAffineMap], *, listed: Iterable[str] | None = None
) -> dict[str, object]:
    """The `universal_checkpoint_info` that describes parameters by their maps.

    Parameters
    ----------
    maps
        Name of each parameter -> its map over the tensor-parallel ranks 0, 1, …
    listed
        Names that old keys may name as well, all by default. DeepSpeed's converter refuses old keys
        that name a parameter without optimizer states, such as a frozen one.

    Raises
    ------
    UsageError
        When maps are of different numbers of ranks, or of ranks that do not count from 0.
    InvalidMapError
        When a map breaks a property that every map must have.

    Examples
    --------
    >>> from reshard.layouts.builders import contiguous_split_map, replicated_map
    >>> norm, out = replicated_map((4,), 2), contiguous_split_map((4, 6), [3, 3], 1)
    >>> info = deepspeed_info({"norm": norm, "out": out})
    >>> info["tp_replicated_parameter_patterns"], info["parameter_with_row_parallelism_patterns"]
    (['^norm$'], ['^out$'])
    >>> sorted(info["affine_map"]["params"])
    ['^norm$', '^out$']
    """
    for name, one in maps.items():
        one.validate(name)
    _require_ranks(maps)
    named = maps if listed is None else {name: maps[name] for name in listed if name in maps}
    return {
        "universal_checkpoint_version": INFO_VERSION,
        Branch.REPLICATED.value: [exact(name) for name, one in named.items() if _is_whole(one)],
        Branch.ROW.value: [exact(name) for name, one in named.items() if _is_row_split(one)],
        "affine_map": maps_to_document({exact(name): one for name, one in maps.items()}),
    }


def _require_ranks(maps: Mapping[str, ParamAffineMap]) -> None:
    degrees = {name: one.ranks for name, one in maps.items()}
    for name, ranks in degrees.items():
        if ranks != tuple(range(len(ranks))) or ranks != next(iter(degrees.values())):
            raise UsageError(
                "maps are not over the same tensor-parallel ranks, counted from 0",
                parameter=name,
                expected=list(range(len(next(iter(degrees.values()))))),
                found=list(ranks),
            )


def _is_whole(one: ParamAffineMap) -> bool:
    try:
        same = replicated(one.shard_shapes, len(one.ranks))
    except LayoutError:
        return False
    return one.same_elements(same)


def _is_row_split(one: ParamAffineMap) -> bool:
    """Whether the shards follow each other along dim 1 of a matrix, which the old key means."""
    if len(one.logical_shape) != 2 or _is_whole(one):
        return False
    try:
        same = concatenated(one.shard_shapes, 1, len(one.ranks))
    except LayoutError:
        return False
    return one.same_elements(same)
