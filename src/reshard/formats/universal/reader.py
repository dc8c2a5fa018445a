"""The reader of universal folders, ours and those of DeepSpeed's converter.

Theory. The tree `zero/<name>/<state>.pt` is the index. A state is a dict with the full tensor under
`param`; DeepSpeed's converter writes a bare, flat tensor after ZeRO-3, whose shape the model-state
file knows. `step.pt` holds a number or a 0-dimensional tensor. What is not a parameter's is in
`zero/optimizer_state.pt` and in the model-state files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path

from reshard.errors import CheckpointError, MissingFileError
from reshard.formats.assembly import record_region, stored_order
from reshard.formats.checkpoint import (
    Checkpoint,
    Extra,
    Problem,
    Role,
    Scalar,
    SourceFile,
    StoredTensor,
    TensorKey,
    Topology,
)
from reshard.formats.folders import TagFolder
from reshard.formats.loss_scale import effective_settings
from reshard.formats.manifest import require_files
from reshard.formats.model_keys import (
    CARRIED,
    OF_THE_PARTITIONS,
    client_state,
    passed_through,
    text_keyed,
)
from reshard.formats.parsing import Cursor
from reshard.formats.pipelines import PIPELINE, read_pipeline
from reshard.formats.stamps import source_file
from reshard.formats.states import require_alike, require_even, states_by_name, uneven_states
from reshard.formats.torch_archive import (
    Archive,
    TensorRecord,
    read_archive,
    read_scalar,
    same_value,
)
from reshard.formats.universal.completeness import require_parameters, trained_groups
from reshard.formats.universal.names import LAYERS, OPTIMIZER_STATE, SCALARS, STEP, ZERO
from reshard.layouts.builders import replicated_map

_PROVENANCE = "universal, whole"


_MODEL_PREFIXES = ("mp_rank_", "zero_pp_rank_0_mp_rank_")


def open_universal(folder: TagFolder) -> Checkpoint:
    """Open a universal folder.

    Raises
    ------
    MissingFileError
        A file is missing that the manifest lists, or a parameter that the model-state files list.
    CheckpointError, ArchiveError
        A file is damaged or hostile, or files contradict each other.
    """
    listing = require_files(folder)
    others = _other_files(folder.path)
    models = _models(folder.path)
    model = models[0] if models else None
    optimizer = _optimizer_file(folder.path)
    shapes = _full_shapes(model)
    aliases = {a: o.text() for a, o in _entries(model.maybe("shared_params"))} if model else {}
    tensors: dict[TensorKey, StoredTensor] = {}
    scalars: dict[TensorKey, Scalar] = {}
    restore_keys: dict[str, dict[str, object]] = {}
    files = []
    for name, state, path in _state_files(folder.path / ZERO):
        files.append(source_file(path, "parameter state"))
        if name in aliases:
            continue
        archive = read_archive(str(path))
        if state == STEP:
            scalars[name, STEP] = _scalar(Cursor(archive.root, str(path)), archive)
        else:
            tensors[name, state] = _tensor(
                name, state, archive, shapes.get(name), _role(name, model)
            )
            restore_keys.setdefault(name, _restore_keys(archive))
    held = states_by_name(tensors)
    require_parameters(folder.path / ZERO, models, held, aliases)
    require_alike(tensors)
    if optimizer is not None:
        scalars |= _other_scalars(optimizer)
    groups = [group for one in models for group in trained_groups(one)]
    require_even(states_by_name((*tensors, *scalars)), groups, folder.path / ZERO)
    return Checkpoint(
        format="universal",
        path=str(folder.path),
        topology=_topology(model),
        tensors=tensors,
        scalars=scalars,
        aliases=aliases,
        extras=_extras(models, optimizer) | _kept(restore_keys),
        versions=_versions(model),
        files=tuple(files) + others,
        listing=listing,
        problems=(
            *_problems(folder.path, tensors),
            *uneven_states(held, chain(*groups), folder.path / ZERO),
        ),
    )


# --------------------------------------------------------------------------- files


def _state_files(zero: Path) -> Iterator[tuple[str, str, Path]]:
    """`(name, state, path)` of every state file; a name may contain slashes."""
    for folder, folders, names in os.walk(zero):
        folders.sort()
        owner = Path(folder).relative_to(zero).as_posix()
        for file in sorted(names):
            if file.endswith(".pt") and owner != ".":
                yield owner, file.removesuffix(".pt"), Path(folder) / file


def _model_paths(folder: Path) -> list[Path]:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file())
    return [
        folder / name
        for pattern in _MODEL_PREFIXES
        for name in names
        if name.startswith(pattern) and name.endswith("_model_states.pt")
    ]


def _models(folder: Path) -> list[Cursor]:
    """One model-state file of each model-parallel rank, ranks ascending."""
    paths = _model_paths(folder)
    first = [path for path in paths if path.name.startswith(_MODEL_PREFIXES[0])]
    return [Cursor(read_archive(str(path)).root, str(path)) for path in first or paths]


def _optimizer_file(folder: Path) -> Archive | None:
    path = folder / OPTIMIZER_STATE
    return read_archive(str(path)) if path.is_file() else None


def _other_files(folder: Path) -> tuple[SourceFile, ...]:
    paths = [*_model_paths(folder), folder / OPTIMIZER_STATE]
    return tuple(
        source_file(path, "model states" if path in paths[:-1] else "optimizer")
        for path in paths
        if path.is_file()
    )


def _problems(folder: Path, tensors: Mapping[TensorKey, StoredTensor]) -> Iterator[Problem]:
    if not tensors:
        raise MissingFileError(
            "the folder holds no parameter", file=folder / ZERO, expected="zero/<name>/<state>.pt"
        )
    yield from _model_problems(folder)
    if not (folder / OPTIMIZER_STATE).is_file():
        yield Problem("no zero/optimizer_state.pt: the optimizer cannot resume", str(folder))


def _model_problems(folder: Path) -> Iterator[Problem]:
    """The two sets of model-state files, one for each loader, must say the same."""
    sets = {
        prefix: {
            path.name.removeprefix(prefix): path
            for path in _model_paths(folder)
            if path.name.startswith(prefix)
        }
        for prefix in _MODEL_PREFIXES
    }
    first, second = (sets[prefix] for prefix in _MODEL_PREFIXES)
    for rest in first.keys() & second.keys():
        _require_twins(first[rest], second[rest])
    stages = ("stage 1 and 2", "stage 3")
    for prefix, stage in zip(_MODEL_PREFIXES, stages, strict=True):
        if not sets[prefix]:
            yield Problem(f"no model-state file for targets of {stage}", f"{folder}/{prefix}*")


def _require_twins(path: Path, twin: Path) -> None:
    left, right = (passed_through(text_keyed(read_archive(str(p)).root)) for p in (path, twin))
    for key in {**left, **right}:
        if not same_value(left.get(key), right.get(key)):
            raise CheckpointError(
                f"the two model-state files of one rank disagree on {key}",
                file=path,
                found=twin.name,
                next_step="one of them was changed after the conversion; convert again",
            )


# --------------------------------------------------------------------------- parameters


def _tensor(
    name: str, state: str, archive: Archive, shape: tuple[int, ...] | None, role: Role
) -> StoredTensor:
    root = Cursor(archive.root, archive.path)
    found = root.value if isinstance(root.value, TensorRecord) else root.at("param").value
    if not isinstance(found, TensorRecord):
        raise CheckpointError(
            "a state file holds no tensor", file=archive.path, parameter=name, state=state
        )
    full = found.shape
    if root.value is found and shape is not None and prod(shape) == prod(full):
        full = shape
    order = stored_order(found, name, archive.path)
    return StoredTensor(
        name,
        state,
        found.dtype,
        replicated_map(full, 1) if order is None else order,
        {0: record_region(found, archive.path)},
        role,
        _PROVENANCE,
    )


def _restore_keys(archive: Archive) -> dict[str, object]:
    """What a state file says beside its tensor (`cat_dim`, `is_expert_param`, …)."""
    return {key: value for key, value in text_keyed(archive.root).items() if key != "param"}


def _kept(restore_keys: Mapping[str, Mapping[str, object]]) -> dict[str, Extra]:
    """The extra that hands these keys to writers; none when no file has any."""
    stated = {name: keys for name, keys in restore_keys.items() if keys}
    return {"restore_keys": Extra(stated)} if stated else {}


def _scalar(cursor: Cursor, archive: Archive) -> Scalar:
    found = cursor.value
    if isinstance(found, TensorRecord) and found.shape == ():
        return Scalar(read_scalar(archive, found), found.dtype, STEP)
    if isinstance(found, (int, float)):
        return Scalar(found, None, STEP)
    raise cursor.unexpected("a number or a 0-dimensional tensor")


def _other_scalars(archive: Archive) -> dict[TensorKey, Scalar]:
    root = Cursor(archive.root, archive.path)
    return {
        (name, state): _scalar(value, archive)
        for name, states in _entries(root.maybe(SCALARS))
        for state, value in states.named()
    }


def _entries(cursor: Cursor | None) -> Iterator[tuple[str, Cursor]]:
    return iter(()) if cursor is None else cursor.named()


def _full_shapes(model: Cursor | None) -> dict[str, tuple[int, ...]]:
    """Shapes that the model-state file states; under tensor parallelism they may be of shards."""
    shapes = {}
    groups = model.maybe("param_shapes") if model else None
    listed = groups.each() if groups and isinstance(groups.value, (list, tuple)) else []
    for group in listed:
        shapes.update({name: value.shape() for name, value in group.named()})
    return shapes


def _role(name: str, model: Cursor | None) -> Role:
    if model is None:
        return Role.PARAMETER
    buffers = model.maybe("buffer_names")
    if buffers and isinstance(buffers.value, (list, tuple)) and name in buffers.value:
        return Role.BUFFER
    frozen = model.maybe("frozen_param_shapes")
    return Role.FROZEN if frozen and name in frozen.mapping() else Role.PARAMETER


# --------------------------------------------------------------------------- the rest


def _topology(model: Cursor | None) -> Topology:
    if model is None:
        return Topology()
    dp, mp = model.maybe("dp_world_size"), model.maybe("mp_world_size")
    degrees = model.maybe("checkpoint_parallel_dimensions")
    pp = degrees.at("pp_degree").integer(1) if degrees else 1
    tp = degrees.at("tp_degree").integer(1) if degrees else (mp.integer() if mp else 1)
    return Topology(None, dp.integer() if dp else 1, tp, pp)


def _versions(model: Cursor | None) -> dict[str, str]:
    version = model.maybe("ds_version") if model else None
    return {"deepspeed": version.text()} if version else {}


def _extras(models: Sequence[Cursor], optimizer: Archive | None) -> dict[str, Extra]:
    extras = _model_extras(models) if models else {}
    if optimizer is not None:
        root = text_keyed(optimizer.root)
        groups = Cursor(root, optimizer.path).maybe("param_groups")
        hyper = [
            {str(key): value for key, value in group.mapping().items() if key != "params"}
            for group in (groups.each() if groups else ())
        ]
        dropped = OF_THE_PARTITIONS.union((SCALARS, LAYERS))
        settings = {key: value for key, value in root.items() if key not in dropped}
        extras["param_groups"] = Extra(hyper if any(hyper) else [], optimizer.path)
        config = extras["ds_config"].value if "ds_config" in extras else None
        extras["optimizer_settings"] = Extra(effective_settings(settings, config), optimizer.path)
        layers = Cursor(root, optimizer.path).maybe(LAYERS)
        if layers is not None:
            extras[PIPELINE] = Extra(read_pipeline(layers), optimizer.path)
    return extras


def _model_extras(models: Sequence[Cursor]) -> dict[str, Extra]:
    model = models[0]
    root = text_keyed(model.value)
    extras = {key: Extra(root[key], model.file) for key in CARRIED if root.get(key) is not None}
    extras["client_state"] = Extra(client_state(root), model.file)
    extras["model_files"] = Extra(_passed_through(models))
    groups = trained_groups(model)
    if groups:
        extras["groups"] = Extra(groups, model.file)
    return extras


def _passed_through(models: Iterable[Cursor]) -> list[dict[str, object]]:
    """What each model-parallel rank's file says beside the model, ranks ascending."""
    return [passed_through(text_keyed(model.value)) for model in models]
