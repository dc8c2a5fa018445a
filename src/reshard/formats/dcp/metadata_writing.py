"""Writes ``.metadata``: an index as the pickle that stock torch reads.

Theory. The pickle is protocol 2, of the same dataclasses that ``FileSystemWriter.finish`` dumps, in
their order. Fields that a version of torch may not know (``transform_descriptors``, a
``StorageMeta`` whose class came with 2.3) are left out, as torch itself does where they are
empty.

Source: ``torch/distributed/checkpoint/metadata.py``, torch 2.3 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard.formats.dcp.index import Chunk, Path, Place, PlaceKey, TensorEntry
from reshard.formats.dcp.metadata import (
    CHUNK,
    GET_LAYOUT,
    INDEX,
    MEMORY_FORMAT,
    OBJECT,
    PROPERTIES,
    ROOT,
    STORAGE_INFO,
    TENSOR,
)
from reshard.formats.dtypes import DType
from reshard.formats.torch_archive import Global, ObjectRecord, Size, Step, write_pickle

VERSION = "1.0.0"
"""``CURRENT_DCP_VERSION`` of torch 2.13."""

_CONTIGUOUS = 0
"""``_MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT``."""


def metadata_pickle(
    tensors: Mapping[str, TensorEntry],
    paths: Mapping[str, Path],
    places: Mapping[PlaceKey, Place],
) -> bytes:
    """The bytes of ``.metadata``.

    Parameters
    ----------
    tensors
        Tensors by FQN.
    paths
        Keys of every entry by FQN; an entry that is no tensor is an object.
    places
        Where each chunk and each object lies.
    """
    properties = _Properties()
    entries = {
        name: _tensor(tensors[name], properties) if name in tensors else _instance(OBJECT, {})
        for name in paths
    }
    numbers: dict[PlaceKey, int] = {
        (name, chunk.offsets): number
        for name, tensor in tensors.items()
        for number, chunk in enumerate(tensor.chunks)
    }
    storage = {_index(key, numbers.get(key)): _info(place) for key, place in places.items()}
    return write_pickle(
        _instance(
            ROOT,
            {
                "state_dict_metadata": entries,
                "planner_data": dict(paths),
                "storage_data": storage,
                "storage_meta": None,
                "version": VERSION,
            },
        )
    )


def _instance(cls: Global, state: object) -> ObjectRecord:
    steps = [Step("state", state)] if state else []
    return ObjectRecord(form="newobj", callable=cls, steps=steps)


class _Properties:
    """One ``TensorProperties`` for each element type, shared by all tensors of it."""

    def __init__(self) -> None:
        self._layout = ObjectRecord(form="reduce", callable=GET_LAYOUT, args=("torch.strided",))
        self._format = ObjectRecord(form="reduce", callable=MEMORY_FORMAT, args=(_CONTIGUOUS,))
        self._made: dict[DType, ObjectRecord] = {}

    def of(self, dtype: DType) -> ObjectRecord:
        found = self._made.get(dtype)
        if found is None:
            state = (dtype, self._layout, False, self._format, False)
            found = self._made[dtype] = _instance(PROPERTIES, state)
        return found


def _tensor(entry: TensorEntry, properties: _Properties) -> ObjectRecord:
    state = {
        "properties": properties.of(entry.dtype),
        "size": Size(entry.shape),
        "chunks": [_chunk(chunk) for chunk in entry.chunks],
    }
    return _instance(TENSOR, state)


def _chunk(chunk: Chunk) -> ObjectRecord:
    return _instance(CHUNK, {"offsets": Size(chunk.offsets), "sizes": Size(chunk.sizes)})


def _index(key: PlaceKey, number: int | None) -> ObjectRecord:
    name, offsets = key
    state: dict[str, object] = {"fqn": name, "index": number}
    if offsets is not None:
        state["offset"] = Size(offsets)
    return _instance(INDEX, state)


def _info(place: Place) -> ObjectRecord:
    state = {"relative_path": place.file, "offset": place.offset, "length": place.nbytes}
    return _instance(STORAGE_INFO, state)
