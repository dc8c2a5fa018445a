"""The configuration of a run, as far as it decides how flat buffers are laid out.

Theory. Two runs of one topology can still lay their flat buffers out differently: ZeRO-1 and 2 may
deal parameters out to ranks like cards (``round_robin_gradients``) or start each at a multiple of
16 bytes (``parameter_alignment``), ZeRO-3 cuts long groups (``sub_group_size``), and bf16 with fp32
accumulation has an optimizer class of its own. None of it is stored but in ``ds_config``. DeepSpeed
checks the alignment when it loads, and nothing else: a buffer in another order is taken as it is.
So the target follows the configuration that the source was trained with, and says so.

Source: `runtime/zero/config.py`, `engine.py` (`_do_optimizer_sanity_check`), `stage_1_and_2.py`,
DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reshard.formats.checkpoint import Checkpoint
from reshard.formats.dtypes import DType
from reshard.formats.model_dtypes import configured_dtype

DEFAULT_SUB_GROUP_SIZE = 10**9
"""DeepSpeed's default of ``zero_optimization.sub_group_size``, in elements."""

_SINGLE = ("fp32", "float32")
"""Spellings of single precision under ``data_types``."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A typed view of ``ds_config``."""

    raw: object
    """The configuration as stored: a mapping, or the path that the user gave, or None."""

    @property
    def is_known(self) -> bool:
        """Whether the configuration itself is stored, not only where it was."""
        return isinstance(self.raw, Mapping)

    def section(self, key: str) -> Mapping[str, object]:
        """A section of the configuration, empty when it has none."""
        found = self.raw.get(key) if isinstance(self.raw, Mapping) else None
        return {str(k): v for k, v in found.items()} if isinstance(found, Mapping) else {}

    @property
    def zero(self) -> Mapping[str, object]:
        """The section ``zero_optimization``."""
        return self.section("zero_optimization")

    @property
    def stage(self) -> int | None:
        """The ZeRO stage that it asks for, None when it does not say."""
        stage = self.zero.get("stage")
        return stage if isinstance(stage, int) and not isinstance(stage, bool) else None

    @property
    def model_dtype(self) -> DType | None:
        """The element type of the model, None when the configuration is not stored."""
        return configured_dtype(self.raw)

    @property
    def round_robin(self) -> bool:
        """Whether ZeRO-1 and 2 deal parameters out to the ranks in turn."""
        return self.zero.get("round_robin_gradients") is True

    @property
    def parameter_alignment(self) -> bool:
        """Whether ZeRO-1 and 2 start parameters at multiples of 16 bytes."""
        return self.zero.get("parameter_alignment") is True

    @property
    def sub_group_size(self) -> int:
        """Elements a rank keeps in one sub-group of ZeRO-3, at least."""
        size = self.zero.get("sub_group_size")
        if isinstance(size, (int, float)) and not isinstance(size, bool):
            return int(size)
        return DEFAULT_SUB_GROUP_SIZE

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer runs on the CPU."""
        offload = self.zero.get("offload_optimizer")
        device = offload.get("device") if isinstance(offload, Mapping) else None
        return device in ("cpu", "nvme") or self.zero.get("cpu_offload") is True

    def uses_bf16_optimizer(self, stage: int, model_dtype: DType) -> bool:
        """Whether the engine of that stage would be a ``BF16_Optimizer``, which never reorders."""
        accumulates = self.section("data_types").get("grad_accum_dtype")
        single = accumulates in _SINGLE
        return (
            stage == 1 and model_dtype.name == "bfloat16" and single and not self.offloads_optimizer
        )


def run_config_of(checkpoint: Checkpoint) -> RunConfig:
    """The configuration that a checkpoint was trained with."""
    extra = checkpoint.extras.get("ds_config")
    return RunConfig(extra.value if extra is not None else None)


def source_stage(checkpoint: Checkpoint) -> int | None:
    """The ZeRO stage the source was trained with: what its files say, else its configuration."""
    if checkpoint.topology.stage is not None:
        return checkpoint.topology.stage
    return run_config_of(checkpoint).stage
