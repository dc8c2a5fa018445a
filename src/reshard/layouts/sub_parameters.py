"""Sub-parameters seen through a view: a stored weight whose cut is easier to say in another shape.

Theory. A fused weight may be stored as `(24, 8)` and cut as `(2, 12, 8)` along its middle dim. The
*view* says so: one entry a dim, each a number of elements, or -1 for "what is left". The entry of
the partition dim says what the sub-parameters are: a tuple of their extents, a positive number of
equal ones, or -1 for a single one. The logical tensor then has the shape of the view, with the
extents of the sub-parameters added up, and a shard is the rank's part of each, one after the other.

Several -1 are told by the weight's own shape where it has as many dims, else they are refused.

Sources: `module_inject/layers.py` (`_infer_subparam_logical_shapes`, `SubParamLinearLayer`),
`checkpoint/ds_to_universal.py` (`_resolve_logical_shape`), DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from reshard.errors import LayoutError, count_text
from reshard.geometry import ParamAffineMap
from reshard.layouts.autotp import ModelNumbers, shard_sizes
from reshard.layouts.builders import replicated_map, sub_param_map
from reshard.layouts.ranges import require_dim, resized

UNKNOWN = -1
"""An extent that follows from the number of elements."""

Extents = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class View:
    """How a stored weight is seen for cutting."""

    extents: Extents
    """One extent a dim, :data:`UNKNOWN` where it follows; at the partition dim the sum of the
    sub-parameters, or :data:`UNKNOWN`."""
    partition_dim: int
    """The dim of the view that is cut."""
    sizes: Extents | None = None
    """Extents of the sub-parameters along it; None when only their number is known."""
    count: int = 1
    """Number of equal sub-parameters where `sizes` is None."""

    @classmethod
    def of(cls, entries: Sequence[int | Sequence[int]], partition_dim: int) -> View:
        """The view that a list of entries describes.

        Raises
        ------
        LayoutError
            When there is no such dim, an entry is 0 or below -1, or sizes stand at another dim.

        Examples
        --------
        >>> View.of((3, -1), 0)
        View(extents=(-1, -1), partition_dim=0, sizes=None, count=3)
        >>> View.of(((16, 8, 8), 64), 0).extents
        (32, 64)
        """
        require_dim(entries, partition_dim)
        extents = []
        sizes: Extents | None = None
        count = 1
        for dim, entry in enumerate(entries):
            if isinstance(entry, int):
                if entry < UNKNOWN or entry == 0:
                    raise LayoutError("an extent of a view is not one", dim=dim, found=entry)
                if dim == partition_dim:
                    count = 1 if entry == UNKNOWN else entry
                extents.append(UNKNOWN if dim == partition_dim else entry)
                continue
            sizes = tuple(entry)
            if dim != partition_dim or not sizes or min(sizes) < 1:
                raise LayoutError(
                    "sizes of sub-parameters stand at the partition dim, and are positive",
                    dim=dim,
                    expected=f"dim {partition_dim}",
                    found=list(sizes),
                )
            extents.append(sum(sizes))
        return cls(tuple(extents), partition_dim, sizes, count)

    def resolved(self, numel: int, like: Sequence[int] = ()) -> Extents:
        """Shape of the logical tensor.

        Parameters
        ----------
        numel
            Number of elements of the parameter.
        like
            Shape of the weight as it is stored, which tells extents that are left open.

        Raises
        ------
        LayoutError
            When the view does not fit, or leaves more than one extent open.

        Examples
        --------
        >>> View.of(((16, 8, 8), -1), 0).resolved(640)
        (32, 20)
        """
        extents = list(self.extents)
        open_dims = [dim for dim, extent in enumerate(extents) if extent == UNKNOWN]
        if len(open_dims) > 1 and len(like) == len(extents):
            for dim in open_dims:
                extents[dim] = like[dim]
        elif len(open_dims) == 1:
            known = prod(extent for extent in extents if extent != UNKNOWN)
            extents[open_dims[0]] = numel // known
        if UNKNOWN in extents or prod(extents) != numel:
            raise LayoutError(
                "a view of sub-parameters does not fit the parameter",
                expected=count_text(numel, "element"),
                found=f"view {self}",
            )
        return tuple(extents)

    def sub_sizes(self, extent: int) -> Extents:
        """Extents of the sub-parameters, given that of the partition dim.

        Raises
        ------
        LayoutError
            When they do not divide it, or do not add up to it.

        Examples
        --------
        >>> View.of((3, -1), 0).sub_sizes(12)
        (4, 4, 4)
        """
        sizes = (extent // self.count,) * self.count if self.sizes is None else self.sizes
        if sum(sizes) != extent:
            raise LayoutError(
                "sub-parameters do not add up to the dim",
                dim=self.partition_dim,
                expected=extent,
                found=f"{len(sizes)} of {list(sizes)}",
            )
        return sizes

    def __str__(self) -> str:
        entries: list[object] = list(self.extents)
        if self.sizes is not None or self.count > 1:
            entries[self.partition_dim] = self.sizes if self.sizes is not None else self.count
        return f"({', '.join(map(str, entries))}) along dim {self.partition_dim}"


def sub_param_view_map(
    view: View,
    shard_widths: Sequence[Sequence[int]] | None,
    tp_degree: int,
    numel: int,
    like: Sequence[int] = (),
) -> ParamAffineMap:
    """The map of a parameter that is cut through a view.

    Parameters
    ----------
    view
        How it is seen.
    shard_widths
        For each sub-parameter, the extent that each rank holds of it; None for an even split.
    tp_degree
        Number of ranks.
    numel
        Number of elements of the parameter.
    like
        As for :meth:`View.resolved`.

    Raises
    ------
    LayoutError
        When the view does not fit, or an even split does not divide.

    Examples
    --------
    A `(4, 2)` weight seen as two sub-parameters of `(2, 2)`; each rank takes a row of each:

    ====  =========  ============
    rank  shard      rows of F
    ====  =========  ============
    0     (2, 2)     0, 2
    1     (2, 2)     1, 3
    ====  =========  ============

    >>> one = sub_param_view_map(View.of((2, -1), 0), None, 2, 8, (4, 2))
    >>> [piece.source_offset for piece in one.pieces_by_rank[1]]
    [2, 6]
    """
    logical = view.resolved(numel, like)
    sizes = view.sub_sizes(logical[view.partition_dim])
    if shard_widths is None:
        uneven = [size for size in sizes if size % tp_degree]
        if uneven:
            raise LayoutError(
                "sub-parameters do not divide by the ranks, and no widths are stated",
                dim=view.partition_dim,
                expected=f"multiples of {tp_degree}",
                found=uneven,
            )
        shard_widths = [(size // tp_degree,) * tp_degree for size in sizes]
    return sub_param_map(logical, sizes, shard_widths, view.partition_dim)


def sub_param_layer_map(
    shape: Sequence[int],
    view: View,
    tp_degree: int,
    numbers: ModelNumbers,
    *,
    layer: str | None = None,
    bias: bool = False,
) -> ParamAffineMap:
    """The weight or bias of AutoTP's `SubParamLinearLayer` and `SubParamLinearAllreduce`.

    Parameters
    ----------
    shape
        Shape of the whole weight `[out, in]`.
    view
        How the layer sees the weight; its last dim is `in`.
    tp_degree, numbers, layer
        As for :func:`~reshard.layouts.autotp.column_parallel_map`.
    bias
        Give the map of the bias instead: it is cut like the weight where the cut dim is one of the
        output dims, else whole on every rank.

    Raises
    ------
    LayoutError
        When the view does not fit the weight.

    Examples
    --------
    >>> view = View.of((2, -1), 0)
    >>> weight = sub_param_layer_map((8, 4), view, 2, ModelNumbers())
    >>> [piece.source_offset for piece in weight.pieces_by_rank[1]]
    [8, 24]
    >>> sub_param_layer_map((8, 4), view, 2, ModelNumbers(), bias=True).logical_shape
    (8,)
    """
    logical = view.resolved(prod(shape), shape)
    dim = view.partition_dim
    sizes = view.sub_sizes(logical[dim])
    if bias:
        logical = logical[:-1]
        if dim >= len(logical):
            return replicated_map(logical, tp_degree)
    widths = [
        shard_sizes(size, tp_degree, kv_heads=numbers.kv_heads, grain=numbers.grain, layer=layer)
        for size in sizes
    ]
    return sub_param_map(resized(logical, dim, sum(sizes)), sizes, widths, dim)
