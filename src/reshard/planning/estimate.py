"""What a plan costs, before a byte moves.

Theory. Bytes read follow from the routes: a contiguous copy reads what it copies, a strided one at
most its covering span. Bytes written are the sizes of the files. Peak memory is the cap on buffers
(see `reshard.execution.buffers`), which does not depend on the plan. Time is bytes divided by a
rate that somebody measured; the plan itself has no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from reshard.planning.moves import Move
from reshard.planning.plan import Plan, Route


@dataclass(frozen=True, slots=True)
class Estimate:
    """Costs of a plan."""

    read_nbytes: int
    """Tensor bytes that have to be read, replicas included."""
    compared_nbytes: int
    """The part of them that is only compared with other copies."""
    write_nbytes: int
    """Bytes of the output files."""
    files: int
    """Number of output files."""
    routes: int
    """Number of distinct geometries."""
    strided_nbytes: int
    """Bytes that pass through a strided copy rather than straight from file to file."""

    def seconds(self, bytes_per_second: float) -> float:
        """Time in seconds at a measured rate of bytes written.

        Replicas that are only read count half.

        >>> Estimate(100, 0, 100, 1, 1, 0).seconds(50.0)
        2.0
        """
        return (self.write_nbytes + self.compared_nbytes / 2) / bytes_per_second


def estimate(plan: Plan) -> Estimate:
    """Price a plan.

    Parameters
    ----------
    plan
        What would be executed.
    """
    read = compared = strided = 0
    counts: dict[int, tuple[int, int, int]] = {}
    for fill in plan.fills():
        known = counts.get(id(fill.route))
        if known is None:
            known = counts[id(fill.route)] = _elements(fill.route)
        item = (fill.stored or fill.dtype).itemsize
        read += known[0] * item
        compared += known[1] * item
        strided += known[2] * item
    return Estimate(
        read_nbytes=read + compared,
        compared_nbytes=compared,
        write_nbytes=sum(file.size for file in plan.files),
        files=len(plan.files),
        routes=len(counts),
        strided_nbytes=strided,
    )


def _elements(route: Route) -> tuple[int, int, int]:
    """Elements moved, compared, and moved by strided copies."""
    moved = sum(move.numel for move in route.moves)
    compared = sum(move.numel for move in route.checks)
    strided = sum(move.numel for move in route.moves if not _is_run(move))
    return moved, compared, strided


def _is_run(move: Move) -> bool:
    return not move.shape or move.source_strides == (1,) == move.target_strides
