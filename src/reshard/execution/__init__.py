"""Execution: plans become published outputs, and checkpoints are compared, in bounded memory.

Call sequence of a conversion: `execute(plan, destination, ...)` checks the destination, locks the
staging folder, fills the files with a crew of threads, and publishes. `compare` streams two
checkpoints against each other, `check_manifest` an output against its manifest. Nothing here knows
a format, imports torch, or asks what the plan is for.
"""

from reshard.execution.audit import Change, check_manifest
from reshard.execution.buffers import DEFAULT_MAX_MEMORY, sizes_for
from reshard.execution.compare import (
    SIDES,
    Comparison,
    StateTotal,
    TensorDifference,
    ValueDifference,
    compare,
)
from reshard.execution.crew import Progress
from reshard.execution.destination import disk_needed
from reshard.execution.execute import Report, execute
from reshard.execution.manifest import read_manifest
from reshard.execution.probe import measured_rate
from reshard.execution.reading import compare_copies
from reshard.execution.replicas import ReplicaFinding
from reshard.execution.staging import staging_path
from reshard.formats.manifest import MANIFEST_NAME

__all__ = [
    "DEFAULT_MAX_MEMORY",
    "MANIFEST_NAME",
    "SIDES",
    "Change",
    "Comparison",
    "Progress",
    "ReplicaFinding",
    "Report",
    "StateTotal",
    "TensorDifference",
    "ValueDifference",
    "check_manifest",
    "compare",
    "compare_copies",
    "disk_needed",
    "execute",
    "measured_rate",
    "read_manifest",
    "sizes_for",
    "staging_path",
]
