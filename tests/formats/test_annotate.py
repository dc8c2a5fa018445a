"""Annotating: maps added, everything else as it was, and accepted by DeepSpeed's own converter."""

from __future__ import annotations

import filecmp
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard.errors import CheckpointError, LayoutError, UsageError
from reshard.execution import execute
from reshard.formats.deepspeed import annotate
from reshard.formats.deepspeed.annotate import Annotated, lay_out_annotated
from reshard.formats.folders import resolve_folder
from reshard.formats.manifest import MANIFEST_NAME
from reshard.formats.stated_layouts import StatedLayouts
from reshard.planning import plan
from tests.formats.edited import (
    LLAMA,
    Info,
    converted,
    model_files,
    nothing,
    opened,
    stated,
    with_info,
    without_map,
    wrong_states,
)
from tests.truth import Case, by_name, case_named, cases, with_undescribed_cuts

needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is of Python 3.11")

OLD_LLAMA = LLAMA.replace("(weight|bias)", "weight") + "'lm_head\\.weight' = \"replicated\"\n"
LLAMA_CASE = "golden/llama_z1_tp2dp2_fp32"
NEW_LLAMA = LLAMA.replace("(weight|bias)", "weight") + (
    "'lm_head\\.weight' = { layout = \"column_parallel\", original_vocab_size = 97 }\n"
)


def annotated(tag: Path, out: Path, layouts: StatedLayouts | None = None) -> Annotated:
    """Write a checkpoint again with maps."""
    made = lay_out_annotated(resolve_folder(tag), tag=out.name, stated=layouts)
    job = plan(made.source, made.target)
    execute(job, out, workers=2, max_memory=16 << 20, fsync=False)
    return made


def info_of(tag: Path) -> Info:
    file = min(model_files(tag))
    info = torch.load(file, weights_only=False)["universal_checkpoint_info"]
    assert isinstance(info, dict)
    return info


def tp_cases() -> list[Case]:
    return [case for case in cases() if case.tp > 1 and case.tp_is_described and case.is_zero]


# ------------------------------------------------------------------------------ what changes


@pytest.mark.parametrize("case", by_name(tp_cases()))
def test_nothing_changes_but_the_info(case: Case, tmp_path: Path) -> None:
    source = with_info(case, tmp_path, without_map)
    annotated(source, tmp_path / "out")
    names = {file.name for file in source.iterdir()}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names | {MANIFEST_NAME}
    for name in names:
        if source / name in model_files(source):
            assert_same_but_the_info(source / name, tmp_path / "out" / name)
        else:
            assert filecmp.cmp(source / name, tmp_path / "out" / name, shallow=False), name


