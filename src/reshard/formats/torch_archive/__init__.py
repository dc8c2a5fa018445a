"""Torch checkpoint files (``.pt``), read and written without torch and without running anything.

``read_archive(path)`` gives an :class:`Archive`: the saved object as a tree of inert values, in
which a tensor is a :class:`TensorRecord`, a place in the file. ``lay_out_archive(root, name)``
gives an :class:`ArchiveLayout`: the file to be for a tree of the same values and
:class:`NewTensor`, as pure data. Nothing here imports torch, NumPy or DeepSpeed.
"""

from reshard.formats.torch_archive.bare_pickle import read_pickle, write_pickle
from reshard.formats.torch_archive.checksum import crc32, crc32_combine
from reshard.formats.torch_archive.comparison import same_value
from reshard.formats.torch_archive.contents import read_bytes, read_scalar
from reshard.formats.torch_archive.known import (
    FRAGMENT_ADDRESS,
    SUBPARAM_SHAPE,
    ZERO_STAGE,
    DynamicLossScaler,
    EnumRecord,
    FragmentAddress,
    LossScaler,
    Namespace,
    NumpyArray,
    NumpyDType,
    NumpyScalar,
    SubparamShape,
)
from reshard.formats.torch_archive.reader import (
    WRONG_CHECKSUM,
    Archive,
    archive_name,
    read_archive,
    read_archive_within,
)
from reshard.formats.torch_archive.tensors import (
    NewTensor,
    ParameterForm,
    StorageRecord,
    SubclassForm,
    TensorRecord,
)
from reshard.formats.torch_archive.values import (
    DefaultDict,
    Device,
    Global,
    ObjectRecord,
    Size,
    Step,
    short_repr,
)
from reshard.formats.torch_archive.writer import (
    ArchiveLayout,
    StorageSlot,
    lay_out_archive,
    write_archive,
)
from reshard.formats.torch_archive.zip_directory import ByteWindow, FileBytes

__all__ = [
    "FRAGMENT_ADDRESS",
    "SUBPARAM_SHAPE",
    "WRONG_CHECKSUM",
    "ZERO_STAGE",
    "Archive",
    "ArchiveLayout",
    "ByteWindow",
    "DefaultDict",
    "Device",
    "DynamicLossScaler",
    "EnumRecord",
    "FileBytes",
    "FragmentAddress",
    "Global",
    "LossScaler",
    "Namespace",
    "NewTensor",
    "NumpyArray",
    "NumpyDType",
    "NumpyScalar",
    "ObjectRecord",
    "ParameterForm",
    "Size",
    "Step",
    "StorageRecord",
    "StorageSlot",
    "SubclassForm",
    "SubparamShape",
    "TensorRecord",
    "archive_name",
    "crc32",
    "crc32_combine",
    "lay_out_archive",
    "read_archive",
    "read_archive_within",
    "read_bytes",
    "read_pickle",
    "read_scalar",
    "same_value",
    "short_repr",
    "write_archive",
    "write_pickle",
]
