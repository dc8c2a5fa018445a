"""The restore keys of AutoTP, lowered to a target map.

Theory. A layer of AutoTP keeps on each parameter how *it* cuts it
(`ds_autotp_universal_checkpoint_meta`): what a loader needs to take its shard out of a whole
tensor. The keys are tried in an order, and each is a layout:

==================================== ===========================================================
key                                  the map
==================================== ===========================================================
`conversion.affine_map`              itself
`replicated`                         whole on every rank
`sub_param_sizes`, `sub_param_shape` sub-parameters in the shape of `logical_shape`, of the widths
                                     in `sub_param_shard_widths`, else even
`partition_sizes`                    a block a rank, of these extents
`partition_dim` alone                a block a rank, as even as can be
==================================== ===========================================================

The last asserts in DeepSpeed that the ranks divide the dim. Uneven blocks can be said here, and
the first ranks get one element more, as AutoTP cuts. `unsupported_reason` refuses only where there
is no map. `output_shape` and `target_partition_shape` are not about the cut and are not read.

Sources: `checkpoint/universal_checkpoint.py` (`_resolve_autotp_partition`),
`module_inject/layers.py` (`_build_param_uc_restore_meta`), DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from reshard.errors import LayoutError
from reshard.formats.parsing import Cursor
from reshard.formats.torch_archive import SubparamShape
from reshard.geometry import ParamAffineMap
from reshard.layouts.autotp import shard_sizes
from reshard.layouts.builders import contiguous_split_map, replicated_map, sub_param_map
from reshard.layouts.ranges import require_dim
from reshard.layouts.sub_parameters import View, sub_param_view_map

META = "ds_autotp_universal_checkpoint_meta"
"""The attribute of a parameter, named in messages."""

Shape = tuple[int, ...]


def map_from_restore_meta(meta: Mapping[str, object], tp_degree: int) -> ParamAffineMap:
    """The map by which a layer of AutoTP holds a parameter.

    Parameters
    ----------
    meta
        The value of the attribute.
    tp_degree
        Number of tensor ranks.

    Raises
    ------
    LayoutError
        When the keys do not say how the parameter is cut, or contradict each other.
    CheckpointError
        When a key holds something else than it should.

    Examples
    --------
    An uneven block a rank, which DeepSpeed's fallback refuses:

    >>> cut = map_from_restore_meta({"partition_dim": 0, "logical_shape": (5, 2)}, 2)
    >>> dict(cut.shard_shapes)
    {0: (3, 2), 1: (2, 2)}
    """
    root = Cursor(meta, META)
    stored = _stored_map(root)
    if stored is not None:
        stored.validate()
        return stored
    shape = _logical_shape(root)
    if _is_set(root, "replicated"):
        return replicated_map(shape, tp_degree)
    dim = root.maybe("partition_dim")
    if dim is None:
        raise LayoutError(
            "the restore keys do not say which dim is cut",
            expected="affine_map, replicated, or partition_dim",
            found=", ".join(sorted(map(str, meta))),
        )
    return _cut(root, shape, dim.integer(), tp_degree)


def _stored_map(root: Cursor) -> ParamAffineMap | None:
    conversion = root.maybe("conversion")
    entry = None if conversion is None else conversion.maybe("affine_map")
    if entry is not None:
        return ParamAffineMap.from_dict(entry.value, f"{META}.{entry.path}")
    reason = None if conversion is None else conversion.maybe("unsupported_reason")
    if reason is not None:
        raise LayoutError(f"AutoTP cannot describe this parameter: {reason.text()}")
    return None


def _logical_shape(root: Cursor) -> Shape:
    found = root.maybe("logical_shape") or root.maybe("original_shape")
    if found is None:
        raise LayoutError("the restore keys state no shape", expected="logical_shape")
    return found.shape()


def _is_set(root: Cursor, key: str) -> bool:
    found = root.maybe(key)
    return found is not None and found.value is True


def _cut(root: Cursor, shape: Shape, dim: int, degree: int) -> ParamAffineMap:
    require_dim(shape, dim)
    widths = root.maybe("sub_param_shard_widths")
    rows = None if widths is None else [row.shape() for row in widths.each()]
    sizes = root.maybe("sub_param_sizes")
    if sizes is not None and rows is not None:
        return sub_param_map(shape, sizes.shape(), rows, dim)
    if sizes is not None:
        entries: list[int | Sequence[int]] = list(shape)
        entries[dim] = sizes.shape()
        return sub_param_view_map(View.of(entries, dim), None, degree, prod(shape))
    view = root.maybe("sub_param_shape")
    if view is not None:
        return sub_param_view_map(_view(view, dim), rows, degree, prod(shape), shape)
    stated = root.maybe("partition_sizes")
    extents = shard_sizes(shape[dim], degree) if stated is None else stated.shape()
    if len(extents) != degree:
        raise LayoutError(
            "partition_sizes are for another number of ranks", expected=degree, found=len(extents)
        )
    return contiguous_split_map(shape, extents, dim)


def _view(found: Cursor, dim: int) -> View:
    """A view, which may be a plain tuple or an object with one."""
    if isinstance(found.value, SubparamShape):
        dim, found = found.value.partition_dim, Cursor(found.value.shape, found.file, found.path)
    entries = [
        entry.shape() if isinstance(entry.value, (list, tuple)) else entry.integer(-1)
        for entry in found.each()
    ]
    return View.of(entries, dim)
