"""An optimizer file as a typed value.

Theory. An optimizer file holds one rank's part of the flat buffers: the fp32 master of each group
and the states of the optimizer. A *group* here is what ZeRO flattens: a parameter group under
ZeRO-1, ZeRO-2 and BF16_Optimizer, a sub-group under ZeRO-3. States are whatever the optimizer
keeps: a one-dimensional tensor as long as the group's partition is a tensor state, a number or
0-dimensional tensor is a scalar state, anything else cannot be cut by geometry and is refused by
name. (Whether the length fits is judged in `partitions`.)

Sources: `engine.py` (`_save_zero_checkpoint`), `stage_1_and_2.py`, `stage3.py`, `bf16_optimizer.py`
(`state_dict`), DeepSpeed 0.12 to 0.19, checked on real files of five versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from reshard.errors import CheckpointError, UnsupportedError
from reshard.formats.assembly import require_flat
from reshard.formats.checkpoint import Scalar
from reshard.formats.deepspeed.records import config_of, version_of
from reshard.formats.parsing import Cursor
from reshard.formats.torch_archive import (
    Archive,
    EnumRecord,
    FragmentAddress,
    TensorRecord,
    read_archive,
    read_scalar,
)


@dataclass(frozen=True, slots=True)
class GroupStates:
    """One group in one optimizer file.

    Parameters
    ----------
    master
        The flat fp32 (or low-precision) master partition, one-dimensional.
    states
        Tensor states, one-dimensional; how their length relates to the partition is not judged
        here.
    scalars
        States that are one number.
    padding
        Elements at the end of the partition that are no parameter's (ZeRO-1/2, BF16).
    alignment
        Padding elements after each parameter; empty when the file states none.
    partitions, partition
        Number of partitions of the group, and which of them this is; None when the file does not
        state it.
    mapping
        Name -> (start in the partition, elements), as the file states it; None when it does not.
    """

    master: TensorRecord
    states: Mapping[str, TensorRecord]
    scalars: Mapping[str, Scalar]
    padding: int
    alignment: tuple[int, ...]
    partitions: int | None
    mapping: Mapping[str, tuple[int, int]] | None
    partition: int | None = None


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """One optimizer file."""

    archive: Archive
    """The open archive."""
    dp: int
    mp: int
    """Rank of the writer, from the file name."""
    stage: int
    """1, 2 or 3; 1 for BF16_Optimizer, which states none."""
    flavour: str
    """Class of the engine's optimizer in words, for messages."""
    groups: tuple[GroupStates, ...]
    """What the rank holds of every group."""
    param_groups: tuple[Mapping[str, object], ...]
    """Hyperparameters of the optimizer's parameter groups, `params` left out; empty when not
    stored."""
    members: tuple[tuple[int, ...], ...]
    """For every parameter group the numbers of the groups it owns (several under ZeRO-3)."""
    settings: Mapping[str, object]
    """Everything of `optimizer_state_dict` that is not bulk: scaler, clipping, versions."""
    config: Mapping[object, object]
    version: str
    """As in :class:`ModelStates`."""

    @property
    def file(self) -> str:
        """Path of the file."""
        return self.archive.path


# --------------------------------------------------------------------------- reading

_MASTER = "fp32"
"""The name under which the masters go, so no state may have it."""

_BULK = frozenset(
    (
        "base_optimizer_state",
        "single_partition_of_fp32_groups",
        "param_slice_mappings",
        "fp32_flat_groups",
        "optimizer_state_dict",
        "ds_zero_partition_groups",
    )
)


def read_optimizer_states(path: str, dp: int, mp: int) -> OptimizerStates:
    """Open an optimizer file of ZeRO-1, ZeRO-2, ZeRO-3 or BF16_Optimizer."""
    archive = read_archive(path)
    root = Cursor(archive.root, path)
    body = root.at("optimizer_state_dict")
    stage = _stage(body)
    if stage == 3:
        flavour, groups = "ZeRO-3", _zero3_groups(body, archive)
        optimizer = body.at("optimizer_state_dict")
    else:
        flavour = "BF16_Optimizer" if body.maybe("zero_stage") is None else f"ZeRO-{stage}"
        groups = _flat_groups(body, archive)
        optimizer = body.at("base_optimizer_state")
    settings = {str(key): value for key, value in body.mapping().items() if key not in _BULK}
    return OptimizerStates(
        archive=archive,
        dp=dp,
        mp=mp,
        stage=stage,
        flavour=flavour,
        groups=groups,
        param_groups=_hyperparameters(optimizer),
        members=_members(optimizer, len(groups)),
        settings=settings,
        config=config_of(root),
        version=version_of(root) or version_of(body),
    )


