"""Planning: a source checkpoint and a target become a plan, which is pure data.

`plan` joins them, `Plan.to_dict` prints the result, `estimate` prices it. Nothing here opens a
file.
"""

from reshard.planning.estimate import Estimate, estimate
from reshard.planning.moves import Move, cut, ordered
from reshard.planning.plan import (
    Origin,
    Place,
    Plan,
    PlannedFile,
    PlannedFill,
    PlannedSlot,
    PlannedSource,
    Route,
)
from reshard.planning.planner import SourceTable, filtered, identity_fill, origin_of, plan
from reshard.planning.routes import RouteBook, identity_map

__all__ = [
    "Estimate",
    "Move",
    "Origin",
    "Place",
    "Plan",
    "PlannedFile",
    "PlannedFill",
    "PlannedSlot",
    "PlannedSource",
    "Route",
    "RouteBook",
    "SourceTable",
    "cut",
    "estimate",
    "filtered",
    "identity_fill",
    "identity_map",
    "ordered",
    "origin_of",
    "plan",
]
