"""The layer files of a pipeline: complete, and the home of what no optimizer trains.

Theory. A pipeline writes the weights of layer `L` to `layer_{L}-[model_{T}-]model_states.pt`, one
file a tensor-parallel rank, under names local to the layer. The parameter itself is called
`L.<local>`, or `tied_modules.<key>.<local>` when the layer is tied to another one. The model-state
file of each stage lists the names it has: trained ones (`param_shapes`), frozen ones (ZeRO-2) and
buffers. So every listed name says which file there must be, and every tensor of a file has a name:

* a listed name whose file is gone, or whose file lacks it, is refused;
* a layer none of whose names are listed as `L.…`, and that has the tensors of a tied module, is a
  copy of that module. It may be in several files, which must then be equal;
* what is in a file and trained by nobody is a frozen parameter or a buffer.

Masters of trained parameters are in the optimizer files; their weights here are given out as what
the masters must be when they are rounded (`weight_copies`).

Source: `runtime/pipe/module.py` (`ckpt_layer_path`, `save_state_dict`, `_build`), DeepSpeed 0.12 to
0.19.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from reshard.errors import CheckpointError, MissingFileError, count_text
from reshard.formats.checkpoint import Role
from reshard.formats.deepspeed.grid import Degrees
from reshard.formats.deepspeed.module import ModuleShard, ModuleTensor, whole_shard
from reshard.formats.deepspeed.names import FileName, layer_file_name
from reshard.formats.deepspeed.optimizer_records import OptimizerStates
from reshard.formats.deepspeed.own_names import require_own_names
from reshard.formats.deepspeed.partitions import Part
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.deepspeed.unlisted import mapped
from reshard.formats.parsing import Cursor
from reshard.formats.pipelines import (
    TIED,
    Pipeline,
    PipelineLayer,
    PipelineStage,
    split_owner,
)
from reshard.formats.torch_archive import TensorRecord, read_archive

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerFile:
    """One layer file, open: its layer, tensor rank, path, own name and tensors by local name."""

    layer: int
    tp: int
    path: str
    written_as: str
    tensors: Mapping[str, TensorRecord]


@dataclass(frozen=True, slots=True)
class _Names:
    """What the model-state files list, over all stages."""

    shapes: dict[str, dict[int, Shape]] = field(default_factory=dict)
    """Trained names -> shape of the shard of each tensor rank that has it."""
    frozen: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)
    """Names that are not trained."""

    def listed(self) -> Iterator[str]:
        """Every name."""
        yield from self.shapes
        yield from sorted(self.frozen - set(self.shapes))
        yield from sorted(self.buffers - set(self.shapes) - self.frozen)


@dataclass(frozen=True, slots=True)
class LayerWeight:
    """One tensor of a layer file, under the name that the checkpoint has for it."""

    name: str
    tp: int
    file: str
    record: TensorRecord


@dataclass(frozen=True, slots=True)
class LayerContents:
    """What the layer files hold."""

    weights: list[ModuleTensor]
    """Their tensors that are not masters in an optimizer file."""
    pipeline: Pipeline | None
    """The layers and the stages; None when there is no pipeline."""
    copies: tuple[LayerWeight, ...] = ()
    """Their tensors whose masters are in optimizer files."""


def read_layers(
    files: Mapping[FileName, Path],
    columns: Sequence[ModelStates],
    tp: int,
    folder: Path,
    *,
    partitioned: bool = True,
) -> LayerContents:
    """Demand every layer file, and return what they hold.

    Parameters
    ----------
    files
        The layer files of the folder.
    columns
        The model-state files by `mp`.
    tp
        The tensor-parallel degree.
    folder
        Where a missing file is to be.
    partitioned
        Whether trained parameters are in the flat buffers of ZeRO; else they are in the layers.

    Raises
    ------
    MissingFileError
        When a layer file is gone.
    CheckpointError
        When a file does not hold what the model-state files list.
    """
    if not files:
        _require_no_pipeline(columns, folder, tp)
        return LayerContents([], None)
    _require_pipeline(columns, next(iter(files.values())))
    opened = [_open(name, path) for name, path in files.items()]
    names = _names(columns, tp)
    _require_ranks(opened, tp, folder)
    require_own_names({file.path: file.written_as for file in opened})
    tied = _tied_layers(opened, names)
    _require_listed(opened, names, tied, tp, folder)
    held = [weight for file in opened for weight in _held(file, tied)]
    elsewhere = set(names.shapes) if partitioned else set()
    return LayerContents(
        list(_weights((weight for weight in held if weight.name not in elsewhere), names)),
        Pipeline(tuple(_layers(opened, tied)), tuple(_stages(columns[::tp]))),
        tuple(weight for weight in held if partitioned),
    )


def _held(file: LayerFile, tied: Mapping[int, str]) -> Iterator[LayerWeight]:
    owner = tied.get(file.layer, str(file.layer))
    for local, record in file.tensors.items():
        yield LayerWeight(f"{owner}.{local}", file.tp, file.path, record)


def _layers(opened: Iterable[LayerFile], tied: Mapping[int, str]) -> Iterator[PipelineLayer]:
    for file in sorted(opened, key=lambda file: file.layer):
        if file.tp == 0:
            dtypes = {local: record.dtype for local, record in file.tensors.items()}
            yield PipelineLayer(file.layer, tied.get(file.layer, str(file.layer)), dtypes)


def _stages(columns: Iterable[ModelStates]) -> Iterator[PipelineStage]:
    for model in columns:
        groups = tuple(tuple(shapes) for shapes in model.param_shapes or ())
        yield PipelineStage(groups, model.buffer_names)


def listed_by_mappings(
    pipeline: Pipeline,
    columns: Sequence[ModelStates],
    ranks: Mapping[tuple[int, int], OptimizerStates],
    degrees: Degrees,
) -> Pipeline:
    """The pipeline, where stages without `param_shapes` have what their buffers say they hold.

    `BF16_Optimizer` without ZeRO writes none; every rank then maps its part of each buffer.
    """
    stages = []
    for number, stage in enumerate(pipeline.stages):
        column = number * degrees.tp
        if columns[column].param_shapes is None:
            own = [ranks[dp, column] for dp in range(degrees.dp)]
            groups = range(len(own[0].groups))
            held = (mapped(group, [Part(rank, group) for rank in own]) for group in groups)
            stages.append(replace(stage, groups=tuple(map(tuple, held))))
        else:
            stages.append(stage)
    return replace(pipeline, stages=tuple(stages))


def _require_no_pipeline(columns: Sequence[ModelStates], folder: Path, tp: int) -> None:
    """A model-state file without `module` is of a pipeline, so its layers have files."""
    for model in columns:
        if model.module is None and any(model.param_shapes or ()):
            raise MissingFileError(
                "no pipeline layer file: the model-state file has no weights of its own",
                file=folder / layer_file_name(0, 0 if tp > 1 else None),
                next_step="copy the layer_*-model_states.pt files here, or name their folder with "
                "--also",
            )


def _require_pipeline(columns: Sequence[ModelStates], path: Path) -> None:
    for model in columns:
        if model.module is not None:
            raise CheckpointError(
                "a pipeline layer file lies beside a model-state file with weights of its own",
                file=path,
                found=model.file,
                next_step="one of them is left over from another run; move it away",
            )


def _open(name: FileName, path: Path) -> LayerFile:
    archive = read_archive(str(path))
    root = Cursor(archive.root, str(path))
    tensors = {
        local: value.value for local, value in root.named() if isinstance(value.value, TensorRecord)
    }
    return LayerFile(name.layer, name.mp, str(path), archive.name, tensors)


def _names(columns: Sequence[ModelStates], tp: int) -> _Names:
    names = _Names()
    for model in columns:
        for shapes in model.param_shapes or ():
            for name, shape in shapes.items():
                names.shapes.setdefault(name, {})[model.mp % tp] = shape
        names.frozen.update(model.frozen_shapes)
        names.buffers.update(model.buffer_names)
    return names


def _require_ranks(opened: Iterable[LayerFile], tp: int, folder: Path) -> None:
    """Every layer has a file of every tensor rank, and of no other."""
    held: dict[int, dict[int, str]] = {}
    for file in opened:
        held.setdefault(file.layer, {})[file.tp] = file.path
    for layer, paths in held.items():
        for rank in range(tp):
            if rank not in paths:
                raise _gone(folder, layer, rank)
        for rank, path in paths.items():
            if rank >= tp:
                raise CheckpointError(
                    "a layer file of a tensor rank that this checkpoint does not have",
                    file=path,
                    rank=f"tp {rank}",
                    expected=f"{count_text(tp, 'file')} a layer",
                    found=len(paths),
                    next_step="it is left over from another run; move it away",
                )


def _gone(folder: Path, layer: int, tp: int, parameter: str | None = None) -> MissingFileError:
    return MissingFileError(
        "a pipeline layer file is missing",
        file=folder / layer_file_name(layer, tp),
        rank=f"tp {tp}",
        parameter=parameter,
        expected=f"a file of layer {layer} for every tensor rank",
        next_step="copy it from the node that wrote it, or name that folder with --also",
    )


# --------------------------------------------------------------------------- names


def _tied_layers(opened: Iterable[LayerFile], names: _Names) -> dict[int, str]:
    """Layers that are copies of a tied module: layer -> `tied_modules.<key>`.

    Raises
    ------
    CheckpointError
        When a layer could be a copy of more than one.
    """
    own = {split_owner(name)[0] for name in names.listed()}
    modules: dict[str, set[str]] = {}
    for name in names.listed():
        owner, local = split_owner(name)
        if owner.startswith(TIED):
            modules.setdefault(owner, set()).add(local)
    tied: dict[int, str] = {}
    for file in opened:
        if str(file.layer) in own or not file.tensors:
            continue
        fitting = [
            module
            for module, locals_ in modules.items()
            if locals_ <= set(file.tensors) and _same_shapes(file, module, names)
        ]
        if len(fitting) > 1:
            raise CheckpointError(
                "a pipeline layer could be a copy of more than one tied module",
                file=file.path,
                found=", ".join(fitting),
            )
        if fitting:
            tied[file.layer] = fitting[0]
    return tied


def _same_shapes(file: LayerFile, module: str, names: _Names) -> bool:
    return all(
        names.shapes.get(f"{module}.{local}", {}).get(file.tp, record.shape) == record.shape
        for local, record in file.tensors.items()
    )


# --------------------------------------------------------------------------- completeness


def _require_listed(
    opened: Sequence[LayerFile], names: _Names, tied: Mapping[int, str], tp: int, folder: Path
) -> None:
    """Every listed name is in the files of its layer, in its shape."""
    by_owner: dict[str, list[LayerFile]] = {}
    for file in opened:
        by_owner.setdefault(tied.get(file.layer, str(file.layer)), []).append(file)
    for name in names.listed():
        owner, local = split_owner(name)
        if not owner.isdecimal() and not owner.startswith(TIED):
            continue  # of the pipeline itself, of no layer
        for rank in range(tp):
            files = [file for file in by_owner.get(owner, ()) if file.tp == rank]
            if not files:
                raise _no_file(name, owner, rank, folder)
            for file in files:
                _require_tensor(name, file, local, names.shapes.get(name, {}).get(rank))


def _no_file(name: str, owner: str, rank: int, folder: Path) -> MissingFileError:
    if owner.isdecimal():
        return _gone(folder, int(owner), rank, name)
    return MissingFileError(
        "no pipeline layer file holds a tied module",
        file=folder / "layer_*-model_states.pt",
        rank=f"tp {rank}",
        parameter=name,
        next_step="copy the file of its first layer here, or name that folder with --also",
    )


def _require_tensor(name: str, file: LayerFile, local: str, shape: Shape | None) -> None:
    record = file.tensors.get(local)
    if record is None or (shape is not None and record.shape != shape):
        raise CheckpointError(
            "a pipeline layer file does not hold a parameter that the model-state file lists",
            file=file.path,
            parameter=name,
            expected=local if shape is None else f"{local} of shape {shape}",
            found="nothing" if record is None else f"shape {record.shape}",
            next_step="the files are of different runs, or frozen parameters were left out of the "
            "checkpoint (exclude_frozen_parameters)",
        )


# --------------------------------------------------------------------------- weights


def _weights(weights: Iterable[LayerWeight], names: _Names) -> Iterator[ModuleTensor]:
    held: dict[str, dict[int, list[tuple[TensorRecord, str]]]] = {}
    for weight in weights:
        files = held.setdefault(weight.name, {}).setdefault(weight.tp, [])
        files.append((weight.record, weight.file))
    for name, ranks in held.items():
        shards: dict[int, ModuleShard] = {
            rank: whole_shard(found[0][0], found) for rank, found in ranks.items()
        }
        role = Role.BUFFER if name in names.buffers else Role.FROZEN
        yield ModuleTensor(name, role, shards)
