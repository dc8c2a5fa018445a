"""Objects of any class come back as inert records and are written back as they were."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import functools
import io
import pathlib
import random
import signal
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from reshard.formats.torch_archive import (
    FRAGMENT_ADDRESS,
    ZERO_STAGE,
    Archive,
    EnumRecord,
    FragmentAddress,
    Global,
    Namespace,
    NumpyArray,
    NumpyScalar,
    ObjectRecord,
    SubparamShape,
    read_archive,
    same_value,
    write_archive,
)
from tests.formats.torch_archive import foreign

if TYPE_CHECKING:
    from pathlib import Path

    Loaded = object


def again(folder: Path, value: object, protocol: int = 2) -> tuple[Archive, object]:
    """Save with torch, read, write, load with torch."""
    path, copy = folder / "saved.pt", folder / "copy.pt"
    torch.save(value, path, pickle_protocol=protocol)
    archive = read_archive(path)
    write_archive(copy, archive.root)
    assert same_value(archive.root, read_archive(copy).root)
    return archive, torch.load(copy, weights_only=False)


def _registry() -> foreign.Registry:
    return foreign.Registry({"a": 1, "b": [2]}, owner="me")


OBJECTS = [
    foreign.Config(hidden=9),
    foreign.Slotted(1, foreign.Slotted(2)),
    _registry(),
    foreign.Names(["x", "y"]),
    foreign.Members({"x", "y", "z"}),
    foreign.Pair(1, 2),
    foreign.Keyword(size=4),
    foreign.Stateful([1, {"x": 2}]),
    foreign.Rebuilt((1, "two")),
    foreign.Colour.BLUE,
    {foreign.Colour.RED: 1, foreign.Colour.BLUE: 2},
    foreign.Outer.Inner(5),
    foreign.Ordered(a=1, b=2),
    [foreign.Config, foreign.Outer.Inner, foreign.rebuilt, collections.OrderedDict],
    argparse.Namespace(lr=0.1, betas=(0.9, 0.95), name="run"),
    SimpleNamespace(a=1),
    dt.datetime(2026, 11, 29, 1, 2, 3, tzinfo=dt.timezone.utc),
    dt.timedelta(days=1, seconds=2),
    decimal.Decimal("1.50"),
    uuid.UUID(int=7),
    pathlib.PurePosixPath("/a/b/../c"),
    deque([1, 2, 3], maxlen=5),
    Counter("hello"),
    defaultdict(functools.partial(dict, a=1), {"x": {}}),
    range(3, 30, 4),
    slice(None, 3),
    1 + 2j,
    bytearray(b"\x00\xff"),
    frozenset([1, "x", (2, 3)]),
    {"deep": [({"s": {1, 2}},)]},
    torch.Size([2, 3]),
    torch.device("cuda:3"),
    torch.device("cpu"),
    torch.float8_e4m3fn,
    torch.strided,
    np.float32(1.5),
    np.dtype("int16"),
    ...,
    NotImplemented,
    type(None),
    ValueError("bad", 3),
    TypeError,
]


@pytest.mark.parametrize("value", OBJECTS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_written_back_as_it_was(value: object, protocol: int, tmp_path: Path) -> None:
    _, loaded = again(tmp_path, value, protocol)
    assert type(loaded) is type(value)
    if isinstance(value, Exception):
        assert isinstance(loaded, Exception)
        assert loaded.args == value.args
    elif isinstance(value, defaultdict):
        assert isinstance(loaded, defaultdict)
        assert dict(loaded) == dict(value)
        assert loaded["new"] == {"a": 1}
    else:
        assert loaded == value
        if hasattr(value, "__dict__") and not isinstance(value, type):
            assert vars(loaded) == vars(value)


def test_objects_that_point_at_each_other(tmp_path: Path) -> None:
    root = foreign.Node()
    root.add().add()
    root.add()
    _, loaded = again(tmp_path, {"tree": root, "same": root})
    assert isinstance(loaded, dict)
    tree = loaded["tree"]
    assert loaded["same"] is tree
    assert [child.parent is tree for child in tree.children] == [True, True]
    assert tree.children[0].children[0].parent is tree.children[0]


def test_a_tuple_that_holds_itself_through_an_object(tmp_path: Path) -> None:
    box = foreign.Stateful(None)
    box.value = (box, 1, 2, 3, 4)
    _, loaded = again(tmp_path, box)
    assert isinstance(loaded, foreign.Stateful)
    assert isinstance(loaded.value, tuple)
    assert loaded.value[0] is loaded
    single = foreign.Config()
    single.names = (single,)  # type: ignore[assignment]
    _, loaded = again(tmp_path, [single.names, single])
    assert isinstance(loaded, list)
    assert loaded[0][0] is loaded[1]


def test_whole_modules_and_schedulers(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    tree = {"module": module, "state": module.state_dict(), "lr": schedule.state_dict()}
    archive, loaded = again(tmp_path, tree)
    assert isinstance(loaded, dict)
    for name, tensor in module.state_dict().items():
        assert torch.equal(loaded["module"].state_dict()[name], tensor)
        assert torch.equal(loaded["state"][name], tensor)
    assert loaded["state"]._metadata == module.state_dict()._metadata  # type: ignore[attr-defined]
    assert loaded["lr"] == schedule.state_dict()
    # The module and its state dict share their storages.
    assert len(archive.storages) == len(module.state_dict())


def test_numpy_random_state(tmp_path: Path) -> None:
    legacy = np.random.RandomState(3)
    generator = np.random.default_rng(5)
    tree = {
        "np_rng_state": legacy.get_state(),
        "generator": generator,
        "random_rng_state": random.Random(7).getstate(),
        "torch_rng_state": torch.get_rng_state(),
        "scalar": np.int64(7),
    }
    archive, loaded = again(tmp_path, tree)
    assert isinstance(archive.root, dict)
    keys = archive.root["np_rng_state"][1]
    assert isinstance(keys, NumpyArray)
    assert (keys.dtype.code, keys.shape, keys.is_fortran) == ("<u4", (624,), False)
    assert isinstance(keys.data, bytes)
    assert keys.data == legacy.get_state()[1].tobytes()  # type: ignore[index]
    scalar = archive.root["scalar"]
    assert isinstance(scalar, NumpyScalar)
    assert (scalar.dtype.code, scalar.data) == ("<i8", np.int64(7).tobytes())
    assert isinstance(loaded, dict)
    legacy.set_state(loaded["np_rng_state"])
    assert loaded["random_rng_state"] == tree["random_rng_state"]
    assert loaded["generator"].random() == generator.random()
    assert torch.equal(loaded["torch_rng_state"], torch.get_rng_state())


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array(["a", None, 3], dtype=object),
        np.array([(1, 2.0)], dtype=[("x", "i4"), ("y", "f8")]),
        np.array([], dtype="bool"),
        np.array(3),
        np.array(["text", "more"]),
        np.array(["2026-11-29"], dtype="datetime64[D]"),
        np.ma.masked_array([1, 2], mask=[True, False]),
    ],
    ids=lambda array: str(array.dtype),
)
def test_numpy_arrays(array: np.ndarray, tmp_path: Path) -> None:
    archive, loaded = again(tmp_path, array)
    assert isinstance(loaded, np.ndarray)
    assert loaded.dtype == array.dtype
    assert loaded.tolist() == array.tolist()
    if isinstance(archive.root, NumpyArray):
        assert archive.root.shape == array.shape
        assert archive.root.dtype.is_structured == (array.dtype.names is not None)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_of_every_kind(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.arange(3.0))
    parameter.tag = "x"  # type: ignore[attr-defined]
    flat = torch.zeros(4, requires_grad=True)
    flat.ds_id = "0_8"  # type: ignore[attr-defined]
    base = torch.arange(12.0)
    tree: dict[str, torch.Tensor] = {
        "base": base,
        "view": base[3:9].view(2, 3).t(),
        "parameter": parameter,
        "frozen": torch.nn.Parameter(base[:2], requires_grad=False),
        "flat": flat,
        "tagged": torch.ones(2).as_subclass(foreign.Tagged),
        "sparse": torch.eye(3).to_sparse(),
        "quantised": torch.quantize_per_tensor(torch.ones(2), 0.5, 1, torch.qint8),
        "meta": torch.empty(3, device="meta"),
        "conj": torch.tensor([1 + 2j]).conj(),
        "u16": torch.tensor([1, 2], dtype=torch.uint16),
        "f8": torch.ones(2).to(torch.float8_e5m2),
        "empty": torch.empty(0),
    }
    _, loaded = again(tmp_path, tree)
    assert isinstance(loaded, dict)
    assert list(loaded) == list(tree)
    for name, tensor in tree.items():
        found = loaded[name]
        assert type(found) is type(tensor)
        assert (found.dtype, found.shape, found.stride() if not found.is_sparse else ()) == (
            tensor.dtype,
            tensor.shape,
            tensor.stride() if not tensor.is_sparse else (),
        )
        assert found.requires_grad == tensor.requires_grad
        assert vars(found) == vars(tensor)
        if name in ("f8", "u16"):
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
        elif name == "sparse":
            assert torch.equal(found.to_dense(), tensor.to_dense())
        elif name != "meta":
            assert torch.equal(found, tensor)
    shared = loaded["base"].untyped_storage().data_ptr()
    assert loaded["view"].untyped_storage().data_ptr() == shared
    assert loaded["frozen"].untyped_storage().data_ptr() == shared


def test_a_bare_storage(tmp_path: Path) -> None:
    _, loaded = again(tmp_path, [torch.arange(3, dtype=torch.uint8).untyped_storage()])
    assert isinstance(loaded, list)
    assert bytes(loaded[0]) == b"\0\1\2"


def test_trees_of_several_archives_in_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        torch.save({"w": torch.full((3,), float(ord(name)))}, tmp_path / f"{name}.pt")
    both = {name: read_archive(tmp_path / f"{name}.pt").root for name in ("a", "b")}
    write_archive(tmp_path / "both.pt", both)
    loaded = torch.load(tmp_path / "both.pt")
    assert loaded["a"]["w"].tolist() == [97.0] * 3
    assert loaded["b"]["w"].tolist() == [98.0] * 3


def test_records_made_from_nothing(tmp_path: Path) -> None:
    made = [
        EnumRecord.of(ZERO_STAGE, 2),
        FragmentAddress.of(numel=3, start=4),
        SubparamShape.of(["^w$"], [(1, 2), 3], 0),
    ]
    path = tmp_path / "made.pt"
    write_archive(path, made)
    root = read_archive(path).root
    assert isinstance(root, list)
    stage, fragment, shape = root
    assert isinstance(stage, EnumRecord)
    assert stage.value == 2
    assert isinstance(fragment, FragmentAddress)
    assert fragment.callable == FRAGMENT_ADDRESS
    assert (fragment.numel, fragment.start) == (3, 4)
    assert isinstance(shape, SubparamShape)
    assert (shape.patterns, shape.shape, shape.partition_dim) == (["^w$"], [(1, 2), 3], 0)
    assert repr(fragment) == "deepspeed.utils.tensor_fragment.fragment_address(numel=3, start=4)"


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_buffer_of_extra_state_is_written_back_with_its_bytes(
    protocol: int, tmp_path: Path
) -> None:
    buffer, line = io.BytesIO(b"\0\xffstate"), io.StringIO("text\n")
    buffer.seek(3)
    saved = {"layer._extra_state": buffer, "log": line, "exit_signal": signal.SIGTERM}
    archive, loaded = again(tmp_path, saved, protocol)
    assert {"_io.BytesIO", "_io.StringIO", "signal.Signals"} <= set(archive.globals)
    assert isinstance(loaded, dict)
    found = loaded["layer._extra_state"]
    assert (found.getvalue(), found.tell()) == (b"\0\xffstate", 3)
    assert loaded["log"].getvalue() == "text\n"
    assert loaded["exit_signal"] is signal.SIGTERM


def test_what_is_shown_of_a_record(tmp_path: Path) -> None:
    archive, _ = again(tmp_path, [foreign.Config(), argparse.Namespace(lr=0.1)])
    assert isinstance(archive.root, list)
    config, namespace = archive.root
    assert repr(config) == (
        "tests.formats.torch_archive.foreign.Config(hidden=8, names=['a', 'b'])"
    )
    assert isinstance(namespace, Namespace)
    assert namespace.fields == {"lr": 0.1}
    assert isinstance(config, ObjectRecord)
    assert config.callable == Global("tests.formats.torch_archive.foreign", "Config")
    assert archive.globals == ("argparse.Namespace", "tests.formats.torch_archive.foreign.Config")


def test_same_value_tells_what_differs(tmp_path: Path) -> None:
    values: list[object] = [
        1,
        True,
        1.0,
        -0.0,
        0.0,
        float("nan"),
        "1",
        [1],
        (1,),
        {"a": 1},
        OrderedDict(a=1),
        {"a": True},
        {1: 2},
        {True: 2},
        {"b": 1},
        {"a": 1, "b": 2},
        foreign.Config(1),
        foreign.Config(2),
        foreign.Colour.RED,
        {foreign.Colour.RED: 1},
        {foreign.Colour.BLUE: 1},
        {foreign.Colour.BLUE},
        {foreign.Colour.RED},
        frozenset("x"),
        torch.zeros(2),
        torch.zeros(2, 1),
        torch.ones(2),
        torch.zeros(2, requires_grad=True),
        torch.nn.Parameter(torch.zeros(2)),
        torch.zeros(2, dtype=torch.float16),
        np.zeros(2),
        np.zeros(2, dtype="f4"),
        defaultdict(int, {"a": 1}),
        defaultdict(bool, {"a": 1}),
        1j,
    ]
    one, other = tmp_path / "one.pt", tmp_path / "other.pt"
    for path in (one, other):
        torch.save(values, path)
    mine, theirs = read_archive(one).root, read_archive(other).root
    assert isinstance(mine, list)
    assert isinstance(theirs, list)
    for row, left in enumerate(mine):
        for column, right in enumerate(theirs):
            assert same_value(left, right) == (row == column), (left, right)
