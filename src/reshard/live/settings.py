"""Settings of an optimizer as plain values by parameter name, and back.

Theory. Optimizers number their groups and keep counts beside tensors; another topology has other
groups, and ZeRO's flat buffers have one count for many parameters. By name everything means the
same everywhere: which settings a parameter has, and each count. A group of the target takes the
settings of its parameters, which must agree; so must the counts of the parameters that lie in one
buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from reshard.errors import UsageError

HOW = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
"""Keys of a group that say how a step is computed, not what."""


def plain_settings(group: Mapping[str, Any]) -> dict[str, object]:
    """Return the settings of a group without what says how; numbers in tensors as numbers."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key not in HOW and not key.startswith("_")
    }


def is_count(value: object) -> bool:
    """Whether a state is one number, as Adam's step is."""
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def told_settings(
    members: Iterable[tuple[Sequence[str], Mapping[str, Any], Mapping[str, Any]]],
) -> dict[str, object]:
    """Return what an optimizer keeps beside its tensors.

    Parameters
    ----------
    members
        Names of parameters, the group they are in, and what is kept for them together.
    """
    groups: list[dict[str, object]] = []
    counts: dict[str, dict[str, float]] = {}
    for names, group, kept in members:
        settings = plain_settings(group)
        if not groups or groups[-1]["settings"] != settings:
            groups.append({"settings": settings, "names": []})
        listed: Any = groups[-1]["names"]
        listed += names
        for state, value in kept.items():
            if is_count(value):
                counts.setdefault(state, {}).update(dict.fromkeys(names, float(value)))
    return {"groups": groups, "counts": counts}


def take_settings(
    told: Mapping[str, Any],
    members: Iterable[tuple[Sequence[str], dict[str, Any], dict[str, Any]]],
) -> None:
    """Set what :func:`told_settings` told, by name.

    Raises
    ------
    UsageError
        When parameters that share a group or a count here had different ones.
    """
    by_name = {name: group["settings"] for group in told["groups"] for name in group["names"]}
    for names, group, kept in members:
        settings = _common("settings", names, by_name) if by_name else {}
        group.update({key: _like(group[key], settings[key]) for key in settings if key in group})
        for state, values in told["counts"].items():
            if is_count(kept.get(state)):
                kept[state] = _like(kept[state], _common(state, names, values))


def _common(what: str, names: Sequence[str], values: Mapping[str, Any]) -> Any:
    missing = [name for name in names if name not in values]
    if missing:
        raise UsageError(
            f"the source has no {what} of a parameter that is trained here",
            parameter=missing[0],
            next_step="train the same parameters on both sides",
        )
    found = [values[name] for name in names]
    if any(value != found[0] for value in found):
        other = next(n for n, value in zip(names, found, strict=True) if value != found[0])
        raise UsageError(
            f"parameters that share their {what} here had different ones",
            parameter=other,
            expected=f"{found[0]}, as {names[0]}",
            found=values[other],
            next_step="put them into groups as the source has them",
        )
    return found[0] if found else {}


def _like(old: Any, new: Any) -> Any:
    """Return a value in the form that the old one has, in its memory where that is a tensor."""
    if isinstance(old, torch.Tensor):
        return old.fill_(new)
    return type(old)(new) if type(old) in (int, float) else new
