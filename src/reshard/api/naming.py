"""Other names for what a checkpoint holds, by files of rules.

Theory. Rules are solved for the checkpoint at hand, so what they will do is known in full before
anything is read: which rule governs which tensor, what is left out, what no rule takes. Several
files are applied one after the other, each to what the one before it gave.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from reshard.api.arguments import paths_of
from reshard.api.opening import AnyPath
from reshard.errors import UsageError
from reshard.formats.checkpoint import Checkpoint
from reshard.names.configuration import configuration
from reshard.names.files import rules_for
from reshard.names.translation import Translation, translated, translation_of

NAMED_STATES = ("all", "weights")
"""What is carried under other names."""


@dataclass(frozen=True, slots=True)
class Named:
    """A checkpoint under other names, and the way there."""

    checkpoint: Checkpoint
    """Under the names of the last rules."""
    translations: tuple[Translation, ...]
    """What each file of rules did."""
    carried: int
    """Tensor states of the checkpoint as it was spelled before."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know."""
        return tuple(note for one in self.translations for note in one.notes())


def named(
    checkpoint: Checkpoint,
    names: Sequence[AnyPath] | AnyPath = (),
    *,
    states: str = "all",
    also: Sequence[str] = (),
) -> Named:
    """Return a checkpoint under the names of another side.

    Parameters
    ----------
    checkpoint
        What is to be translated.
    names
        Files of rules, or ``"preset:NAME"``, in the order in which they are applied.
    states
        ``"all"``, or ``"weights"`` to carry the weights alone.
    also
        Further folders in which the ``config.json`` of the model may lie.

    Raises
    ------
    UsageError
        The rules do not take all of the checkpoint, or contradict it.
    DocumentError
        A file of rules is malformed.
    UnsupportedError
        A state or an optimizer that cannot be joined or split.
    """
    if states not in NAMED_STATES:
        raise UsageError(
            "no such choice of states for other names",
            expected=" or ".join(NAMED_STATES),
            found=repr(states),
        )
    done, carried = [], len(checkpoint.tensors)
    config = configuration(checkpoint.path, also)
    for given in paths_of("names", names):
        rules, side = rules_for(os.fspath(given), config)
        translation = translation_of(checkpoint, rules, config, side)
        checkpoint = translated(checkpoint, translation, weights_only=states == "weights")
        done.append(translation)
    return Named(checkpoint, tuple(done), carried)
