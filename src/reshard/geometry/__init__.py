"""Geometry: an algebra of affine strided pieces. Imports NumPy, and neither torch nor DeepSpeed.

One idea: where the elements of a tensor live is a set of strided blocks, so that cutting,
joining, nesting and resharding tensors is arithmetic on a few integers. See ``docs/geometry.md``.
"""

from reshard.geometry.affine_map import (
    SCALE_POWER,
    ParamAffineMap,
    maps_from_document,
    maps_to_document,
)
from reshard.geometry.composition import alternates, compose
from reshard.geometry.nesting import cut_flat_range, locate, nest
from reshard.geometry.piece import AffinePiece
from reshard.geometry.plan import Segment, TransferPlan
from reshard.geometry.replicas import lowest_rank, same_rank_first
from reshard.geometry.trace import trace_map

__all__ = [
    "SCALE_POWER",
    "AffinePiece",
    "ParamAffineMap",
    "Segment",
    "TransferPlan",
    "alternates",
    "compose",
    "cut_flat_range",
    "locate",
    "lowest_rank",
    "maps_from_document",
    "maps_to_document",
    "nest",
    "same_rank_first",
    "trace_map",
]
