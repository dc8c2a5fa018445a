"""What a DeepSpeed checkpoint carries besides tensors, under the keys that all formats share.

Theory. Beside the model a trainer needs counters, schedulers, the scaler, hyperparameters and
whatever the client added. They lie in the model-state file of each model-parallel rank and in
`optimizer_state_dict`. Some of it speaks of the topology it was saved under (paddings, partition
counts, world sizes) and is dropped: the target has its own. The rest goes into `Checkpoint.extras`:

========================= ==========================================================================
`param_groups`            hyperparameters of each parameter group, `params` left out
`groups`                  names of the parameters in each parameter group
`optimizer_settings`      loss scaler, clipping, overflow flag
`global_steps` …          counters, `lr_scheduler`, `data_sampler`, `random_ltd`
`client_state`            what the client gave to `save_checkpoint`
`ds_config`               the configuration of the run
`universal_checkpoint_info`  the layout metadata of the source topology
`model_files`             the pass-through part of each model-parallel rank's file, for writers
`module`                  element type of every tensor of the state dict, in its order
`lists_frozen`            true where the files list all frozen parameters, though there be none
========================= ==========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.formats.checkpoint import Extra
from reshard.formats.deepspeed.grid import require_one_value
from reshard.formats.deepspeed.numbered import inner_optimizer
from reshard.formats.deepspeed.optimizer_records import OptimizerStates
from reshard.formats.deepspeed.partitions import Partitions
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.loss_scale import effective_settings
from reshard.formats.model_keys import (
    CARRIED,
    OF_THE_PARTITIONS,
    client_state,
    passed_through,
    text_keyed,
)
from reshard.formats.torch_archive import TensorRecord


def collect_extras(
    columns: Sequence[ModelStates],
    ranks: Mapping[tuple[int, int], OptimizerStates],
    found: Partitions,
) -> dict[str, Extra]:
    """Collect the extras of a checkpoint; `columns` are the model-state files by `mp`."""
    first = columns[0]
    root = text_keyed(first.archive.root)
    extras = {key: Extra(root[key], first.file) for key in CARRIED if root.get(key) is not None}
    extras["client_state"] = Extra(client_state(root), first.file)
    extras["model_files"] = Extra(
        [passed_through(text_keyed(column.archive.root)) for column in columns]
    )
    if root.get("frozen_param_fragments") is not None:
        extras["lists_frozen"] = Extra(value=True, file=first.file)
    dtypes = {
        name: record.dtype for column in columns for name, record in (column.module or {}).items()
    }
    if dtypes:
        extras["module"] = Extra(dtypes, first.file)
    groups = group_names(ranks, found)
    if groups:
        extras["groups"] = Extra(groups, first.file)
    if ranks:
        extras |= _of_the_optimizer(ranks, root.get("ds_config"))
    elif root.get("optimizer"):
        extras["param_groups"] = _of_an_ordinary_optimizer(columns)
    return extras


def group_names(
    ranks: Mapping[tuple[int, int], OptimizerStates], found: Partitions
) -> list[list[str]]:
    """Names of the parameters in each parameter group, in flat-buffer order."""
    if not ranks:
        return [list(names) for names in found.groups]
    return [
        [
            name
            for group in owned
            for name in (found.groups[group] if group < len(found.groups) else ())
        ]
        for owned in _fullest(ranks).members
    ]


def _fullest(ranks: Mapping[tuple[int, int], OptimizerStates]) -> OptimizerStates:
    """The first rank with the most groups: a stage or a rank without experts may have fewer."""
    return max(ranks.values(), key=lambda rank: (len(rank.param_groups), len(rank.groups)))


def _of_the_optimizer(
    ranks: Mapping[tuple[int, int], OptimizerStates], config: object
) -> dict[str, Extra]:
    first = _fullest(ranks)
    settings = {key: value for key, value in first.settings.items() if key not in OF_THE_PARTITIONS}
    require_one_value(
        {rank.file: rank.settings.get("loss_scaler") for rank in ranks.values()}, "the loss scaler"
    )
    numbers = {rank.file: _numbers(rank.param_groups) for rank in ranks.values()}
    for index in range(len(first.param_groups)):
        stated = {file: groups[index] for file, groups in numbers.items() if index < len(groups)}
        require_one_value(stated, f"the hyperparameters of group {index}")
    return {
        "param_groups": Extra([dict(group) for group in first.param_groups], first.file),
        "optimizer_settings": Extra(effective_settings(settings, config), first.file),
    }


def _of_an_ordinary_optimizer(columns: Sequence[ModelStates]) -> Extra:
    """Hyperparameters of a run without ZeRO; a pipeline stage may have fewer groups."""
    stated = {
        column.file: [
            {str(key): value for key, value in group.mapping().items() if key != "params"}
            for group in inner_optimizer(column.archive).at("param_groups").each()
        ]
        for column in columns
    }
    most = max(stated.values(), key=len)
    for index in range(len(most)):
        held = {f: _numbers(groups)[index] for f, groups in stated.items() if index < len(groups)}
        require_one_value(held, f"the hyperparameters of group {index}")
    return Extra(most, columns[0].file)


def _numbers(groups: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Hyperparameters without those kept as tensors, whose bytes lie elsewhere in each file."""
    return [
        {key: value for key, value in group.items() if not isinstance(value, TensorRecord)}
        for group in groups
    ]