def stage_of(archive: Archive) -> int:
    """Return the ZeRO stage of an optimizer file that is open; 1 for BF16_Optimizer.

    Raises
    ------
    ReshardError
        It is no optimizer file, or of no stage that is known.
    """
    return _stage(Cursor(archive.root, archive.path).at("optimizer_state_dict"))


def _stage(body: Cursor) -> int:
    cursor = body.maybe("zero_stage")
    if cursor is None:
        return 3 if body.maybe("fp32_flat_groups") is not None else 1
    stage = cursor.value.value if isinstance(cursor.value, EnumRecord) else cursor.value
    if stage not in (1, 2, 3):
        raise CheckpointError(
            "unknown ZeRO stage", file=body.file, expected="1, 2 or 3", found=str(stage)
        )
    return int(stage)


def _hyperparameters(optimizer: Cursor) -> tuple[Mapping[str, object], ...]:
    """Parameter groups without `params`; an elastic checkpoint (a list of states) keeps none."""
    groups = optimizer.maybe("param_groups") if isinstance(optimizer.value, Mapping) else None
    if groups is None:
        return ()
    return tuple(
        {str(name): value for name, value in group.mapping().items() if name != "params"}
        for group in groups.each()
    )


def _members(optimizer: Cursor, count: int) -> tuple[tuple[int, ...], ...]:
    groups = optimizer.maybe("param_groups") if isinstance(optimizer.value, Mapping) else None
    if groups is None:
        return tuple((index,) for index in range(count))
    members = tuple(group.at("params").shape() for group in groups.each())
    if sorted(index for owned in members for index in owned) != list(range(count)):
        raise CheckpointError(
            "param_groups do not own every flat group exactly once",
            file=optimizer.file,
            expected=f"groups 0 to {count - 1}",
            found=members,
        )
    return members


def _group_states(optimizer: Cursor, count: int) -> list[Cursor | None]:
    """State of each group: by position when elastic, else under the group's number."""
    if not isinstance(optimizer.value, Mapping):
        return list(optimizer.each())
    state = optimizer.at("state") if optimizer.value.get("state") else None
    if state is None:
        return [None] * count
    unknown = [key for key in state.mapping() if key not in range(count)]
    if unknown:
        raise CheckpointError(
            "optimizer states of groups that do not exist",
            file=optimizer.file,
            expected=f"groups 0 to {count - 1}",
            found=", ".join(map(str, unknown)),
        )
    return [state.maybe(index) for index in range(count)]


def _flat_groups(body: Cursor, archive: Archive) -> tuple[GroupStates, ...]:
    masters = body.at("single_partition_of_fp32_groups").each()
    count = len(masters)
    optimizer = body.at("base_optimizer_state")
    states = _group_states(optimizer, count)
    paddings = [cursor.integer() for cursor in body.at("group_paddings").each()]
    partitions = [cursor.integer(1) for cursor in body.at("partition_count").each()]
    alignment = body.maybe("param_alignment_paddings")
    mappings = body.maybe("param_slice_mappings")
    for word, found in (("group_paddings", paddings), ("partition_count", partitions)):
        if len(found) != count:
            raise CheckpointError(
                f"{word} does not fit the groups", file=body.file, expected=count, found=len(found)
            )
    group_steps = _group_steps(optimizer)
    return tuple(
        _group(
            masters[index],
            states[index] if index < len(states) else None,
            archive,
            step=group_steps.get(index),
            padding=paddings[index],
            partitions=partitions[index],
            alignment=() if alignment is None else alignment.at(index).shape(),
            mapping=None if mappings is None else _mapping(mappings.at(index)),
        )
        for index in range(count)
    )


