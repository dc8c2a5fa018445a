"""What a shell offers to complete: names of parameters, states, formats.

Theory. A completion must answer while somebody waits with a finger on the tab key, and may never
complain: whatever goes wrong, nothing is offered. Names come from the checkpoint that stands on the
line already, headers only.
"""

from __future__ import annotations

from collections.abc import Iterable

import typer


def parameter_names(context: typer.Context, incomplete: str) -> list[str]:
    """Offer the names of the parameters of CKPT."""
    try:
        from reshard.api import open_checkpoint

        params = context.params
        checkpoint = open_checkpoint(
            _checkpoint(context), also=params.get("also") or (), layout=params.get("layout")
        )
        return _beginning((*checkpoint.names, *checkpoint.aliases), incomplete)
    except Exception:  # noqa: BLE001 - a completion never complains
        return []


def states(context: typer.Context, incomplete: str) -> list[str]:
    """Offer the states that CKPT holds."""
    try:
        from reshard.api import open_checkpoint, states_in_order

        checkpoint = open_checkpoint(_checkpoint(context))
        return _beginning(states_in_order(state for _, state in checkpoint.tensors), incomplete)
    except Exception:  # noqa: BLE001 - a completion never complains
        return []


def formats(incomplete: str) -> list[str]:
    """Offer the formats that can be written."""
    from reshard.formats.registry import FORMATS

    return _beginning((f.name for f in FORMATS.values() if f.writer is not None), incomplete)


def _checkpoint(context: typer.Context) -> str:
    """CKPT; behind an option without its value, the line is not parsed yet."""
    return str(context.params.get("ckpt") or context.args[0])


def _beginning(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in dict.fromkeys(words) if word.startswith(incomplete)]
