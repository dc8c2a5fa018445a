"""Live: `M_t ∘ M_s⁻¹` between running processes, over ``torch.distributed``.

Theory. The operation that converts checkpoints moves the state of a running job as well: every rank
says where its elements lie (:mod:`~reshard.live.states`, made from what users hold by
:mod:`~reshard.live.adapting`), all of that together is two maps for each tensor
(:mod:`~reshard.live.survey`), their composition says what must go where, and a decision which
holder sends it (:mod:`~reshard.live.deciding`). The plan (:mod:`~reshard.live.plan`) cuts it into
messages that go in as few rounds as can be (:mod:`~reshard.live.rounds`), and the exchange
(:mod:`~reshard.live.exchange`) carries it out within a budget, each message proved on arrival.
See ``docs/live.md``.

This is the only package that imports torch; ``pip install 'reshard[torch]'`` brings it.
"""

from reshard.live.adapting import state_of
from reshard.live.checkpoints import load
from reshard.live.dtensors import tensor_shards
from reshard.live.engines import engine_state
from reshard.live.moving import Moved, Transfer, move, plan
from reshard.live.plan import LivePlan
from reshard.live.states import LiveState, Shard, shard_of
from reshard.live.trainers import trainer_state
from reshard.live.transport import Transport

__all__ = [
    "LivePlan",
    "LiveState",
    "Moved",
    "Shard",
    "Transfer",
    "Transport",
    "engine_state",
    "load",
    "move",
    "plan",
    "shard_of",
    "state_of",
    "tensor_shards",
    "trainer_state",
]
