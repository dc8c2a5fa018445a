"""Fused attention projections: query, key and value in one weight, as models and AutoTP cut them.

Theory. A fused weight `[out, in]` holds the rows of Q, K and V in an order that is the model
family's, and AutoTP cuts it by the family's rule, found by the class name of the block. The
families here are named as DeepSpeed names them:

========== ================================== ======================================================
kind       rows of F                          a rank holds
========== ================================== ======================================================
bloom      q k v of head 1, of head 2, …      a contiguous range
glm, qwen  all q, all k, all v                its part of each of the three
phi3       all q, all k, all v (fewer heads)  its part of each of the three
bigcode    all q, one k and one v             its part of q, and all of k and v (shared by all)
codegen    four blocks, each q v k in thirds  12 scattered blocks, by :func:`codegen_blocks`
========== ================================== ======================================================

Widths are by heads (:func:`~reshard.layouts.autotp.shard_sizes`, no layer name). For a bias, which
has no second dim, the numbers must bring what the weight's shape would tell.

Beside them :func:`shared_qk_map`, Yuan's value and output projections, whose heads are taken in
pairs from the two halves.

Sources: `module_inject/fusedqkv_utils.py`, `module_inject/layers.py` (`fused_LinearLayer`,
`Yuan_LinearLayer`), DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from reshard.errors import LayoutError, count_text
from reshard.geometry import ParamAffineMap
from reshard.layouts.autotp import ModelNumbers, shard_sizes
from reshard.layouts.builders import (
    block_gather_map,
    contiguous_split_map,
    segmented_map,
    sub_param_map,
)
from reshard.layouts.ranges import require_dim

CODEGEN_BLOCKS = 4
"""`mp_num` of the CodeGen model: its rows are in as many blocks."""

FusedBuilder = Callable[[Sequence[int], int, ModelNumbers], ParamAffineMap]
"""`(shape, tp_degree, numbers) -> map`."""


def bloom_map(shape: Sequence[int], tp_degree: int, numbers: ModelNumbers) -> ParamAffineMap:
    """Heads one after the other, each with its q, k and v; also AutoTP's rule for unknown blocks.

    Parameters
    ----------
    shape
        Shape of the whole weight or bias; dim 0 is cut.
    tp_degree
        Number of ranks.
    numbers
        `kv_heads` decides the widths.

    Examples
    --------
    Two heads of three rows each:

    >>> dict(bloom_map((6, 2), 2, ModelNumbers(kv_heads=2)).shard_shapes)
    {0: (3, 2), 1: (3, 2)}
    """
    require_dim(shape, 0)
    return contiguous_split_map(shape, _widths(shape[0], tp_degree, numbers), 0)


def glm_map(shape: Sequence[int], tp_degree: int, numbers: ModelNumbers) -> ParamAffineMap:
    """All of Q, then K, then V; with two key/value heads (ChatGLM 2 and 3) of unequal sizes.

    Parameters
    ----------
    shape
        Shape of the whole weight or bias; dim 0 is cut.
    tp_degree
        Number of ranks.
    numbers
        `kv_heads`; where that is 2, `hidden` is the number of query rows.

    Raises
    ------
    LayoutError
        When the rows do not divide into the three parts.

    Examples
    --------
    ====  =======  =====================================
    rank  shard    rows of F
    ====  =======  =====================================
    0     (4, 1)   0, 1 (Q), 4 (K), 6 (V)
    1     (4, 1)   2, 3 (Q), 5 (K), 7 (V)
    ====  =======  =====================================

    >>> one = glm_map((8, 1), 2, ModelNumbers(kv_heads=2, hidden=4))
    >>> [piece.source_offset for piece in one.pieces_by_rank[0]]
    [0, 4, 6]
    """
    require_dim(shape, 0)
    if numbers.kv_heads == 2:
        query = _known("hidden", numbers.hidden)
        return _three_parts(shape, query, tp_degree, numbers)
    if shape[0] % 3:
        raise LayoutError("Q, K and V of equal sizes are three parts", dim=0, found=shape[0])
    return _three_parts(shape, shape[0] // 3, tp_degree, numbers)


def phi3_map(shape: Sequence[int], tp_degree: int, numbers: ModelNumbers) -> ParamAffineMap:
    """All of Q, then K, then V, with `kv_heads` heads of `hidden / heads` rows in K and in V.

    Parameters
    ----------
    shape
        Shape of the whole weight or bias; dim 0 is cut.
    tp_degree
        Number of ranks.
    numbers
        `kv_heads` and `heads`; `hidden` for a bias.

    Raises
    ------
    LayoutError
        When a number is missing, or the parts do not fit the rows.

    Examples
    --------
    >>> numbers = ModelNumbers(kv_heads=2, heads=4, hidden=8)
    >>> [piece.numel for piece in phi3_map((16,), 2, numbers).pieces_by_rank[0]]
    [4, 2, 2]
    """
    require_dim(shape, 0)
    hidden = shape[1] if len(shape) > 1 else _known("hidden", numbers.hidden)
    head = hidden // _known("heads", numbers.heads)
    query = shape[0] - 2 * head * _known("kv_heads", numbers.kv_heads)
    return _three_parts(shape, query, tp_degree, numbers)


def bigcode_map(shape: Sequence[int], tp_degree: int, numbers: ModelNumbers) -> ParamAffineMap:
    """Multi-query attention: Q is split, the one K and V are on every rank.

    Parameters
    ----------
    shape
        Shape of the whole weight or bias; dim 0 is cut.
    tp_degree
        Number of ranks.
    numbers
        `hidden` is the number of query rows, `kv_heads` decides their widths.

    Raises
    ------
    LayoutError
        When a number is missing, or no row is left for K and V.

    Examples
    --------
    ====  =======  ===========================
    rank  shard    rows of F
    ====  =======  ===========================
    0     (4, 1)   0, 1, and 4, 5 (shared)
    1     (4, 1)   2, 3, and 4, 5 (shared)
    ====  =======  ===========================

    >>> one = bigcode_map((6, 1), 2, ModelNumbers(kv_heads=4, hidden=4))
    >>> [(piece.source_offset, piece.locations) for piece in one.pieces_by_rank[1]]
    [(2, (1,)), (4, (0, 1))]
    """
    require_dim(shape, 0)
    query = _known("hidden", numbers.hidden)
    if query >= shape[0]:
        raise LayoutError(
            "no rows are left for keys and values", dim=0, expected=f"> {query}", found=shape[0]
        )
    widths = _widths(query, tp_degree, numbers)
    segments = [(query, False), (shape[0] - query, True)]
    return segmented_map(shape, segments, 0, tp_degree, [widths])


def codegen_map(shape: Sequence[int], tp_degree: int, numbers: ModelNumbers) -> ParamAffineMap:
    """CodeGen: the rows are permuted in blocks, then split.

    Parameters
    ----------
    shape
        Shape of the whole weight; dim 0 is cut.
    tp_degree
        Number of ranks, at least 2.
    numbers
        `kv_heads`, which must be a multiple of four times the ranks.

    Raises
    ------
    LayoutError
        When the heads or the rows do not divide.

    Examples
    --------
    ====  =======  ==========================================
    rank  shard    blocks of F (of 24 of one row each)
    ====  =======  ==========================================
    0     (12, 1)  0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11
    1     (12, 1)  12, 14, 16, 13, 15, 17, 18, 20, 22, …
    ====  =======  ==========================================

    >>> one = codegen_map((24, 1), 2, ModelNumbers(kv_heads=8))
    >>> len(one.pieces_by_rank[0])
    11
    """
    require_dim(shape, 0)
    heads = _known("kv_heads", numbers.kv_heads)
    if tp_degree < 2 or heads % (tp_degree * CODEGEN_BLOCKS):
        raise LayoutError(
            "the CodeGen layout needs a multiple of four heads a rank, and two ranks",
            expected=f"a multiple of {tp_degree * CODEGEN_BLOCKS}",
            found=heads,
        )
    size, rest = divmod(shape[0], 3 * CODEGEN_BLOCKS * tp_degree)
    if rest or not size:
        raise LayoutError(
            "the rows do not divide into CodeGen's blocks",
            dim=0,
            expected=f"a multiple of {3 * CODEGEN_BLOCKS * tp_degree}",
            found=shape[0],
        )
    return block_gather_map(shape, codegen_blocks(tp_degree), size, 0)


def codegen_blocks(tp_degree: int) -> dict[int, list[int]]:
    """The blocks of each rank, in the order of its shard; there are `12 * tp_degree` in all.

    The weight is four blocks of three thirds, each third cut into `tp_degree` parts. Regrouped
    third by third, entry `e` of rank `r` is part `w` of block `m`, where
    `(m, w) = divmod(4 r + e, tp_degree)`.

    >>> codegen_blocks(2)[0][:6]
    [0, 2, 4, 1, 3, 5]
    """
    return {
        rank: [
            (3 * block + third) * tp_degree + part
            for block, part in (
                divmod(CODEGEN_BLOCKS * rank + entry, tp_degree) for entry in range(CODEGEN_BLOCKS)
            )
            for third in range(3)
        ]
        for rank in range(tp_degree)
    }


FUSED_KINDS: Mapping[str, FusedBuilder] = MappingProxyType(
    {
        "bloom": bloom_map,
        "glm": glm_map,
        "qwen": glm_map,
        "phi3": phi3_map,
        "bigcode": bigcode_map,
        "codegen": codegen_map,
    }
)
"""The builder of each kind, by the name that DeepSpeed gives it (without `type`)."""


def shared_qk_heads(num_heads: int, tp_degree: int, rank: int) -> list[int]:
    """The value heads of a rank under Yuan's shared-QK attention, in the order of its shard.

    A rank has `num_heads / tp_degree` query heads; each pair of them shares a value head of the
    first half, and takes the same one of the second half. With an odd number a rank the pairs
    straddle the border, and two ranks hold the same value head.

    >>> shared_qk_heads(8, 2, 0), shared_qk_heads(6, 2, 0), shared_qk_heads(6, 2, 1)
    ([0, 1, 4, 5], [0, 1, 3, 4], [1, 2, 4, 5])
    """
    each = num_heads // tp_degree
    first = [(rank * each + step) // 2 for step in range(0, each, 2)]
    return [*first, *(head + num_heads // 2 for head in first)]


def shared_qk_map(
    shape: Sequence[int], num_heads: int, tp_degree: int, partition_dim: int
) -> ParamAffineMap:
    """Yuan's value projection (dim 0) or output projection (dim 1).

    Parameters
    ----------
    shape
        Shape of the whole weight or bias.
    num_heads
        Number of heads; a multiple of the ranks, and at least two a rank.
    tp_degree
        Number of ranks.
    partition_dim
        The dim that is made of heads.

    Raises
    ------
    LayoutError
        When the heads do not divide.

    Examples
    --------
    Six heads, three a rank: heads 1 and 4 are on both ranks, which DeepSpeed cannot describe.

    ====  =======  ==============
    rank  shard    heads of F
    ====  =======  ==============
    0     (4, 1)   0, 1, 3, 4
    1     (4, 1)   1, 2, 4, 5
    ====  =======  ==============

    >>> odd = shared_qk_map((6, 1), 6, 2, 0)
    >>> [(piece.source_offset, piece.locations) for piece in odd.pieces_by_rank[0]]
    [(0, (0,)), (1, (0, 1)), (3, (0,)), (4, (0, 1))]
    """
    require_dim(shape, partition_dim)
    size, rest = divmod(shape[partition_dim], num_heads) if num_heads > 0 else (0, 1)
    if rest or num_heads % 2 or num_heads % tp_degree or tp_degree > num_heads // 2:
        raise LayoutError(
            "shared-QK heads need an even number, divisible by the ranks, of equal sizes",
            dim=partition_dim,
            found=f"{count_text(num_heads, 'head')} over {count_text(tp_degree, 'rank')}, "
            f"extent {shape[partition_dim]}",
        )
    heads = {rank: shared_qk_heads(num_heads, tp_degree, rank) for rank in range(tp_degree)}
    return block_gather_map(shape, heads, size, partition_dim)


def _three_parts(
    shape: Sequence[int], query: int, tp_degree: int, numbers: ModelNumbers
) -> ParamAffineMap:
    """Q of `query` rows, and K and V that share the rest."""
    half, odd = divmod(shape[0] - query, 2)
    if odd or half < 0 or query < 0:
        raise LayoutError(
            "keys and values do not share the rows beside the queries",
            dim=0,
            expected=f"{query} query rows and an even rest",
            found=shape[0],
        )
    sizes = (query, half, half)
    widths = [_widths(size, tp_degree, numbers) for size in sizes]
    return sub_param_map(shape, sizes, widths, 0)


def _widths(total: int, tp_degree: int, numbers: ModelNumbers) -> tuple[int, ...]:
    return shard_sizes(total, tp_degree, kv_heads=numbers.kv_heads, grain=numbers.grain)


def _known(what: str, value: int | None) -> int:
    if value is None or value < 1:
        raise LayoutError(f"the layout needs {what}", expected="a positive number", found=value)
    return value
