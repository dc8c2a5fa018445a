"""What each conversion key means in geometry: shapes of shards in, a map out.

Theory. DeepSpeed's converter joins shards by a branch chain over name patterns. Each branch is one
layout, and given the shapes of the shards its map follows without further knowledge:

================ ====================================================== ====================
branch           the logical tensor                                     restore keys
================ ====================================================== ====================
replicated       any shard; all are the same                            –
average          as replicated: a mean of different shards has no       –
                 inverse, so shards must be equal
two halves       firsts of all ranks, then seconds                      `cat_dim`,
                                                                        `param_n_sub_params`
sub-parameters   each sub-parameter over all ranks, one after the       `sub_param_shape`
                 other, in the shape of its view
row, default     shards along dim 1, along dim 0                        `cat_dim`
================ ====================================================== ====================

A rank that holds no element may be absent from the files; it then has a width of 0.

Source: `checkpoint/ds_to_universal.py` (`merge_tp_slices`), DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

from reshard.errors import LayoutError
from reshard.formats.torch_archive import SubparamShape
from reshard.geometry import ParamAffineMap
from reshard.layouts.from_shards import Shape, Shards, concatenated, equal_parts, joined, replicated
from reshard.layouts.sub_parameters import View, sub_param_view_map

Lowered = tuple[ParamAffineMap, dict[str, object]]
"""The map, and the keys that a universal loader without maps needs."""


class Branch(Enum):
    """A branch of the converter, in the order in which it tries them; the value is the key."""

    REPLICATED = "tp_replicated_parameter_patterns"
    AVERAGED = "parameter_to_average_patterns"
    TWO_HALVES = "parameter_with_2_sub_params_cat_dim_0"
    SUB_PARAMS = "parameter_with_sub_params"
    ROW = "parameter_with_row_parallelism_patterns"


@dataclass(frozen=True, slots=True)
class SubParams:
    """One entry of `parameter_with_sub_params`."""

    patterns: tuple[str, ...]
    """All patterns of the entry."""
    entries: tuple[int | tuple[int, ...], ...]
    """The view as stated, sizes of sub-parameters as a tuple."""
    partition_dim: int
    """The dim of the view that is cut."""
    widths: tuple[tuple[int, ...], ...] | None
    """For each sub-parameter the extent that each rank holds; None when they are not stated."""
    even: bool
    """Whether the split is even where no widths are stated."""
    is_list: bool
    """Whether the file keeps the view as a list."""


def lower(branch: Branch | None, rule: SubParams | None, shards: Shards, degree: int) -> Lowered:
    """The map and the restore keys of a parameter.

    Parameters
    ----------
    branch
        The branch that its pattern selects, None when it has none.
    rule
        The entry of `parameter_with_sub_params`, for that branch.
    shards
        Tensor rank -> shape of the shard; ranks without elements may be absent.
    degree
        Number of tensor ranks.

    Raises
    ------
    LayoutError
        When the shards are not of the shapes that the branch needs.
    """
    if branch in (Branch.REPLICATED, Branch.AVERAGED):
        return replicated(shards, degree), {}
    if branch is Branch.TWO_HALVES:
        return equal_parts(shards, 2, 0, degree), {"cat_dim": 0, "param_n_sub_params": 2}
    if branch is Branch.SUB_PARAMS and rule is not None:
        return _sub_params(rule, shards, degree)
    dim = 1 if branch is Branch.ROW else 0
    return concatenated(shards, dim, degree), {"cat_dim": dim}


def _sub_params(rule: SubParams, shards: Shards, degree: int) -> Lowered:
    entries = rule.entries
    view = View.of(entries, rule.partition_dim)
    numel = sum(map(prod, shards.values()))
    widths = _counted_widths(rule, view)
    found = sub_param_view_map(view, widths, degree, numel, _stored_shape(rule, shards, degree))
    sizes = view.sub_sizes(found.logical_shape[rule.partition_dim])
    shape = (*entries[: rule.partition_dim], sizes, *entries[rule.partition_dim + 1 :])
    record = SubparamShape.of(
        list(rule.patterns), list(shape) if rule.is_list else shape, rule.partition_dim
    )
    return found, {"sub_param_shape": record}


def _counted_widths(rule: SubParams, view: View) -> Sequence[Sequence[int]] | None:
    """The stated widths; there must be a row for each sub-parameter, unless the split is even."""
    if rule.widths is None and not rule.even:
        raise LayoutError(
            "sub-parameters are declared and their widths are not stated",
            expected="an entry of sub_param_shard_widths",
            found="none",
        )
    count = view.count if view.sizes is None else len(view.sizes)
    if rule.widths is not None and len(rule.widths) != count:
        raise LayoutError(
            "sub_param_shard_widths has another number of sub-parameters than the view",
            expected=count,
            found=len(rule.widths),
        )
    return rule.widths


def _stored_shape(rule: SubParams, shards: Shards, degree: int) -> Shape:
    """Shape of the weight as it is stored, where the view has as many dims; else nothing."""
    first = next(iter(shards.values()))
    if len(first) != len(rule.entries):
        return ()
    return joined(shards, rule.partition_dim, degree)[0]
