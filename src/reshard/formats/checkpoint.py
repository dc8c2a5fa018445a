"""The format-neutral meeting point: what a checkpoint holds, and where its bytes lie.

Theory. Whatever its format, a checkpoint is three things.

*Tensors.* Each `(name, state)` is one logical tensor `F`, described by a map from `F` to *holders*.
A holder is a number; `regions[holder]` is the byte range of a file in which that holder's shard
lies as a flat buffer, so element `k` of the shard starts at byte `region.offset + k * itemsize`.
Parallelism is gone at this level: a ZeRO partition, a tensor-parallel shard and an expert file are
all holders.

*Scalars.* States that are one number per parameter (`step`) rather than one per element.

*Extras.* All the rest, by key, with the file it came from: parameter groups, loss scaler,
scheduler, counters, client state. Values are the inert ones of the safe reader; nothing has been
executed.

Opening a checkpoint reads headers and metadata, never tensor bytes; what the reader finds wrong on
the way is a :class:`Problem`, or an error when nothing exact can be said without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from reshard.errors import CheckpointError
from reshard.formats.dtypes import DType
from reshard.formats.manifest import Listing
from reshard.geometry import ParamAffineMap

TensorKey = tuple[str, str]
"""`(name of the parameter, state)`, for example `("lm_head.weight", "exp_avg")`."""


COMPARED_EXTRAS = (
    "param_groups",
    "optimizer_settings",
    "global_steps",
    "skipped_steps",
    "global_samples",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "client_state",
)
"""Extras that say the same in every format and topology, so one run has one value of each.

The others (`ds_config`, `universal_checkpoint_info`, `groups`, …) speak of the topology."""


EXPERT_GROUP = re.compile(r"ep_size_\d+")
"""Names that a parameter group of experts has after the expert-parallel degree."""


def comparable_extra(key: str, value: object) -> object:
    """One of :data:`COMPARED_EXTRAS` without what it says of the topology.

    Examples
    --------
    >>> comparable_extra("param_groups", [{"lr": 0.1, "moe": True, "name": "ep_size_4"}])
    [{'lr': 0.1, 'moe': True, 'name': None}]
    """
    if key != "param_groups" or not isinstance(value, (list, tuple)):
        return value
    return [_without_degree(group) for group in value]


def _without_degree(group: object) -> object:
    """A parameter group; the name of a group of experts is the degree, and nothing else."""
    if not isinstance(group, Mapping) or group.get("moe") is not True:
        return group
    name = group.get("name")
    after_degree = isinstance(name, str) and EXPERT_GROUP.fullmatch(name)
    return {**group, "name": None} if after_degree else group


class Role(Enum):
    """What a tensor is for a trainer; it decides which states to expect, never where bytes lie."""

    PARAMETER = "parameter"
    FROZEN = "frozen"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True)
class Region:
    """A byte range of a file: the flat shard buffer of one holder."""

    file: str
    """Path of the file in its byte source (an absolute path for the local one)."""
    offset: int
    """First byte."""
    nbytes: int
    """Length in bytes."""


@dataclass(frozen=True, slots=True)
class RoundedCopy:
    """The start of a stored range of master weights, and the model's copy of the same elements.

    Parameters
    ----------
    name
        The parameter.
    master, copy
        Byte ranges of as many elements.
    master_dtype, copy_dtype
        Their element types.
    """

    name: str
    master: Region
    master_dtype: DType
    copy: Region
    copy_dtype: DType


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One state of one parameter, and where each of its elements is stored."""

    name: str
    state: str
    """Its key."""
    dtype: DType
    """Element type in the files."""
    map: ParamAffineMap
    """From the logical tensor to holders; `map.shard_shapes[h]` is the shape of holder `h`'s
    buffer."""
    regions: Mapping[int, Region]
    """Byte range of every holder of the map."""
    role: Role = Role.PARAMETER
    """What a trainer uses it for."""
    provenance: str = ""
    """Where the map came from, in words: ``"stored map"``, ``"one shard a rank"``, a rule, a
    file."""

    @property
    def key(self) -> TensorKey:
        """`(name, state)`."""
        return (self.name, self.state)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the logical tensor."""
        return self.map.logical_shape

    @property
    def numel(self) -> int:
        """Number of elements of the logical tensor."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the logical tensor, replicas and padding not counted."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Scalar:
    """A state that is one number per parameter, such as Adam's `step`."""

    value: int | float | bool
    """The number."""
    dtype: DType | None = None
    """Element type when the file holds it as a 0-dimensional tensor, None for a Python number."""
    source: str = field(default="", compare=False)
    """Where it was kept, in words (``"state of group 0"``, ``"param_groups[1]"``)."""


