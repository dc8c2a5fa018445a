"""The machine reads every pickle of plain values as the pickle module does."""

from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard.errors import ArchiveError
from reshard.formats.dtypes import DTYPES
from reshard.formats.torch_archive import (
    DefaultDict,
    Device,
    Global,
    LossScaler,
    ObjectRecord,
    Size,
    StorageRecord,
    short_repr,
)
from reshard.formats.torch_archive.construction import Construction
from reshard.formats.torch_archive.machine import Machine
from tests.formats.torch_archive.handmade import STORAGE, named, read_pickle, tensor, text

if TYPE_CHECKING:
    from pathlib import Path

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(1 << 300), max_value=1 << 300)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
KEYS = st.text() | st.integers(-(1 << 62), 1 << 62) | st.tuples(st.text(), st.booleans())
TREES = st.recursive(
    SCALARS | st.binary().map(bytearray) | st.sets(KEYS) | st.frozensets(KEYS),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(KEYS, inner).map(OrderedDict)
    ),
    max_leaves=20,
)


def read(data: bytes) -> object:
    def no_storage(*_: object) -> StorageRecord:
        raise ArchiveError("no storages here")

    construction = Construction("x.pt", len(data), no_storage)
    root, end = Machine(data, construction).run()
    assert end == len(data)
    construction.finish(root)
    return root


