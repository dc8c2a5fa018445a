"""Classes that are known to occur in checkpoints, as records with typed fields.

Theory. A known class is an :class:`~reshard.formats.torch_archive.values.ObjectRecord` with names
for what it holds, so it is written back like any other record; :data:`RECORD_CLASSES` says which
class of record stands for which global. ``check`` runs once, when the whole pickle has been read,
so the properties never meet a missing field. ``of`` makes a record from nothing, for writers.

Sources: ``deepspeed/runtime/fp16/loss_scaler.py``, ``deepspeed/runtime/zero/config.py``,
``deepspeed/utils/tensor_fragment.py``, ``deepspeed/checkpoint/universal_checkpoint.py`` (0.10 to
0.19); ``numpy/_core/src/multiarray/methods.c`` (``array_reduce``) for the state of an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reshard.errors import ArchiveError
from reshard.formats.torch_archive.values import (
    Global,
    ObjectRecord,
    Step,
    maker_of,
    short_repr,
    wrong_field,
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class EnumRecord(ObjectRecord):
    """A member of DeepSpeed's ``ZeroStageEnum``.

    Enums are pickled as a call with the value; early versions of Python 3.11 pickled them as
    ``getattr`` of the class and the name (bpo-44342).
    """

    @property
    def value(self) -> int:
        """The value of the member: the ZeRO stage."""
        value = self.args[-1]
        return value if isinstance(value, int) else _ZERO_STAGES[str(value)]

    @classmethod
    def of(cls, enum: Global, value: int) -> EnumRecord:
        """Return the member of ``enum`` with that value."""
        return cls(form="reduce", callable=enum, args=(value,))

    def check(self) -> None:
        """Raise :class:`ArchiveError` unless it is made from an integer or a known name."""
        by_value = len(self.args) == 1 and type(self.args[0]) is int
        by_name = len(self.args) == 2 and self.args[1] in _ZERO_STAGES
        if self.form != "reduce" or not (by_value or by_name):
            raise ArchiveError(
                f"a member of {self.type_name} is made from neither its value nor its name",
                expected="an int",
                found=short_repr(self.args),
            )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class LossScaler(ObjectRecord):
    """DeepSpeed's static ``LossScaler``; :class:`DynamicLossScaler` adds the moving fields.

    ``fields`` has every attribute by name.
    """

    @property
    def cur_scale(self) -> float:
        """The loss scale; :class:`ArchiveError` when it is not kept as a number."""
        value = self.attribute("cur_scale")
        if not isinstance(value, (int, float)):
            raise wrong_field(self, "cur_scale", "a number")
        return float(value)

    @property
    def dynamic(self) -> bool:
        """Whether the scale adapts during training."""
        return self.attribute("dynamic") is True


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class DynamicLossScaler(LossScaler):
    """DeepSpeed's ``DynamicLossScaler``."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class FragmentAddress(ObjectRecord):
    """DeepSpeed's ``fragment_address``: a range of a flat partition, in elements."""

    @property
    def numel(self) -> int:
        """Length in elements."""
        return _integer(self, "numel")

    @property
    def start(self) -> int:
        """First element."""
        return _integer(self, "start")

    @classmethod
    def of(cls, numel: int, start: int) -> FragmentAddress:
        """Return the address of ``numel`` elements from ``start`` on."""
        state = Step("state", {"numel": numel, "start": start})
        return cls(form="newobj", callable=FRAGMENT_ADDRESS, steps=[state])

    def check(self) -> None:
        """Raise :class:`ArchiveError` unless both fields are non-negative integers."""
        for name in ("numel", "start"):
            _integer(self, name)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class SubparamShape(ObjectRecord):
    """DeepSpeed's ``SubparamShape``: how a fused parameter is made of sub-parameters."""

    @property
    def patterns(self) -> Sequence[object]:
        """Regular expressions for the names of the parameters."""
        return _sequence(self, "patterns")

    @property
    def shape(self) -> Sequence[object]:
        """Extents; a tuple of sub-sizes at ``partition_dim``, -1 for "any"."""
        return _sequence(self, "shape")

    @property
    def partition_dim(self) -> int:
        """The dimension that is cut."""
        return _integer(self, "partition_dim")

    @classmethod
    def of(
        cls, patterns: Sequence[str], shape: Sequence[object], partition_dim: int
    ) -> SubparamShape:
        """Return a record of the three fields."""
        fields = {"patterns": patterns, "shape": shape, "partition_dim": partition_dim}
        return cls(form="newobj", callable=SUBPARAM_SHAPE, steps=[Step("state", fields)])

    def check(self) -> None:
        """Raise :class:`ArchiveError` unless the fields are two sequences and an integer."""
        _sequence(self, "patterns")
        _sequence(self, "shape")
        _integer(self, "partition_dim")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Namespace(ObjectRecord):
    """An ``argparse.Namespace``; ``fields`` has its attributes by name."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class NumpyDType(ObjectRecord):
    """A ``numpy.dtype``."""

    @property
    def code(self) -> str:
        """Type code with its byte order, for example ``"<f8"``."""
        state = self.state
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else "|"
        return f"{order}{self.args[0]}"

    @property
    def is_structured(self) -> bool:
        """Whether it has fields or a sub-array, so that ``code`` does not say all."""
        state = self.state
        return isinstance(state, tuple) and any(part is not None for part in state[2:5])

    def check(self) -> None:
        """Raise :class:`ArchiveError` unless it is made from a type code."""
        if not self.args or not isinstance(self.args[0], str):
            raise ArchiveError("a numpy.dtype is not made from a type code")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class NumpyScalar(ObjectRecord):
    """A NumPy scalar, made from a dtype and the bytes of its value."""

    @property
    def dtype(self) -> NumpyDType:
        """Its dtype."""
        return _numpy_dtype(self.args[0])

    @property
    def data(self) -> object:
        """Its bytes (an object for ``object`` dtypes)."""
        return self.args[1] if len(self.args) > 1 else b""

    def check(self) -> None:
        """Raise :class:`ArchiveError` unless it is made from a dtype."""
        if not self.args:
            raise ArchiveError("a NumPy scalar without a dtype")
        _numpy_dtype(self.args[0])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class NumpyArray(ObjectRecord):
    """A ``numpy.ndarray`` whose content lies in the pickle, as in a NumPy generator's state."""

    @property
    def dtype(self) -> NumpyDType:
        """Its dtype."""
        return _numpy_dtype(self._state()[2])

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        shape = self._state()[1]
        return shape if isinstance(shape, tuple) else ()

    @property
    def is_fortran(self) -> bool:
        """Whether ``data`` is in column-major order."""
        return bool(self._state()[3])

    @property
    def data(self) -> object:
        """Its elements: bytes, or a list for ``object`` dtypes."""
        return self._state()[4]

    def _state(self) -> tuple[object, ...]:
        state = self.state
        if isinstance(state, tuple) and len(state) == 5:
            return state
        raise ArchiveError(
            "the state of a numpy.ndarray is not the known one",
            expected="(version, shape, dtype, order, data)",
            found=type(state).__name__,
        )

    def check(self) -> None:
        """Raise :class:`ArchiveError` unless its state is the known five-tuple."""
        _numpy_dtype(self._state()[2])


