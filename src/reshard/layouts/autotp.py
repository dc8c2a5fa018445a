"""DeepSpeed AutoTP: how wide each rank's part is, and the maps of its layers.

Theory. AutoTP cuts a weight `[out, in]` along `out` (column-parallel) or `in` (row-parallel). How
wide a rank's part is follows one of two rules (:func:`shard_sizes`):

* *by heads*: rank `r` gets the columns of `kv // tp` key/value heads, one more for the first
  `kv % tp` ranks, so no head is cut. With fewer heads than ranks the last ranks hold nothing.
* *nearly even*: in units of the grain, one more unit for the first ranks, the rest of the division
  by the grain for the last.

The first applies where the model's configuration states heads and they divide the extent, except to
the layers that :func:`follows_heads` names: the language-model head and the feed-forward layers.
Neither the heads nor the grain are in a checkpoint, so a source map never comes from here; these
maps are for targets, for stated layouts and for tests.

Sources: `module_inject/tp_shard.py` (`get_shard_size`), `module_inject/layers.py`, DeepSpeed
0.19.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from reshard.errors import LayoutError, count_text
from reshard.geometry import AffinePiece, ParamAffineMap
from reshard.geometry.index_math import row_major_strides
from reshard.layouts.builders import contiguous_split_map, replicated_map, sub_param_map
from reshard.layouts.ranges import require_dim

OUTPUT_HEADS = frozenset(("lm_head", "embed_out"))
"""Names of layers that are always cut nearly evenly."""

FEED_FORWARD = ("mlp", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Parts of names of layers that are always cut nearly evenly."""


@dataclass(frozen=True, slots=True)
class ModelNumbers:
    """What AutoTP takes from a model's configuration."""

    kv_heads: int | None = None
    """Number of key/value heads; of query heads where the model knows no other. None when
    unknown."""
    heads: int | None = None
    """Number of query heads."""
    hidden: int | None = None
    """Width of the hidden state."""
    grain: int = 1
    """`tp_grain_size`: parts are multiples of it where heads do not decide."""


def follows_heads(layer: str | None) -> bool:
    """Whether AutoTP cuts a layer of this name by heads.

    >>> follows_heads("self_attn.q_proj"), follows_heads("mlp.dense"), follows_heads("lm_head")
    (True, False, False)
    """
    name = str(layer)
    return name not in OUTPUT_HEADS and not any(part in name for part in FEED_FORWARD)


