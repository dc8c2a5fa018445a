"""What goes into a DCP optimizer beside tensors: groups, numbers, and what torch needs supplied.

Theory. `dcp.load` fills the tree of the run that loads: a key that the run has and the checkpoint
lacks is an error, one that only the checkpoint has is passed over. So groups get every setting that
``torch.optim.AdamW`` has (any Adam of DeepSpeed or torch is recognised by ``betas`` and ``eps``);
what the source did not state is AdamW's default, said in a note and remembered under the key
``reshard``, so that reading the folder gives the groups that were there.

``decoupled_weight_decay`` decides between Adam and AdamW, and a loader takes it over. torch states
it in 2.13, and did not in 2.4. DeepSpeed's ``AdamW`` is AdamW, and so is its ``Adam`` unless
``adam_w_mode`` is false in the configuration (``engine.py``, ``_configure_basic_optimizer``). Where
nothing says it and some group decays, the user does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reshard.errors import CheckpointError, UnsupportedError, count_text
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


def settings_of(checkpoint: Checkpoint, adam: str | None = None) -> Settings:
    """The groups of a checkpoint; none where it does not keep them.

    Parameters
    ----------
    checkpoint
        The source.
    adam
        Which Adam it was trained with, ``"adam"`` or ``"adamw"``, where the user says it.

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
            expected=count_text(len(names), "group"),
            found=len(stored),
            next_step="write the weights alone with --states fp32",
        )
    held = {name for name, _ in checkpoint.tensors}
    decoupled = _is_decoupled(checkpoint, list(map(_mapping, stored)), adam)
    groups = tuple(
        _group([name for name in owned if name in held], settings, decoupled=decoupled)
        for owned, settings in zip(map(_texts, names), map(_mapping, stored), strict=True)
    )
    return Settings(groups, tuple(_notes(groups)))


def _group(names: list[str], kept: Mapping[str, object], *, decoupled: bool) -> WrittenGroup:
    settings = {key: value for key, value in kept.items() if key != "params"}
    added: dict[str, object] = {}
    if _is_adam(settings):
        defaults = {**_ADAM, "decoupled_weight_decay": decoupled}
        added = {key: value for key, value in defaults.items() if key not in settings}
    return WrittenGroup(tuple(names), {**settings, **added}, frozenset(added))


def _is_decoupled(
    checkpoint: Checkpoint, groups: Sequence[Mapping[str, object]], adam: str | None
) -> bool:
    """Whether an Adam that does not say so decays weights apart from gradients."""
    if adam is not None:
        return adam == "adamw"
    optimizer = _mapping(_mapping(_value(checkpoint, "ds_config")).get("optimizer"))
    kind = str(optimizer.get("type", "")).lower()
    if kind in ("adam", "adamw"):
        mode = _mapping(optimizer.get("params")).get("adam_w_mode")
        return kind == "adamw" or mode is not False
    unclear = any(
        group.get("weight_decay", 0) != 0 and "decoupled_weight_decay" not in group
        for group in groups
        if _is_adam(group)
    )
    if unclear:
        raise UnsupportedError(
            "the source does not say whether its optimizer is Adam or AdamW, and it decays weights",
            file=checkpoint.path,
            next_step="say it with --adam adamw or --adam adam",
        )
    return True


def _is_adam(group: Mapping[str, object]) -> bool:
    return "betas" in group and "eps" in group


def _notes(groups: Sequence[WrittenGroup]) -> Iterator[str]:
    supplied = sorted(frozenset().union(*(group.supplied for group in groups)))
    if supplied:
        yield (
            "settings of torch's AdamW that the source does not state, written with its defaults: "
            f"{', '.join(supplied)}"
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
