"""The verbs: open, inspect, convert, verify, and questions to a map.

Theory. Every verb is the same walk with other ends. A reader turns a path into a
:class:`~reshard.formats.checkpoint.Checkpoint`; a selection may narrow it; a writer lays a
:class:`~reshard.formats.target.Target` out for it; the planner joins the two into a plan, which
is data and can be priced without moving a byte; the executor runs the plan and publishes the
result. Nothing here knows a format, moves a byte or prints. Budgets have their defaults here, and
nowhere below; below, they are always passed.
"""

from reshard.api.annotation import annotate
from reshard.api.budgets import DEFAULT_MAX_MEMORY_BYTES, default_workers
from reshard.api.conversion import ConversionReport, convert
from reshard.api.inspection import FileSummary, InertRecord, Inspection, StateSummary, inspect
from reshard.api.locating import (
    ElementLocation,
    PieceRange,
    element_location,
    find_tensor,
    piece_ranges,
)
from reshard.api.opening import AnyPath, files_of, open_checkpoint
from reshard.api.selection import select
from reshard.api.verification import verify
from reshard.execution import Comparison, ReplicaFinding, TensorDifference
from reshard.formats.checkpoint import Checkpoint

__all__ = [
    "DEFAULT_MAX_MEMORY_BYTES",
    "AnyPath",
    "Checkpoint",
    "Comparison",
    "ConversionReport",
    "ElementLocation",
    "FileSummary",
    "InertRecord",
    "Inspection",
    "PieceRange",
    "ReplicaFinding",
    "StateSummary",
    "TensorDifference",
    "annotate",
    "convert",
    "default_workers",
    "element_location",
    "files_of",
    "find_tensor",
    "inspect",
    "open_checkpoint",
    "piece_ranges",
    "select",
    "verify",
]
