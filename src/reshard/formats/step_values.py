"""What a step can be: a whole number of steps that an optimizer made.

Theory. `step` is kept as a number or as a floating-point tensor without dimensions, and every
format carries it as it is. A value that is no count (NaN, infinite, negative, a fraction) comes out
of a damaged or edited file, and no optimizer can go on from it.
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard.errors import CheckpointError
from reshard.formats.checkpoint import Scalar, TensorKey
from reshard.formats.parsing import shown

STEP = "step"
MOST_STEPS = 1 << 53
"""No run makes more, and a float64 tells no two of more apart."""


def require_steps(scalars: Mapping[TensorKey, Scalar], path: str) -> None:
    """Refuse a checkpoint with a step that is no step.

    Raises
    ------
    CheckpointError
        The step of a parameter is not a whole number from 0 on.
    """
    for (name, state), scalar in scalars.items():
        if state == STEP and not _is_step(scalar.value):
            raise CheckpointError(
                "the step of a parameter is no number of steps",
                file=path,
                parameter=name,
                expected="a whole number from 0 on",
                found=shown(scalar.value),
                next_step="the file is damaged or edited; take another checkpoint",
            )


def _is_step(value: float) -> bool:
    return 0 <= value < MOST_STEPS and value == int(value)
