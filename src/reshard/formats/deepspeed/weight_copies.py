"""The model's own weights beside the masters, of which they are the rounded copies.

Theory. Under ZeRO-0 to 2 a file of the model holds the weights in the type that the model runs in,
and the optimizer files hold their masters. The one is the other, rounded; where it is not, the
files are of two runs or steps, a file has the name of another, or the flat buffers are in another
order than is believed. A copy is checked by its first elements, which is enough to tell two runs or
two places apart.
"""

from __future__ import annotations

from math import prod

from reshard.formats.checkpoint import Region, RoundedCopy
from reshard.formats.deepspeed.partitions import MASTER, Fragment
from reshard.formats.rounded_copies import SAMPLE
from reshard.formats.torch_archive import TensorRecord
from reshard.layouts.builders import row_major_strides


def copy_of(
    name: str, fragment: Fragment, path: str, record: TensorRecord, skip: int = 0
) -> RoundedCopy | None:
    """What the weight says about a fragment; None where it is transposed or elsewhere."""
    if record.strides != row_major_strides(record.shape) and prod(record.shape) > 1:
        return None
    first = max(fragment.shard_start, skip)
    last = min(fragment.shard_start + fragment.numel, skip + prod(record.shape))
    count = min(SAMPLE, last - first)
    if count <= 0:
        return None
    source, size = fragment.record(MASTER).dtype, record.dtype.itemsize
    held = fragment.stretch(MASTER).region
    start = held.offset + (first - fragment.shard_start) * source.itemsize
    master = Region(held.file, start, count * source.itemsize)
    weight = Region(path, record.offset + (first - skip) * size, count * size)
    return RoundedCopy(name, master, source, weight, record.dtype)


def whole_copy(
    name: str, master: tuple[str, TensorRecord], weight: tuple[str, TensorRecord]
) -> RoundedCopy | None:
    """The same for a master that is a tensor of its own; None where either is transposed."""
    (master_file, full), (weight_file, record) = master, weight
    count = min(SAMPLE, prod(record.shape))
    if not count or any(r.strides != row_major_strides(r.shape) for r in (full, record)):
        return None
    return RoundedCopy(
        name,
        Region(master_file, full.offset, count * full.dtype.itemsize),
        full.dtype,
        Region(weight_file, record.offset, count * record.dtype.itemsize),
        record.dtype,
    )
