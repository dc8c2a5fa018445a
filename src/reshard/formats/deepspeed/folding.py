"""`folding`: how AutoEP and AutoTP share the ranks of a stage.

Theory. With folding the expert-parallel groups run across tensor-parallel ranks: over all ranks of
a stage, `D * tp + T`, experts are spread as over one pool. Every file states the place of its
writer. Experts are never cut by tensor parallelism themselves (`etp_size` is 1).

Source: `module_inject/auto_ep_folding.py`, `checkpoint/autoep_universal.py`
(`make_folding_metadata`), DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reshard.errors import UnsupportedError
from reshard.formats.parsing import Cursor

_FOLDING_VERSION = 1


@dataclass(frozen=True, slots=True)
class Folding:
    """`folding`: how AutoEP and AutoTP share the ranks, as one file states it."""

    tp_size: int
    ep_size: int
    """Degrees."""
    tp_rank: int
    ep_rank: int
    """Of the writer."""
    partition_ranks: Mapping[str, int] = field(default_factory=dict)
    """Which partition of a parameter's buffer the writer holds, by name; empty when not stated."""


def read_folding(root: Cursor) -> Folding | None:
    """The folding metadata of a file, None when it has none.

    Raises
    ------
    UnsupportedError
        When its version is unknown, or experts are cut by tensor parallelism themselves.
    """
    found = root.maybe("folding")
    if found is None:
        return None
    version = found.at("version").value
    etp = found.at("etp_size").integer(1)
    if version != _FOLDING_VERSION or etp != 1:
        raise UnsupportedError(
            "experts that are cut by tensor parallelism themselves (etp_size)"
            if version == _FOLDING_VERSION
            else "unknown version of the folding metadata",
            file=root.file,
            expected=f"version {_FOLDING_VERSION}, etp_size 1",
            found=f"version {version}, etp_size {etp}",
            next_step="no DeepSpeed that is known writes such files; convert with the one that did",
        )
    families = found.maybe("param_families")
    ranks = {}
    for name, family in families.named() if families is not None else ():
        stated = family.maybe("zero_partition_rank") if isinstance(family.value, Mapping) else None
        if stated is not None:
            ranks[name] = stated.integer()
    return Folding(
        tp_size=found.at("tp_size").integer(1),
        ep_size=found.at("ep_size").integer(1),
        tp_rank=found.at("tp_rank").integer(),
        ep_rank=found.at("ep_rank").integer(),
        partition_ranks=ranks,
    )
