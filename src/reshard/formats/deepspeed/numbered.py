"""The optimizer of a run without ZeRO: states by number, numbers by parameter group.

Theory. The state dict of a torch optimizer knows parameters by number only. In half precision
DeepSpeed wraps the optimizer: its own state dict is then under `optimizer_state_dict`, and the fp32
masters, one a parameter in the order of the groups, are in `fp32_groups`. The wrapper for fused
kernels keeps each group as one flat buffer (`fp32_groups_flat`), in which nothing tells parameters
apart; it is refused.

What a parameter is called is not in here. Its shape is, if it has a state or a master at all (a
parameter that never had a gradient has none, and plain SGD keeps nothing).

Source: `torch.optim.Optimizer.state_dict`; `state_dict` in `fp16/unfused_optimizer.py` and
`fp16/fused_optimizer.py`, DeepSpeed 0.12 to 0.19.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reshard.errors import CheckpointError, UnsupportedError
from reshard.formats.checkpoint import Scalar
from reshard.formats.deepspeed.optimizer_records import uncuttable
from reshard.formats.deepspeed.partitions import MASTER
from reshard.formats.loss_scale import effective_settings
from reshard.formats.parsing import Cursor
from reshard.formats.torch_archive import Archive, TensorRecord, read_scalar

Shape = tuple[int, ...]

_INNER = "optimizer_state_dict"
_MASTERS, _FLAT_MASTERS = "fp32_groups", "fp32_groups_flat"


@dataclass(frozen=True, slots=True)
class Numbered:
    """One parameter of the optimizer."""

    group: int
    """Its parameter group."""
    shape: Shape | None
    """Shape of its states and master; None where it keeps neither."""
    state: Cursor
    """Its states by name; an empty mapping where it has none."""
    master: TensorRecord | None
    """Its fp32 master, None where the weights of the model are the master."""
    is_expert: bool
    """Whether its group is one of experts."""

    def state_names(self) -> list[str]:
        """The states of the parameter, its master first if it has one of its own."""
        own = [] if self.master is None else [MASTER]
        return [*own, *(key for key, _ in self.state.named())]

    def value(self, archive: Archive, state: str) -> Scalar | TensorRecord:
        """One state: a tensor of the parameter's shape, or a number.

        Raises
        ------
        UnsupportedError
            When it is neither.
        """
        if state == MASTER and self.master is not None:
            return self.master
        cursor = self.state.at(state)
        found = cursor.value
        if isinstance(found, TensorRecord):
            if found.shape != () or (state != "step" and self.shape is None):
                return found
            return Scalar(read_scalar(archive, found), found.dtype, cursor.path)
        if isinstance(found, (int, float)):
            return Scalar(found, None, cursor.path)
        raise uncuttable(archive.path, state, found)


def has_optimizer(archive: Archive) -> bool:
    """Whether a model-state file holds an optimizer, so there is no ZeRO."""
    return Cursor(archive.root, archive.path).maybe("optimizer") is not None


def plain_settings(archive: Archive) -> dict[str, object]:
    """What lies beside states and groups: clipping, the loss scale of half precision."""
    optimizer = Cursor(archive.root, archive.path).at("optimizer")
    bulk = (_INNER, _MASTERS, _FLAT_MASTERS, "state", "param_groups")
    config = Cursor(archive.root, archive.path).maybe("ds_config")
    return effective_settings(
        {str(key): value for key, value in optimizer.mapping().items() if key not in bulk},
        config.value if config is not None else None,
    )


def inner_optimizer(archive: Archive) -> Cursor:
    """The torch optimizer's own state dict, inside its wrapper for half precision if it has one."""
    optimizer = Cursor(archive.root, archive.path).at("optimizer")
    return optimizer.maybe(_INNER) or optimizer


def read_numbered(archive: Archive) -> list[Numbered]:
    """The parameters of an optimizer in the order of its groups.

    Raises
    ------
    UnsupportedError
        When the masters are flat buffers, so that parameters cannot be told apart.
    CheckpointError
        When states and groups do not fit each other.
    """
    inner = inner_optimizer(archive)
    states = _states_by_number(inner)
    masters = _masters(archive)
    numbered = []
    for position, group in enumerate(inner.at("param_groups").each()):
        numbers = group.at("params").shape()
        moe = group.maybe("moe")
        is_expert = moe is not None and moe.value is True
        own = _of_group(masters, position, numbers, archive.path)
        for number, master in zip(numbers, own, strict=True):
            state = states.get(number, Cursor({}, archive.path, f"optimizer.state[{number}]"))
            numbered.append(Numbered(position, _shape(state, master), state, master, is_expert))
    return numbered


def _states_by_number(inner: Cursor) -> dict[int, Cursor]:
    state = inner.at("state")
    return {
        Cursor(number, state.file, state.path).integer(): state.at(_as_key(number))
        for number in state.mapping()
    }


def _as_key(number: object) -> int:
    return number if isinstance(number, int) else -1


def _masters(archive: Archive) -> list[list[TensorRecord]] | None:
    """The masters of every group, None where the weights of the model are the masters."""
    wrapper = Cursor(archive.root, archive.path).at("optimizer")
    if wrapper.maybe(_FLAT_MASTERS) is not None:
        raise UnsupportedError(
            "the masters of a ZeRO-0 run with a fused optimizer lie in flat buffers, and nothing "
            "says which parameter is where",
            file=archive.path,
            expected=_MASTERS,
            found=_FLAT_MASTERS,
            next_step="save the run with ZeRO-1, which records names",
        )
    groups = wrapper.maybe(_MASTERS)
    if groups is None and wrapper.maybe(_INNER) is not None:
        raise CheckpointError(
            "an optimizer of half precision without its master weights",
            file=archive.path,
            expected=f"optimizer.{_MASTERS}",
            found="nothing",
            next_step="the file is damaged or edited; take another checkpoint",
        )
    if groups is None:
        return None
    return [[_tensor(master) for master in group.each()] for group in groups.each()]


def _tensor(cursor: Cursor) -> TensorRecord:
    if not isinstance(cursor.value, TensorRecord):
        raise cursor.unexpected("a tensor")
    return cursor.value


def _of_group(
    masters: list[list[TensorRecord]] | None, position: int, numbers: Sequence[int], file: str
) -> Sequence[TensorRecord | None]:
    if masters is None:
        return [None] * len(numbers)
    held = masters[position] if position < len(masters) else []
    if len(held) != len(numbers):
        raise CheckpointError(
            f"group {position} of the optimizer has another number of masters than of parameters",
            file=file,
            expected=len(numbers),
            found=len(held),
        )
    return held


def _shape(state: Cursor, master: TensorRecord | None) -> Shape | None:
    shapes = {} if master is None else {"fp32": master.shape}
    for key, value in state.named():
        if isinstance(value.value, TensorRecord) and value.value.shape != ():
            shapes[key] = value.value.shape
    if len(set(shapes.values())) > 1:
        raise uncuttable(state.file, state.path, shapes)
    return next(iter(shapes.values()), None)
