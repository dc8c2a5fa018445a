"""The verbs: open, inspect, convert, verify, and questions to a map.

Theory. Every verb is the same walk with other ends. A reader turns a path into a
:class:`~reshard.formats.checkpoint.Checkpoint`; a selection may narrow it; a writer lays a
:class:`~reshard.formats.target.Target` out for it; the planner joins the two into a plan, which
is data and can be priced without moving a byte; the executor runs the plan and publishes the
result. Nothing here knows a format, moves a byte or prints. Budgets have their defaults here, and
nowhere below; below, they are always passed.

As in :mod:`reshard`, names are looked up on first use: inspecting does not wait for what executes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.first_use import looked_up

if TYPE_CHECKING:
    from reshard.api.annotation import AnnotationReport, annotate
    from reshard.api.budgets import DEFAULT_MAX_MEMORY_BYTES, default_workers
    from reshard.api.conversion import ConversionReport, convert
    from reshard.api.diagnosis import Diagnosis, diagnose
    from reshard.api.inspection import FileSummary, InertRecord, Inspection, StateSummary, inspect
    from reshard.api.locating import (
        ElementLocation,
        PieceRange,
        element_location,
        find_tensor,
        piece_ranges,
        states_in_order,
    )
    from reshard.api.naming import Named, named
    from reshard.api.opening import AnyPath, files_of, open_checkpoint
    from reshard.api.reading import read
    from reshard.api.replicas import accepts
    from reshard.api.selection import select
    from reshard.api.verification import verify
    from reshard.execution import Comparison, ReplicaFinding, TensorDifference
    from reshard.formats.checkpoint import Checkpoint

_HOMES = {
    "DEFAULT_MAX_MEMORY_BYTES": "reshard.api.budgets",
    "AnnotationReport": "reshard.api.annotation",
    "AnyPath": "reshard.api.opening",
    "Checkpoint": "reshard.formats.checkpoint",
    "Comparison": "reshard.execution",
    "ConversionReport": "reshard.api.conversion",
    "Diagnosis": "reshard.api.diagnosis",
    "ElementLocation": "reshard.api.locating",
    "FileSummary": "reshard.api.inspection",
    "InertRecord": "reshard.api.inspection",
    "Inspection": "reshard.api.inspection",
    "Named": "reshard.api.naming",
    "PieceRange": "reshard.api.locating",
    "ReplicaFinding": "reshard.execution",
    "StateSummary": "reshard.api.inspection",
    "TensorDifference": "reshard.execution",
    "accepts": "reshard.api.replicas",
    "annotate": "reshard.api.annotation",
    "convert": "reshard.api.conversion",
    "default_workers": "reshard.api.budgets",
    "diagnose": "reshard.api.diagnosis",
    "element_location": "reshard.api.locating",
    "files_of": "reshard.api.opening",
    "find_tensor": "reshard.api.locating",
    "inspect": "reshard.api.inspection",
    "named": "reshard.api.naming",
    "open_checkpoint": "reshard.api.opening",
    "piece_ranges": "reshard.api.locating",
    "read": "reshard.api.reading",
    "select": "reshard.api.selection",
    "states_in_order": "reshard.api.locating",
    "verify": "reshard.api.verification",
}
"""Public name -> the module that defines it."""

__all__ = [
    "DEFAULT_MAX_MEMORY_BYTES",
    "AnnotationReport",
    "AnyPath",
    "Checkpoint",
    "Comparison",
    "ConversionReport",
    "Diagnosis",
    "ElementLocation",
    "FileSummary",
    "InertRecord",
    "Inspection",
    "Named",
    "PieceRange",
    "ReplicaFinding",
    "StateSummary",
    "TensorDifference",
    "accepts",
    "annotate",
    "convert",
    "default_workers",
    "diagnose",
    "element_location",
    "files_of",
    "find_tensor",
    "inspect",
    "named",
    "open_checkpoint",
    "piece_ranges",
    "read",
    "select",
    "states_in_order",
    "verify",
]


if not TYPE_CHECKING:  # a type checker reads the imports above, and knows what is not there

    def __getattr__(name: str) -> object:
        return looked_up(name, _HOMES, globals())


def __dir__() -> list[str]:
    return sorted(__all__)
