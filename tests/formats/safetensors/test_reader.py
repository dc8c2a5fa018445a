"""Reading sets that others wrote: files, shards, indexes, and everything that can be stale."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import reshard
from reshard.errors import (
    ArchiveError,
    CheckpointError,
    MissingFileError,
    UnsupportedError,
    UsageError,
)

library = pytest.importorskip("safetensors.torch")
hub = pytest.importorskip("huggingface_hub")

WEIGHTS = {
    "embed.weight": torch.arange(24, dtype=torch.float32).view(6, 4),
    "norm.weight": torch.tensor([1.5, -0.0, float("nan"), 1e-42]).bfloat16(),
    "steps": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "nothing": torch.zeros(0, 3),
}


def save_sharded(folder: Path, weights: dict[str, torch.Tensor], limit: int) -> Path:
    """Save as transformers does: ``huggingface_hub`` cuts, the library writes."""
    folder.mkdir(exist_ok=True)
    split = hub.split_torch_state_dict_into_shards(weights, max_shard_size=limit)
    for file, names in split.filename_to_tensors.items():
        library.save_file({name: weights[name] for name in names}, folder / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A set of several files."""
    return save_sharded(tmp_path / "model", WEIGHTS, 40)


def bits(value: object) -> tuple[str, tuple[int, ...], bytes]:
    """An array or a tensor as element type, shape and bytes."""
    if isinstance(value, torch.Tensor):
        flat = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        return str(value.dtype).removeprefix("torch."), tuple(value.shape), flat.tobytes()
    array = np.asarray(value)
    return str(array.dtype), array.shape, array.tobytes()


@pytest.mark.parametrize("limit", [40, 10**9])
def test_every_tensor_is_read_bit_for_bit(limit: int, tmp_path: Path) -> None:
    found = reshard.read(save_sharded(tmp_path / "model", WEIGHTS, limit))
    assert {name: bits(array) for name, array in found.items()} == {
        name: bits(tensor) for name, tensor in WEIGHTS.items()
    }


def test_a_file_may_be_named_or_its_index(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    names = set(reshard.open_checkpoint(sharded).names)
    assert set(reshard.open_checkpoint(index).names) == names
    first = next(sharded.glob("model-00001-*"))
    assert set(reshard.open_checkpoint(first).names) == names


def test_one_of_several_sets_is_chosen_by_naming_it(tmp_path: Path) -> None:
    library.save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    library.save_file({"a": torch.zeros(2)}, tmp_path / "ema.safetensors")
    with pytest.raises(CheckpointError, match=r"two sets hold the same state.*name the file"):
        reshard.open_checkpoint(tmp_path)
    assert reshard.read(tmp_path / "ema.safetensors")["a"].tolist() == [0, 0]


def test_weights_beside_a_trainers_checkpoint_do_not_hide_it(tmp_path: Path) -> None:
    library.save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "latest").write_text("step9")
    with pytest.raises(MissingFileError, match="names a folder that is not there: 'step9'"):
        reshard.open_checkpoint(tmp_path)
    assert reshard.open_checkpoint(tmp_path / "model.safetensors").format == "safetensors"


def test_a_whole_row_of_files_needs_no_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert set(reshard.open_checkpoint(sharded).names) == set(WEIGHTS)