def _zero3_groups(body: Cursor, archive: Archive) -> tuple[GroupStates, ...]:
    masters = body.at("fp32_flat_groups").each()
    optimizer = body.at("optimizer_state_dict")
    states = _group_states(optimizer, len(masters))
    group_steps = _group_steps(optimizer)
    declared = _declared_partitions(body, len(masters))
    return tuple(
        replace(
            _group(
                master,
                states[index],
                archive,
                step=group_steps.get(index),
                padding=0,
                partitions=declared[index][0],
                alignment=(),
                mapping=None,
            ),
            partition=declared[index][1],
        )
        for index, master in enumerate(masters)
    )


def _declared_partitions(body: Cursor, count: int) -> list[tuple[int | None, int | None]]:
    """Number of partitions and own partition of every sub-group, where the file declares them."""
    declared = body.maybe("ds_zero_partition_groups")
    if declared is None:
        return [(None, None)] * count
    stated = {
        entry.at("sub_group").integer(): (
            entry.at("partition_count").integer(1),
            entry.at("partition_rank").integer(),
        )
        for entry in declared.each()
    }
    if sorted(stated) != list(range(count)):
        raise CheckpointError(
            "ds_zero_partition_groups does not declare every flat group once",
            file=body.file,
            expected=f"sub-groups 0 to {count - 1}",
            found=sorted(stated),
        )
    return [stated[index] for index in range(count)]


def _group_steps(optimizer: Cursor) -> dict[int, Scalar]:
    """`step` of optimizers that keep it in their parameter groups, by ZeRO group."""
    groups = optimizer.maybe("param_groups") if isinstance(optimizer.value, Mapping) else None
    steps: dict[int, Scalar] = {}
    for position, group in enumerate(groups.each() if groups else ()):
        step, params = group.maybe("step"), group.maybe("params")
        if step is None or params is None or not isinstance(step.value, (int, float)):
            continue
        for owned in params.each():
            steps[owned.integer()] = Scalar(step.value, None, f"param_groups[{position}]")
    return steps


def _mapping(cursor: Cursor) -> dict[str, tuple[int, int]]:
    ranges = {}
    for name, value in cursor.named():
        if not isinstance(value.value, FragmentAddress):
            raise value.unexpected("a fragment address")
        ranges[name] = (value.value.start, value.value.numel)
    return ranges


def _group(
    master: Cursor,
    state: Cursor | None,
    archive: Archive,
    *,
    step: Scalar | None,
    padding: int,
    partitions: int | None,
    alignment: tuple[int, ...],
    mapping: Mapping[str, tuple[int, int]] | None,
) -> GroupStates:
    if not isinstance(master.value, TensorRecord) or len(master.value.shape) != 1:
        raise master.unexpected("a one-dimensional tensor")
    require_flat(master.value, master.file, "a flat group of masters")
    states: dict[str, TensorRecord] = {}
    scalars: dict[str, Scalar] = {}
    for name, value in state.named() if state else ():
        found = value.value
        if name == _MASTER:
            raise uncuttable(value.file, name, found, f"no state called {_MASTER!r}")
        if isinstance(found, TensorRecord) and len(found.shape) == 1:
            require_flat(found, value.file, f"the state {name!r}")
            states[name] = found
        elif isinstance(found, (int, float)) or (
            isinstance(found, TensorRecord) and found.shape == ()
        ):
            scalars[name] = _scalar(value, archive)
        else:
            raise uncuttable(value.file, name, found)
    if "step" not in scalars and step is not None:
        scalars["step"] = step
    return GroupStates(master.value, states, scalars, padding, alignment, partitions, mapping)


def _scalar(cursor: Cursor, archive: Archive) -> Scalar:
    found = cursor.value
    if isinstance(found, TensorRecord):
        return Scalar(read_scalar(archive, found), found.dtype, cursor.path)
    if not isinstance(found, (int, float)):
        raise cursor.unexpected("a number")
    return Scalar(found, None, cursor.path)


def uncuttable(
    file: str, state: str, found: object, expected: str = "a number or a flat tensor"
) -> UnsupportedError:
    """The error for a state that geometry cannot cut: quantised tables, factored moments."""
    shape = f"shape {found.shape}" if isinstance(found, TensorRecord) else type(found).__name__
    return UnsupportedError(
        "an optimizer state is neither one number nor one element a parameter element",
        file=file,
        state=state,
        expected=expected,
        found=shape,
        next_step="quantised and factored states cannot be cut; leave them out with --states",
    )
