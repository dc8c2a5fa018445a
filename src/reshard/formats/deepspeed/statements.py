"""What model-state files state twice: shapes and ties, checked against each other.

Theory. A file that says one thing in two places can be caught lying. Under ZeRO-1 and 2 the shape
of a parameter stands in `param_shapes` and again with its weights in `module`; a tie stands in
`shared_params` and needs an owner that exists. What contradicts itself is refused, before the
wrong half of it is believed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from math import prod

from reshard.errors import CheckpointError
from reshard.formats.deepspeed.records import ModelStates


def require_module_shapes(models: Iterable[ModelStates], fused: Container[str]) -> None:
    """Refuse a parameter whose weights in `module` have another shape than `param_shapes` says.

    Parameters
    ----------
    models
        The model-state files.
    fused
        Names of fused experts, which `module` holds under other names.
    """
    for model in models:
        for shapes in model.param_shapes or ():
            for name, shape in shapes.items():
                held = (model.module or {}).get(name)
                if held is None or name in fused or not prod(held.shape) or held.shape == shape:
                    continue
                raise CheckpointError(
                    "param_shapes contradicts the shape of the weights in `module`",
                    file=model.file,
                    parameter=name,
                    expected=f"shape {held.shape}",
                    found=f"shape {shape}",
                    next_step="the file is damaged or edited",
                )


def stated_aliases(models: Iterable[ModelStates]) -> dict[str, str]:
    """Ties of all ranks, alias -> owner, the owner being no alias itself.

    Raises
    ------
    CheckpointError
        When a tie leads to itself, or to a name that no rank has.
    """
    held = list(models)
    ties = {alias: owner for model in held for alias, owner in model.shared.items()}
    known = {name for model in held for name in (*(model.module or {}), *model.frozen_shapes)}
    known |= {name for model in held for shapes in model.param_shapes or () for name in shapes}
    resolved = {}
    for alias, first in ties.items():
        owner, seen = first, {alias}
        while owner in ties and owner not in seen:
            seen.add(owner)
            owner = ties[owner]
        if owner in seen or owner not in known:
            raise CheckpointError(
                "a tied parameter is stated to be one that is not there",
                file=held[0].file,
                parameter=alias,
                found=f"tied to {first}",
            )
        resolved[alias] = owner
    return resolved