def test_files_of_one_set_may_lie_in_two_folders(sharded: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    shutil.move(next(sharded.glob("model-00002-*")), other)
    with pytest.raises(MissingFileError, match="the index names a file that is not there"):
        reshard.open_checkpoint(sharded)
    assert set(reshard.open_checkpoint(sharded, also=[other]).names) == set(WEIGHTS)


def test_a_wrong_total_is_a_problem_and_no_refusal(sharded: Path) -> None:
    edit_index(sharded, lambda index: index["metadata"].update(total_size=1))
    problems = reshard.open_checkpoint(sharded).problems
    assert "the index states 1 as the bytes of its tensors, and there are" in str(problems[0])


@pytest.mark.parametrize(
    ("stated", "shown"),
    [
        ('"x"', "'x'"),
        ("NaN", "nan"),
        ("1e400", "inf"),
        ("true", "True"),
        ("[1]", "list"),
        ("12.5", "12.5"),
        ("9" * 4000, "a number beyond 2^64"),
    ],
)
def test_a_total_that_is_no_number_is_a_problem(stated: str, shown: str, sharded: Path) -> None:
    edit_index(sharded, lambda index: index["metadata"].update(total_size=987654))
    index = sharded / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("987654", stated))
    (problem,) = reshard.open_checkpoint(sharded).problems
    assert problem.what.startswith(f"the index states {shown} as the bytes of its tensors, ")


def test_a_total_may_be_a_float(sharded: Path) -> None:
    edit_index(
        sharded,
        lambda index: index["metadata"].update(total_size=float(index["metadata"]["total_size"])),
    )
    assert reshard.open_checkpoint(sharded).problems == ()


