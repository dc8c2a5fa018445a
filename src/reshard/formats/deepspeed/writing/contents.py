"""What there is to write: the source, sorted by the place that each thing has in a native file.

Theory. A checkpoint lists tensors by name and state; a native file wants them by role. Trained
parameters belong to a parameter group of the optimizer, in a fixed order; frozen parameters and
buffers lie in the module; an alias shares the tensor of its owner. Sorting demands that every
tensor finds its place: a trained parameter that no group lists would be lost without a word.

The order inside a group is the optimizer's own. A source whose flat buffers were dealt out round
robin lists its parameters in the order of the buffer (`groups`), so the deal is undone here, and
done again for the target's number of ranks where it is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from reshard.errors import CheckpointError, UnsupportedError, count_text
from reshard.formats.checkpoint import Checkpoint, Role, Scalar
from reshard.formats.deepspeed.native_moe import EXPERTS_ARE_CUT, is_native
from reshard.formats.deepspeed.partitions import MASTER
from reshard.formats.deepspeed.writing.flat_rules import deal_order
from reshard.formats.deepspeed.writing.native_experts import in_model_order
from reshard.formats.deepspeed.writing.options import NativeOptions
from reshard.formats.deepspeed.writing.run_config import RunConfig, run_config_of, source_stage
from reshard.formats.dtypes import DType
from reshard.formats.model_dtypes import stated_dtypes
from reshard.formats.pipelines import PIPELINE, Pipeline


@dataclass(frozen=True, slots=True)
class Group:
    """A parameter group of the optimizer."""

    names: tuple[str, ...]
    """Its parameters, in the optimizer's order."""
    settings: Mapping[str, object]
    """Its hyperparameters, `params` left out."""

    @property
    def uses_muon(self) -> bool:
        """Whether Muon updates its matrices."""
        return self.settings.get("use_muon") is True

    @property
    def has_experts(self) -> bool:
        """Whether its parameters are experts, spread over an expert-parallel group."""
        return self.settings.get("moe") is True


@dataclass(frozen=True, slots=True)
class HeldStates:
    """What an optimizer keeps of a parameter."""

    master: DType
    """Element type of the master weights."""
    tensors: Mapping[str, DType]
    """Tensor states and their element types."""
    scalars: Mapping[str, Scalar]
    """States that are one number."""

    def __str__(self) -> str:
        tensors = [f"{state} ({dtype})" for state, dtype in self.tensors.items()]
        scalars = [f"{state} {scalar.value}" for state, scalar in self.scalars.items()]
        return ", ".join([f"master ({self.master})", *tensors, *scalars])


