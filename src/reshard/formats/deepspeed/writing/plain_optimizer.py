"""The optimizer without ZeRO: whole tensors, in the model-state file itself.

Theory. Without ZeRO there is no flat buffer. DeepSpeed stores the state dict of the optimizer as it
is: states by number, numbers by parameter group, and the numbers count the parameters in the order
of the groups. In single precision there is no master beside the weight: the master *is* the weight.
In half precision the engine wraps the optimizer in classes of its own, which differ by optimizer
and are not written.

Source: `torch.optim.Optimizer.state_dict`, `engine.py` (`_configure_optimizer`), DeepSpeed 0.19.8.
"""

from __future__ import annotations

from itertools import count

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.writing.archives import Bulk, scalar_value
from reshard.formats.deepspeed.writing.contents import Contents
from reshard.formats.deepspeed.writing.model_files import Column


def require_plain(contents: Contents) -> None:
    """Refuse a model whose optimizer cannot be written without ZeRO.

    Raises
    ------
    UnsupportedError
        When the model is not in the element type of its masters.
    """
    for name, held in contents.held.items():
        if contents.dtypes[name] != held.master:
            raise UnsupportedError(
                "without ZeRO the optimizer of a half-precision model cannot be written",
                parameter=name,
                expected=f"a model in {held.master}",
                found=contents.dtypes[name],
                next_step="choose --stage 1, or --dtype float32",
            )


def plain_optimizer(column: Column, bulk: Bulk) -> dict[str, object]:
    """The state dict of the optimizer of one column.

    Parameters
    ----------
    column
        The model-parallel rank.
    bulk
        Receives what goes into the storages.
    """
    numbers = count()
    states: dict[int, dict[str, object]] = {}
    groups: list[dict[str, object]] = []
    for group in column.contents.groups:
        owned = {next(numbers): name for name in group.names if column.shape(name) is not None}
        for number, name in owned.items():
            kept = _states_of(column, name, number, bulk)
            if kept:
                states[number] = kept
        groups.append({**group.settings, "params": list(owned)})
    return {"state": states, "param_groups": groups}


def _states_of(column: Column, name: str, number: int, bulk: Bulk) -> dict[str, object]:
    held, cut = column.contents.held[name], column.cuts[name]
    shape = cut.shapes[column.tp]
    kept: dict[str, object] = {
        state: scalar_value(scalar) for state, scalar in held.scalars.items()
    }
    for state, dtype in held.tensors.items():
        label = ("state", str(number), state)
        kept[state] = bulk.shard(label, (name, state), dtype, shape, cut.map, column.tp, dtype)
    return kept