def test_there_is_no_layout_to_state(sharded: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.json"
    rules.write_text('{"layouts": {}}')
    with pytest.raises(UsageError, match="holds whole tensors, so there is no layout to state"):
        reshard.open_checkpoint(sharded, layout=rules)


# --------------------------------------------------------------------------- stale and broken


def edit_index(folder: Path, change: object) -> None:
    """Change an index file."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)  # type: ignore[operator]
    path.write_text(json.dumps(index))


def refused(folder: Path, kind: type[Exception], said: str, tmp_path: Path) -> None:
    """The folder is refused by every verb that would read it, and nothing is written."""
    with pytest.raises(kind, match=said):
        reshard.open_checkpoint(folder)
    with pytest.raises(kind, match=said):
        reshard.convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_shard_is_refused(sharded: Path, tmp_path: Path) -> None:
    gone = next(sharded.glob("model-00002-*"))
    gone.unlink()
    said = f"the index names a file that is not there: .*{gone.name}"
    refused(sharded, MissingFileError, said, tmp_path)


def test_a_missing_shard_is_refused_without_an_index_too(sharded: Path, tmp_path: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    gone = next(sharded.glob("model-00002-*"))
    gone.unlink()
    refused(sharded, MissingFileError, f"a file of the set is missing: .*{gone.name}", tmp_path)


def test_an_index_that_names_a_tensor_elsewhere_is_stale(sharded: Path, tmp_path: Path) -> None:
    first = next(sharded.glob("model-00001-*")).name
    edit_index(sharded, lambda index: index["weight_map"].update(steps=first))
    said = f"the index is stale: a tensor is not in the file that it names: .*steps: .*{first}"
    refused(sharded, CheckpointError, said, tmp_path)


def test_an_index_that_names_a_tensor_too_many_is_stale(sharded: Path, tmp_path: Path) -> None:
    first = next(sharded.glob("model-00001-*")).name
    edit_index(sharded, lambda index: index["weight_map"].update(more=first))
    refused(sharded, CheckpointError, "parameter more: .*found in no file", tmp_path)


def test_an_index_that_does_not_name_a_tensor_is_stale(sharded: Path, tmp_path: Path) -> None:
    edit_index(sharded, lambda index: index["weight_map"].pop("steps"))
    said = "the index is stale: a file holds a tensor that it does not name: .*parameter steps"
    refused(sharded, CheckpointError, said, tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00009.safetensors"])
def test_a_file_beside_the_index_is_stale(name: str, sharded: Path, tmp_path: Path) -> None:
    library.save_file({"a": torch.ones(1)}, sharded / name)
    said = f"a file of the set is not named by its index: .*{name}"
    refused(sharded, CheckpointError, said, tmp_path)


def test_rows_of_two_saves_in_one_folder_are_refused(sharded: Path, tmp_path: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    library.save_file({"a": torch.ones(1)}, sharded / "model.safetensors")
    refused(sharded, CheckpointError, "files of two sets lie in one folder", tmp_path)


def test_a_tensor_in_two_files_is_refused(sharded: Path, tmp_path: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    paths = sorted(sharded.glob("*.safetensors"))
    shutil.copy(paths[0], paths[1])
    refused(sharded, CheckpointError, "a tensor is in two files of a set", tmp_path)


@pytest.mark.parametrize("where", ["../model.safetensors", "/etc/x.safetensors", "notes.txt"])
def test_an_index_that_leads_away_is_refused(where: str, sharded: Path, tmp_path: Path) -> None:
    edit_index(sharded, lambda index: index["weight_map"].update(steps=where))
    said = "unexpected content at weight_map.steps: .*the name of a .safetensors file beside"
    refused(sharded, CheckpointError, said, tmp_path)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("", ArchiveError, "the index is no sound JSON"),
        ("[" * 100_000, ArchiveError, "the index is no sound JSON"),
        ('{"weight_map": {"a": "x", "a": "y"}}', ArchiveError, "a name is there twice"),
        ("{}", CheckpointError, "a key is missing: weight_map"),
        ('{"weight_map": []}', CheckpointError, "unexpected content at weight_map"),
        ('{"weight_map": {"a": 1}}', CheckpointError, "weight_map.a: .*expected text, found int"),
        (
            '{"weight_map": {"a": "../b.safetensors"}}',
            CheckpointError,
            "file beside the index, found '../b.safetensors'$",
        ),
        ('{"weight_map": {"a": "b.bin"}}', CheckpointError, "beside the index, found 'b.bin'$"),
    ],
)
def test_an_index_that_is_none_is_refused(
    text: str, kind: type[Exception], said: str, sharded: Path, tmp_path: Path
) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    refused(sharded, kind, said, tmp_path)


def test_a_file_cut_short_is_refused(sharded: Path, tmp_path: Path) -> None:
    path = next(sharded.glob("model-00001-*"))
    path.write_bytes(path.read_bytes()[:-1])
    refused(sharded, ArchiveError, f"the file is cut short: .*{path.name}", tmp_path)


def test_a_file_with_more_bytes_is_refused(sharded: Path, tmp_path: Path) -> None:
    path = next(sharded.glob("model-00001-*"))
    path.write_bytes(path.read_bytes() + b"\0")
    refused(sharded, ArchiveError, "there are bytes after the last tensor", tmp_path)


def test_an_empty_set_is_refused(tmp_path: Path) -> None:
    library.save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(MissingFileError, match="the files hold no tensor"):
        reshard.open_checkpoint(tmp_path)


def test_files_of_one_set_that_state_two_states_are_refused(tmp_path: Path) -> None:
    for number, state in ((1, "exp_avg"), (2, "exp_avg_sq")):
        path = tmp_path / f"model-{number:05d}-of-00002.safetensors"
        library.save_file({f"w{number}": torch.ones(1)}, path, {"reshard_state": state})
    with pytest.raises(CheckpointError, match="the files of a set hold different states"):
        reshard.open_checkpoint(tmp_path)


def test_a_rank_s_part_is_not_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    said = {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [0, 0]}}'}
    library.save_file({"w": torch.ones(2, 3)}, path, metadata=said)
    with pytest.raises(UnsupportedError, match="one rank's part of each tensor"):
        reshard.open_checkpoint(path)


def test_placeholders_are_not_weights(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    library.save_file({"a": torch.empty(0), "b": torch.empty(0)}, path)
    with pytest.raises(CheckpointError, match="the placeholders of ZeRO-3"):
        reshard.open_checkpoint(path)
    library.save_file({"a": torch.empty(0), "b": torch.ones(2)}, path)
    assert set(reshard.open_checkpoint(path).names) == {"a", "b"}