def assert_same_but_the_info(before: Path, after: Path) -> None:
    left, right = (torch.load(file, weights_only=False) for file in (before, after))
    assert list(left) == list(right)
    old, new = (content.pop("universal_checkpoint_info") for content in (left, right))
    assert [key for key in new if key not in old] == ["affine_map"]
    new.pop("affine_map")
    assert old == new
    assert_same(left, right)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the whole storage, also what the tensor does not show of it."""
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape, left.stride()) == (right.dtype, right.shape, right.stride())
        assert bytes_of(left) == bytes_of(right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key, value in left.items():
            assert_same(value, right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif hasattr(left, "__dict__"):
        assert_same(vars(left), vars(right))
    else:
        assert left == right


def test_every_parameter_gets_a_map_and_is_read_by_it(tmp_path: Path) -> None:
    case = case_named("golden/llama_z1_tp2_frozen")
    source = with_info(case, tmp_path, without_map)
    annotated(source, tmp_path / "out")
    checkpoint = opened(tmp_path / "out")
    told = {tensor.provenance for tensor in checkpoint.tensors.values()}
    assert told - {"buffer, whole on every rank"} == {"stored map"}
    assert wrong_states(case, converted(checkpoint, tmp_path / "universal")) == []


def test_annotating_twice_changes_nothing_more(tmp_path: Path) -> None:
    case = case_named(LLAMA_CASE)
    annotated(case.tag_path, tmp_path / "one")
    annotated(tmp_path / "one", tmp_path / "two")
    for file in (tmp_path / "one").glob("*.pt"):
        assert filecmp.cmp(file, tmp_path / "two" / file.name, shallow=False), file.name


def test_stored_maps_stay_as_they_are(tmp_path: Path) -> None:
    case = case_named(LLAMA_CASE)
    annotated(case.tag_path, tmp_path / "out")
    assert info_of(tmp_path / "out") == info_of(case.tag_path)


@pytest.mark.parametrize("version", [0.2, 0.3, 0.4])
def test_the_stated_version_stays(version: float, tmp_path: Path) -> None:
    def edit(info: Info) -> Info:
        return {**without_map(info), "universal_checkpoint_version": version}

    source = with_info(case_named(LLAMA_CASE), tmp_path, edit)
    annotated(source, tmp_path / "out")
    assert info_of(tmp_path / "out")["universal_checkpoint_version"] == version


def test_maps_are_plain_data(tmp_path: Path) -> None:
    source = with_info(case_named(LLAMA_CASE), tmp_path, without_map)
    annotated(source, tmp_path / "out")
    pending: list[Any] = [info_of(tmp_path / "out")["affine_map"]]
    while pending:
        value = pending.pop()
        assert type(value) in (dict, list, int, float, str)
        pending += [*value, *value.values()] if isinstance(value, dict) else []
        pending += value if isinstance(value, list) else []


# ------------------------------------------------------------------------------ without metadata


@needs_toml
def test_a_new_info_has_old_keys_too(tmp_path: Path) -> None:
    source = with_info(case_named(LLAMA_CASE), tmp_path, nothing)
    annotated(source, tmp_path / "out", stated(tmp_path, NEW_LLAMA))
    info = info_of(tmp_path / "out")
    assert info["universal_checkpoint_version"] == 0.4
    assert r"^model\.norm\.weight$" in info["tp_replicated_parameter_patterns"]
    rows = info["parameter_with_row_parallelism_patterns"]
    assert r"^model\.layers\.0\.self_attn\.o_proj\.weight$" in rows
    del info["affine_map"]
    case = case_named(LLAMA_CASE)
    by_keys = with_info(case, tmp_path / "keys", lambda _: info)
    assert wrong_states(case, converted(opened(by_keys), tmp_path / "universal")) == []


@needs_toml
@pytest.mark.parametrize("case", by_name(with_undescribed_cuts()))
def test_an_old_checkpoint_opens_without_its_layout_file_afterwards(
    case: Case, tmp_path: Path
) -> None:
    annotated(case.tag_path, tmp_path / "out", stated(tmp_path, OLD_LLAMA))
    out = converted(opened(tmp_path / "out"), tmp_path / "universal")
    assert wrong_states(case, out) == []


def test_what_is_not_known_is_not_annotated(tmp_path: Path) -> None:
    source = with_info(case_named(LLAMA_CASE), tmp_path, nothing)
    with pytest.raises(LayoutError, match=r"12 parameters .* not known"):
        lay_out_annotated(resolve_folder(source), tag="out")


# ------------------------------------------------------------------------------ edges


def test_other_files_and_folders_come_along(tmp_path: Path) -> None:
    tag = tmp_path / "tag"
    shutil.copytree(case_named(LLAMA_CASE).tag_path, tag)
    (tag / "notes").mkdir()
    (tag / "notes" / "empty.txt").touch()
    (tag / "notes" / "a.bin").write_bytes(bytes(range(256)) * 9)
    annotated(tag, tmp_path / "out")
    assert (tmp_path / "out/notes/empty.txt").read_bytes() == b""
    assert (tmp_path / "out/notes/a.bin").read_bytes() == bytes(range(256)) * 9


def test_node_local_folders_are_put_together(tmp_path: Path) -> None:
    case = case_named(LLAMA_CASE)
    for node, mp in (("a", "00"), ("b", "01")):
        for file in case.tag_path.glob(f"*mp_rank_{mp}_*"):
            (tmp_path / node).mkdir(exist_ok=True)
            shutil.copy(file, tmp_path / node)
    folder = resolve_folder(tmp_path / "a", [str(tmp_path / "b")])
    made = lay_out_annotated(folder, tag="out")
    execute(plan(made.source, made.target), tmp_path / "out", workers=1, max_memory=16 << 20)
    assert wrong_states(case, converted(opened(tmp_path / "out"), tmp_path / "universal")) == []


def test_the_pointer_file_is_deepspeeds(tmp_path: Path) -> None:
    tag = case_named(LLAMA_CASE).tag_path
    annotated(tag, tmp_path / "out")
    assert (tmp_path / "latest").read_text() == "out"
    made = lay_out_annotated(resolve_folder(tag), tag="out", pointer=False)
    assert made.target.pointer is None


def test_one_tensor_rank_has_nothing_to_annotate() -> None:
    with pytest.raises(UsageError, match="one tensor-parallel rank"):
        lay_out_annotated(resolve_folder(case_named("golden/odd_z1_dp2_fp32").path), tag="out")


def test_only_native_checkpoints_can_be_annotated(tmp_path: Path) -> None:
    case = case_named(LLAMA_CASE)
    universal = converted(opened(case.tag_path), tmp_path / "universal")
    with pytest.raises(UsageError, match="universal folder"):
        lay_out_annotated(resolve_folder(universal), tag="out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    with pytest.raises(CheckpointError, match="no model-state file"):
        lay_out_annotated(resolve_folder(tmp_path / "other"), tag="out")


def test_the_bytes_of_files_are_tensors_of_one_holder() -> None:
    made = lay_out_annotated(resolve_folder(case_named(LLAMA_CASE).path), tag="out")
    assert {tensor.dtype.name for tensor in made.source.tensors.values()} == {"uint8"}
    assert {state for _, state in made.source.tensors} == {annotate.BYTES}


# ------------------------------------------------------------------------------ DeepSpeed


def convert_with_deepspeed(tag: Path, out: Path) -> Path:
    from scripts.deepspeed_lab import jobs

    jobs.convert_with_deepspeed(tag, out, False, True)
    return out


def describable() -> list[Case]:
    """What DeepSpeed itself converts: no frozen shards, no empty ones, no drift, one group."""
    return [
        case
        for case in tp_cases()
        if not case.drifts
        and not case.has_experts
        and not any(word in case.name for word in ("frozen", "kv2", "empty", "bf16o"))
    ]


@pytest.mark.deepspeed
@pytest.mark.parametrize("case", by_name(describable()))
def test_deepspeeds_converter_accepts_an_annotated_checkpoint(case: Case, tmp_path: Path) -> None:
    """With its keys, and with maps that we made where we could make them without a layout file."""
    fused = case.model in ("codegen", "yuan")
    source = case.tag_path if fused else with_info(case, tmp_path, without_map)
    annotated(source, tmp_path / "out")
    assert wrong_states(case, convert_with_deepspeed(tmp_path / "out", tmp_path / "u")) == []


@needs_toml
@pytest.mark.deepspeed
@pytest.mark.parametrize("case", by_name(with_undescribed_cuts()))
def test_deepspeeds_converter_accepts_an_old_annotated_checkpoint(
    case: Case, tmp_path: Path
) -> None:
    """Strict, and without its hidden flag, which would have doubled what is replicated."""
    annotated(case.tag_path, tmp_path / "out", stated(tmp_path, OLD_LLAMA))
    assert wrong_states(case, convert_with_deepspeed(tmp_path / "out", tmp_path / "u")) == []
