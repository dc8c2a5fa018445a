"""Tensors and storages as places in a file, and tensors that are to be written.

Theory. A torch file keeps bytes in *storages*, one zip record each, and a tensor is a strided view
into one: element ``i`` lies at ``storage_offset + sum(i[d] * strides[d])``, counted in elements
from the start of the storage. Several tensors may view one storage (tied weights, slices of a flat
buffer); they then share a ``storage_key``, and writing keeps that.

What torch wraps around the view (a ``Parameter``, Python attributes, the conj bit, a subclass) is
kept beside it, so that a record is written back as it was. Source: ``torch/_utils.py``,
``torch/_tensor.py`` (``_reduce_ex_internal``, ``_rebuild_from_type_v2``), torch 1.6 to 2.13.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from reshard.errors import UsageError
from reshard.formats.dtypes import DType
from reshard.formats.torch_archive.values import Global


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StorageRecord:
    """One storage of a file."""

    path: str
    """The file."""
    key: str
    """Its name in the archive: the record ``data/<key>``."""
    storage_class: Global
    """The torch class it is stored as (``torch.FloatStorage``,
    ``torch.storage.UntypedStorage``)."""
    dtype: DType | None
    """The element type of that class, None for untyped ones."""
    numel: int
    """Length as the pickle states it: elements of ``dtype``, bytes when untyped."""
    location: str
    """The device it was saved from, for example ``"cpu"`` or ``"cuda:0"``."""
    offset: int
    """First byte in the file."""
    nbytes: int
    """Length in bytes."""
    crc32: int
    """Checksum of its bytes as the file states it; zero or wrong when the file was written with
    ``torch.serialization.set_crc32_options(False)``."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class ParameterForm:
    """What ``torch._utils._rebuild_parameter`` wraps around a tensor."""

    data: TensorRecord
    """The wrapped tensor."""
    requires_grad: bool
    """Of the parameter; that of the wrapped tensor is False as a rule."""
    hooks: object = None
    """The backward hooks, None for an empty ``OrderedDict``."""
    state: object = None
    """Python attributes (``_rebuild_parameter_with_state``)."""
    has_state: bool = False
    """Whether the form with state was used."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SubclassForm:
    """What ``torch._tensor._rebuild_from_type_v2`` adds: a Python class and attributes."""

    type: Global
    state: object


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TensorRecord:
    """A tensor of a file: a typed strided view of a storage. No bytes are read."""

    storage: StorageRecord
    """The storage that it views."""
    dtype: DType
    """Element type."""
    shape: tuple[int, ...]
    """Extents."""
    strides: tuple[int, ...]
    """Strides in elements."""
    storage_offset: int
    """First element, counted from the start of the storage."""
    requires_grad: bool = False
    """Whether autograd tracks it."""
    hooks: object = None
    """Backward hooks, None for the empty ``OrderedDict`` that torch writes."""
    metadata: object = None
    """The conj and neg bits, None when the file states none."""
    rebuild: str = "_rebuild_tensor_v2"
    """The function of ``torch._utils`` that the file names for it."""
    parameter: ParameterForm | None = None
    subclass: SubclassForm | None = None
    """What is wrapped around the view, None where nothing is."""

    @property
    def path(self) -> str:
        """The file."""
        return self.storage.path

    @property
    def storage_key(self) -> str:
        """Key of the storage; tensors with the same key share bytes."""
        return self.storage.key

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of its elements in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def offset(self) -> int:
        """First byte of its first element in the file."""
        return self.storage.offset + self.storage_offset * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one after the other in row-major order."""
        return is_row_major(self.shape, self.strides)

    @property
    def is_parameter(self) -> bool:
        """Whether it is a ``torch.nn.Parameter``."""
        return self.parameter is not None

    @property
    def attributes(self) -> Mapping[str, object]:
        """Python attributes of the tensor object by name, such as DeepSpeed's ``ds_id``."""
        state = self.subclass.state if self.subclass is not None else None
        if state is None and self.parameter is not None:
            state = self.parameter.state
        parts = state if isinstance(state, tuple) else (state,)
        return {
            key: value
            for part in parts
            if isinstance(part, Mapping)
            for key, value in part.items()
            if isinstance(key, str)
        }

    def __repr__(self) -> str:
        kind = "Parameter" if self.is_parameter else "Tensor"
        return (
            f"{kind}({self.dtype}, {list(self.shape)}, storage {self.storage_key}"
            f"+{self.storage_offset})"
        )


@dataclass(frozen=True, slots=True, eq=False)
class NewTensor:
    """A tensor to be written.

    Examples
    --------
    >>> from reshard.formats.dtypes import DTYPES
    >>> NewTensor(DTYPES["float32"], (2, 3), "w").extent
    6
    """

    dtype: DType
    """Element type."""
    shape: Sequence[int]
    """Extents."""
    label: Hashable | None = None
    """Name of the storage it lies in: the slot of the layout carries it. Tensors with equal
    labels are views of one storage. None gives the tensor a storage of its own."""
    storage_offset: int = 0
    """First element, counted from the start of the storage."""
    strides: Sequence[int] | None = None
    """Strides in elements, row-major when None."""
    storage_numel: int | None = None
    """Length of the storage in elements; just long enough for its tensors when None."""
    data: bytes | None = None
    """Bytes of the whole storage, when they are known already."""
    requires_grad: bool = False
    """As in torch."""
    is_parameter: bool = False
    """Whether it becomes a ``torch.nn.Parameter``."""
    attributes: Mapping[str, object] | None = None
    """Python attributes; with any, the tensor is written through ``_rebuild_from_type_v2``, as
    torch does."""

    def __post_init__(self) -> None:
        numbers = (*self.shape, *(self.strides or ()), self.storage_offset)
        if any(number < 0 for number in numbers):
            raise UsageError("a tensor has a negative extent, stride or offset", found=numbers)
        if self.strides is not None and len(self.strides) != len(self.shape):
            raise UsageError("a tensor has as many strides as extents", found=self.strides)

    @property
    def element_strides(self) -> tuple[int, ...]:
        """Strides in elements, row-major unless given."""
        return row_major(self.shape) if self.strides is None else tuple(self.strides)

    @property
    def extent(self) -> int:
        """Length in elements that the storage needs at least."""
        return needed_extent(self.shape, self.element_strides, self.storage_offset)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return torch's contiguous strides of a shape, in elements.

    >>> row_major((2, 0, 3))
    (3, 3, 1)
    """
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a view lists its elements one after the other.

    Strides of extents 0 and 1 do not matter.

    >>> is_row_major((2, 1, 3), (3, 99, 1)), is_row_major((2, 3), (1, 2))
    (True, False)
    """
    if 0 in shape:
        return True
    expected = row_major(shape)
    return all(
        extent == 1 or stride == wanted
        for extent, stride, wanted in zip(shape, strides, expected, strict=True)
    )


def needed_extent(shape: Sequence[int], strides: Sequence[int], storage_offset: int) -> int:
    """Return how many elements a storage must have for a view: one past its last element.

    >>> needed_extent((2, 3), (3, 1), 4), needed_extent((0, 3), (3, 1), 4)
    (10, 0)
    """
    if 0 in shape:
        return 0
    last = storage_offset
    for extent, stride in zip(shape, strides, strict=True):
        last += (extent - 1) * stride
    return last + 1
