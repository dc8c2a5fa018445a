"""The words in which a user states a layout, and the map that each means.

Theory. A rule names a layout and what the shards cannot tell. Extents are never asked for where the
shards have them: how wide each rank's part is, is the extent of its shard. So most rules are one
word, and hold for all layers of a model.

==================== ================================================ ==============================
word                 fields                                           means
==================== ================================================ ==============================
`replicated`         `scale`                                          whole on every rank
`column_parallel`                                                     split along dim 0
`row_parallel`                                                        split along dim 1
`contiguous_split`   `partition_dim`, `per_rank_sizes`                split along a dim
`gate_up`                                                             two halves, each split
`sub_param`          `partition_dim`, `sub_params` or                 sub-parameters, each split
                     `sub_dim_sizes`, `shard_widths`, `view`
`segmented`          `partition_dim`, `segments`, `split_widths`      blocks, split or replicated
`block_gather`       `partition_dim`, `block_size`,                   chosen blocks
                     `block_ids_by_rank`
`fused_qkv`          `kind`, `kv_heads`, `heads`, `hidden`            a fused weight of a family
`shared_qk`          `num_heads`, `partition_dim`                     Yuan's value and output heads
`map`                `logical_shape`, `ranks`                         the pieces themselves
==================== ================================================ ==============================

Every word also takes `original_vocab_size`: rows of dim 0 from there on only pad.

A word that contradicts the shards is refused by the builder that it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from types import MappingProxyType

from reshard.errors import LayoutError
from reshard.formats.parsing import Cursor
from reshard.geometry import ParamAffineMap
from reshard.layouts.autotp import ModelNumbers, shard_sizes
from reshard.layouts.builders import block_gather_map, contiguous_split_map, segmented_map
from reshard.layouts.from_shards import Shards, concatenated, equal_parts, joined, replicated
from reshard.layouts.fused import FUSED_KINDS, shared_qk_heads, shared_qk_map
from reshard.layouts.ranges import require_dim, resized
from reshard.layouts.sub_parameters import View, sub_param_view_map

Rule = Callable[[Shards, int], ParamAffineMap]
"""`(shape of each rank's shard, number of ranks) -> map`; ranks without elements may be absent."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word of the language."""

    read: Callable[[Cursor], Rule]
    """Reads its fields into a rule."""
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    """Names of the fields."""


def read_rule(word: str, fields: Cursor) -> Rule:
    """Read the rule that a word and its fields state.

    Parameters
    ----------
    word
        The word.
    fields
        A table of its fields; `layout` and `original_vocab_size` are not looked at.

    Raises
    ------
    LayoutError
        When there is no such word, a field is missing or is unknown.
    CheckpointError
        When a field is of the wrong kind.
    """
    known = WORDS.get(word)
    if known is None:
        raise LayoutError(
            f"no layout is called {word!r}",
            file=fields.file,
            expected=", ".join(WORDS),
            next_step="docs/layouts.md explains the words",
        )
    given = {str(key) for key in fields.mapping()} - {"layout", "original_vocab_size"}
    missing = [name for name in known.required if name not in given]
    unknown = sorted(given - {*known.required, *known.optional})
    if missing or unknown:
        raise LayoutError(
            f"the layout {word!r} at {fields.path} has other fields",
            file=fields.file,
            expected=", ".join((*known.required, *(f"[{name}]" for name in known.optional)))
            or "none",
            found=", ".join(sorted(given)) or "none",
        )
    return known.read(fields)


# --------------------------------------------------------------------------- the words


def _replicated(fields: Cursor) -> Rule:
    stated = fields.maybe("scale")
    scale = 1.0 if stated is None else number_of(stated)
    if stated is not None and (not isfinite(scale) or scale == 0):
        raise LayoutError(
            f"no rank can hold a parameter by the factor at {stated.path}",
            file=stated.file,
            expected="a finite number other than 0",
            found=scale,
        )
    return lambda shards, degree: replicated(shards, degree, scale)


