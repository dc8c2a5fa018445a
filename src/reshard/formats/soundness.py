"""Whether the files of a checkpoint are of one save: what every verb asks before it uses values.

Theory. A reader refuses what cannot be read exactly. What can, may still be put together of two
saves, and then the files say so in two ways: in statements that contradict each other, which the
reader collects, and in values that must be the same and are not. The latter are the few that cost
next to nothing; copies of whole tensors are compared while these are read. An objection is an
error, unless a policy for copies other than ``"refuse"`` accepts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from reshard.errors import ReshardError
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.rounded_copies import differing_copies

REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Objection:
    """What speaks against a checkpoint, and what is said where the user accepts it."""

    error: ReshardError
    accepted: str


def objections(checkpoint: Checkpoint) -> Iterator[Objection]:
    """Everything that speaks against its being of one save."""
    for error in checkpoint.contradictions:
        said = ", ".join(
            f"{word} {value}"
            for word, value in (("expected", error.expected), ("found", error.found))
            if value is not None
        )
        yield Objection(error, f"{error.what} ({said}); the files were taken as they are")
    differing = differing_copies(checkpoint)
    if differing is not None:
        taken = f"(first {differing.parameter}); the master weights were taken"
        yield Objection(differing, f"{differing.what} {taken}")


def require_sound(checkpoint: Checkpoint, replicas: str = REFUSE) -> tuple[str, ...]:
    """Refuse a checkpoint whose files are of two saves.

    Parameters
    ----------
    checkpoint
        What is to be used.
    replicas
        The policy for copies that differ: all but ``"refuse"`` only tell.

    Returns
    -------
    tuple of str
        What the user should know.

    Raises
    ------
    ReshardError
        The first objection, with the policy ``"refuse"``.
    """
    told = []
    for objection in objections(checkpoint):
        if replicas == REFUSE:
            raise objection.error
        told.append(objection.accepted)
    return tuple(told)
