"""The reader of safetensors sets, ours and anybody's.

Theory. A set holds whole tensors, so every map is the identity and every region one byte range.
Weights are the state ``fp32``, whatever their element type, as in every other format. A set that
holds another state says so in the metadata of its files (:data:`STATE_KEY`); nobody else writes
that key, so nothing is guessed from names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from reshard.errors import CheckpointError, MissingFileError, UnsupportedError, count_text
from reshard.formats.checkpoint import (
    Checkpoint,
    Extra,
    Problem,
    Region,
    Role,
    SourceFile,
    StoredTensor,
    TensorKey,
    Topology,
)
from reshard.formats.folders import TagFolder, names_set
from reshard.formats.manifest import require_files
from reshard.formats.model_dtypes import MODULE_EXTRA
from reshard.formats.safetensors.files import SUFFIX, FileSet, file_sets
from reshard.formats.safetensors.header import Entry, Header, read_header
from reshard.formats.safetensors.options import WEIGHTS
from reshard.formats.stamps import source_file
from reshard.geometry import ParamAffineMap
from reshard.layouts.builders import replicated_map

STATE_KEY = "reshard_state"
"""Key in the metadata of a file that holds another state than the weights."""

SHARDING_KEY = "DCP_SHARDING_INFO"
"""Key in the metadata of a file of parts: which part of each tensor it holds."""

_PROVENANCE = "safetensors, whole"
_whole = lru_cache(maxsize=1024)(lambda shape: replicated_map(shape, 1))


def open_safetensors(folder: TagFolder) -> Checkpoint:
    """Open the sets of a folder.

    Raises
    ------
    MissingFileError
        A file is missing, of a set or of those that the manifest lists.
    CheckpointError
        An index and its files contradict each other, or two sets hold the same state.
    ArchiveError
        A file is damaged or hostile.
    UnsupportedError
        A tensor has an element type that is not known here.
    """
    if not names_set(folder):
        require_files(folder, SUFFIX)
    sets = file_sets(folder)
    tensors: dict[TensorKey, StoredTensor] = {}
    files: list[SourceFile] = []
    problems: list[Problem] = []
    states: dict[str, FileSet] = {}
    for found in sets:
        sources = [source_file(path, WEIGHTS) for path in found.paths]
        headers = {path: read_header(str(path)) for path in found.paths}
        for path, header in headers.items():
            _require_values(path, header)
        state = _state(found, headers)
        _require_first(states.setdefault(state, found), found, state)
        held = _tensors(state, headers)
        if found.index is not None:
            _require_agreement(found, headers)
            problems += _size_problems(found, headers)
        tensors |= {tensor.key: tensor for tensor in held}
        files += _files(found, sources, state)
    if not tensors:
        raise MissingFileError("the files hold no tensor", file=folder.path)
    weights = {name: t.dtype for (name, state), t in tensors.items() if state == WEIGHTS}
    return Checkpoint(
        format="safetensors",
        path=str(folder.path),
        topology=Topology(),
        tensors=tensors,
        extras={MODULE_EXTRA: Extra(weights)},
        files=tuple(files),
        problems=tuple(problems),
        is_export=True,
    )


def _require_values(path: Path, header: Header) -> None:
    """Refuse a file of parts of tensors, and one of the placeholders that ZeRO-3 leaves."""
    if SHARDING_KEY in header.metadata:
        raise UnsupportedError(
            "the file holds one rank's part of each tensor, and not the tensors",
            file=path,
            found=f"{SHARDING_KEY} in its header, as torch's HuggingFaceStorageWriter writes it",
            next_step="consolidate the files of all ranks with torch "
            "(consolidate_safetensors_files), then convert what that gives",
        )
    if header.entries and all(entry.shape == (0,) for entry in header.entries):
        raise CheckpointError(
            "every tensor of the file is empty: these are the placeholders of ZeRO-3, saved "
            "without gathering the weights",
            file=path,
            found=f"{count_text(len(header.entries), 'tensor')} of shape (0,)",
            next_step="convert the checkpoint of the same run, the folder that latest names",
        )


def _require_first(first: FileSet, found: FileSet, state: str) -> None:
    if first is not found:
        raise CheckpointError(
            "two sets hold the same state, and may be two versions of one model",
            file=first.paths[0],
            state=state,
            found=found.paths[0].name,
            next_step="name the file or the index of one of them",
        )


def _state(found: FileSet, headers: Mapping[Path, Header]) -> str:
    states = {header.metadata.get(STATE_KEY, WEIGHTS) for header in headers.values()}
    if len(states) > 1:
        raise CheckpointError(
            "the files of a set hold different states",
            file=found.paths[0],
            found=", ".join(sorted(states)),
        )
    return states.pop() if states else WEIGHTS


def _tensors(state: str, headers: Mapping[Path, Header]) -> list[StoredTensor]:
    places: dict[str, Path] = {}
    held = []
    for path, header in headers.items():
        for entry in header.entries:
            if places.setdefault(entry.name, path) is not path:
                raise CheckpointError(
                    "a tensor is in two files of a set",
                    file=path,
                    parameter=entry.name,
                    found=places[entry.name].name,
                )
            held.append(_tensor(entry, state, str(path), header))
    return held


def _tensor(entry: Entry, state: str, path: str, header: Header) -> StoredTensor:
    whole: ParamAffineMap = _whole(entry.shape)
    region = Region(path, header.data + entry.start, entry.stop - entry.start)
    return StoredTensor(
        entry.name, state, entry.dtype, whole, {0: region}, Role.PARAMETER, _PROVENANCE
    )


def _require_agreement(found: FileSet, headers: Mapping[Path, Header]) -> None:
    """An index and its files must name the same tensors in the same files."""
    index = found.index
    if index is None:
        return
    held = {entry.name: path.name for path, header in headers.items() for entry in header.entries}
    for name, file in index.weight_map.items():
        if held.get(name) != file:
            raise CheckpointError(
                "the index is stale: a tensor is not in the file that it names",
                file=index.path,
                parameter=name,
                expected=file,
                found=held.get(name, "in no file"),
                next_step="the index and the files are of different saves",
            )
    for name, file in held.items():
        if name not in index.weight_map:
            raise CheckpointError(
                "the index is stale: a file holds a tensor that it does not name",
                file=index.path.with_name(file),
                parameter=name,
                next_step="the index and the files are of different saves",
            )


def _size_problems(found: FileSet, headers: Mapping[Path, Header]) -> Iterator[Problem]:
    index = found.index
    total = sum(header.nbytes - header.data for header in headers.values())
    if index is not None and index.total_size not in (None, total):
        yield Problem(
            f"the index states {index.total_size} as the bytes of its tensors, and there are "
            f"{total}",
            str(index.path),
        )


def _files(found: FileSet, sources: Iterable[SourceFile], state: str) -> Iterator[SourceFile]:
    kind = "weights" if state == WEIGHTS else f"state {state}"
    for source in sources:
        yield replace(source, kind=kind)
    if found.index is not None:
        yield source_file(found.index.path, "index")
