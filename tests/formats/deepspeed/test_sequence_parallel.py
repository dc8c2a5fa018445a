"""Sequence parallelism cuts no weight, though DeepSpeed puts its degree and ranks where others are.

The folders are real ones, with what a run under Ulysses states instead: its degree among the
parallel dimensions (DeepSpeed 0.19), or its ranks in the names of the files (before).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import reshard
from reshard.errors import CheckpointError, MissingFileError
from reshard.formats.deepspeed.survey import survey_deepspeed
from reshard.formats.folders import resolve_folder
from tests.formats.deepspeed.reading import opened, wrong_states
from tests.truth import case_named

CASES = ["golden/odd_z3_dp4_bf16", "golden/odd_z1_dp2_fp32"]


def dimensions(tag: Path, degree: int = 2, **also: int) -> Path:
    """State the degree as that of tensor parallelism."""
    for path in tag.glob("*model_states.pt"):
        content = torch.load(path, weights_only=False)
        content["checkpoint_parallel_dimensions"] = {"pp_degree": 1, "tp_degree": degree}
        torch.save(content | also, path)
    return tag


def names(tag: Path, degree: int = 2) -> Path:
    """Put the rank of the sequence into the names of the files."""
    for path in list(tag.glob("*zero_pp_rank_*")):
        content = torch.load(path, weights_only=False)
        content.pop("checkpoint_parallel_dimensions", None)
        path.unlink()
        rank = int(re.search(r"pp_rank_(\d+)", path.name)[1])  # type: ignore[index]
        torch.save(content, tag / path.name.replace("mp_rank_00", f"mp_rank_{rank % degree:02d}"))
    return tag


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("as_written", [dimensions, names])
def test_a_folder_is_read_as_data_parallel(
    name: str, as_written: Callable[[Path], Path], tmp_path: Path
) -> None:
    case = case_named(name)
    tag = as_written(shutil.copytree(case.tag_path, tmp_path / case.tag))
    checkpoint = opened(tag)
    assert wrong_states(checkpoint, case.truth().full) == []
    assert checkpoint.topology == opened(case.tag_path).topology
    (said,) = [one.what for one in checkpoint.problems if "the files prove" in one.what]
    assert said.endswith("mp_world_size, 1, is what the files prove, and was taken")
    assert survey_deepspeed(resolve_folder(tag)).whole


@pytest.mark.parametrize(
    ("degree", "also"), [(3, {}), (2, {"dp_world_size": 3}), (1, {"mp_world_size": 2})]
)
def test_what_no_sequence_explains_is_refused(
    degree: int, also: dict[str, int], tmp_path: Path
) -> None:
    """A degree that does not divide the data-parallel one, or that is less than the columns."""
    tag = shutil.copytree(case_named(CASES[0]).tag_path, tmp_path / "step3")
    with pytest.raises(CheckpointError, match=r"^checkpoint_parallel_dimensions contradict"):
        opened(dimensions(tag, degree, **also))


def test_files_of_a_second_column_prove_tensor_parallelism(tmp_path: Path) -> None:
    tag = dimensions(shutil.copytree(case_named(CASES[0]).tag_path, tmp_path / "step3"))
    first = tag / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    shutil.copy(first, tag / "zero_pp_rank_0_mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match=r"^checkpoint_parallel_dimensions contradict"):
        opened(tag)


def test_a_missing_file_is_asked_for_by_the_name_it_had(tmp_path: Path) -> None:
    tag = names(shutil.copytree(case_named(CASES[0]).tag_path, tmp_path / "step3"))
    gone = tag / "zero_pp_rank_3_mp_rank_01_model_states.pt"
    gone.unlink()
    with pytest.raises(MissingFileError) as refused:
        reshard.open_checkpoint(tag)
    assert str(refused.value.file) == str(gone)
    found = survey_deepspeed(resolve_folder(tag))
    assert [file.file for file in found.files if file.presence.value == "missing"] == [str(gone)]
