"""`folding`: what every file says when experts are spread across tensor-parallel ranks.

Theory. With several tensor ranks AutoEP spreads experts over all ranks of the stage, whatever their
tensor rank (`expert_grid`). DeepSpeed then has each file state the place of its writer, and
compares it when it loads: the degrees, the ranks, and to which family every parameter belongs,
which decides over which group ZeRO cuts it.

Families are told by name, as DeepSpeed itself does it; they are a label that its loader compares,
and decide nothing here.

Sources: `engine.py` (`_autoep_param_family`, `_autoep_zero_optimizer_param_families`,
`_autoep_non_expert_param_families`), `checkpoint/autoep_universal.py` (`make_folding_metadata`),
DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from reshard.formats.deepspeed.writing.expert_grid import ExpertGrid
from reshard.formats.deepspeed.writing.flat_groups import Bank

FOLDING = "folding"
"""Key under which a file states it."""

_EXPERT = "routed_expert"
_MARKS = ((".router.", "router_gate_replicated"), (".shared_experts", "shared_expert"))


@dataclass(frozen=True, slots=True)
class Writer:
    """A rank that writes a file: where it stands among experts, and its data and tensor rank."""

    grid: ExpertGrid
    dp_rank: int
    tp_rank: int

    def of_the_model(self, names: Iterable[str]) -> dict[str, object]:
        """What its model-state file states; `names` are those of the state dict."""
        families = {name: _dense_family(name) for name in names}
        return self._entry("dense", "dense_dp", self.dp_rank, self.grid.dp) | {
            "param_families": families
        }

    def of_an_expert(self) -> dict[str, object]:
        """What a file of one of its experts states."""
        _, partition = self.grid.place(self.dp_rank, self.tp_rank)
        return self._entry(_EXPERT, "edp", partition, self.grid.edp)

    def of_the_optimizer(self, banks: Sequence[Bank], stage: int) -> dict[str, object]:
        """What its optimizer file states."""
        entry = self._entry("zero_optimizer_state", "per_family", self.dp_rank, self.grid.dp)
        if stage == 3:
            return entry
        families: dict[str, Mapping[str, object]] = {}
        for bank in banks:
            group, partition = bank.held_by(self.dp_rank, self.tp_rank)
            for name in group.shapes:
                families[name] = {
                    "family": _dense_family(name) if bank.experts is None else _EXPERT,
                    "zero_partition_group": "dense_dp" if bank.experts is None else "edp",
                    "zero_partition_rank": partition,
                    "zero_partition_count": len(group.partitions),
                }
        return entry | {"param_families": families}

    def _entry(self, family: str, group: str, partition: int, count: int) -> dict[str, object]:
        ep_rank, _ = self.grid.place(self.dp_rank, self.tp_rank)
        return {
            "version": 1,
            "tp_size": self.grid.tp,
            "tp_rank": self.tp_rank,
            "ep_size": self.grid.ep,
            "ep_rank": ep_rank,
            "etp_size": 1,
            "etp_rank": 0,
            "zero_partition_group": group,
            "zero_partition_rank": partition,
            "zero_partition_count": count,
            "dispatch_strategy": "route_full_partition_dispatch",
            "shared_expert_placement": "tp_sharded",
            "family": family,
        }


def _dense_family(name: str) -> str:
    return next((family for mark, family in _MARKS if mark in name), "dense")