@dataclass(frozen=True, slots=True)
class Contents:
    """A checkpoint, sorted for native files."""

    checkpoint: Checkpoint
    """The source."""
    config: RunConfig
    """The configuration it was trained with."""
    model_dtype: DType
    """Element type that the target's engine runs the model in."""
    groups: tuple[Group, ...]
    """Parameter groups."""
    held: Mapping[str, HeldStates]
    """What the optimizer keeps of every trained parameter."""
    frozen: tuple[str, ...]
    buffers: tuple[str, ...]
    """Names of frozen parameters and of buffers."""
    dtypes: Mapping[str, DType]
    """Element type in the module of every parameter and buffer."""
    module: tuple[str, ...]
    """Names of the state dict in its order, aliases included."""
    pipeline: Pipeline | None
    """Its layers and stages, None when it is no pipeline."""

    @property
    def lists_frozen(self) -> bool:
        """Whether the source has all frozen parameters of the model, though there be none.

        It has none of them where the run left them out (`exclude_frozen_parameters`, as adapters
        are saved). DeepSpeed's loader then wants no list: of an empty one it demands each.
        """
        return bool(self.frozen) or "lists_frozen" in self.checkpoint.extras

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter or buffer."""
        return self.checkpoint.tensors[name, MASTER].shape

    def held_by_all(self, names: Sequence[str]) -> HeldStates:
        """What the optimizer keeps of parameters that share a flat buffer.

        Raises
        ------
        UnsupportedError
            When they do not all keep the same: a buffer has one set of states and one step.
        """
        first = self.held[names[0]]
        for name in names[1:]:
            if self.held[name] != first:
                raise UnsupportedError(
                    "parameters of one flat buffer differ in what the optimizer keeps of them",
                    parameter=name,
                    expected=f"{first}, as for {names[0]}",
                    found=self.held[name],
                    next_step="leave the odd state out with --states, or choose another format",
                )
        return first


def contents_of(checkpoint: Checkpoint, options: NativeOptions) -> Contents:
    """Sort a checkpoint.

    Raises
    ------
    CheckpointError
        When something has no place, or what native files need is not there.
    UnsupportedError
        When the element type of the model is stated nowhere.
    """
    config = run_config_of(checkpoint)
    roles = {tensor.name: tensor.role for tensor in checkpoint.tensors.values()}
    pipeline = _pipeline(checkpoint, config)
    groups = _groups(checkpoint, config, pipeline)
    trained = [name for group in groups for name in group.names]
    _require_places(roles, trained)
    frozen = tuple(name for name, role in roles.items() if role is Role.FROZEN)
    buffers = tuple(name for name, role in roles.items() if role is Role.BUFFER)
    has_experts = any(group.has_experts for group in groups)
    stored = _stored_module(checkpoint, None if has_experts else pipeline)
    model_dtype = options.dtype or _model_dtype(checkpoint, config, stored, trained)
    dtypes = dict.fromkeys(trained, model_dtype)
    if options.dtype is None:
        dtypes |= {name: stored[name] for name in trained if name in stored}
    for name in (*frozen, *buffers):
        kept = checkpoint.tensors[name, MASTER].dtype
        is_cast = name in frozen and kept.is_floating and options.dtype is not None
        dtypes[name] = model_dtype if is_cast else kept
    return Contents(
        checkpoint=checkpoint,
        config=config,
        model_dtype=model_dtype,
        groups=groups,
        held=_held(checkpoint, trained),
        frozen=frozen,
        buffers=buffers,
        dtypes=dtypes,
        module=_module_order(stored, (*trained, *frozen, *buffers), checkpoint.aliases),
        pipeline=pipeline,
    )


# --------------------------------------------------------------------------- groups


def listed(checkpoint: Checkpoint, key: str) -> Sequence[object]:
    """An extra that is a list, empty when it is absent."""
    extra = checkpoint.extras.get(key)
    value = extra.value if extra is not None else None
    return value if isinstance(value, (list, tuple)) else ()


def _groups(
    checkpoint: Checkpoint, config: RunConfig, pipeline: Pipeline | None
) -> tuple[Group, ...]:
    names = listed(checkpoint, "groups")
    settings = listed(checkpoint, "param_groups")
    if not names:
        raise CheckpointError(
            "the source does not say which parameters are in which optimizer group",
            file=checkpoint.path,
            next_step="convert from a checkpoint that holds the optimizer",
        )
    if len(names) != len(settings):
        raise CheckpointError(
            "the source does not keep the hyperparameters of every optimizer group",
            file=checkpoint.path,
            expected=count_text(len(names), "group"),
            found=len(settings),
            next_step="DeepSpeed's native loader takes them from the checkpoint; "
            "convert to universal instead",
        )
    if pipeline is None:
        orders = [_texts(owned) for owned in names]
    else:
        orders = [pipeline.group(index) for index in range(len(names))]
    groups = [
        Group(tuple(owned), _without_params(kept))
        for owned, kept in zip(orders, settings, strict=True)
    ]
    if pipeline is not None:
        return tuple(groups)
    return tuple(_in_order(group, checkpoint, config) for group in groups)


def _in_order(group: Group, checkpoint: Checkpoint, config: RunConfig) -> Group:
    """A group in the order of the optimizer, native experts in that of the model."""
    ep = _ep_of(group, checkpoint)
    native = bool(group.names) and group.has_experts and all(map(is_native, group.names))
    ranks = _ranks_sharing(group, checkpoint, ep) if _is_dealt(checkpoint, config) else 1
    # of native experts those of each EP rank are dealt out by themselves
    length = max(len(group.names) // ep, 1) if native else len(group.names)
    names: list[str] = []
    for start in range(0, len(group.names), length or 1):
        names += _undealt(list(group.names[start : start + length]), ranks)
    return replace(group, names=tuple(in_model_order(names, ep) if native else names))


def _ep_of(group: Group, checkpoint: Checkpoint) -> int:
    """The expert-parallel degree of a group, after which it is called in universal folders too."""
    degree = str(group.settings.get("name", "")).removeprefix("ep_size_")
    return int(degree) if degree.isdecimal() else checkpoint.topology.ep


def _ranks_sharing(group: Group, checkpoint: Checkpoint, ep: int) -> int:
    """How many ranks of the source share a buffer of a group."""
    if not group.has_experts:
        return checkpoint.topology.dp
    cut = checkpoint.extras.get(EXPERTS_ARE_CUT)
    columns = 1 if cut is not None and cut.value is True else checkpoint.topology.tp
    return max(checkpoint.topology.dp * columns // ep, 1)


def _pipeline(checkpoint: Checkpoint, config: RunConfig) -> Pipeline | None:
    """The layers and stages of a pipeline, the groups of each stage in the optimizer's order."""
    extra = checkpoint.extras.get(PIPELINE)
    found = extra.value if extra is not None else None
    if not isinstance(found, Pipeline):
        return None
    settings = [_without_params(group) for group in listed(checkpoint, "param_groups")]
    stages = (
        replace(
            stage,
            groups=tuple(
                _in_order(Group(names, kept or {}), checkpoint, config).names
                for names, kept in zip_longest(stage.groups, settings[: len(stage.groups)])
            ),
        )
        for stage in found.stages
    )
    return replace(found, stages=tuple(stages))


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, Iterable) else []


