"""`universal_checkpoint_info` of the target: the layout metadata for the new topology.

Theory. The info is what a later reader has to go by, DeepSpeed's converter or reshard. What it says
about degrees is made anew: the maps, and the widths of sub-parameters on every rank. What holds for
every degree (patterns, sub-parameters, the size of the vocabulary) stays as the source has it, and
so does the version. A vocabulary whose padding the user stated is added (`vocabulary`).

Two things are kept beside it for later conversions (`tensor_parallel`): maps of other degrees, and
the number of heads where it was stated. A source without an info gets one when its target has
several tensor ranks, in the form that any framework may write (`info_entry`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from reshard.formats.deepspeed.conversion_keys import VOCABULARY
from reshard.formats.deepspeed.info_entry import INFO_VERSION, deepspeed_info, exact
from reshard.formats.deepspeed.key_lowering import Branch
from reshard.formats.deepspeed.writing.rescaling import ranges_along
from reshard.formats.deepspeed.writing.source_cuts import KEPT, KEPT_HEADS, Source
from reshard.formats.deepspeed.writing.vocabulary import ORIGINAL, PADDED, vocabulary_info
from reshard.geometry import maps_to_document

if TYPE_CHECKING:
    from reshard.formats.deepspeed.conversion_keys import ConversionKeys, KeyRule
    from reshard.formats.deepspeed.writing.contents import Contents
    from reshard.formats.deepspeed.writing.cuts import Cut
    from reshard.formats.deepspeed.writing.options import NativeOptions
    from reshard.geometry import ParamAffineMap

MAPS = "affine_map"
VERSION = "universal_checkpoint_version"
WIDTHS = "sub_param_shard_widths"


def target_info(
    contents: Contents, options: NativeOptions, source: Source, cuts: Mapping[str, Cut]
) -> dict[str, object] | None:
    """The info of the target, None when it has none.

    Parameters
    ----------
    contents, options
        What is written, and for which topology.
    source
        The info of the source.
    cuts
        How the target cuts every parameter.
    """
    dense = [name for group in contents.groups if not group.has_experts for name in group.names]
    maps = {name: cuts[name].map for name in (*dense, *contents.frozen) if not cuts[name].is_padded}
    padding = vocabulary_info(source.info, source.keys(options.tp), cuts)
    kept = {**_kept(source, options), **padding}
    if options.tp == 1 and not source.info:
        # No list of what is replicated: with one rank everything is, and later readers would
        # take it for the layout of every degree.
        return {VERSION: INFO_VERSION, **kept} if padding else None
    if not set(source.info) - {VERSION, VOCABULARY, ORIGINAL, PADDED, KEPT_HEADS}:
        return {**source.info, **_entry(maps, contents, options), **kept}
    info = {key: value for key, value in source.info.items() if key not in (KEPT, KEPT_HEADS)}
    if MAPS in info or (options.tp > 1 and not source.is_explicit):
        info[MAPS] = maps_to_document({exact(name): one for name, one in maps.items()})
    if WIDTHS in info:
        info[WIDTHS] = _widths(source.keys(options.tp), maps)
    return {**info, **kept}


def _entry(
    maps: Mapping[str, ParamAffineMap], contents: Contents, options: NativeOptions
) -> dict[str, object]:
    """What is said of parameters of which the source said nothing."""
    return deepspeed_info(maps, listed=contents.held) if options.tp > 1 else {}


def _kept(source: Source, options: NativeOptions) -> dict[str, object]:
    """What later conversions may need: maps of the other degrees, and the number of heads."""
    others = {str(d): document for d, document in source.documents.items() if d != options.tp}
    heads = options.kv_heads or source.kv_heads
    return {
        **({KEPT: others} if others else {}),
        **({KEPT_HEADS: heads} if heads is not None else {}),
    }


def _widths(keys: ConversionKeys, maps: Mapping[str, ParamAffineMap]) -> dict[str, list[list[int]]]:
    """For every pattern of sub-parameters, the extent of each on each rank."""
    found = {}
    for rule in keys.rules:
        if rule.branch is Branch.SUB_PARAMS:
            for name, one in maps.items():
                if rule.pattern.match(name):
                    found[rule.text] = _widths_of(rule, one)
    return found


def _widths_of(rule: KeyRule, one: ParamAffineMap) -> list[list[int]]:
    dim = rule.sub_params.partition_dim if rule.sub_params is not None else 0
    entry = rule.sub_params.entries[dim] if rule.sub_params is not None else 1
    extent = one.logical_shape[dim]
    sizes = list(entry) if isinstance(entry, tuple) else [extent // max(entry, 1)] * max(entry, 1)
    ranges = ranges_along(one, dim) or {}
    rows = []
    start = 0
    for size in sizes:
        stop = start + size
        rows.append(
            [
                sum(max(0, min(first + n, stop) - max(first, start)) for first, n in ranges[rank])
                for rank in one.ranks
            ]
        )
        start = stop
    return rows
