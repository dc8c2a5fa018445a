"""Annotating: the same checkpoint, with a map for every tensor-parallel parameter.

Theory. A checkpoint from before maps says how it was cut by patterns, or not at all. Its layouts
are resolved once more (`tensor_parallel`), and the maps go into `universal_checkpoint_info` of
every model-state file. Nothing else changes: other keys and the stated version stay, because an old
reader takes them by its own rules; the tensors of a changed file keep their bytes, and all other
files are copied. DeepSpeed 0.19.8 converts the result with its own converter, and prefers the maps.

Where there was no info at all, the new one has the old keys as well that say the same as a map
(`info_entry`).

*Every byte is a tensor.* To the planner and the executor a file to be copied is a one-dimensional
tensor of bytes, held whole by one holder. So copying is a plan like any other: bounded, resumable,
published by rename.

A map describes the padded vocabulary, because a shard has those rows; that they do not count is
still said by `vocabulary_parameter_patterns`, which readers apply after the map.

Parameters that need no map or cannot have one keep what they have: experts, whose place is another
matter, and parameters whose stored map was made from an empty placeholder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import CheckpointError, UsageError
from reshard.formats.checkpoint import (
    Checkpoint,
    Region,
    Role,
    SourceFile,
    StoredTensor,
    TensorKey,
    Topology,
)
from reshard.formats.deepspeed.grid import Degrees, by_data_rank, settle_degrees, take_inventory
from reshard.formats.deepspeed.info_entry import deepspeed_info
from reshard.formats.deepspeed.names import FileKind
from reshard.formats.deepspeed.records import ModelStates, read_model_states
from reshard.formats.deepspeed.statements import stated_aliases
from reshard.formats.deepspeed.tensor_parallel import (
    GovernedMap,
    parameter_shapes,
    read_layouts,
    require_same_for_ties,
)
from reshard.formats.dtypes import DTYPES
from reshard.formats.folders import TagFolder
from reshard.formats.layout_source import Layouts, Shape
from reshard.formats.manifest import MANIFEST_NAME
from reshard.formats.parsing import Cursor
from reshard.formats.patterns import bounded_pattern, exact, literal_name
from reshard.formats.stated_layouts import StatedLayouts
from reshard.formats.target import Fill, OutputFile, Slot, Target
from reshard.formats.torch_archive import lay_out_archive
from reshard.geometry import ParamAffineMap, maps_to_document
from reshard.layouts.builders import replicated_map

BYTES = "bytes"
"""The one state of a file that is copied."""

POINTER = "latest"
"""The pointer file that DeepSpeed follows to load a checkpoint."""

INFO = "universal_checkpoint_info"

VOCABULARY = "vocabulary_parameter_patterns"


@dataclass(frozen=True, slots=True)
class Annotated:
    """What annotating a checkpoint comes to, before a byte is copied."""

    source: Checkpoint
    """The files of the checkpoint, as byte ranges."""
    target: Target
    """The files to be."""
    maps: Mapping[str, GovernedMap]
    """The map of every parameter that got one, and where it comes from."""


def lay_out_annotated(
    folder: TagFolder, *, tag: str, stated: StatedLayouts | None = None, pointer: bool = True
) -> Annotated:
    """Lay out a checkpoint with a map for every tensor-parallel parameter.

    Parameters
    ----------
    folder
        A native DeepSpeed checkpoint.
    tag
        Name of the output folder, for the pointer file.
    stated
        Layouts that the user states.
    pointer
        Whether the pointer file `latest` is written beside the output.

    Raises
    ------
    UsageError
        When there is one tensor rank, so nothing to state.
    LayoutError
        When a layout is not known, or rules contradict the data.
    CheckpointError, ArchiveError
        When the folder is no native checkpoint, or is not whole.
    """
    models, degrees = _models(folder)
    if degrees.tp == 1:
        raise UsageError(
            "the checkpoint has one tensor-parallel rank, so there is nothing to annotate",
            file=folder.path,
        )
    columns = [models[0, mp] for mp in range(degrees.mp)]
    layouts = read_layouts(columns, degrees.tp, stated)
    if stated is not None:
        require_same_for_ties(stated, stated_aliases(columns), layouts)
    maps = _maps(layouts, parameter_shapes(columns), degrees.tp)
    added = _added_info(columns[0], maps, _trained(columns))
    changed = {Path(model.file).name: _changed(model, added) for model in models.values()}
    sources = dict(_all_files(folder))
    files = [
        changed[name].file if name in changed else _copied(name, path)
        for name, path in sources.items()
    ]
    tensors = {
        tensor.key: tensor
        for name, path in sources.items()
        for tensor in (changed[name].storages if name in changed else [_as_bytes(name, path)])
    }
    source = Checkpoint(
        format="deepspeed",
        path=str(folder.path),
        topology=Topology(None, degrees.dp, degrees.tp, degrees.pp),
        tensors=tensors,
        files=tuple(SourceFile(str(p), p.stat().st_size, "file") for p in sources.values()),
    )
    target = Target("deepspeed", tuple(files), (POINTER, tag) if pointer else None)
    return Annotated(source, target, maps)


def _models(folder: TagFolder) -> tuple[dict[tuple[int, int], ModelStates], Degrees]:
    """Every model-state file, and the degrees of the grid."""
    if (folder.path / "zero").is_dir():
        raise UsageError(
            "a universal folder holds whole tensors, so there is nothing to annotate",
            file=folder.path,
        )
    inventory = take_inventory(folder)
    models = {
        (name.dp, name.mp): read_model_states(str(path), name.dp, name.mp)
        for kind in (FileKind.MODEL, FileKind.ZERO3_MODEL)
        for name, path in inventory.of_kind(kind).items()
    }
    if not models:
        raise CheckpointError(
            "no model-state file, so this is no DeepSpeed checkpoint",
            file=folder.path,
            next_step="name the tag folder itself",
        )
    inventory, models = by_data_rank(inventory, models)
    degrees = settle_degrees(models.values(), inventory)
    for mp in range(degrees.mp):
        if (0, mp) not in models:
            raise CheckpointError(
                "the model-state file of a rank is missing", file=folder.path, rank=f"mp {mp}"
            )
    return models, degrees


def _trained(columns: Sequence[ModelStates]) -> frozenset[str]:
    return frozenset(
        name for column in columns for group in column.param_shapes or () for name in group
    )


def _maps(
    layouts: Layouts, shapes: Mapping[str, Mapping[int, Shape]], degree: int
) -> dict[str, GovernedMap]:
    """The map of every parameter that has one; all that are not known in one error."""
    maps, unknown = {}, []
    void = layouts.empty_names()
    for name, by_column in shapes.items():
        stage = min(by_column) // degree
        held = {c % degree: shape for c, shape in by_column.items() if c // degree == stage}
        found = layouts.map_of(name, held)
        if found is not None:
            maps[name] = found
        elif name not in void and not layouts.is_expert(name):
            unknown.append(name)
    if unknown:
        raise layouts.unknown({name: shapes[name] for name in unknown})
    return maps


# --------------------------------------------------------------------------- the info


def _added_info(
    first: ModelStates, maps: Mapping[str, GovernedMap], trained: frozenset[str]
) -> dict[object, object]:
    """The keys to add to an info; old maps that concern none of the mapped names stay."""
    whole = {name: found.whole for name, found in maps.items()}
    if first.info is None:
        made = deepspeed_info(whole, listed=[name for name in maps if name in trained])
        return dict[object, object](made) | _vocabulary(maps)
    document = maps_to_document({exact(name): found for name, found in whole.items()})
    merged = _merged(first.info.maybe("affine_map"), document, whole)
    padding = _vocabulary(maps) if first.info.maybe(VOCABULARY) is None else {}
    return {**padding, "affine_map": merged}


def _merged(
    old: Cursor | None, document: Mapping[str, object], maps: Mapping[str, ParamAffineMap]
) -> dict[str, object]:
    """The new map document, with the entries of the old one as they were where they still hold."""
    params = document["params"]
    if old is None or not isinstance(params, dict):
        return dict(document)
    merged = dict(params)
    for pattern, entry in old.at("params").named():
        name = literal_name(pattern)
        if name is None:
            if not any(map(bounded_pattern(pattern, INFO).match, maps)):
                merged[pattern] = entry.value
        elif name not in maps or _is_same(entry, maps[name]):
            merged[pattern] = entry.value
    return {**document, "params": merged}


def _is_same(entry: Cursor, other: ParamAffineMap) -> bool:
    stored = ParamAffineMap.from_dict(entry.value, f"{entry.file}: {entry.path}")
    return stored.same_elements(other)


def _vocabulary(maps: Mapping[str, GovernedMap]) -> dict[object, object]:
    """The keys that say how many rows of padded tables count."""
    rows = {name: found.map.logical_shape[0] for name, found in maps.items() if found.padded}
    if len(set(rows.values())) > 1:
        raise UsageError(
            "vocabularies of different sizes cannot be stated in one checkpoint", found=rows
        )
    if not rows:
        return {}
    size = next(iter(rows.values()))
    return {VOCABULARY: [exact(name) for name in rows], "original_vocab_size": size}


# --------------------------------------------------------------------------- files


@dataclass(frozen=True, slots=True)
class _Changed:
    """A model-state file to be, and the storages that it takes over."""

    file: OutputFile
    storages: list[StoredTensor]


def _changed(model: ModelStates, added: Mapping[object, object]) -> _Changed:
    root = model.archive.root
    stated = root.get(INFO) if isinstance(root, dict) else None
    if not isinstance(root, dict) or not isinstance(stated, (dict, type(None))):
        raise CheckpointError("a model-state file is not made of dictionaries", file=model.file)
    name = Path(model.file).name
    info = {**(stated or {}), **added}
    layout = lay_out_archive({**root, INFO: info}, name.removesuffix(".pt"))
    slots, storages = [], []
    for slot in layout.slots:
        if slot.source is None:
            continue
        region = Region(slot.source.path, slot.source.offset, slot.nbytes)
        tensor = _byte_tensor(f"{name}/{slot.key}", region)
        storages.append(tensor)
        slots.append(Slot(slot.offset, slot.nbytes, (_fill(tensor),), slot.crc_offsets))
    return _Changed(OutputFile(name, layout.size, layout.literals, tuple(slots)), storages)


def _all_files(folder: TagFolder) -> Iterator[tuple[str, Path]]:
    """Every file of the tag folder and of the `also` folders, by its path inside them."""
    seen: set[str] = set()
    for top in (folder.path, *folder.also):
        for parent, folders, names in os.walk(top):
            folders.sort()
            for name in sorted(names):
                path = Path(parent, name)
                inside = path.relative_to(top).as_posix()
                if inside not in seen and inside != MANIFEST_NAME:
                    seen.add(inside)
                    yield inside, path


def _copied(name: str, path: Path) -> OutputFile:
    size = path.stat().st_size
    tensor = _as_bytes(name, path)
    slots = (Slot(0, size, (_fill(tensor),)),) if size else ()
    return OutputFile(name, size, (), slots)


def _as_bytes(name: str, path: Path) -> StoredTensor:
    return _byte_tensor(name, Region(str(path), 0, path.stat().st_size))


def _byte_tensor(name: str, region: Region) -> StoredTensor:
    """A byte range as a tensor that one holder has."""
    whole = replicated_map((region.nbytes,), 1)
    return StoredTensor(
        name, BYTES, DTYPES["uint8"], whole, {0: region}, Role.BUFFER, "bytes of a file"
    )


def _fill(tensor: StoredTensor) -> Fill:
    key: TensorKey = tensor.key
    return Fill(key, tensor.dtype, tensor.map, 0)
