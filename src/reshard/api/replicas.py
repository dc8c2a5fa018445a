"""Copies that differ: who said that they are copies, and who accepts that they differ.

Theory. Ranks hold copies of a tensor because a map says so, and a map may be wrong: when the user
stated it, the rule is the first thing to doubt, so the error names it. Where copies do differ in
the source, a comparison cannot call both sides equal; what a conversion made of them is still
as it was asked for, and `accepts` says whether that explains all that was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reshard.errors import ReplicaMismatchError, UsageError

if TYPE_CHECKING:
    from reshard.execution import Comparison
    from reshard.formats.checkpoint import Checkpoint

POLICIES = ("refuse", "first", "mean")
STATED = "stated"
"""How the provenance of a map begins that the user stated."""


@contextmanager
def naming_the_rule(checkpoint: Checkpoint) -> Iterator[None]:
    """Add to the error of copies that differ which stated rule calls them copies."""
    try:
        yield
    except ReplicaMismatchError as error:
        key = (error.parameter or "", error.state or "")
        tensor = checkpoint.tensors.get(key)
        if tensor is None or not tensor.provenance.startswith(STATED):
            raise
        raise ReplicaMismatchError(
            error.what,
            ranks=error.ranks,
            offset=error.offset,
            file=error.file,
            parameter=error.parameter,
            state=error.state,
            found=error.found,
            next_step=f"correct the rule if it is wrong that they are copies ({tensor.provenance});"
            f" otherwise {error.next_step}",
        ) from error


def accepts(found: Comparison, replicas: str) -> bool:
    """Return whether a comparison found nothing but what a policy for copies brings about.

    Parameters
    ----------
    found
        A source (left) compared with what was made of it.
    replicas
        The policy it was made with.

    Raises
    ------
    UsageError
        There is no such policy.
    """
    if replicas not in POLICIES:
        raise UsageError(
            "no such policy for copies that differ",
            expected=f"one of {', '.join(POLICIES)}",
            found=repr(replicas),
        )
    if found.equal:
        return True
    if replicas == "refuse" or found.values or found.changes:
        return False
    drifted = {f.key: f.count for side, f in found.replicas if side == "left"}
    own = all(side == "left" for side, _ in found.replicas)
    return own and all(
        replicas == "mean"
        and difference.what == "values"
        and difference.count <= drifted.get(difference.key, 0)
        for difference in found.differences
    )
