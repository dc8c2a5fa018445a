"""The optimizer file of one rank: ``*_optim_states.pt``.

Theory. A rank's file holds the partitions of all flat buffers: the fp32 master and the states. The
two dialects differ in names and in what they tell beside it.

*ZeRO-1, ZeRO-2* (and ``BF16_Optimizer``, whose loader takes the same file): masters without the
padding at their end, states with it; paddings, counts and the place of every parameter are written
down, and DeepSpeed compares the alignment when it loads.

*ZeRO-3*: masters and states of every sub-group with all padding; a parameter group owns several
sub-groups; no place is written down, it follows from ``param_shapes``.

Settings of the optimizer that the target's dialect does not know (gradient clipping under ZeRO-3)
are written all the same: the loader ignores them, and a later conversion finds them again.

Sources: `stage_1_and_2.py` (`state_dict`, `_load_legacy_checkpoint`), `stage3.py`
(`_rigid_state_dict`, `_rigid_load_state_dict`), DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from reshard.formats.deepspeed.partitions import MASTER
from reshard.formats.deepspeed.writing.archives import Bulk, scalar_value
from reshard.formats.deepspeed.writing.contents import Contents
from reshard.formats.deepspeed.writing.flat_groups import FlatGroup
from reshard.formats.deepspeed.writing.options import NativeOptions
from reshard.formats.deepspeed.writing.settings import optimizer_settings
from reshard.formats.torch_archive import (
    ZERO_STAGE,
    EnumRecord,
    FragmentAddress,
    Global,
    NewTensor,
    ObjectRecord,
    Step,
)

LOSS_SCALER = Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
"""Class of the loss scaler that does nothing, which every run has that is not in fp16."""


def optimizer_tree(
    contents: Contents,
    options: NativeOptions,
    groups: Sequence[FlatGroup],
    rank: int,
    head: Mapping[str, object],
    bulk: Bulk,
) -> dict[str, object]:
    """The content of the file of data-parallel rank ``rank`` of one column.

    Parameters
    ----------
    contents, options
        What is written, and for which topology.
    groups
        The flat buffers of the column.
    rank
        Data-parallel rank.
    head
        `ds_config` and `ds_version`.
    bulk
        Receives what goes into the storages.
    """
    settings = optimizer_settings(contents, options)
    states = {
        "state": _states(groups, rank, bulk),
        "param_groups": _param_groups(contents, groups),
    }
    masters = _masters(groups, rank, bulk, stripped=options.stage != 3)
    stage = EnumRecord.of(ZERO_STAGE, options.stage)
    if options.stage == 3:
        body = _zero3_body(groups, stage, settings, states, masters)
    else:
        body = _flat_body(groups, rank, stage, settings, states, masters)
        body["ds_version"] = head["ds_version"]
        body["param_slice_mappings"] = [_mapping(group, rank) for group in groups]
    return {"optimizer_state_dict": body, **head}


def still_loss_scaler() -> ObjectRecord:
    """The loss scaler of a run that needs none: the factor 1."""
    state = Step("state", {"cur_scale": 1.0, "dynamic": False})
    return ObjectRecord(form="newobj", callable=LOSS_SCALER, steps=[state])


# --------------------------------------------------------------------------- the two dialects


def _flat_body(
    groups: Sequence[FlatGroup],
    rank: int,
    stage: EnumRecord,
    settings: Mapping[str, object],
    states: Mapping[str, object],
    masters: Sequence[NewTensor],
) -> dict[str, object]:
    """ZeRO-1 and 2, all but the last two keys."""
    return {
        **settings,
        "base_optimizer_state": states,
        "single_partition_of_fp32_groups": masters,
        "zero_stage": stage,
        "group_paddings": [group.partitions[rank].padding for group in groups],
        "param_alignment_paddings": [list(group.alignment) for group in groups],
        "partition_count": [len(group.partitions) for group in groups],
    }


def _mapping(group: FlatGroup, rank: int) -> OrderedDict[str, FragmentAddress]:
    return OrderedDict(
        (part.name, FragmentAddress.of(part.numel, part.start))
        for part in group.partitions[rank].windows
    )


def _zero3_body(
    groups: Sequence[FlatGroup],
    stage: EnumRecord,
    settings: Mapping[str, object],
    states: Mapping[str, object],
    masters: Sequence[NewTensor],
) -> dict[str, object]:
    """ZeRO-3, whose loader demands a loss scaler."""
    still = {"loss_scaler": still_loss_scaler(), "dynamic_loss_scale": False, "overflow": False}
    return {
        "zero_stage": stage,
        **still,
        **settings,
        "partition_count": len(groups[0].partitions),
        "optimizer_state_dict": states,
        "fp32_flat_groups": masters,
    }


# --------------------------------------------------------------------------- what they share


def _param_groups(contents: Contents, groups: Sequence[FlatGroup]) -> list[dict[str, object]]:
    owned: list[list[int]] = [[] for _ in contents.groups]
    for number, group in enumerate(groups):
        owned[group.param_group].append(number)
    return [
        {**group.settings, "params": numbers}
        for group, numbers in zip(contents.groups, owned, strict=True)
    ]


def _states(groups: Sequence[FlatGroup], rank: int, bulk: Bulk) -> dict[int, dict[str, object]]:
    found: dict[int, dict[str, object]] = {}
    for number, group in enumerate(groups):
        kept: dict[str, object] = {
            state: scalar_value(scalar) for state, scalar in group.held.scalars.items()
        }
        part = group.partitions[rank]
        for state, dtype in group.held.tensors.items():
            whole = state in group.whole_states
            windows = part.whole if whole else part.windows
            numel = sum(window.numel for window in windows) if whole else part.length
            kept[state] = bulk.flat(("state", str(number), state), state, dtype, numel, windows)
        if kept:
            found[number] = kept
    return found


def _masters(
    groups: Sequence[FlatGroup], rank: int, bulk: Bulk, *, stripped: bool
) -> list[NewTensor]:
    masters = []
    for number, group in enumerate(groups):
        part = group.partitions[rank]
        numel = part.length - part.padding if stripped else part.length
        label = ("master", str(number))
        masters.append(bulk.flat(label, MASTER, group.held.master, numel, part.windows))
    return masters