def _integer(record: ObjectRecord, name: str) -> int:
    value = record.attribute(name)
    if type(value) is not int:
        raise wrong_field(record, name, "an int")
    return value


def _sequence(record: ObjectRecord, name: str) -> Sequence[object]:
    value = record.attribute(name)
    if not isinstance(value, (list, tuple)):
        raise wrong_field(record, name, "a list")
    return value


def _numpy_dtype(value: object) -> NumpyDType:
    if isinstance(value, NumpyDType):
        return value
    raise ArchiveError(
        "a NumPy value without a dtype", expected="a numpy.dtype", found=type(value).__name__
    )


FRAGMENT_ADDRESS = Global("deepspeed.utils.tensor_fragment", "fragment_address")
SUBPARAM_SHAPE = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
ZERO_STAGE = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")

_ZERO_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}
"""Members of ``ZeroStageEnum`` by name."""

RECORD_CLASSES: dict[str, type[ObjectRecord]] = {
    ZERO_STAGE.path: EnumRecord,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": LossScaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": DynamicLossScaler,
    FRAGMENT_ADDRESS.path: FragmentAddress,
    # The home of fragment_address before 0.12; later versions keep an alias there.
    "deepspeed.runtime.bf16_optimizer.fragment_address": FragmentAddress,
    SUBPARAM_SHAPE.path: SubparamShape,
    "argparse.Namespace": Namespace,
    "numpy.dtype": NumpyDType,
    "numpy.core.multiarray._reconstruct": NumpyArray,
    "numpy._core.multiarray._reconstruct": NumpyArray,
    "numpy.core.multiarray.scalar": NumpyScalar,
    "numpy._core.multiarray.scalar": NumpyScalar,
}
"""The class of record that stands for what a global makes, by the global's path."""

_NDARRAY = Global("numpy", "ndarray")


def record_class(function: object, args: tuple[object, ...]) -> type[ObjectRecord]:
    """Return the class of record for what ``function(*args)`` makes."""
    maker = maker_of(function, args)
    if not isinstance(maker, Global):
        return ObjectRecord
    known = RECORD_CLASSES.get(maker.path, ObjectRecord)
    if known is NumpyArray and args[:1] != (_NDARRAY,):
        # A subclass of ndarray has a state of its own.
        return ObjectRecord
    return known
