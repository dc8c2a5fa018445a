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
from reshard.formats.deepspeed.writing.flat_groups import Bank, FlatGroup, FlatPartition
from reshard.formats.deepspeed.writing.folded import FOLDING, Writer
from reshard.formats.deepspeed.writing.options import NativeOptions
from reshard.formats.deepspeed.writing.settings import optimizer_settings
from reshard.formats.torch_archive import (
    ZERO_STAGE,
    EnumRecord,
    FragmentAddress,
    NewTensor,
)

Own = tuple[FlatGroup, FlatPartition]
"""A flat buffer that a rank takes part in, and its partition of it."""


def optimizer_tree(
    contents: Contents,
    options: NativeOptions,
    banks: Sequence[Bank],
    rank: int,
    tp: int,
    head: Mapping[str, object],
    bulk: Bulk,
) -> dict[str, object]:
    """The content of the file of data-parallel rank ``rank`` of one column.

    Parameters
    ----------
    contents, options
        What is written, and for which topology.
    banks
        The flat buffers of the column.
    rank, tp
        Data- and tensor-parallel rank.
    head
        `ds_config` and `ds_version`.
    bulk
        Receives what goes into the storages.
    """
    held = [bank.held_by(rank, tp) for bank in banks]
    own = [(group, group.partitions[partition]) for group, partition in held]
    grid = next((bank.experts for bank in banks if bank.experts is not None), None)
    settings = optimizer_settings(contents, options)
    states = {"state": _states(own, bulk), "param_groups": _param_groups(contents, banks)}
    masters = _masters(own, bulk, stripped=options.stage != 3)
    stage = EnumRecord.of(ZERO_STAGE, options.stage)
    if options.stage == 3:
        body = _zero3_body(options.dp, stage, settings, states, masters)
        if grid is not None:
            body["ds_zero_partition_groups"] = _sharing(banks, options, rank, tp)
    else:
        body = _flat_body(own, stage, settings, states, masters)
        body["ds_version"] = head["ds_version"]
        names = grid.local_names if grid is not None else {}
        body["param_slice_mappings"] = [_mapping(part, names) for _, part in own]
    root: dict[str, object] = {"optimizer_state_dict": body, **head}
    if grid is not None and grid.is_folded:
        root[FOLDING] = Writer(grid, rank, tp).of_the_optimizer(banks, options.stage)
    return root


# --------------------------------------------------------------------------- the two dialects


def _flat_body(
    own: Sequence[Own],
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
        "group_paddings": [part.padding for _, part in own],
        "param_alignment_paddings": [list(group.alignment) for group, _ in own],
        "partition_count": [len(group.partitions) for group, _ in own],
    }


def _mapping(part: FlatPartition, names: Mapping[str, str]) -> OrderedDict[str, FragmentAddress]:
    return OrderedDict(
        (names.get(window.name, window.name), FragmentAddress.of(window.numel, window.start))
        for window in part.windows
    )


def _zero3_body(
    dp: int,
    stage: EnumRecord,
    settings: Mapping[str, object],
    states: Mapping[str, object],
    masters: Sequence[NewTensor],
) -> dict[str, object]:
    """ZeRO-3, whose loader demands a loss scaler."""
    return {
        "zero_stage": stage,
        **settings,
        "partition_count": dp,
        "optimizer_state_dict": states,
        "fp32_flat_groups": masters,
    }


def _sharing(
    banks: Sequence[Bank], options: NativeOptions, rank: int, tp: int
) -> list[dict[str, object]]:
    """Which ranks share every sub-group, as a model with experts says under ZeRO-3."""
    alike = [dp * options.tp + tp for dp in range(options.dp)]
    entries: list[dict[str, object]] = []
    for number, bank in enumerate(banks):
        group, partition = bank.held_by(rank, tp)
        grid = bank.experts
        ranks = alike if grid is None else grid.ranks_of(grid.place(rank, tp)[0])
        entries.append(
            {
                "sub_group": number,
                "partition_count": len(group.partitions),
                "partition_rank": partition,
                "partition_ranks": ranks,
                "families": ["replicated" if grid is None else "autoep_expert"],
                "group_names": ["replicated" if grid is None else grid.group_name],
            }
        )
    return entries


# --------------------------------------------------------------------------- what they share


def _param_groups(contents: Contents, banks: Sequence[Bank]) -> list[dict[str, object]]:
    owned: list[list[int]] = [[] for _ in contents.groups]
    names: dict[int, str] = {}
    for number, bank in enumerate(banks):
        owned[bank.first.param_group].append(number)
        if bank.experts is not None:
            names[bank.first.param_group] = bank.experts.group_name
    return [
        {
            **group.settings,
            **({"name": names[index]} if index in names else {}),
            "params": owned[index],
        }
        for index, group in enumerate(contents.groups)
    ]


def _states(own: Sequence[Own], bulk: Bulk) -> dict[int, dict[str, object]]:
    found: dict[int, dict[str, object]] = {}
    for number, (group, part) in enumerate(own):
        kept: dict[str, object] = {
            state: scalar_value(scalar) for state, scalar in group.held.scalars.items()
        }
        for state, dtype in group.held.tensors.items():
            whole = state in group.whole_states
            windows = part.whole if whole else part.windows
            numel = sum(window.numel for window in windows) if whole else part.length
            kept[state] = bulk.flat(("state", str(number), state), state, dtype, numel, windows)
        if kept:
            found[number] = kept
    return found


def _masters(own: Sequence[Own], bulk: Bulk, *, stripped: bool) -> list[NewTensor]:
    masters = []
    for number, (group, part) in enumerate(own):
        numel = part.length - part.padding if stripped else part.length
        label = ("master", str(number))
        masters.append(bulk.flat(label, MASTER, group.held.master, numel, part.windows))
    return masters