def _without_params(settings: object) -> dict[str, object]:
    if not isinstance(settings, Mapping):
        return {}
    return {str(key): value for key, value in settings.items() if key != "params"}


def _is_dealt(checkpoint: Checkpoint, config: RunConfig) -> bool:
    """Whether the source's buffers were dealt out round robin."""
    stage = source_stage(checkpoint)
    dtype = config.model_dtype
    if stage not in (1, 2) or not config.round_robin or dtype is None:
        return False
    return not config.uses_bf16_optimizer(stage, dtype)


def _undealt(names: list[str], ranks: int) -> list[str]:
    original = names.copy()
    for name, index in zip(names, deal_order(len(names), ranks), strict=True):
        original[index] = name
    return original


def _require_places(roles: Mapping[str, Role], trained: Sequence[str]) -> None:
    known = set(trained)
    if len(known) != len(trained):
        twice = next(name for index, name in enumerate(trained) if name in trained[:index])
        raise CheckpointError("a parameter is in two optimizer groups", parameter=twice)
    for name, role in roles.items():
        if role is Role.PARAMETER and name not in known:
            raise CheckpointError(
                "a trained parameter is in no optimizer group of the source", parameter=name
            )
    for name in trained:
        if name not in roles:
            raise CheckpointError(
                "a native checkpoint needs every trained parameter, and one is not there",
                parameter=name,
                next_step="convert without --include and --exclude",
            )


def _held(checkpoint: Checkpoint, trained: Sequence[str]) -> dict[str, HeldStates]:
    tensors: dict[str, dict[str, DType]] = {name: {} for name in trained}
    scalars: dict[str, dict[str, Scalar]] = {name: {} for name in trained}
    for (name, state), tensor in checkpoint.tensors.items():
        if name in tensors:
            tensors[name][state] = tensor.dtype
    for (name, state), scalar in checkpoint.scalars.items():
        if name in scalars:
            scalars[name][state] = scalar
    return {
        name: HeldStates(states.pop(MASTER), states, scalars[name])
        for name, states in tensors.items()
    }


# --------------------------------------------------------------------------- the module


def _stored_module(checkpoint: Checkpoint, pipeline: Pipeline | None) -> dict[str, DType]:
    if pipeline is not None:
        return {
            layer.name(local): dtype
            for layer in pipeline.layers
            for local, dtype in layer.tensors.items()
        }
    return stated_dtypes(checkpoint)


def _model_dtype(
    checkpoint: Checkpoint, config: RunConfig, stored: Mapping[str, DType], trained: Sequence[str]
) -> DType:
    found = config.model_dtype
    if found is not None:
        return found
    dtypes = {stored[name] for name in trained if name in stored}
    if len(dtypes) == 1:
        return dtypes.pop()
    raise UnsupportedError(
        "the source does not say in which element type the model runs",
        file=checkpoint.path,
        found="a ds_config that is not stored with it",
        next_step="choose it with --dtype",
    )


def _module_order(
    stored: Mapping[str, DType], names: Sequence[str], aliases: Mapping[str, str]
) -> tuple[str, ...]:
    """Names of the state dict: in the source's order, those it does not list at the end."""
    known = set(names)
    wanted = dict.fromkeys((*names, *(alias for alias in aliases if aliases[alias] in known)))
    return tuple(dict.fromkeys((*(name for name in stored if name in wanted), *wanted)))
