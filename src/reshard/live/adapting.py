"""Adapting: what users hold, as states, so that nobody writes a map by hand.

=======================  ==========================================================================
what is given            what it becomes
=======================  ==========================================================================
a ``LiveState``          itself
None                     nothing: the rank only takes part
a dictionary of tensors  their weights: a ``DTensor`` by its mesh and placements, another as whole
=======================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from reshard.errors import UsageError
from reshard.live.deciding import WEIGHTS
from reshard.live.dtensors import tensor_shards
from reshard.live.states import LiveState


def state_of(thing: object) -> LiveState:
    """Return the state that something a user holds stands for.

    Raises
    ------
    UsageError
        When it is nothing that a state can be made from.

    Examples
    --------
    >>> [shard.key for shard in state_of({"w": torch.zeros(3)}).shards]
    [('w', 'fp32')]
    """
    if thing is None:
        return LiveState()
    if isinstance(thing, LiveState):
        return thing
    if isinstance(thing, Mapping) and all(isinstance(t, torch.Tensor) for t in thing.values()):
        return LiveState(
            tuple([s for name, t in thing.items() for s in tensor_shards(name, WEIGHTS, t)])
        )
    raise UsageError(
        "no state can be made from this",
        expected="a LiveState or a dictionary of tensors",
        found=type(thing).__name__,
        next_step="describe its tensors with reshard.live.Shard",
    )
