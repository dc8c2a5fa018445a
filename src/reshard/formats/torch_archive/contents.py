"""Bytes and numbers of small tensors, fetched on demand.

Theory. A contiguous tensor is one range of the file. A strided one is gathered from the shortest
range that holds it: the innermost dimensions that lie together are copied as runs, the outer ones
are walked. This is for scalars, steps and buffers; bulk data goes from file to file by plan.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from reshard.errors import ArchiveError, UnsupportedError, count_text
from reshard.formats.torch_archive.reader import Archive
from reshard.formats.torch_archive.tensors import TensorRecord, needed_extent
from reshard.formats.torch_archive.zip_directory import FileBytes

Place = tuple[str, int]
"""A file and an offset in it, in bytes."""

_BLOCK = 1 << 22

LARGEST_READ = 1 << 28
"""Largest tensor that :func:`read_bytes` fetches unless told otherwise, in bytes."""

_SCALAR_CODES = {
    "float64": "<d",
    "float32": "<f",
    "float16": "<e",
    "int64": "<q",
    "int32": "<i",
    "int16": "<h",
    "int8": "<b",
    "uint8": "<B",
    "uint16": "<H",
    "uint32": "<I",
    "uint64": "<Q",
    "bool": "<?",
}


def read_bytes(archive: Archive, tensor: TensorRecord, *, largest: int = LARGEST_READ) -> bytes:
    """Return the elements of a tensor as bytes in row-major order.

    Parameters
    ----------
    archive
        The archive that the tensor belongs to.
    tensor
        The tensor.
    largest
        Most bytes to read.

    Raises
    ------
    ArchiveError
        The tensor is larger than that, or the file has changed since it was opened.
    """
    return fetch(tensor, file_size=archive.size, largest=largest)


def fetch(
    tensor: TensorRecord, *, file_size: int | None = None, largest: int = LARGEST_READ
) -> bytes:
    """Return the elements of a tensor as bytes, given the size that its file should have."""
    itemsize = tensor.dtype.itemsize
    extent = needed_extent(tensor.shape, tensor.strides, 0) * itemsize
    if max(extent, tensor.nbytes) > largest:
        raise ArchiveError(
            "a tensor is too large to be read at once",
            file=tensor.path,
            expected=f"at most {count_text(largest, 'byte')}",
            found=f"{max(extent, tensor.nbytes)} bytes",
        )
    if not extent:
        return b""
    with FileBytes(tensor.path, tail=0) as source:
        if source.size != (source.size if file_size is None else file_size):
            raise ArchiveError(
                "the file has changed since it was opened",
                file=tensor.path,
                expected=f"a size of {file_size}",
                found=source.size,
            )
        raw = source.read(tensor.offset, extent)
    return raw if tensor.is_contiguous else b"".join(_runs(raw, tensor))


def same_region(one: Place, other: Place, nbytes: int) -> bool:
    """Return whether two byte ranges, given by path and offset, hold the same bytes."""
    with FileBytes(one[0], tail=0) as mine, FileBytes(other[0], tail=0) as theirs:
        for start in range(0, nbytes, _BLOCK):
            length = min(_BLOCK, nbytes - start)
            if mine.read(one[1] + start, length) != theirs.read(other[1] + start, length):
                return False
    return True


def _runs(raw: bytes, tensor: TensorRecord) -> Iterator[bytes]:
    """Yield the elements of a strided tensor, ``raw`` starting at its first one."""
    itemsize = tensor.dtype.itemsize
    run = itemsize
    dims = list(zip(tensor.shape, tensor.strides, strict=True))
    while dims and dims[-1][1] * itemsize == run:
        run *= dims.pop()[0]
    starts = [0]
    for extent, stride in dims:
        step = stride * itemsize
        starts = [start + index * step for start in starts for index in range(extent)]
    for start in starts:
        yield raw[start : start + run]


def read_scalar(archive: Archive, tensor: TensorRecord) -> int | float | bool:
    """Return the number in a tensor of one element.

    Raises
    ------
    ArchiveError
        The tensor has not one element.
    UnsupportedError
        Its dtype has no Python number (complex, float8 and packed types).
    """
    if tensor.numel != 1:
        raise ArchiveError(
            "a tensor is not a single number",
            file=tensor.path,
            expected="1 element",
            found=f"shape {tensor.shape}",
        )
    raw = read_bytes(archive, tensor)
    if tensor.dtype.name == "bfloat16":
        # A bfloat16 is the upper half of a float32.
        code, raw = "<f", b"\0\0" + raw
    else:
        code = _SCALAR_CODES.get(tensor.dtype.name, "")
    if not code:
        raise UnsupportedError(f"a single {tensor.dtype} has no Python number", file=tensor.path)
    value: int | float | bool = struct.unpack(code, raw)[0]
    return value