def number_of(cursor: Cursor) -> float:
    """A value that is a number."""
    if isinstance(cursor.value, bool) or not isinstance(cursor.value, (int, float)):
        raise cursor.unexpected("a number")
    return float(cursor.value)


def _along(dim: int) -> Callable[[Cursor], Rule]:
    def read(_fields: Cursor) -> Rule:
        return lambda shards, degree: concatenated(shards, dim, degree)

    return read


def _contiguous_split(fields: Cursor) -> Rule:
    dim = fields.at("partition_dim").integer()
    stated = fields.maybe("per_rank_sizes")
    sizes = None if stated is None else stated.shape()

    def rule(shards: Shards, degree: int) -> ParamAffineMap:
        shape, held = joined(shards, dim, degree)
        return contiguous_split_map(shape, held if sizes is None else sizes, dim)

    return rule


def _gate_up(_fields: Cursor) -> Rule:
    return lambda shards, degree: equal_parts(shards, 2, 0, degree)


def _sub_param(fields: Cursor) -> Rule:
    dim = fields.at("partition_dim").integer()
    count, view = fields.maybe("sub_params"), fields.maybe("view")
    sizes, widths = fields.maybe("sub_dim_sizes"), rows_of(fields.maybe("shard_widths"))
    if (count is None) == (sizes is None and view is None):
        raise LayoutError(
            f"a sub_param layout at {fields.path} needs either `sub_params`, a number of equal "
            "ones, or `sub_dim_sizes`, or a `view`",
            file=fields.file,
        )
    if count is not None:
        number = count.integer(1)
        return lambda shards, degree: equal_parts(shards, number, dim, degree)
    entries = None if view is None else [extent_of(entry) for entry in view.each()]
    stated = None if sizes is None else sizes.shape()

    def rule(shards: Shards, degree: int) -> ParamAffineMap:
        numel = sum(map(prod, shards.values()))
        same_dims = entries is None or len(entries) == len(next(iter(shards.values())))
        whole = joined(shards, dim, degree)[0] if same_dims else ()
        seen: list[int | Sequence[int]] = list(whole if entries is None else entries)
        if stated is not None:
            require_dim(seen, dim)
            seen[dim] = stated
        return sub_param_view_map(View.of(seen, dim), widths, degree, numel, whole)

    return rule


def extent_of(entry: Cursor) -> int | tuple[int, ...]:
    """An entry of a view: an extent, or the extents of sub-parameters."""
    return entry.shape() if isinstance(entry.value, (list, tuple)) else entry.integer(-1)


def rows_of(cursor: Cursor | None) -> list[tuple[int, ...]] | None:
    """A list of lists of extents."""
    return None if cursor is None else [row.shape() for row in cursor.each()]


def segments_of(fields: Cursor) -> list[tuple[int, bool]]:
    """The blocks of a segmented layout: extent, and whether every rank holds it."""
    segments = []
    for entry in fields.at("segments").each():
        kind = entry.at(1).text()
        if kind not in ("split", "replicated"):
            raise entry.at(1).unexpected('"split" or "replicated"')
        segments.append((entry.at(0).integer(), kind == "replicated"))
    return segments


def _segmented(fields: Cursor) -> Rule:
    dim, segments = fields.at("partition_dim").integer(), segments_of(fields)
    stated = rows_of(fields.maybe("split_widths"))

    def rule(shards: Shards, degree: int) -> ParamAffineMap:
        first = next(iter(shards.values()))
        require_dim(first, dim)
        shape = resized(first, dim, sum(size for size, _ in segments))
        widths = stated if stated is not None else _split_widths(segments, shards, dim, degree)
        return segmented_map(shape, segments, dim, degree, widths)

    return rule


def _split_widths(
    segments: list[tuple[int, bool]], shards: Shards, dim: int, degree: int
) -> list[list[int]]:
    """Widths that follow from the shards: what they hold beside the replicated blocks."""
    shared = sum(size for size, replicated in segments if replicated)
    if sum(not replicated for _, replicated in segments) != 1:
        raise LayoutError(
            "with several split blocks the shards do not tell the widths of each",
            expected="split_widths",
            found="none",
        )
    return [[(shards[rank][dim] if rank in shards else shared) - shared for rank in range(degree)]]


