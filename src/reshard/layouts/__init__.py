"""Layouts: how runtimes cut a parameter, as builders of maps.

A layout knows the words of a runtime (partition dim, sub-parameters, flat partitions) and never
files. `docs/layouts.md` shows where each is used.

=================  =================================================================================
`builders`         replicated, split, sub-parameters, segmented, block gather
`ranges`           the kernel of these: ranks that hold ranges of one dim
`from_shards`      the same, from the shapes of the shards
`sub_parameters`   sub-parameters seen through a view
`autotp`, `fused`  DeepSpeed AutoTP: widths, layers, fused attention weights, Yuan's heads
`experts`          expert placement
`flat`             ZeRO's flat partitions
=================  =================================================================================
"""

from reshard.layouts.builders import (
    block_gather_map,
    contiguous_split_map,
    replicated_map,
    segmented_map,
    sub_param_map,
)
from reshard.layouts.experts import expert_map
from reshard.layouts.ranges import ranges_map

__all__ = [
    "block_gather_map",
    "contiguous_split_map",
    "expert_map",
    "ranges_map",
    "replicated_map",
    "segmented_map",
    "sub_param_map",
]
