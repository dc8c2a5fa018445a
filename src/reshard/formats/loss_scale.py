"""The loss scaler, and whether it does anything.

Theory. Every engine of ZeRO-1, 2 and 3 keeps a loss scaler; only in fp16 does it scale. Otherwise
it is the number 1, and two fields beside it say that nothing overflowed. `BF16_Optimizer` and
engines without ZeRO keep none of the three. So a scaler that does nothing is no state: it is
dropped when a checkpoint is read, by every reader, and made again where a loader demands it.

In fp16 the factor 1 is a choice of the user (``loss_scale: 1``), and is kept. DeepSpeed's engines
always store a scaler there; where it is absent a conversion left it out, and nobody knows it.

Without ZeRO a scaler is stored as numbers instead of an object (:data:`SCALE_NUMBERS`), fewer than
the object has. Where both are there, the object is the whole of it. The factor 1 needs no more
than the numbers, so it becomes the object when it is read.

Source: `fp16/loss_scaler.py`, `fp16/unfused_optimizer.py` (`state_dict`), DeepSpeed 0.12 to 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard.formats.model_dtypes import configured_dtype
from reshard.formats.torch_archive import Global, ObjectRecord, Step

HALF = "float16"
"""The element type that needs a loss scaler."""

LOSS_SCALER = Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
"""Class of the loss scaler whose factor never changes."""

SCALER, DYNAMIC, OVERFLOW = "loss_scaler", "dynamic_loss_scale", "overflow"
"""Keys of the scaler, of whether it changes, and of whether the last step overflowed."""

SCALE_NUMBERS = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
"""What engines without ZeRO keep of a scaler, and its fields."""


def still_loss_scaler() -> ObjectRecord:
    """The loss scaler of a run that needs none: the factor 1."""
    state = Step("state", {"cur_scale": 1.0, "dynamic": False})
    return ObjectRecord(form="newobj", callable=LOSS_SCALER, steps=[state])


def still_settings() -> dict[str, object]:
    """All that an engine of ZeRO keeps of a scaler that does nothing."""
    return {SCALER: still_loss_scaler(), DYNAMIC: False, OVERFLOW: False}


def effective_settings(settings: Mapping[str, object], config: object) -> dict[str, object]:
    """Settings of an optimizer without a scaler that does nothing.

    Parameters
    ----------
    settings
        As they are stored.
    config
        ``ds_config`` of the run: in fp16 the scaler is always kept.
    """
    effective = without_still_scaler(settings)
    dtype = configured_dtype(config)
    if dtype is not None and dtype.name == HALF and _states_still(settings):
        others = {key: value for key, value in effective.items() if key not in SCALE_NUMBERS}
        return {**still_settings(), **others}
    return effective


def without_still_scaler(settings: Mapping[str, object]) -> dict[str, object]:
    """Settings of an optimizer in another element type than fp16.

    Examples
    --------
    >>> without_still_scaler({**still_settings(), "clip_grad": 1.0})
    {'clip_grad': 1.0}
    >>> without_still_scaler({"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": 3})
    {}
    >>> without_still_scaler({"dynamic_loss_scale": False, "cur_scale": 128.0, "cur_iter": 3})
    {'dynamic_loss_scale': False, 'cur_scale': 128.0, 'cur_iter': 3}
    """
    found = dict(settings)
    if _is_still(found.get(SCALER)):
        del found[SCALER]
    if SCALER in found:
        return {key: value for key, value in found.items() if key not in SCALE_NUMBERS}
    if found.get(DYNAMIC) or found.get("cur_scale", 1.0) != 1.0:
        return found
    for key, idle in ((DYNAMIC, False), (OVERFLOW, False), ("cur_scale", 1.0)):
        if found.get(key) == idle:
            found.pop(key, None)
    if "cur_scale" not in found:
        found.pop("cur_iter", None)
    return found


def scale_numbers(settings: Mapping[str, object], steps: object) -> dict[str, object] | None:
    """What an engine without ZeRO keeps of a scaler; None when the settings do not tell.

    Parameters
    ----------
    settings
        As :func:`effective_settings` leaves them.
    steps
        How many steps the run has made.

    Examples
    --------
    >>> scale_numbers({}, 3)
    {'dynamic_loss_scale': False, 'cur_scale': 1.0, 'cur_iter': 3}
    """
    scaler = settings.get(SCALER)
    if not isinstance(scaler, ObjectRecord):
        if DYNAMIC not in settings:
            return {DYNAMIC: False, "cur_scale": 1.0, "cur_iter": steps}
        return {key: settings[key] for key in (DYNAMIC, *SCALE_NUMBERS) if key in settings}
    fields = scaler.fields
    dynamic = fields.get("dynamic")
    wanted = SCALE_NUMBERS if dynamic is True else SCALE_NUMBERS[:1]
    if not isinstance(dynamic, bool) or not all(key in fields for key in wanted):
        return None
    return {DYNAMIC: dynamic, "cur_iter": steps, **{key: fields[key] for key in wanted}}


def _states_still(settings: Mapping[str, object]) -> bool:
    """Whether the factor 1 is stated, as an object or else as numbers."""
    if SCALER in settings:
        return _is_still(settings[SCALER])
    return settings.get(DYNAMIC) is False and settings.get("cur_scale") == 1.0


def _is_still(scaler: object) -> bool:
    return (
        isinstance(scaler, ObjectRecord)
        and scaler.type_name == LOSS_SCALER.path
        and scaler.fields.get("cur_scale") == 1.0
        and scaler.fields.get("dynamic") is False
    )