def _block_gather(fields: Cursor) -> Rule:
    dim, size = fields.at("partition_dim").integer(), fields.at("block_size").integer(1)
    blocks = [row.shape() for row in fields.at("block_ids_by_rank").each()]

    def rule(shards: Shards, degree: int) -> ParamAffineMap:
        if len(blocks) != degree:
            raise LayoutError(
                "blocks are stated for another number of ranks", expected=degree, found=len(blocks)
            )
        first = next(iter(shards.values()))
        require_dim(first, dim)
        count = 1 + max((number for row in blocks for number in row), default=-1)
        return block_gather_map(
            resized(first, dim, count * size), dict(enumerate(blocks)), size, dim
        )

    return rule


def _fused_qkv(fields: Cursor) -> Rule:
    kind = fields.at("kind").text()
    builder = FUSED_KINDS.get(kind)
    if builder is None:
        raise LayoutError(
            f"no fused layout is called {kind!r}",
            file=fields.file,
            expected=", ".join(FUSED_KINDS),
        )
    numbers = numbers_of(fields)

    def rule(shards: Shards, degree: int) -> ParamAffineMap:
        shape, sizes = joined(shards, 0, degree)
        if kind == "bigcode":
            # Keys and values are on every rank, so they count once.
            query = shard_sizes(numbers.hidden or 0, degree, kv_heads=numbers.kv_heads)
            shape = resized(shape, 0, sum(query) + sizes[0] - query[0])
        return builder(shape, degree, numbers)

    return rule


def numbers_of(fields: Cursor) -> ModelNumbers:
    """The numbers of the model that a fused layout states."""
    counts = {
        name: None if (found := fields.maybe(name)) is None else found.integer(1)
        for name in ("kv_heads", "heads", "hidden")
    }
    return ModelNumbers(counts["kv_heads"], counts["heads"], counts["hidden"])


def _shared_qk(fields: Cursor) -> Rule:
    heads, dim = fields.at("num_heads").integer(1), fields.at("partition_dim").integer()

    def rule(shards: Shards, degree: int) -> ParamAffineMap:
        first = shards[min(shards)]
        require_dim(first, dim)
        # A rank may hold more heads than its share, so the extent follows from one of them.
        held = len(shared_qk_heads(heads, degree, min(shards)))
        size = first[dim] // held if held else 0
        return shared_qk_map(resized(first, dim, size * heads), heads, degree, dim)

    return rule


def _map(fields: Cursor) -> Rule:
    entry = {name: fields.at(name).value for name in ("logical_shape", "ranks")}
    stated = ParamAffineMap.from_dict(entry, f"{fields.file}: {fields.path}")
    return lambda _shards, _degree: stated


WORDS: Mapping[str, Word] = MappingProxyType(
    {
        "replicated": Word(_replicated, (), ("scale",)),
        "column_parallel": Word(_along(0)),
        "row_parallel": Word(_along(1)),
        "contiguous_split": Word(_contiguous_split, ("partition_dim",), ("per_rank_sizes",)),
        "gate_up": Word(_gate_up),
        "sub_param": Word(
            _sub_param, ("partition_dim",), ("sub_params", "sub_dim_sizes", "shard_widths", "view")
        ),
        "segmented": Word(_segmented, ("partition_dim", "segments"), ("split_widths",)),
        "block_gather": Word(_block_gather, ("partition_dim", "block_size", "block_ids_by_rank")),
        "fused_qkv": Word(_fused_qkv, ("kind",), ("kv_heads", "heads", "hidden")),
        "shared_qk": Word(_shared_qk, ("num_heads", "partition_dim")),
        "map": Word(_map, ("logical_shape", "ranks")),
    }
)
"""Every word, with its fields."""
