"""In which element type the model runs, beside the fp32 masters that the optimizer keeps.

Theory. Mixed-precision training has two element types: masters in single precision, and a model
that computes in another one. The masters are what a checkpoint is about; the other type is what a
model is served in. It is stated twice: by each weight in the state dict, parameter for parameter,
and by the configuration of the run, for all of them. The weights are believed first.
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard.formats.checkpoint import Checkpoint, Role
from reshard.formats.dtypes import DTYPES, DType

MODULE_EXTRA = "module"
"""The extra with the model's state dict: name -> element type, in the order of the model."""

_SECTIONS = (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16"))
"""Sections of DeepSpeed's configuration that choose the model's element type."""


def stated_dtypes(checkpoint: Checkpoint) -> dict[str, DType]:
    """Element types of the weights in the model's state dict, in its order; empty if not known."""
    extra = checkpoint.extras.get(MODULE_EXTRA)
    value = extra.value if extra is not None else None
    if not isinstance(value, Mapping):
        return {}
    return {str(name): dtype for name, dtype in value.items() if isinstance(dtype, DType)}


def configured_dtype(config: object) -> DType | None:
    """The element type that ``ds_config`` chooses; None when it is not stored."""
    if not isinstance(config, Mapping):
        return None
    for key, name in _SECTIONS:
        section = config.get(key)
        if isinstance(section, Mapping) and section.get("enabled") is True:
            return DTYPES[name]
    return DTYPES["float32"]


def model_dtype(checkpoint: Checkpoint) -> DType | None:
    """The element type of the whole model: as configured, else the one that all weights have.

    None when neither is known, or weights have several.
    """
    extra = checkpoint.extras.get("ds_config")
    configured = configured_dtype(extra.value if extra is not None else None)
    if configured is not None:
        return configured
    trained = {t.name for t in checkpoint.tensors.values() if t.role is Role.PARAMETER}
    stated = {dtype for name, dtype in stated_dtypes(checkpoint).items() if name in trained}
    return stated.pop() if len(stated) == 1 else None