@dataclass(frozen=True, slots=True)
class Extra:
    """Something that is not a tensor of the model, kept as the safe reader gave it."""

    value: object
    file: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Topology:
    """The degrees a checkpoint was saved under; ``stage`` is None where ZeRO has no meaning."""

    stage: int | None = None
    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __str__(self) -> str:
        degrees = f"dp{self.dp} tp{self.tp} pp{self.pp} ep{self.ep}"
        return degrees if self.stage is None else f"ZeRO-{self.stage} {degrees}"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong or notable and does not make the tensors inexact."""

    what: str
    """One clause."""
    file: str = ""
    parameter: str = ""
    """Where, when known."""
    next_step: str = ""
    """What to do about it, when there is something to do."""

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.file, self.parameter) if part)
        line = f"{self.what}: {where}" if where else self.what
        return f"{line}; next: {self.next_step}" if self.next_step else line


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the checkpoint."""

    path: str
    """Where it is."""
    nbytes: int
    """Its size in bytes."""
    kind: str
    """Its role in words."""
    stamp: tuple[int, ...] = field(default=(), compare=False)
    """Device, inode and time of the last change in nanoseconds, as they were before anything was
    read of it; empty where nobody looked. Bytes that are read later must be of this file."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything that a checkpoint holds, independent of its format."""

    format: str
    """Name of the format: ``"deepspeed"``, ``"universal"``, …"""
    path: str
    """The folder that was opened."""
    topology: Topology
    """Degrees it was saved under."""
    tensors: Mapping[TensorKey, StoredTensor]
    """Every tensor by `(name, state)`, in the order of the files."""
    scalars: Mapping[TensorKey, Scalar] = field(default_factory=dict)
    """Every scalar state by `(name, state)`."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names that are the same parameter as another (tied weights): alias -> owner."""
    extras: Mapping[str, Extra] = field(default_factory=dict)
    """What is not a tensor of the model, by key."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions the files state about themselves (``"deepspeed"``, ``"universal"``, …)."""
    files: tuple[SourceFile, ...] = ()
    """The files it is made of."""
    problems: tuple[Problem, ...] = ()
    """What the reader found wrong."""
    copies: tuple[RoundedCopy, ...] = ()
    """Where the model's own weights must be the masters rounded, for whoever reads bytes."""
    contradictions: tuple[CheckpointError, ...] = ()
    """What the files say against each other, as errors; the user may accept it (`soundness`)."""
    unproved: tuple[Problem, ...] = ()
    """What the files leave open of whether they are of one save; it is told, and in no way."""
    cuts: Mapping[str, ParamAffineMap] = field(default_factory=dict)
    """How the source cut parameters over its tensor ranks, by name, where the user stated that."""
    is_export: bool = False
    """Whether it is of a format that holds what is used when training is over: some states,
    perhaps rounded, and nothing of the optimizer's beside them."""
    listing: Listing | None = field(default=None, repr=False, compare=False)
    """What the manifest of the folder lists, where reshard wrote it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters and buffers, in the order of the files."""
        return tuple(dict.fromkeys(name for name, _ in self.tensors))

    @property
    def nbytes(self) -> int:
        """Bytes of all logical tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def states_of(self, name: str) -> Iterator[StoredTensor]:
        """Every tensor state of one parameter."""
        return (tensor for (owner, _), tensor in self.tensors.items() if owner == name)