def exact(value: object) -> object:
    """Types and values, since 1 == 1.0 == True."""
    if isinstance(value, dict):
        return type(value), [(exact(key), exact(inner)) for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [exact(inner) for inner in value]
    return type(value), value


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(TREES, st.integers(0, 5))
def test_reads_what_pickle_reads(tree: object, protocol: int) -> None:
    data = pickle.dumps(tree, protocol=protocol)
    assert exact(read(data)) == exact(pickle.loads(data))


@pytest.mark.parametrize("protocol", range(6))
def test_shared_and_cyclic_parts_are_one_object(protocol: int) -> None:
    shared = ["x"]
    root = read(pickle.dumps({"a": shared, "b": (shared, shared)}, protocol=protocol))
    assert isinstance(root, dict)
    assert root["a"] is root["b"][0] is root["b"][1]


@pytest.mark.parametrize("protocol", range(6))
def test_long_containers(protocol: int) -> None:
    tree = [list(range(5000)), {number: str(number) for number in range(5000)}]
    assert read(pickle.dumps(tree, protocol=protocol)) == tree


@pytest.mark.parametrize("protocol", range(6))
def test_other_builtins(protocol: int) -> None:
    counted: defaultdict[str, list[int]] = defaultdict(list)
    counted["a"].append(1)
    tree = [range(3, 9, 2), slice(1, None, 2), counted, ValueError, ...]
    found = read(pickle.dumps(tree, protocol=protocol))
    assert isinstance(found, list)
    assert found[:2] == tree[:2]
    assert isinstance(found[2], DefaultDict)
    assert found[2] == {"a": [1]}
    assert found[2].default_factory == Global("builtins", "list")
    assert found[3] == Global("builtins", "ValueError")


def test_texts_of_python_2() -> None:
    assert read(b"U\x03abc.") == read(b"T\x03\0\0\0abc.") == read(b"S'abc'\n.") == "abc"
    assert read(b"V\\u00e9\n.") == "é"


def test_a_state_dict_keeps_its_metadata(tmp_path: Path) -> None:
    pickled = named("collections OrderedDict") + b")R}" + text("_metadata") + b"}sb"
    root = read_pickle(tmp_path, pickled).root
    assert isinstance(root, OrderedDict)
    assert vars(root) == {"_metadata": {}}


def test_torch_values(tmp_path: Path) -> None:
    size = named("torch Size") + b"(K\x02K\x03t\x85R"
    device = named("torch device") + text("cuda") + b"K\x01\x86R"
    pickled = b"(" + size + device + named("torch bfloat16") + named("torch.nn Linear") + b"t"
    root = read_pickle(tmp_path, pickled).root
    assert isinstance(root, tuple)
    assert root == ((2, 3), Device("cuda", 1), DTYPES["bfloat16"], Global("torch.nn", "Linear"))
    assert isinstance(root[0], Size)
    assert repr(root[0]) == "Size(2, 3)"
    assert str(root[1]) == "cuda:1"


def test_tensors_that_share_a_storage(tmp_path: Path) -> None:
    part = tensor(offset=b"K\x01", shape=b"K\x03\x85")
    archive = read_pickle(tmp_path, b"(" + tensor() + part + STORAGE + b"t")
    assert isinstance(archive.root, tuple)
    whole, rest, storage = archive.root
    assert whole.storage is rest.storage is storage
    assert (whole.offset, whole.nbytes) == (storage.offset, 16)
    assert (rest.offset, rest.nbytes, rest.shape) == (storage.offset + 4, 12, (3,))
    assert archive.tensors == (whole, rest)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"shape": b"K\x05\x85"}, "storage '0' is shorter.*expected 20 bytes, found 16 bytes"),
        ({"offset": b"K\x01"}, "expected 20 bytes, found 16 bytes"),
        ({"strides": b"K\x02\x85"}, "expected 28 bytes"),
        ({"strides": b"K\x01K\x01\x86"}, "not as many strides"),
        ({"offset": b"J\xff\xff\xff\xff"}, "out of range"),
        ({"shape": b"J\xff\xff\xff\xff\x85"}, "out of range"),
        ({"strides": b"J\xff\xff\xff\xff\x85"}, "out of range"),
        ({"shape": b"\x88\x85"}, "wrong type"),
        ({"shape": b"G\0\0\0\0\0\0\0\0\x85"}, "wrong type"),
        ({"shape": b"N"}, "not a tuple"),
        ({"storage": b"N"}, "without a storage"),
        ({"rest": b"K\x01" + named("collections OrderedDict") + b")R"}, "requires_grad"),
        ({"rest": b"\x89"}, "wrong number of arguments"),
        ({"shape": b"(" + b"J\xff\xff\xff\x7f" * 3 + b"t", "strides": b"K\0K\0K\0\x87"}, "memory"),
        ({"storage": STORAGE.replace(b"Float", b"Odd")}, "unknown class"),
        ({"storage": STORAGE.replace(b"K\x04t", b"K\x05t")}, "expected 20 bytes, found 16"),
        ({"storage": STORAGE.replace(b"K\x04t", b"\x88t")}, "wrong type"),
        ({"storage": STORAGE.replace(b"X\x01\0\0\x000", b"X\x01\0\0\x007")}, "lacks the bytes"),
        ({"storage": STORAGE.replace(b"X\x01\0\0\x000", b"K\x00")}, "wrong types"),
        ({"storage": STORAGE.replace(b"torch\nFloatStorage", b"torch.storage\nUntypedStorage")},
         "dtype"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_refused(wrong: dict[str, bytes], what: str, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=what) as caught:
        read_pickle(tmp_path, tensor(**wrong))
    assert "handmade.pt" in str(caught.value)


def test_a_storage_has_one_class_and_length(tmp_path: Path) -> None:
    half = STORAGE.replace(b"FloatStorage", b"HalfStorage")
    with pytest.raises(ArchiveError, match="named twice"):
        read_pickle(tmp_path, STORAGE + half + b"\x86")


def test_a_loss_scaler_without_a_scale(tmp_path: Path) -> None:
    scaler = read_pickle(
        tmp_path, named("deepspeed.runtime.fp16.loss_scaler LossScaler") + b")\x81"
    )
    assert isinstance(scaler.root, LossScaler)
    assert not scaler.root.dynamic
    with pytest.raises(ArchiveError, match="cur_scale"):
        _ = scaler.root.cur_scale


def test_what_is_shown_is_short(tmp_path: Path) -> None:
    values = [
        1 << 100_000,
        -(1 << 100_000),
        b"x" * 10_000,
        bytearray(10_000),
        "y" * 10_000,
        OrderedDict.fromkeys(range(10_000)),
        Size(range(10_000)),
        set(range(10_000)),
        [[[[[[[[1]]]]]]]],
        DTYPES["int8"],
    ]
    for value in values:
        assert len(short_repr(value)) < 400
    record = read_pickle(tmp_path, named("m C") + b"(" + b"]" * 20 + b"t\x81").root
    assert repr(record).startswith("m.C([], [], [], ")
    assert len(repr(record)) < 100


def test_records_say_how_they_are_made(tmp_path: Path) -> None:
    pickled = named("m C") + b"K\x01\x85\x81(K\x02K\x03e(K\x04K\x05u}" + text("a") + b"K\x06sb"
    record = read_pickle(tmp_path, pickled).root
    assert isinstance(record, ObjectRecord)
    assert (record.form, record.callable, record.args) == ("newobj", Global("m", "C"), (1,))
    assert record.list_items == [2, 3]
    assert record.dict_items == [(4, 5)]
    assert record.fields == {"a": 6}
    assert record.type_name == "m.C"
    assert repr(record) == "m.C(1, a=6, [2, 3], [(4, 5)])"


@pytest.mark.parametrize(
    ("pickled", "what"),
    [
        (named("deepspeed.utils.tensor_fragment fragment_address") + b")\x81}b", "numel"),
        (named("deepspeed.runtime.zero.config ZeroStageEnum") + text("x") + b"\x85R", "value"),
        (named("deepspeed.checkpoint.universal_checkpoint SubparamShape") + b")\x81", "patterns"),
        (named("numpy dtype") + b"K\x01\x85R", "type code"),
        (named("numpy.core.multiarray scalar") + b"N\x85R", "dtype"),
        (named("numpy.core.multiarray _reconstruct") + named("numpy ndarray") + b"\x85R", "state"),
    ],
)
def test_known_classes_have_their_fields(pickled: bytes, what: str, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=what) as caught:
        read_pickle(tmp_path, pickled)
    assert "handmade.pt" in str(caught.value)
