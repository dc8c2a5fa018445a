"""The optimizer without ZeRO: whole tensors, in the model-state file itself.

Theory. Without ZeRO there is no flat buffer. DeepSpeed stores the state dict of the optimizer as it
is: states by number, numbers by parameter group, and the numbers count the parameters in the order
of the groups. What trains in which class follows from the element type of the model:

* float32: the optimizer itself. There is no master beside the weight: the master *is* the weight.
* bfloat16, float16: `FP16_UnfusedOptimizer`, which keeps a master a parameter (`fp32_groups`) and
  the loss scale beside the optimizer's state dict; or, for DeepSpeed's own FusedAdam,
  `FP16_Optimizer` with flat groups, which is not written. Which of the two it would be is in the
  hyperparameters: FusedAdam has a `bias_correction`, optimizers of torch have none.

Sources: `torch.optim.Optimizer.state_dict`, `engine.py` (`_configure_optimizer`),
`fp16/unfused_optimizer.py` (`state_dict`, `load_state_dict`), DeepSpeed 0.19.8.
"""

from __future__ import annotations

from itertools import count

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.partitions import MASTER
from reshard.formats.deepspeed.writing.archives import Bulk, scalar_value
from reshard.formats.deepspeed.writing.contents import Contents, Group
from reshard.formats.deepspeed.writing.model_files import Column
from reshard.formats.deepspeed.writing.settings import carried_settings, scales_nothing
from reshard.formats.loss_scale import DYNAMIC, SCALER, scale_numbers
from reshard.formats.torch_archive import NewTensor

FUSED = "bias_correction"
"""A hyperparameter that DeepSpeed's own optimizers have, and those of torch have not."""


def require_plain(contents: Contents) -> None:
    """Refuse a model whose optimizer cannot be written without ZeRO.

    Raises
    ------
    UnsupportedError
        When it is a pipeline in bf16, masters are not in single precision, the optimizer is one
        that keeps flat groups, or fp16 would need a loss scaler that the source does not have.
    """
    if not _keeps_masters(contents):
        return
    if contents.pipeline is not None and contents.model_dtype.name == "bfloat16":
        # engine.py, _do_optimizer_sanity_check: pipeline_parallelism and bf16 give BF16_Optimizer
        raise UnsupportedError(
            "a pipeline in bf16 without ZeRO has a BF16_Optimizer, whose files are not written",
            found="--stage 0",
            next_step="choose --stage 1",
        )
    for name, held in contents.held.items():
        if held.master.name != "float32" or contents.dtypes[name] != contents.model_dtype:
            raise UnsupportedError(
                "without ZeRO a half-precision model keeps masters of every weight in float32",
                parameter=name,
                expected=f"weights in {contents.model_dtype}, masters in float32",
                found=f"{contents.dtypes[name]}, {held.master}",
                next_step="choose --stage 1",
            )
    if any(FUSED in group.settings for group in contents.groups):
        raise UnsupportedError(
            "without ZeRO, DeepSpeed's own optimizers keep half-precision models in flat groups, "
            "which cannot be written",
            found=f"{FUSED} among the hyperparameters",
            next_step="choose --stage 1, or --dtype float32",
        )
    settings = carried_settings(contents)
    known = {SCALER, DYNAMIC} & settings.keys() and scale_numbers(settings, 0)
    if not (known or scales_nothing(contents)):
        raise UnsupportedError(
            "the optimizer takes its loss scale from the checkpoint, and the source has none for "
            "fp16",
            next_step="choose --stage 1 or 2, whose engines make one",
        )


def _keeps_masters(contents: Contents) -> bool:
    """Whether there are masters beside the weights."""
    return any(contents.dtypes[name] != held.master for name, held in contents.held.items())


def plain_optimizer(column: Column, bulk: Bulk) -> dict[str, object]:
    """The state dict of the optimizer of one column.

    Settings that the class does not know (gradient clipping) are written all the same: its loader
    ignores them, and a later conversion finds them again.

    Parameters
    ----------
    column
        The model-parallel rank.
    bulk
        Receives what goes into the storages.
    """
    contents = column.contents
    settings = carried_settings(contents)
    inner = _inner(column, bulk)
    if not _keeps_masters(contents):
        return {**inner, **settings}
    steps = column.part.get("global_steps")
    return {
        **settings,
        **(scale_numbers(settings, steps) or {}),
        "optimizer_state_dict": inner,
        "fp32_groups": [
            [_whole(column, name, MASTER, bulk) for name in _owned(column, group)]
            for group in contents.groups
        ],
    }


def _inner(column: Column, bulk: Bulk) -> dict[str, object]:
    """The state dict of the optimizer itself."""
    numbers = count()
    states: dict[int, dict[str, object]] = {}
    groups: list[dict[str, object]] = []
    for group in column.contents.groups:
        owned = {next(numbers): name for name in _owned(column, group)}
        for number, name in owned.items():
            kept = _states_of(column, name, bulk)
            if kept:
                states[number] = kept
        groups.append({**group.settings, "params": list(owned)})
    return {"state": states, "param_groups": groups}


def _owned(column: Column, group: Group) -> list[str]:
    """The parameters of a group that the column has."""
    return [name for name in group.names if column.shape(name) is not None]


def _states_of(column: Column, name: str, bulk: Bulk) -> dict[str, object]:
    held = column.contents.held[name]
    return {
        **{state: scalar_value(scalar) for state, scalar in held.scalars.items()},
        **{state: _whole(column, name, state, bulk) for state in held.tensors},
    }


def _whole(column: Column, name: str, state: str, bulk: Bulk) -> NewTensor:
    """The column's shard of a state."""
    cut, held = column.cuts[name], column.contents.held[name]
    dtype = held.master if state == MASTER else held.tensors[state]
    label = ("state", name, state)
    shard = column.shard(name)
    return bulk.shard(label, (name, state), dtype, cut.shapes[shard], cut.map, shard, dtype)
