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
from reshard.geometry.algebra import (
    canonicalise,
    coalesce,
    distribute,
    follow,
    intersect,
    invert,
    restrict,
)
from reshard.geometry.balance import Balance
from reshard.geometry.balancing import Wanted, balance_of
from reshard.geometry.composition import alternates, compose
from reshard.geometry.nesting import cut_flat_range, locate, nest
from reshard.geometry.piece import AffinePiece
from reshard.geometry.piece_table import PieceTable
from reshard.geometry.plan import TransferPlan
from reshard.geometry.replicas import Choose, balanced, lowest_rank, same_rank_first
from reshard.geometry.segments import Segment, SegmentTable
from reshard.geometry.tables import LinkTable
from reshard.geometry.trace import trace_map

__all__ = [
    "SCALE_POWER",
    "AffinePiece",
    "Balance",
    "Choose",
    "LinkTable",
    "ParamAffineMap",
    "PieceTable",
    "Segment",
    "SegmentTable",
    "TransferPlan",
    "Wanted",
    "alternates",
    "balance_of",
    "balanced",
    "canonicalise",
    "coalesce",
    "compose",
    "cut_flat_range",
    "distribute",
    "follow",
    "intersect",
    "invert",
    "locate",
    "lowest_rank",
    "maps_from_document",
    "maps_to_document",
    "nest",
    "restrict",
    "same_rank_first",
    "trace_map",
]
