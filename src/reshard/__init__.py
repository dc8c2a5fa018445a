"""reshard moves the state of a training run from the topology it was saved under to any other.

Theory. A checkpoint is a set of logical tensors, each cut into pieces that lie in storage. A
*piece* says where one strided block sits in the full tensor, where it sits in a holder's shard,
who else holds it, and by which factor. Every format is read into pieces and written from pieces,
so one operation, `M_t ∘ M_s⁻¹`, does everything: converting, resharding, comparing, extracting.

The names below are the public API. They are looked up on first use, so that ``import reshard``
costs next to nothing and ``reshard --help`` does not wait for NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import (
    ArchiveError,
    CheckpointError,
    CompositionError,
    DocumentError,
    HostileFileError,
    InternalError,
    InvalidMapError,
    LayoutError,
    MissingFileError,
    OutputError,
    ReplicaMismatchError,
    ReshardError,
    ScaledStateError,
    TraceError,
    TransferError,
    UnknownLayoutError,
    UnsupportedError,
    UsageError,
)
from reshard.first_use import looked_up

if TYPE_CHECKING:
    from reshard import live
    from reshard.api import (
        annotate,
        convert,
        diagnose,
        inspect,
        open_checkpoint,
        read,
        select,
        verify,
    )
    from reshard.formats.dcp.options import DcpOptions
    from reshard.formats.deepspeed.info_entry import deepspeed_info
    from reshard.formats.deepspeed.writing.options import NativeOptions
    from reshard.formats.safetensors.options import SafetensorsOptions, dtype_rules
    from reshard.geometry import AffinePiece, ParamAffineMap, TransferPlan, compose, trace_map
    from reshard.layouts.builders import (
        block_gather_map,
        contiguous_split_map,
        replicated_map,
        segmented_map,
        sub_param_map,
    )
    from reshard.layouts.experts import expert_map

__version__ = "0.1.0"

_HOMES = {
    "AffinePiece": "reshard.geometry",
    "ParamAffineMap": "reshard.geometry",
    "TransferPlan": "reshard.geometry",
    "compose": "reshard.geometry",
    "block_gather_map": "reshard.layouts.builders",
    "contiguous_split_map": "reshard.layouts.builders",
    "replicated_map": "reshard.layouts.builders",
    "segmented_map": "reshard.layouts.builders",
    "sub_param_map": "reshard.layouts.builders",
    "expert_map": "reshard.layouts.experts",
    "live": "reshard.live",
    "deepspeed_info": "reshard.formats.deepspeed.info_entry",
    "trace_map": "reshard.geometry",
    "DcpOptions": "reshard.formats.dcp.options",
    "NativeOptions": "reshard.formats.deepspeed.writing.options",
    "SafetensorsOptions": "reshard.formats.safetensors.options",
    "dtype_rules": "reshard.formats.safetensors.options",
    "annotate": "reshard.api",
    "diagnose": "reshard.api",
    "inspect": "reshard.api",
    "select": "reshard.api",
    "open_checkpoint": "reshard.api",
    "read": "reshard.api",
    "convert": "reshard.api",
    "verify": "reshard.api",
}
"""Public name -> the module that defines it."""

__all__ = [
    "AffinePiece",
    "ArchiveError",
    "CheckpointError",
    "CompositionError",
    "DcpOptions",
    "DocumentError",
    "HostileFileError",
    "InternalError",
    "InvalidMapError",
    "LayoutError",
    "MissingFileError",
    "NativeOptions",
    "OutputError",
    "ParamAffineMap",
    "ReplicaMismatchError",
    "ReshardError",
    "SafetensorsOptions",
    "ScaledStateError",
    "TraceError",
    "TransferError",
    "TransferPlan",
    "UnknownLayoutError",
    "UnsupportedError",
    "UsageError",
    "__version__",
    "annotate",
    "block_gather_map",
    "compose",
    "contiguous_split_map",
    "convert",
    "deepspeed_info",
    "diagnose",
    "dtype_rules",
    "expert_map",
    "inspect",
    "live",
    "open_checkpoint",
    "read",
    "replicated_map",
    "segmented_map",
    "select",
    "sub_param_map",
    "trace_map",
    "verify",
]


if not TYPE_CHECKING:  # a type checker reads the imports above, and knows what is not there

    def __getattr__(name: str) -> object:
        return looked_up(name, _HOMES, globals())


def __dir__() -> list[str]:
    return sorted(__all__)
