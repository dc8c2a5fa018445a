"""Reads ``.metadata``: the foreign pickle becomes an :class:`~.index.Index`, or an error.

Theory. The file is ``pickle.dump`` of a ``Metadata`` dataclass: dicts of dataclasses, sizes,
dtypes. Its classes are a closed list, :data:`KNOWN`; a file that names anything else is refused by
that name, and nothing named is imported. What each class holds is checked field by field here,
once.

What torch allows and a reader cannot know how to undo is refused: chunks that went through a
*transform* (compression, encryption by an extension), and tensors that are not strided.

Source: ``torch/distributed/checkpoint/metadata.py``, ``filesystem.py`` (``_StorageInfo``,
``FileSystemWriter.finish``), torch 2.4 and 2.13. Older versions had ``TensorProperties`` in
``torch/distributed/_shard/sharded_tensor/metadata.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath

from reshard.errors import CheckpointError, UnsupportedError, count_text
from reshard.formats.dcp.index import Chunk, Index, Path, Place, PlaceKey, TensorEntry
from reshard.formats.dtypes import DType
from reshard.formats.parsing import Cursor
from reshard.formats.torch_archive import Global, ObjectRecord, read_pickle, short_repr

_METADATA = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"

PROPERTIES = Global(_METADATA, "TensorProperties")
TENSOR = Global(_METADATA, "TensorStorageMetadata")
CHUNK = Global(_METADATA, "ChunkStorageMetadata")
OBJECT = Global(_METADATA, "BytesStorageMetadata")
ROOT = Global(_METADATA, "Metadata")
INDEX = Global(_METADATA, "MetadataIndex")
MEMORY_FORMAT = Global(_METADATA, "_MEM_FORMAT_ENCODING")
STORAGE_META = Global(_METADATA, "StorageMeta")
STORAGE_INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
GET_LAYOUT = Global("torch.serialization", "_get_layout")

KNOWN = frozenset(
    {
        *(
            known.path
            for known in (
                *(PROPERTIES, TENSOR, CHUNK, OBJECT, ROOT, INDEX),
                *(MEMORY_FORMAT, STORAGE_META, STORAGE_INFO, GET_LAYOUT),
            )
        ),
        f"{_SHARDED}.TensorProperties",
        f"{_SHARDED}.MEM_FORMAT_ENCODING",
        "torch.Size",
        "collections.OrderedDict",
        "pathlib.PosixPath",
        "pathlib.WindowsPath",
        "pathlib._local.PosixPath",
        "pathlib._local.WindowsPath",
    }
)
"""The classes and functions that a ``.metadata`` file may name."""

_STRIDED = "torch.strided"
_STATE_LENGTHS = (5, 6)
"""Fields in the state of ``TensorProperties``."""


def read_index(path: FilePath) -> Index:
    """Read the index of a DCP folder.

    Parameters
    ----------
    path
        The file ``.metadata``.

    Raises
    ------
    ArchiveError, HostileFileError
        It is not one whole pickle, or names what an index does not have.
    CheckpointError
        A field is missing or of another kind than torch writes.
    UnsupportedError
        Chunks went through a transform.
    """
    file = str(path)
    root = _fields(Cursor(read_pickle(path, KNOWN), file, ".metadata"), ROOT)
    entries = _at(root, "state_dict_metadata")
    tensors: dict[str, TensorEntry] = {}
    objects = []
    for name, entry in entries.named():
        made_by = _made_by(entry)
        if made_by == TENSOR:
            tensors[name] = _tensor(name, entry)
        elif made_by == OBJECT:
            objects.append(name)
        else:
            raise entry.unexpected("a tensor or bytes of DCP")
    version = root.maybe("version")
    return Index(
        file=file,
        tensors=tensors,
        objects=tuple(objects),
        paths=dict(_paths(root, (*tensors, *objects))),
        places=dict(_places(_at(root, "storage_data"))),
        version=version.text() if version is not None else "",
    )


# --------------------------------------------------------------------------- records


def _made_by(cursor: Cursor) -> object:
    value = cursor.value
    return value.made_by if isinstance(value, ObjectRecord) else None


def _fields(cursor: Cursor, cls: Global) -> Cursor:
    """The attributes of an instance of a class."""
    value = cursor.value
    if not isinstance(value, ObjectRecord) or value.made_by != cls:
        raise cursor.unexpected(f"a {cls.name}")
    return Cursor(value.fields, cursor.file, cursor.path)


def _at(cursor: Cursor, key: str) -> Cursor:
    found = cursor.maybe(key)
    if found is None:
        raise CheckpointError(
            f"the index has no {key}",
            file=cursor.file,
            next_step="the save did not finish, or the file is of an unknown version",
        )
    return found


def _tensor(name: str, cursor: Cursor) -> TensorEntry:
    fields = _fields(cursor, TENSOR)
    shape = _at(fields, "size").shape()
    chunks = tuple(_chunk(chunk, len(shape)) for chunk in _at(fields, "chunks").each())
    return TensorEntry(_dtype(name, _at(fields, "properties")), shape, chunks)


def _chunk(cursor: Cursor, dims: int) -> Chunk:
    fields = _fields(cursor, CHUNK)
    chunk = Chunk(_at(fields, "offsets").shape(), _at(fields, "sizes").shape())
    if not len(chunk.offsets) == len(chunk.sizes) == dims:
        raise cursor.unexpected(f"a box of {count_text(dims, 'dim')}")
    return chunk


def _dtype(name: str, cursor: Cursor) -> DType:
    """The element type, from the state tuple of ``TensorProperties``.

    Versions after 2.13 add strides, which each archive states for itself.
    """
    value = cursor.value
    state = value.state if isinstance(value, ObjectRecord) else None
    if (
        not isinstance(state, tuple)
        or len(state) not in _STATE_LENGTHS
        or not isinstance(state[0], DType)
    ):
        raise cursor.unexpected("(dtype, layout, requires_grad, memory format, pin_memory)")
    layout = state[1]
    word = layout.args[0] if isinstance(layout, ObjectRecord) and layout.args else None
    if word != _STRIDED:
        raise UnsupportedError(
            "a tensor is not strided",
            file=cursor.file,
            parameter=name,
            expected=_STRIDED,
            found=short_repr(word),
        )
    return state[0]


# --------------------------------------------------------------------------- places and paths


def _places(cursor: Cursor) -> Iterator[tuple[PlaceKey, Place]]:
    seen: set[PlaceKey] = set()
    for key, info in cursor.mapping().items():
        at = _fields(Cursor(key, cursor.file, "a key of storage_data"), INDEX)
        name, offset = _at(at, "fqn").text(), at.maybe("offset")
        found = (name, None if offset is None else offset.shape())
        if found in seen:
            raise CheckpointError(
                "the index places one chunk twice", file=cursor.file, parameter=name
            )
        seen.add(found)
        yield found, _place(name, Cursor(info, cursor.file, f"storage_data of {name}"))


def _place(name: str, cursor: Cursor) -> Place:
    fields = _fields(cursor, STORAGE_INFO)
    transforms = fields.maybe("transform_descriptors")
    if transforms is not None and transforms.each():
        raise UnsupportedError(
            "the bytes went through a transform of an extension",
            file=cursor.file,
            parameter=name,
            found=short_repr(transforms.value),
            next_step="load the checkpoint in torch with that extension and save it without",
        )
    file = _at(fields, "relative_path")
    if not _is_inside(file.text()):
        raise CheckpointError(
            "the index names a data file outside of its folder",
            file=cursor.file,
            parameter=name,
            found=short_repr(file.value),
            next_step="get the file again from a source you trust",
        )
    return Place(file.text(), _at(fields, "offset").integer(), _at(fields, "length").integer())


def _is_inside(file: str) -> bool:
    parts = file.split("/")
    return "\0" not in file and all(part not in ("", ".", "..") for part in parts)


def _paths(root: Cursor, names: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """The keys of each entry; a planner that did not flatten leaves the name itself."""
    planned = root.maybe("planner_data")
    known: Mapping[object, object] = {} if planned is None else planned.mapping()
    for name in names:
        path = known.get(name, (name,))
        if (
            not isinstance(path, tuple)
            or not path
            or not all(type(key) in (str, int) for key in path)
        ):
            raise CheckpointError(
                "the index flattened an entry from something that is no path",
                file=root.file,
                parameter=name,
                expected="a tuple of keys",
                found=short_repr(path),
            )
        yield name, path
