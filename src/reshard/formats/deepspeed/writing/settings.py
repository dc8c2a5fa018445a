"""What the target says besides tensors: configuration, counters, scaler, and what was left out.

Theory. Most of it is carried as it is. Three things speak of the topology or of the element type,
and are made to fit:

* ``ds_config`` gets the stage, the tensor-parallel degree and the element type of the target. A
  later reader goes by it (the order of flat buffers is stored nowhere else), so it must be that of
  the files beside it.
* The client's state is stored once a model-parallel rank, and parts of it may differ between ranks
  (Megatron's RNG trackers). With other ranks there is no right one: every rank gets the first
  rank's, and the report names the keys that differed.
* The loss scaler belongs to fp16. Between fp16 and other types it is left out: ZeRO-1 and 2 then
  keep the new engine's own. A later conversion of such a checkpoint leaves it out as well.

What a native checkpoint cannot hold, or holds in a way that the user must know, is said in notes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from reshard.errors import CheckpointError, UnsupportedError, count_text
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.deepspeed.writing.contents import Contents, listed
from reshard.formats.deepspeed.writing.options import NativeOptions
from reshard.formats.deepspeed.writing.rank_bound import SHOWN, bound_to_ranks
from reshard.formats.loss_scale import (
    DYNAMIC,
    HALF,
    OVERFLOW,
    SCALE_NUMBERS,
    SCALER,
    still_settings,
)
from reshard.formats.torch_archive import same_value

if TYPE_CHECKING:
    from reshard.formats.deepspeed.writing.flat_groups import Bank

SPOKEN_VERSION = "0.19.8"
"""Version stated in the output when the source states none; the loader demands one."""

INFO = "universal_checkpoint_info"
COUNTERS = ("global_steps", "skipped_steps")

# --------------------------------------------------------------------------- model-state files


def carried_part(
    contents: Contents, options: NativeOptions, mp: int, info: Mapping[str, object] | None
) -> dict[str, object]:
    """What the model-state file of a model-parallel rank says besides the model.

    Parameters
    ----------
    contents, options
        What is written, and for which topology.
    mp
        The rank.
    info
        `universal_checkpoint_info` of the target, None for none.

    Raises
    ------
    CheckpointError
        When the source lacks a counter that DeepSpeed's loader demands.
    """
    parts = _parts(contents.checkpoint)
    part = parts[mp] if _has_same_ranks(contents.checkpoint, options) else parts[0]
    for key in COUNTERS:
        if not isinstance(part.get(key), int):
            raise CheckpointError(
                f"the source does not say {key}, which DeepSpeed's loader demands",
                file=contents.checkpoint.path,
            )
    part = {key: value for key, value in part.items() if key != INFO}
    part["ds_config"] = target_config(contents, options)
    part["ds_version"] = contents.checkpoint.versions.get("deepspeed") or SPOKEN_VERSION
    return part if info is None else {**part, INFO: info}


def _parts(checkpoint: Checkpoint) -> list[dict[str, object]]:
    parts = [
        {str(key): value for key, value in part.items()}
        for part in listed(checkpoint, "model_files")
        if isinstance(part, Mapping)
    ]
    return parts or [{}]


def _has_same_ranks(checkpoint: Checkpoint, options: NativeOptions) -> bool:
    source = checkpoint.topology
    same = (source.tp, source.pp) == (options.tp, options.pp)
    return same and len(_parts(checkpoint)) == options.mp


def target_config(contents: Contents, options: NativeOptions) -> object:
    """``ds_config`` of the target; a path stays a path."""
    raw = contents.config.raw
    if not isinstance(raw, Mapping):
        return raw
    config = {str(key): value for key, value in raw.items()}
    size = {"sub_group_size": options.sub_group_size} if options.sub_group_size else {}
    config["zero_optimization"] = {**contents.config.zero, "stage": options.stage, **size}
    experts = contents.config.section("expert_parallel")
    if "autoep_size" in experts:
        config["expert_parallel"] = {**experts, "autoep_size": options.ep}
    parallel = contents.config.section("tensor_parallel")
    if "autotp_size" in parallel or options.tp > 1:
        config["tensor_parallel"] = {**parallel, "autotp_size": options.tp}
    if options.dtype is not None:
        for key, name in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", HALF)):
            enabled = options.dtype.name == name
            if key in config or (enabled and key != "bfloat16"):
                config[key] = {**contents.config.section(key), "enabled": enabled}
    return config


# --------------------------------------------------------------------------- optimizer files


def optimizer_settings(contents: Contents, options: NativeOptions) -> dict[str, object]:
    """Loss scaler, clipping and overflow flag, as far as the source has them and they fit.

    Raises
    ------
    UnsupportedError
        When ZeRO-3 in fp16 would need a loss scaler that the source does not have.
    """
    settings = carried_settings(contents)
    kept = {key: value for key, value in settings.items() if key not in SCALE_NUMBERS}
    if SCALER in kept:
        return kept
    if scales_nothing(contents):
        keeps_none = contents.config.uses_bf16_optimizer(options.stage, contents.model_dtype)
        return kept if keeps_none else {**still_settings(), **kept}
    if options.stage == 3:
        raise UnsupportedError(
            "ZeRO-3 takes its loss scaler from the checkpoint, and the source has none for fp16",
            next_step="choose --stage 1 or 2, whose engines make one",
        )
    return {key: value for key, value in kept.items() if key not in (DYNAMIC, OVERFLOW)}


def scales_nothing(contents: Contents) -> bool:
    """Whether the loss scale is the number 1 without being stated: always but in fp16."""
    return contents.model_dtype.name != HALF


def carried_settings(contents: Contents) -> dict[str, object]:
    """Settings of the source's optimizer; of another element type without its loss scaler."""
    extra = contents.checkpoint.extras.get("optimizer_settings")
    value = extra.value if extra is not None else None
    settings = {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {}
    if _scaler_fits(contents):
        return settings
    scaler_keys = (SCALER, DYNAMIC, OVERFLOW, *SCALE_NUMBERS)
    return {key: value for key, value in settings.items() if key not in scaler_keys}


def _scaler_fits(contents: Contents) -> bool:
    """Whether source and target are both in fp16, or neither is."""
    before = contents.config.model_dtype
    known = before is not None and before != contents.model_dtype
    return not known or HALF not in (before.name if before else "", contents.model_dtype.name)


# --------------------------------------------------------------------------- the report


def notes(
    contents: Contents,
    options: NativeOptions,
    columns: Sequence[Sequence[Bank]],
    empty: Sequence[str],
) -> Iterator[str]:
    """What the user should know about the target.

    Parameters
    ----------
    contents, options
        What is written, and for which topology.
    columns
        The flat buffers of every column.
    empty
        Parameters of which some rank holds nothing.
    """
    yield from _layout_notes(contents, options, columns)
    source = contents.checkpoint.topology
    bound = bound_to_ranks(contents.checkpoint, files=not options.drop_in)
    if bound and (source.dp, source.tp, source.pp) != (options.dp, options.tp, options.pp):
        yield (
            "RNG states and data-loader positions belong to single ranks, and other ranks cannot "
            f"go on with them: {', '.join(bound[:SHOWN])}"
            + (f" and {len(bound) - SHOWN} more" if len(bound) > SHOWN else "")
        )
    yield from _carried_notes(contents, options)
    if empty and options.stage == 3:
        yield (
            f"some tensor rank holds nothing of {count_text(len(empty), 'parameter')} "
            f"({', '.join(empty[:SHOWN])}{', …' if len(empty) > SHOWN else ''}); DeepSpeed 0.19.8 "
            "cannot train such a model under ZeRO-3"
        )
    if options.stage == 0:
        yield (
            "without ZeRO the optimizer's states are numbered: the optimizer that loads them must "
            "be given the trained parameters only, in the order of the model"
        )


def _layout_notes(
    contents: Contents, options: NativeOptions, columns: Sequence[Sequence[Bank]]
) -> Iterator[str]:
    config = contents.config
    if not config.is_known:
        yield (
            "the source does not hold its ds_config, so DeepSpeed's defaults were taken for the "
            "order and the alignment of flat buffers"
        )
    flat = options.stage in (1, 2) and not config.uses_bf16_optimizer(
        options.stage, contents.model_dtype
    )
    if flat and config.round_robin and options.dp > 1:
        yield "laid out for round_robin_gradients: true, as the source was; keep it configured"
    if flat and config.parameter_alignment:
        yield "laid out for parameter_alignment: true, as the source was; keep it configured"
    if options.stage == 3 and len(columns[0]) > len(contents.groups):
        size = options.sub_group_size or config.sub_group_size
        yield f"laid out for sub_group_size: {size}; keep it configured"


def _carried_notes(contents: Contents, options: NativeOptions) -> Iterator[str]:
    parts = _parts(contents.checkpoint)
    if not _has_same_ranks(contents.checkpoint, options):
        odd = sorted(
            {
                key
                for part in parts[1:]
                for key in {*part, *parts[0]}
                if key != INFO and not same_value(part.get(key), parts[0].get(key))
            }
        )
        if odd:
            yield (
                "model-parallel ranks of the source differ in "
                f"{', '.join(odd)}; every rank has the first rank's"
            )
    if options.dtype is not None and any(
        contents.checkpoint.tensors[name, "fp32"].dtype != contents.dtypes[name]
        for name in contents.frozen
    ):
        yield f"frozen parameters are rounded to {options.dtype}"
    if not _scaler_fits(contents):
        yield "the loss scaler is left out, because it belongs to another element type"
    elif options.stage and not scales_nothing(contents):
        yield from _scaler_notes(carried_settings(contents))


def _scaler_notes(settings: Mapping[str, object]) -> Iterator[str]:
    """What becomes of a run in fp16 whose loss scaler is not whole."""
    if SCALER in settings:
        return
    if DYNAMIC in settings:
        reason = "an engine without ZeRO keeps too little of its loss scaler"
    else:
        reason = "the source has no loss scaler"
    yield f"{reason}: the run that resumes begins with a new one"
