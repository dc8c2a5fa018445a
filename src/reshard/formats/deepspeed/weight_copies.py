"""The model's own weights beside the masters, of which they are the rounded copies.

Theory. Under ZeRO-0 to 2 a model-state file holds the weights in the type that the model runs in,
and the optimizer files hold their masters. The one is the other, rounded; where it is not, the
files are of two runs, or the flat buffers are in another order than is believed. A copy is checked
by its first elements, which is enough to tell two runs or two places apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from reshard.formats.checkpoint import Region, RoundedCopy
from reshard.formats.deepspeed.partitions import MASTER, Fragment, Shard
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.rounded_copies import SAMPLE
from reshard.formats.torch_archive import TensorRecord
from reshard.layouts.builders import row_major_strides


def weight_copies(
    columns: Sequence[ModelStates],
    shards: Mapping[str, Mapping[int, Shard]],
    aliases: Mapping[str, str],
    without: Collection[str],
) -> Iterator[RoundedCopy]:
    """The weights of model-state files that say something about masters.

    Parameters
    ----------
    columns
        Model-state files by model-parallel rank.
    shards
        Trained parameter -> column -> where its shard lies in the optimizer files.
    aliases
        Tied names; such a parameter has several weights, and all must be its master's.
    without
        Parameters whose weights are not in these files.
    """
    for column in columns:
        for weight, record in (column.module or {}).items():
            name = aliases.get(weight, weight)
            shard = shards.get(name, {}).get(column.mp)
            if shard is None or name in without:
                continue
            if weight == name or record.shape == shard.shape:
                found = (copy_of(name, part, column.file, record) for part in shard.fragments)
                yield from (copy for copy in found if copy is not None)


def copy_of(
    name: str, fragment: Fragment, path: str, record: TensorRecord, skip: int = 0
) -> RoundedCopy | None:
    """What the weight says about a fragment; None where it is transposed or elsewhere."""
    if record.strides != row_major_strides(record.shape) and prod(record.shape) > 1:
        return None
    start = fragment.shard_start - skip
    count = min(SAMPLE, fragment.numel, prod(record.shape) - start)
    if start < 0 or count <= 0:
        return None
    source, size = fragment.record(MASTER).dtype, record.dtype.itemsize
    first = fragment.stretch(MASTER).region
    master = Region(first.file, first.offset, count * source.itemsize)
    weight = Region(path, record.offset + start * size, count * size)
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
