"""What DeepSpeed's universal loader loses of a folder that holds everything.

Theory. The bytes of a universal folder are right; whether a run gets them back is up to the loader,
and it does not say what it leaves behind. So whoever writes a folder of which it loses something is
told then, with the way round it. Each of these is pinned by `tests/deepspeed_judge`.

Sources: `stage3.py` (`load_hp_checkpoint_state_from_checkpoint_dir_stage3`: three states by name,
one `step` for all sub-groups, `param_groups[0]` for all groups), `stage_1_and_2.py`
(`_link_all_hp_params`: the original order, whatever `round_robin_gradients` made of it),
`engine.py`, DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from reshard.formats.checkpoint import Checkpoint, Role
from reshard.formats.universal.names import STEP, ZERO

_READ_BY_ZERO3 = frozenset({"fp32", "exp_avg", "exp_avg_sq"})
_NATIVE_EXPERT = ".deepspeed_moe.experts.deepspeed_experts."
"""In the names of native experts."""

_NATIVE = "write --to deepspeed --stage 3 --dp N"


def notes(checkpoint: Checkpoint, groups: int) -> Iterator[str]:
    """Tell what the loader of the run that resumes does not give back.

    Parameters
    ----------
    checkpoint
        What is written.
    groups
        Number of parameter groups.
    """
    yield from _unread(checkpoint)
    if not _has_native_experts(checkpoint):  # which DeepSpeed does not train under ZeRO-3
        yield from _of_groups(checkpoint, groups)
        yield from _of_states(checkpoint)
    if _is_dealt(checkpoint):
        yield (
            "the source was trained with round_robin_gradients: DeepSpeed's universal loader puts "
            "every state in the wrong place under it, so switch it off in the configuration of the "
            "run that resumes"
        )


def _unread(checkpoint: Checkpoint) -> Iterator[str]:
    roles = {tensor.name: tensor.role for tensor in checkpoint.tensors.values()}
    for role, word in ((Role.FROZEN, "frozen parameter"), (Role.BUFFER, "buffer")):
        count = sum(1 for found in roles.values() if found is role)
        if count:
            yield (
                f"{count} {word}{'s' if count > 1 else ''} written to {ZERO}/, which DeepSpeed's "
                f"universal loader does not read back: load {'them' if count > 1 else 'it'} into "
                "the model (docs/convert/deepspeed-to-universal.md shows how)"
            )
    if _has_native_experts(checkpoint):
        yield (
            "experts of native DeepSpeed MoE have their global numbers; DeepSpeed's universal "
            "loader looks for the numbers local to a rank, so it loads them at ep_size 1 only"
        )
    if checkpoint.scalars and not any(state == STEP for _, state in checkpoint.scalars):
        yield "the optimizer keeps no step"


def _has_native_experts(checkpoint: Checkpoint) -> bool:
    return any(_NATIVE_EXPERT in f".{name}" for name, _ in checkpoint.tensors)


def _of_groups(checkpoint: Checkpoint, groups: int) -> Iterator[str]:
    if groups < 2:
        return
    tensors = (scalar.dtype for (_, state), scalar in checkpoint.scalars.items() if state == STEP)
    ahead = " and lets their one step run ahead" if any(tensors) else ""
    yield (
        f"there are {groups} parameter groups: under ZeRO-3 DeepSpeed's universal loader gives all "
        f"of them the hyperparameters of the first{ahead}; to resume under ZeRO-3, {_NATIVE}"
    )


def _of_states(checkpoint: Checkpoint) -> Iterator[str]:
    kept = {t.state for t in checkpoint.tensors.values() if t.role is Role.PARAMETER}
    kept |= {state for _, state in checkpoint.scalars if state != STEP}
    if kept > {"fp32"} and kept != _READ_BY_ZERO3:
        states = ", ".join(sorted(kept - {"fp32"}))
        yield (
            "under ZeRO-3 DeepSpeed's universal loader reads the optimizer states exp_avg and "
            f"exp_avg_sq only, and this optimizer keeps {states}: resume at stage 1 or 2, or "
            f"{_NATIVE}"
        )


def _is_dealt(checkpoint: Checkpoint) -> bool:
    """Whether the configuration of the source says `round_robin_gradients`."""
    extra = checkpoint.extras.get("ds_config")
    config = extra.value if extra is not None else None
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return isinstance(zero, Mapping) and zero.get("round_robin_gradients") is True
