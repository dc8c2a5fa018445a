"""What goes into a DCP optimizer beside tensors: groups, numbers, and what torch needs supplied.

Theory. `dcp.load` fills the tree of the run that loads: a key that the run has and the checkpoint
lacks is an error, one that only the checkpoint has is passed over. So groups get every setting that
``torch.optim.AdamW`` has (any Adam of DeepSpeed or torch is recognised by ``betas`` and ``eps``);
what the source did not state is AdamW's default, said in a note and remembered under the key
``reshard``, so that reading the folder gives the groups that were there.

``decoupled_weight_decay`` decides between Adam and AdamW. DeepSpeed's own Adam is AdamW unless
``adam_w_mode`` is false in its configuration; torch's state it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reshard.errors import CheckpointError
from reshard.formats.checkpoint import Checkpoint, Extra, Role, Scalar
from reshard.formats.dcp.carried import CARRIED_EXTRAS, Carried
from reshard.formats.dtypes import DTYPES
from reshard.formats.torch_archive import NewTensor, Size, TensorRecord

STEP = "step"

_ADAM: Mapping[str, object] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""Settings of a group of ``torch.optim.AdamW`` beside lr, betas, eps and weight_decay (2.13)."""

_PLAIN = (type(None), bool, int, float, str, bytes)


@dataclass(frozen=True, slots=True)
class WrittenGroup:
    """A parameter group as it is written, and which settings were supplied."""

    names: tuple[str, ...]
    settings: Mapping[str, object]
    supplied: frozenset[str]


@dataclass(frozen=True, slots=True)
class Settings:
    """Groups, and what the user should know of them."""

    groups: tuple[WrittenGroup, ...] = ()
    notes: tuple[str, ...] = ()


def settings_of(checkpoint: Checkpoint) -> Settings:
    """The groups of a checkpoint; none where it does not keep them.

    Raises
    ------
    CheckpointError
        There are states, and groups that do not fit them.
    """
    names, stored = _listed(checkpoint, "groups"), _listed(checkpoint, "param_groups")
    has_states = any(state != "fp32" for _, state in (*checkpoint.tensors, *checkpoint.scalars))
    if not has_states:
        return Settings(notes=("no optimizer state: the folder holds the model alone",))
    if len(names) != len(stored) or not names:
        raise CheckpointError(
            "the source does not keep the hyperparameters of every optimizer group",
            file=checkpoint.path,
            expected=f"{len(names)} groups",
            found=len(stored),
            next_step="write the weights alone with --states fp32",
        )
    held = {name for name, _ in checkpoint.tensors}
    decoupled = _is_decoupled(checkpoint)
    groups = tuple(
        _group([name for name in owned if name in held], settings, decoupled=decoupled)
        for owned, settings in zip(map(_texts, names), map(_mapping, stored), strict=True)
    )
    return Settings(groups, tuple(_notes(groups)))


def _group(names: list[str], kept: Mapping[str, object], *, decoupled: bool) -> WrittenGroup:
    settings = {key: value for key, value in kept.items() if key != "params"}
    added: dict[str, object] = {}
    if "betas" in settings and "eps" in settings:
        defaults = {**_ADAM, "decoupled_weight_decay": decoupled}
        added = {key: value for key, value in defaults.items() if key not in settings}
    return WrittenGroup(tuple(names), {**settings, **added}, frozenset(added))


def _is_decoupled(checkpoint: Checkpoint) -> bool:
    """Whether an Adam that does not say so decays weights apart from gradients."""
    config = _mapping(_value(checkpoint, "ds_config"))
    parameters = _mapping(_mapping(config.get("optimizer")).get("params"))
    return parameters.get("adam_w_mode") is not False


def _notes(groups: Sequence[WrittenGroup]) -> Iterator[str]:
    supplied = sorted(frozenset().union(*(group.supplied for group in groups)))
    if supplied:
        yield (
            f"torch's AdamW has settings that the source does not state: {', '.join(supplied)} "
            "are written with their defaults"
        )


def state_value(name: str, state: str, scalar: Scalar) -> object:
    """A number as torch's optimizers keep it: a step is a float32 tensor of no dims.

    Raises
    ------
    CheckpointError
        The step is too large for the float32 that torch keeps it in.
    """
    dtype = scalar.dtype
    if state == STEP:
        dtype = DTYPES["float32"]
        if float(np.float32(scalar.value)) != scalar.value:
            raise CheckpointError(
                "torch keeps steps in float32, which cannot hold this one",
                parameter=name,
                state=state,
                found=scalar.value,
            )
    if dtype is None:
        return scalar.value
    return NewTensor(dtype, (), data=np.array(scalar.value, dtype=dtype.numpy()).tobytes())


# --------------------------------------------------------------------------- the reshard object


def carried_of(checkpoint: Checkpoint, settings: Settings) -> tuple[Carried, tuple[str, ...]]:
    """What goes under the key ``reshard``, and a note for what cannot."""
    roles = {
        tensor.name: tensor.role
        for tensor in checkpoint.tensors.values()
        if tensor.role is not Role.PARAMETER
    }
    extras, left = {}, []
    for key in CARRIED_EXTRAS:
        extra = checkpoint.extras.get(key)
        if extra is None:
            continue
        if is_plain(extra.value):
            extras[key] = extra.value
        else:
            left.append(key)
    notes = (f"left out, since they hold objects of classes: {', '.join(left)}",) if left else ()
    supplied = {group.names[0]: group.supplied for group in settings.groups if group.names}
    return Carried(roles, supplied, extras), notes


def is_plain(value: object) -> bool:
    """Whether a tree holds numbers, texts, containers and plain tensors only."""
    pending, seen = [value], set[int]()
    while pending:
        part = pending.pop()
        if isinstance(part, _PLAIN) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Mapping):
            pending += [*part.keys(), *part.values()]
        elif isinstance(part, (list, tuple, set, frozenset, Size)):
            pending += list(part)
        elif not isinstance(part, TensorRecord) or part.subclass or part.parameter:
            return False
    return True


def _value(checkpoint: Checkpoint, key: str) -> object:
    extra: Extra | None = checkpoint.extras.get(key)
    return None if extra is None else extra.value


def _listed(checkpoint: Checkpoint, key: str) -> Sequence[object]:
    value = _value(checkpoint, key)
    return value if isinstance(value, (list, tuple)) else ()


def _mapping(value: object) -> dict[str, object]:
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else []
