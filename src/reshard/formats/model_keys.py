"""The keys of DeepSpeed's model-state and optimizer dictionaries, sorted by what they speak of.

Theory. Native and universal checkpoints share these dictionaries. A key speaks of the run
(counters, schedulers: carried everywhere), of the model or the topology (shapes, paddings, world
sizes: every output has its own), or is the client's. Both readers and the writers sort by this one
table, so that two checkpoints of the same run have equal extras whatever their format.

Source: `engine.py` (`_save_checkpoint`), `stage_1_and_2.py`, `stage3.py`, DeepSpeed 0.12 to 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping

CARRIED = (
    "global_steps",
    "skipped_steps",
    "global_samples",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "ds_config",
    "universal_checkpoint_info",
)
"""Keys of a model-state file that are carried under their own name."""

OF_THE_MODEL = frozenset(
    (
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "sparse_tensor_module_names",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_version",
        "num_experts",
        "ds_autoep_layers",
        "autoep_layers",
        "folding",
    )
)
"""Keys of a model-state file that describe the model or the topology, so are never client state."""

OF_THE_PARTITIONS = frozenset(
    (
        "zero_stage",
        "partition_count",
        "group_paddings",
        "param_alignment_paddings",
        "ds_version",
        "universal_checkpoint_info",
        "param_shapes",
        "base_optimizer_state",
        "base_optimizer_state_step",
        "single_partition_of_fp32_groups",
        "param_slice_mappings",
        "fp32_flat_groups",
        "optimizer_state_dict",
        "ds_zero_partition_groups",
        "param_groups",
    )
)
"""Keys of `optimizer_state_dict` that are bulk, hyperparameters, or speak of the partitions."""


def client_state(root: Mapping[str, object]) -> dict[str, object]:
    """What the client added to a model-state file."""
    known = OF_THE_MODEL.union(CARRIED)
    return {key: value for key, value in root.items() if key not in known}


def passed_through(root: Mapping[str, object]) -> dict[str, object]:
    """The part of a model-state file that does not depend on the model or the topology."""
    return {key: value for key, value in root.items() if key not in OF_THE_MODEL}


def text_keyed(value: object) -> dict[str, object]:
    """A mapping with its keys as text; anything else as an empty one."""
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}
