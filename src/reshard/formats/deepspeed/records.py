"""A model-state file as a typed value.

Theory. DeepSpeed has two kinds of files. A *model-state file* says what there is: names and shapes
of the parameters, in the order in which ZeRO's flat buffers hold them, buffers, frozen weights,
counters, whatever the client added. An *optimizer file* (`optimizer_records`) holds one rank's part
of the flat buffers. Neither says where a parameter lies; that follows from both (`partitions`).

Source: `engine.py` (`_save_checkpoint`, `_common_checkpoint_state`), DeepSpeed 0.12 to 0.19,
checked on real files of five versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reshard.formats.parsing import Cursor
from reshard.formats.torch_archive import (
    Archive,
    TensorRecord,
    read_archive,
)

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ParallelDegrees:
    """`checkpoint_parallel_dimensions`, which DeepSpeed writes from about 0.19.7 on."""

    pp: int
    tp: int

    def __str__(self) -> str:
        return f"pp {self.pp}, tp {self.tp}"


@dataclass(frozen=True, slots=True)
class ModelStates:
    """One model-state file."""

    archive: Archive
    """The open archive; `archive.root` is the whole tree."""
    dp: int
    mp: int
    """Rank of the writer, from the file name."""
    module: Mapping[str, TensorRecord] | None
    """`module`: every tensor of the model that the file holds, None for a pipeline."""
    buffer_names: frozenset[str]
    """Names in `module` that are buffers."""
    param_shapes: tuple[Shapes, ...] | None
    """Per group, name -> shape of this rank's shard, in flat-buffer order; None without ZeRO."""
    frozen_shapes: Shapes
    frozen_fragments: Mapping[str, TensorRecord]
    """Shapes and stored parts of frozen parameters."""
    shared: Mapping[str, str]
    """Alias -> owner."""
    dp_world_size: int | None
    mp_world_size: int | None
    """Degrees that the file states."""
    degrees: ParallelDegrees | None
    """Pipeline and tensor degrees, when the file states them."""
    info: Cursor | None
    """`universal_checkpoint_info`, when there is any; what it repeats of `ds_autoep_layers` is
    left out."""
    config: Mapping[object, object]
    """The DeepSpeed configuration, empty when it is kept as a path."""
    version: str
    """DeepSpeed version, empty when the file does not state it."""

    @property
    def file(self) -> str:
        """Path of the file."""
        return self.archive.path


# --------------------------------------------------------------------------- model states


def read_model_states(path: str, dp: int, mp: int) -> ModelStates:
    """Open a model-state file."""
    archive = read_archive(path)
    root = Cursor(archive.root, path)
    root.mapping()
    return ModelStates(
        archive=archive,
        dp=dp,
        mp=mp,
        module=_tensors(root.maybe("module")) if root.maybe("module") else None,
        buffer_names=_names(root.maybe("buffer_names")),
        param_shapes=_param_shapes(root.maybe("param_shapes")),
        frozen_shapes=_shapes(root.maybe("frozen_param_shapes")),
        frozen_fragments=_tensors(root.maybe("frozen_param_fragments")),
        shared=_texts(root.maybe("shared_params")),
        dp_world_size=_integer(root.maybe("dp_world_size")),
        mp_world_size=_integer(root.maybe("mp_world_size")),
        degrees=_degrees(root.maybe("checkpoint_parallel_dimensions")),
        info=_info(root),
        config=config_of(root),
        version=version_of(root),
    )


def _info(root: Cursor) -> Cursor | None:
    """The info without the copy of AutoEP's metadata, which differs from rank to rank."""
    info = root.maybe("universal_checkpoint_info")
    if info is None or not isinstance(info.value, Mapping):
        return info
    shared = {key: value for key, value in info.value.items() if key != "ds_autoep_layers"}
    return Cursor(shared, info.file, info.path)


def _integer(cursor: Cursor | None) -> int | None:
    return None if cursor is None else cursor.integer()


def version_of(root: Cursor) -> str:
    """The DeepSpeed version of a file, empty when it does not state it."""
    cursor = root.maybe("ds_version")
    return "" if cursor is None else cursor.text()


def config_of(root: Cursor) -> Mapping[object, object]:
    """The DeepSpeed configuration of a file, empty when it is kept as a path."""
    cursor = root.maybe("ds_config")
    return cursor.value if cursor is not None and isinstance(cursor.value, Mapping) else {}


def _names(cursor: Cursor | None) -> frozenset[str]:
    return frozenset() if cursor is None else frozenset(name.text() for name in cursor.each())


def _texts(cursor: Cursor | None) -> dict[str, str]:
    return {} if cursor is None else {name: value.text() for name, value in cursor.named()}


def _shapes(cursor: Cursor | None) -> dict[str, tuple[int, ...]]:
    return {} if cursor is None else {name: value.shape() for name, value in cursor.named()}


def _param_shapes(cursor: Cursor | None) -> tuple[Shapes, ...] | None:
    if cursor is None:
        return None
    if isinstance(cursor.value, Mapping):
        return (_shapes(cursor),)
    return tuple(_shapes(group) for group in cursor.each())


def _tensors(cursor: Cursor | None) -> dict[str, TensorRecord]:
    if cursor is None:
        return {}
    entries = ((name, value.value) for name, value in cursor.named())
    return {name: value for name, value in entries if isinstance(value, TensorRecord)}


def _degrees(cursor: Cursor | None) -> ParallelDegrees | None:
    if cursor is None:
        return None
    return ParallelDegrees(cursor.at("pp_degree").integer(1), cursor.at("tp_degree").integer(1))