def shard_sizes(
    total: int,
    tp_degree: int,
    *,
    kv_heads: int | None = None,
    grain: int = 1,
    layer: str | None = None,
) -> tuple[int, ...]:
    """Extent of each rank's part of a dim of `total` elements.

    Parameters
    ----------
    total
        Extent of the dim.
    tp_degree
        Number of ranks.
    kv_heads, grain
        As in :class:`ModelNumbers`.
    layer
        Name of the layer, which may except it from the rule by heads.

    Raises
    ------
    LayoutError
        When there is no rank, no head, or no grain.

    Examples
    --------
    Three heads of 8 over two ranks; the same extent in a feed-forward layer; two heads over four:

    >>> shard_sizes(24, 2, kv_heads=3), shard_sizes(24, 2, kv_heads=3, layer="mlp.up_proj")
    ((16, 8), (12, 12))
    >>> shard_sizes(16, 4, kv_heads=2)
    (8, 8, 0, 0)
    >>> shard_sizes(97, 2, grain=8)
    (48, 49)
    """
    if tp_degree < 1 or grain < 1 or (kv_heads is not None and kv_heads < 1):
        raise LayoutError(
            "a cut needs at least one rank, one head and a grain of one element",
            found=f"degree {tp_degree}, heads {kv_heads}, grain {grain}",
        )
    if kv_heads is not None and total % kv_heads == 0 and follows_heads(layer):
        return tuple(size * (total // kv_heads) for size in _nearly_even(kv_heads, tp_degree))
    if total < grain:
        return _nearly_even(total, tp_degree)
    units, rest = divmod(total, grain)
    sizes = [size * grain for size in _nearly_even(units, tp_degree)]
    sizes[-1] += rest
    return tuple(sizes)


def _nearly_even(total: int, parts: int) -> tuple[int, ...]:
    each, more = divmod(total, parts)
    return tuple(each + (part < more) for part in range(parts))


HEADS_UNSTATED = "its parts follow from the number of key/value heads, which nobody states"

TWO_RULES = "whether heads decide about its parts is open: its name says both"


@dataclass(frozen=True, slots=True)
class Widths:
    """How wide the parts of one layer are at one degree.

    Examples
    --------
    >>> Widths.of_parameter("layers.0.self_attn.k_proj.weight", 4, ModelNumbers(kv_heads=2)).of(16)
    (8, 8, 0, 0)
    >>> Widths.of_parameter("layers.0.mlp.fc.weight", 4, ModelNumbers()).of(16)
    (4, 4, 4, 4)
    >>> Widths.of_parameter("layers.0.self_attn.k_proj.weight", 4, ModelNumbers()).of(16)
    Traceback (most recent call last):
    reshard.errors.LayoutError: its parts follow from the number of key/value heads, which ...
    """

    degree: int
    """Number of ranks."""
    numbers: ModelNumbers
    """What decides the widths."""
    layers: tuple[str, ...]
    """The names by which AutoTP may know the layer."""

    @classmethod
    def of_parameter(cls, name: str, degree: int, numbers: ModelNumbers) -> Widths:
        """Those of the layer that a parameter belongs to.

        AutoTP knows it by its whole path, or by its own name and that of the module it is in; the
        language-model head also by its own name alone.
        """
        path = name.split(".")[:-1]
        names = {".".join(path), ".".join(path[-2:])}
        own = {path[-1]} & OUTPUT_HEADS if path else set()
        return cls(degree, numbers, tuple(sorted(names | own)))

    def of(self, total: int) -> tuple[int, ...]:
        """Extent of each rank's part of a dim of `total` elements.

        Raises
        ------
        LayoutError
            When the heads decide and are not known, or the names of the layer disagree.
        """
        if self.numbers.kv_heads is None and any(map(follows_heads, self.layers)):
            raise LayoutError(HEADS_UNSTATED)
        found = {self._sizes(total, layer) for layer in self.layers}
        if len(found) > 1:
            raise LayoutError(TWO_RULES, found=sorted(found))
        return found.pop()

    def _sizes(self, total: int, layer: str) -> tuple[int, ...]:
        numbers = self.numbers
        return shard_sizes(
            total, self.degree, kv_heads=numbers.kv_heads, grain=numbers.grain, layer=layer
        )

    def even(self, total: int) -> tuple[int, ...]:
        """The same where heads never decide: as even as it goes."""
        return _nearly_even(total, self.degree)

    def completed(self, own: ModelNumbers) -> ModelNumbers:
        """Numbers that are stated for the layer, and the number of heads where they lack it.

        Raises
        ------
        LayoutError
            When nobody states the number of heads.
        """
        heads = own.kv_heads or self.numbers.kv_heads
        if heads is None:
            raise LayoutError(HEADS_UNSTATED)
        return replace(own, kv_heads=heads)


def column_parallel_map(
    shape: Sequence[int], tp_degree: int, numbers: ModelNumbers, layer: str | None = None
) -> ParamAffineMap:
    """The weight or bias of a column-parallel layer: `LinearLayer`, vocabulary-parallel layers.

    Parameters
    ----------
    shape
        Shape of the whole weight `[out, in]` or bias `[out]`.
    tp_degree
        Number of ranks.
    numbers
        What decides the widths.
    layer
        Name of the layer: `"lm_head"` for a vocabulary-parallel output head.

    Examples
    --------
    A vocabulary of 5 over two ranks:

    ====  =======  ============
    rank  shard    rows of F
    ====  =======  ============
    0     (3, 2)   0, 1, 2
    1     (2, 2)   3, 4
    ====  =======  ============

    >>> dict(column_parallel_map((5, 2), 2, ModelNumbers(), "lm_head").shard_shapes)
    {0: (3, 2), 1: (2, 2)}
    """
    return _split(shape, 0, tp_degree, numbers, layer)


def row_parallel_map(
    shape: Sequence[int], tp_degree: int, numbers: ModelNumbers, layer: str | None = None
) -> ParamAffineMap:
    """The weight of a row-parallel layer: `LinearAllreduce`, hidden-parallel embeddings.

    The bias of such a layer is whole on every rank and not divided: :func:`replicated_map`.

    Parameters
    ----------
    shape
        Shape of the whole weight `[out, in]`; `in` is cut.
    tp_degree, numbers, layer
        As for :func:`column_parallel_map`.

    Examples
    --------
    ====  =======  ============
    rank  shard    columns of F
    ====  =======  ============
    0     (2, 4)   0 to 3
    1     (2, 2)   4, 5
    ====  =======  ============

    >>> dict(row_parallel_map((2, 6), 2, ModelNumbers(kv_heads=3)).shard_shapes)
    {0: (2, 4), 1: (2, 2)}
    """
    return _split(shape, 1, tp_degree, numbers, layer)


def _split(
    shape: Sequence[int], dim: int, tp_degree: int, numbers: ModelNumbers, layer: str | None
) -> ParamAffineMap:
    require_dim(shape, dim)
    sizes = shard_sizes(
        shape[dim], tp_degree, kv_heads=numbers.kv_heads, grain=numbers.grain, layer=layer
    )
    return contiguous_split_map(shape, sizes, dim)


def gate_up_map(shape: Sequence[int], tp_degree: int, numbers: ModelNumbers) -> ParamAffineMap:
    """A feed-forward pack: gate and up, one after the other, each split nearly evenly.

    Parameters
    ----------
    shape
        Shape of the whole weight `[2 * ff, in]` or bias `[2 * ff]`.
    tp_degree, numbers
        As for :func:`column_parallel_map`.

    Examples
    --------
    ====  =======  ========================
    rank  shard    rows of F
    ====  =======  ========================
    0     (4, 1)   0, 1 (gate), 3, 4 (up)
    1     (2, 1)   2 (gate), 5 (up)
    ====  =======  ========================

    >>> pack = gate_up_map((6, 1), 2, ModelNumbers())
    >>> [(piece.source_offset, piece.numel) for piece in pack.pieces_by_rank[0]]
    [(0, 2), (3, 2)]
    """
    require_dim(shape, 0)
    half, odd = divmod(shape[0], 2)
    if odd:
        raise LayoutError("a pack of gate and up has an even extent", dim=0, found=shape[0])
    widths = shard_sizes(
        half, tp_degree, kv_heads=numbers.kv_heads, grain=numbers.grain, layer="mlp"
    )
    return sub_param_map(shape, [half, half], [widths, widths], 0)


def row_bias_map(shape: Sequence[int], tp_degree: int, *, divided: bool = False) -> ParamAffineMap:
    """The bias of a row-parallel layer, whole on every rank.

    Parameters
    ----------
    shape
        Shape of the bias.
    tp_degree
        Number of ranks.
    divided
        Whether each rank holds it divided by their number, so that the sum of their outputs adds
        it once. No layer of AutoTP that trains does so; Megatron forks do.

    Examples
    --------
    >>> row_bias_map((4,), 4, divided=True).pieces_by_rank[3][0].scale
    0.25
    """
    return replicated_map(shape, tp_degree, 1.0 / tp_degree if divided else 1.0)


def conv1d_column_map(
    shape: Sequence[int], tp_degree: int, numbers: ModelNumbers
) -> ParamAffineMap:
    """The weight of AutoTP's `conv_LinearLayer`, a `Conv1D` weight `[in, out]` cut along `out`.

    The sizes are computed from `in` and applied to `out`, so only a square weight can be built at
    all. The map that DeepSpeed 0.19.8 stores for it says that `in` is cut, which is false.

    Parameters
    ----------
    shape
        Shape of the whole weight.
    tp_degree, numbers
        As for :func:`column_parallel_map`.

    Examples
    --------
    >>> dict(conv1d_column_map((4, 4), 2, ModelNumbers()).shard_shapes)
    {0: (4, 2), 1: (4, 2)}
    """
    require_dim(shape, 1)
    sizes = shard_sizes(shape[0], tp_degree, kv_heads=numbers.kv_heads, grain=numbers.grain)
    return contiguous_split_map(shape, sizes, 1)


def conv1d_row_map(shape: Sequence[int], tp_degree: int, numbers: ModelNumbers) -> ParamAffineMap:
    """The weight of AutoTP's `Conv_LinearALlreduce`: `[in, out]`, transposed, then cut along `in`.

    A shard is `F.T[:, part]`, so its strides are permuted. The map that DeepSpeed 0.19.8 stores
    leaves the transposition out; for a square weight the shapes do not show it.

    Parameters
    ----------
    shape
        Shape of the whole weight.
    tp_degree, numbers
        As for :func:`column_parallel_map`.

    Examples
    --------
    ====  =======  =====================
    rank  shard    columns of F.T
    ====  =======  =====================
    0     (4, 2)   0, 1
    1     (4, 2)   2, 3
    ====  =======  =====================

    >>> print(conv1d_row_map((4, 4), 2, ModelNumbers()).pieces_by_rank[1][0])
    F[8 + 4×1 2×4] → [0 + 4×2 2×1] on 1
    """
    require_dim(shape, 1)
    rows, columns = shape
    sizes = shard_sizes(columns, tp_degree, kv_heads=numbers.kv_heads, grain=numbers.grain)
    if sum(sizes) != rows:
        raise LayoutError(
            "AutoTP can cut a Conv1D weight only when it is square",
            expected=count_text(columns, "row"),
            found=rows,
        )
    strides = (1, row_major_strides((rows, columns))[0])
    shapes, pieces, start = {}, {}, 0
    for rank, size in enumerate(sizes):
        shapes[rank] = (columns, size)
        piece = AffinePiece((columns, size), start * columns, strides, 0, (size, 1), (rank,))
        pieces[rank] = [piece] if piece.numel else []
        start += size
    return ParamAffineMap((rows, columns), shapes, pieces)
