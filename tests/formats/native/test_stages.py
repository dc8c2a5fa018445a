"""Pipelines: the layers' files are DeepSpeed's own, and stages are dealt out or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.errors import LayoutError, UnsupportedError, UsageError
from reshard.formats.checkpoint import Checkpoint, Extra
from reshard.formats.deepspeed.writing import NativeOptions, lay_out_deepspeed
from reshard.formats.dtypes import DTYPES
from reshard.formats.pipelines import PIPELINE, Pipeline
from reshard.formats.registry import open_checkpoint
from tests.formats.native.sources import compared, content, converted, made_up
from tests.truth import Case, by_name, case_named, with_pipeline

LAYERS = "0.19.8/pipe_pp2dp2_z1_fp32"
TIED = "0.19.8/pipe_pp2dp1_tied_z1_fp32"
TIED_NAME = "tied_modules.embed.e.weight"


OF_THIS_VERSION = [case for case in with_pipeline() if case.name.startswith("0.19.8/")]


@pytest.mark.parametrize("case", by_name(OF_THIS_VERSION))
def test_the_files_are_deepspeeds_own(case: Case, tmp_path: Path) -> None:
    out = converted(case.path, tmp_path, stage=1, dp=case.topology["dp"], pp=2) / "step3"
    names = sorted(path.name for path in case.tag_path.glob("*.pt"))
    assert sorted(path.name for path in out.glob("*.pt")) == names
    for name in names:
        mine, theirs = content(out / name), content(case.tag_path / name)
        for file in (mine, theirs):
            file.pop("checkpoint_parallel_dimensions", None)
        assert mine == theirs, name


def test_a_pipeline_in_bf16_is_not_written_without_zero(tmp_path: Path) -> None:
    source = case_named(LAYERS).path
    half = converted(source, tmp_path, stage=1, dp=1, pp=2, dtype=DTYPES["bfloat16"])
    with pytest.raises(UnsupportedError, match=r"pipeline in bf16 .* next: choose --stage 1"):
        converted(half, tmp_path / "out", stage=0, dp=1, pp=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"dp": 3, "pp": 1},
        {"dp": 1, "pp": 2},
        {"dp": 1, "pp": 3, "stage_starts": (0, 2, 5)},
        {"dp": 2, "pp": 2, "stage_starts": (0, 1)},
    ],
)
def test_stages_hold_what_they_are_told_to(options: dict[str, Any], tmp_path: Path) -> None:
    source = case_named(LAYERS).path
    there = converted(source, tmp_path / "there", stage=1, **options)
    assert compared(source, there).equal
    starts = options.get("stage_starts") or {1: (0,), 2: (0, 3)}[options["pp"]]
    for stage, (first, last) in enumerate(zip(starts, (*starts[1:], 6), strict=True)):
        shapes = content(there / f"step3/mp_rank_{stage:02d}_model_states.pt")["param_shapes"]
        layers = {int(name.split(".")[0]) for group in shapes for name in group}
        assert layers <= set(range(first, last))
    back = converted(there, tmp_path / "back", stage=1, dp=2, pp=2, stage_starts=(0, 3))
    for file in case_named(LAYERS).tag_path.glob("*optim_states.pt"):
        mine, theirs = (content(folder / file.name) for folder in (back / "step3", file.parent))
        assert mine["optimizer_state_dict"] == theirs["optimizer_state_dict"]


def test_a_tied_module_goes_to_one_stage(tmp_path: Path) -> None:
    source = case_named(TIED).path
    there = converted(source, tmp_path, stage=1, dp=2, pp=1)
    assert compared(source, there).equal
    shapes = content(there / "step3/mp_rank_00_model_states.pt")["param_shapes"]
    assert next(iter(shapes[0])).startswith("tied_modules.")


def lay_out(source: Checkpoint, **options: Any) -> None:
    chosen = NativeOptions(**{"stage": 1, "dp": 1, **options})
    lay_out_deepspeed(source, tag="step3", options=chosen)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_has_no_such_pipelines(stage: int) -> None:
    with pytest.raises(UnsupportedError, match="trains no pipeline"):
        lay_out(open_checkpoint(case_named(LAYERS).path), stage=stage, pp=2)


def test_a_pipeline_without_experts_has_none_to_spread() -> None:
    with pytest.raises(UsageError, match="no experts to spread"):
        lay_out(open_checkpoint(case_named(LAYERS).path), dp=2, ep=2, pp=2)


def test_stages_that_nobody_states_are_not_guessed() -> None:
    with pytest.raises(LayoutError, match="--stage-starts"):
        lay_out(open_checkpoint(case_named(LAYERS).path), pp=3)


@pytest.mark.parametrize("starts", [(0, 2, 4), (0, 5), (0, 1, 2, 4)])
def test_stages_of_a_tied_module_follow_when_one_answer_is_left(
    starts: tuple[int, ...], tmp_path: Path
) -> None:
    """Layer 0 is the embedding; what calls a function of it has no file and lies past layer 5."""
    source, options = case_named(TIED).path, {"stage": 1, "dp": 1, "pp": len(starts)}
    there = converted(source, tmp_path / "there", stage_starts=starts, **options)
    assert compared(source, there).equal
    tied = [TIED_NAME in names for names in names_by_stage(there)]
    assert tied == [number in (0, len(starts) - 1) for number in range(len(starts))]
    back = converted(there, tmp_path / "back", stage=1, dp=1, pp=2, stage_starts=(0, 4))
    for file in case_named(TIED).tag_path.glob("*optim_states.pt"):
        mine, theirs = (content(folder / file.name) for folder in (back / "step3", file.parent))
        assert mine["optimizer_state_dict"] == theirs["optimizer_state_dict"]


def test_stages_of_a_tied_module_are_not_guessed(tmp_path: Path) -> None:
    """From one stage, a second use may be anywhere past the last file; the user states it."""
    one = converted(case_named(TIED).path, tmp_path / "one", stage=1, dp=1, pp=1)
    source = open_checkpoint(one)
    with pytest.raises(LayoutError, match=r"have a tied module is not known.*--tied KEY=LAYER"):
        lay_out(source, pp=2, stage_starts=(0, 4))
    two = converted(
        one,
        tmp_path / "two",
        stage=1,
        dp=1,
        pp=2,
        stage_starts=(0, 4),
        tied_layers={"embed": (0, 6)},
    )
    assert [TIED_NAME in names for names in names_by_stage(two)] == [True, True]
    alone = {"embed": (0,)}
    there = converted(
        one, tmp_path / "there", stage=1, dp=1, pp=2, stage_starts=(0, 4), tied_layers=alone
    )
    assert [TIED_NAME in names for names in names_by_stage(there)] == [True, False]


@pytest.mark.parametrize(
    ("tied", "message"),
    [
        ({"head": (0, 6)}, r"no such tied module: expected embed, found head"),
        ({"embed": (6,)}, r"contradict the layer files.*expected layers \[0\]"),
        ({"embed": (0, 3)}, r"contradict the layer files.*found embed=0,3"),
    ],
)
def test_what_is_stated_of_ties_must_fit(tied: dict[str, tuple[int, ...]], message: str) -> None:
    source = open_checkpoint(case_named(TIED).path)
    with pytest.raises(UsageError, match=message):
        lay_out(source, pp=3, stage_starts=(0, 2, 4), tied_layers=tied)


def names_by_stage(folder: Path) -> list[set[str]]:
    files = sorted((folder / "step3").glob("mp_rank_*_model_states.pt"))
    return [{name for group in content(file)["param_shapes"] for name in group} for file in files]


@pytest.mark.parametrize("case", by_name(OF_THIS_VERSION))
def test_a_universal_folder_of_a_pipeline_is_a_source(case: Case, tmp_path: Path) -> None:
    """There and back, the pipeline's files are DeepSpeed's own again."""
    universal = tmp_path / "u" / "step3_universal"
    reshard.convert(case.path, universal, fsync=False)
    out = converted(universal, tmp_path, stage=1, dp=case.topology["dp"], pp=2) / "step3"
    for path in case.tag_path.glob("*.pt"):
        mine, theirs = content(out / path.name), content(path)
        for file in (mine, theirs):
            file.pop("checkpoint_parallel_dimensions", None)
        assert mine == theirs, path.name
    assert reshard.verify(universal, out).equal


def with_pipeline_changed(source: Checkpoint, found: Pipeline | None) -> Checkpoint:
    extras = {key: extra for key, extra in source.extras.items() if key != PIPELINE}
    return replace(source, extras=extras if found is None else {**extras, PIPELINE: Extra(found)})


def test_a_source_that_does_not_tell_its_layers_is_refused() -> None:
    source = open_checkpoint(case_named(LAYERS).path)
    with pytest.raises(UnsupportedError, match="which layers its pipeline has"):
        lay_out(with_pipeline_changed(source, None), pp=2)


def test_an_order_that_is_not_of_the_layers_keeps_its_stages() -> None:
    source = open_checkpoint(case_named(LAYERS).path)
    found = source.extras[PIPELINE].value
    assert isinstance(found, Pipeline)
    turned = tuple(
        replace(stage, groups=tuple(group[::-1] for group in stage.groups))
        for stage in found.stages
    )
    changed = with_pipeline_changed(source, replace(found, stages=turned))
    lay_out(changed, pp=2)
    with pytest.raises(LayoutError, match="in the order of the layers"):
        lay_out(changed, pp=1)


def test_what_is_no_pipeline_has_no_stages(tmp_path: Path) -> None:
    source, _ = made_up(tmp_path / "s", [{"a": (2,)}])
    with pytest.raises(UnsupportedError, match="no pipeline"):
        lay_out(source, pp=2)


@pytest.mark.parametrize("starts", [(0,), (1, 2), (0, 0), (0, 3, 2)])
def test_first_layers_must_ascend(starts: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="must ascend"):
        NativeOptions(stage=1, dp=1, pp=2, stage_starts=starts)
