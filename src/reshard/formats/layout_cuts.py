"""The words of a stated layout, for a target: from the shape of a parameter to its map.

Theory. A source has shards, and their extents tell how wide each rank's part is
(:mod:`~reshard.formats.layout_words`). A target has none yet. There the widths are those of the
rule by which a runtime cuts a layer at a degree (:class:`~reshard.layouts.autotp.Widths`), or what
the word itself states: sizes a rank, widths, blocks. A width that neither tells is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType

from reshard.errors import LayoutError
from reshard.formats.layout_words import extent_of, number_of, numbers_of, rows_of, segments_of
from reshard.formats.parsing import Cursor
from reshard.geometry import ParamAffineMap
from reshard.layouts.autotp import Widths
from reshard.layouts.builders import (
    block_gather_map,
    contiguous_split_map,
    replicated_map,
    segmented_map,
    sub_param_map,
)
from reshard.layouts.fused import FUSED_KINDS, shared_qk_map
from reshard.layouts.ranges import require_dim
from reshard.layouts.sub_parameters import View, sub_param_view_map

Shape = tuple[int, ...]

CutRule = Callable[[Shape, Widths], ParamAffineMap]
"""`(shape of the parameter, how wide parts are) -> map`; refuses what the word does not tell."""


def read_cut(word: str, fields: Cursor) -> CutRule:
    """Read what a word states about a target.

    Parameters
    ----------
    word
        A word that :func:`~reshard.formats.layout_words.read_rule` has read.
    fields
        A table of its fields.
    """
    return _CUTS[word](fields)


def stated_map(stated: ParamAffineMap) -> CutRule:
    """The rule of a layout that is a map already; it is of one number of ranks."""

    def cut(_shape: Shape, widths: Widths) -> ParamAffineMap:
        _require_ranks(len(stated.ranks), widths)
        return stated

    return cut


def _require_ranks(stated: int, widths: Widths) -> None:
    if stated != widths.degree:
        raise LayoutError(
            "the layout is stated for another number of ranks",
            expected=widths.degree,
            found=stated,
        )


def _replicated(fields: Cursor) -> CutRule:
    stated = fields.maybe("scale")
    scale = 1.0 if stated is None else number_of(stated)
    return lambda shape, widths: replicated_map(shape, widths.degree, scale)


def _along(dim: int) -> Callable[[Cursor], CutRule]:
    def read(_fields: Cursor) -> CutRule:
        def cut(shape: Shape, widths: Widths) -> ParamAffineMap:
            require_dim(shape, dim)
            return contiguous_split_map(shape, widths.of(shape[dim]), dim)

        return cut

    return read


def _contiguous_split(fields: Cursor) -> CutRule:
    dim = fields.at("partition_dim").integer()
    stated = fields.maybe("per_rank_sizes")
    sizes = None if stated is None else stated.shape()

    def cut(shape: Shape, widths: Widths) -> ParamAffineMap:
        require_dim(shape, dim)
        if sizes is not None:
            _require_ranks(len(sizes), widths)
        return contiguous_split_map(shape, sizes or widths.even(shape[dim]), dim)

    return cut


def _gate_up(_fields: Cursor) -> CutRule:
    def cut(shape: Shape, widths: Widths) -> ParamAffineMap:
        require_dim(shape, 0)
        if shape[0] % 2:
            raise LayoutError("two equal halves are an even number", dim=0, found=shape[0])
        half = shape[0] // 2
        return sub_param_map(shape, (half, half), (widths.of(half),) * 2, 0)

    return cut


def _sub_param(fields: Cursor) -> CutRule:
    dim = fields.at("partition_dim").integer()
    count, sizes, seen = map(fields.maybe, ("sub_params", "sub_dim_sizes", "view"))
    stated = rows_of(fields.maybe("shard_widths"))
    own = count.integer(1) if count else sizes.shape() if sizes else None
    entries = None if seen is None else [extent_of(entry) for entry in seen.each()]

    def cut(shape: Shape, widths: Widths) -> ParamAffineMap:
        viewed: list[int | tuple[int, ...]] = list(shape if entries is None else entries)
        require_dim(viewed, dim)
        if own is not None:
            viewed[dim] = own
        view, numel = View.of(viewed, dim), prod(shape)
        logical = view.resolved(numel, shape)
        if logical != shape:
            raise LayoutError(
                "a view of another shape is not written",
                expected=f"the parameter's own shape {shape}",
                found=logical,
                next_step="state its map",
            )
        parts = stated or [widths.of(size) for size in view.sub_sizes(shape[dim])]
        return sub_param_view_map(view, parts, widths.degree, numel, shape)

    return cut


def _segmented(fields: Cursor) -> CutRule:
    dim, segments = fields.at("partition_dim").integer(), segments_of(fields)
    stated = rows_of(fields.maybe("split_widths"))

    def cut(shape: Shape, widths: Widths) -> ParamAffineMap:
        parts = stated or [widths.of(size) for size, shared in segments if not shared]
        return segmented_map(shape, segments, dim, widths.degree, parts)

    return cut


def _block_gather(fields: Cursor) -> CutRule:
    dim, size = fields.at("partition_dim").integer(), fields.at("block_size").integer(1)
    blocks = [row.shape() for row in fields.at("block_ids_by_rank").each()]

    def cut(shape: Shape, widths: Widths) -> ParamAffineMap:
        _require_ranks(len(blocks), widths)
        return block_gather_map(shape, dict(enumerate(blocks)), size, dim)

    return cut


def _fused_qkv(fields: Cursor) -> CutRule:
    builder, own = FUSED_KINDS[fields.at("kind").text()], numbers_of(fields)
    return lambda shape, widths: builder(shape, widths.degree, widths.completed(own))


def _shared_qk(fields: Cursor) -> CutRule:
    heads, dim = fields.at("num_heads").integer(1), fields.at("partition_dim").integer()
    return lambda shape, widths: shared_qk_map(shape, heads, widths.degree, dim)


def _map(fields: Cursor) -> CutRule:
    entry = {name: fields.at(name).value for name in ("logical_shape", "ranks")}
    return stated_map(ParamAffineMap.from_dict(entry, f"{fields.file}: {fields.path}"))


_CUTS: Mapping[str, Callable[[Cursor], CutRule]] = MappingProxyType(
    {
        "replicated": _replicated,
        "column_parallel": _along(0),
        "row_parallel": _along(1),
        "contiguous_split": _contiguous_split,
        "gate_up": _gate_up,
        "sub_param": _sub_param,
        "segmented": _segmented,
        "block_gather": _block_gather,
        "fused_qkv": _fused_qkv,
        "shared_qk": _shared_qk,
        "map": _map,
    }
)
