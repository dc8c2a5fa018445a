"""Entries at one place: what cannot be one thing is refused, with both names and the place."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

import reshard
from reshard.errors import CheckpointError
from tests.formats.dcp.folders import edit, opened, save, state_dicts, trained
from tests.truth import GOLDEN

UP, NORM = "model.up.weight", "optim.state.norm.weight"
SHARED = "two entries that are not the same lie at one place"
NEXT = "; next: the index was changed, or is of two saves; take another checkpoint"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six parameters, of which `norm.weight`, `norm.bias`, `up.bias` and `gate` have one shape."""
    model, nested = state_dicts(*trained())
    return save({"model": model, "optim": nested}, tmp_path / "ckpt")


def key_of(index: Any, entry: str) -> Any:
    (key,) = (key for key in index.storage_data if key.fqn == entry)
    return key


def point(index: Any, entry: str, other: str) -> None:
    """Say that one entry lies where another does."""
    info = index.storage_data[key_of(index, other)]
    index.storage_data[key_of(index, entry)] = _StorageInfo(
        info.relative_path, info.offset, info.length
    )


def place_of(folder: Path, entry: str) -> str:
    index = pickle.loads((folder / ".metadata").read_bytes())
    info = index.storage_data[key_of(index, entry)]
    return f"bytes {info.offset} to {info.offset + info.length} of {info.relative_path}"


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        opened(folder)
    with pytest.raises(CheckpointError):
        reshard.convert(folder, folder.parent / "out")
    return str(caught.value).replace(str(folder), "CKPT")


PAIRS = [
    (f"{NORM}.exp_avg_sq", f"{NORM}.exp_avg"),
    ("optim.state.norm.bias.exp_avg", f"{NORM}.exp_avg"),
    (f"{NORM}.exp_avg", "model.norm.weight"),
    (f"{NORM}.exp_avg", "model.gate"),
    (f"{NORM}.step", "optim.param_groups.0.lr"),
]


@pytest.mark.parametrize(("entry", "other"), PAIRS)
def test_entries_that_cannot_be_one_thing(folder: Path, entry: str, other: str) -> None:
    order = [key.fqn for key in pickle.loads((folder / ".metadata").read_bytes()).storage_data]
    first, second = sorted((entry, other), key=order.index)
    edit(folder, lambda index: point(index, entry, other))
    assert refusal(folder) == (
        f"{SHARED}: CKPT/.metadata, parameter {second}: expected a place of its own, unless it is "
        f"tied to the other or an equal value, found {first} and {second} at "
        f"{place_of(folder, other)}{NEXT}"
    )


def test_an_entry_that_is_not_read_is_held_to_it_too(tmp_path: Path) -> None:
    model, nested = state_dicts(*trained())
    tree = {"model": model, "optim": nested, "average": {"norm.bias": torch.zeros(5)}}
    folder = save(tree, tmp_path / "ckpt")
    edit(folder, lambda index: point(index, "average.norm.bias", "model.norm.bias"))
    assert refusal(folder).startswith(f"{SHARED}: CKPT/.metadata, parameter ")


class TestTies:
    """`head` is a second name of `embed`, stored once as reshard stores it."""

    @pytest.fixture
    def tied(self, tmp_path: Path) -> Path:
        out = tmp_path / "ckpt"
        reshard.convert(GOLDEN / "odd_z1_dp2_fp32" / "ckpt", out, to="dcp")
        assert opened(out).aliases == {"head.weight": "embed.weight"}
        return out

    @pytest.fixture
    def alone(self, tmp_path: Path) -> Path:
        out = tmp_path / "ckpt"
        source = GOLDEN / "odd_z1_dp2_fp32" / "ckpt"
        reshard.convert(source, out, to="dcp", states=("fp32",))
        assert opened(out).aliases == {"head.weight": "embed.weight"}
        return out

    def refused(self, folder: Path) -> str:
        place = place_of(folder, "model.embed.weight")
        return (
            f"{SHARED}: CKPT/.metadata, parameter model.head.weight: expected a place of its own, "
            "unless it is tied to the other or an equal value, found model.embed.weight and "
            f"model.head.weight at {place}{NEXT}"
        )

    @pytest.mark.parametrize("kind", ["tied", "alone"])
    def test_of_another_shape(self, kind: str, request: pytest.FixtureRequest) -> None:
        folder: Path = request.getfixturevalue(kind)

        def enlarge(index: Any) -> None:
            entry = copy.deepcopy(index.state_dict_metadata["model.head.weight"])
            entry.size = torch.Size((200, 7))
            index.state_dict_metadata["model.head.weight"] = entry

        edit(folder, enlarge)
        assert refusal(folder) == self.refused(folder)

    @pytest.mark.parametrize("kind", ["tied", "alone"])
    def test_of_another_element_type(self, kind: str, request: pytest.FixtureRequest) -> None:
        folder: Path = request.getfixturevalue(kind)

        def retype(index: Any) -> None:
            # One object of the pickle describes both.
            entry = copy.deepcopy(index.state_dict_metadata["model.head.weight"])
            entry.properties.dtype = torch.int32
            index.state_dict_metadata["model.head.weight"] = entry

        edit(folder, retype)
        assert refusal(folder) == self.refused(folder)


def test_two_trained_parameters_are_not_tied(folder: Path) -> None:
    """Each has moments of its own: as an alias, one would lose its weight."""
    edit(folder, lambda index: point(index, "model.norm.bias", "model.norm.weight"))
    line = refusal(folder)
    place = place_of(folder, "model.norm.weight")
    names = {"norm.weight", "norm.bias"}
    (second,) = (name for name in names if f"parameter {name}: " in line)
    (first,) = names - {second}
    assert line == (
        "two parameters that the optimizer trains lie at one place: CKPT/.metadata, parameter "
        f"{second}: expected a place of its own; of tied names the optimizer has one, found "
        f"model.{first} and model.{second} at {place}{NEXT}"
    )


def grow(info: Any) -> None:
    info.length += 1


def shift(info: Any) -> None:
    info.offset -= 1


@pytest.mark.parametrize("change", [grow, shift])
def test_places_that_overlap(folder: Path, change: Callable[[Any], None]) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    ordered = sorted(index.storage_data.items(), key=lambda item: item[1].offset)
    (before, first), (after, second) = ordered[-3], ordered[-2]
    chosen = before if change is grow else after
    edit(folder, lambda index: change(index.storage_data[chosen]))
    starts = [first.offset, second.offset - (change is shift)]
    stops = [first.offset + first.length + (change is grow), sum((starts[1], second.length))]
    assert refusal(folder) == (
        f"the places of two entries overlap: CKPT/.metadata, parameter {after.fqn}: expected a "
        f"place of its own, found {before.fqn} at bytes {starts[0]} to {stops[0]} of __0_0.distcp, "
        f"{after.fqn} at bytes {starts[1]} to {stops[1]} of __0_0.distcp{NEXT}"
    )
