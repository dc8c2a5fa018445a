"""Selections: what is kept, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from reshard.api import select
from reshard.errors import UsageError
from reshard.formats.checkpoint import Checkpoint, Extra
from tests.faces.samples import SHAPES


def names(checkpoint: Checkpoint) -> list[str]:
    return sorted(checkpoint.names)


def test_no_filter_keeps_everything(sample: Checkpoint) -> None:
    assert select(sample) == sample


@pytest.mark.parametrize(
    ("include", "exclude", "kept"),
    [
        (["layers.*"], [], ["layers.0.bias", "layers.0.weight"]),
        (["*.weight"], ["embed*"], ["layers.0.weight"]),
        ([], ["layers.*", "norm.scale"], ["embed.weight"]),
        (["head.weight"], [], ["embed.weight"]),
        (["layers.0.weight", "norm.*"], [], ["layers.0.weight", "norm.scale"]),
    ],
)
def test_patterns_choose_parameters(
    sample: Checkpoint, include: list[str], exclude: list[str], kept: list[str]
) -> None:
    chosen = select(sample, include=include, exclude=exclude)
    assert names(chosen) == kept
    trained = [name for name in SHAPES if name in kept and name != "norm.scale"]
    assert {name for name, _ in chosen.scalars} == set(trained)
    assert chosen.extras["groups"] == Extra([trained])
    assert chosen.extras["param_groups"] == sample.extras["param_groups"]


def test_a_name_is_a_pattern_for_itself_whatever_it_is_made_of(sample: Checkpoint) -> None:
    assert names(select(sample, include=["norm.scale"])) == ["norm.scale"]


def test_case_counts(sample: Checkpoint) -> None:
    with pytest.raises(UsageError):
        select(sample, include=["LAYERS.*"])


def test_states_choose_tensors_and_scalars(sample: Checkpoint) -> None:
    chosen = select(sample, states=["fp32"])
    assert {state for _, state in chosen.tensors} == {"fp32"}
    assert not chosen.scalars
    assert select(sample, states=["fp32", "step"]).scalars == sample.scalars


def test_an_alias_goes_with_its_owner_and_may_be_left_out_alone(sample: Checkpoint) -> None:
    assert select(sample, include=["embed.*"]).aliases == {"head.weight": "embed.weight"}
    assert not select(sample, include=["layers.*"]).aliases
    without = select(sample, exclude=["head.weight"])
    assert not without.aliases
    assert "embed.weight" in without.names


def test_a_pattern_that_matches_nothing_is_refused_with_the_closest_names(
    sample: Checkpoint,
) -> None:
    typo = ["layers.0.wieght"]
    with pytest.raises(UsageError, match=r"matches no parameter.*did you mean layers.0.weight"):
        select(sample, include=typo)
    with pytest.raises(UsageError, match=r"matches no parameter.*did you mean layers.0.weight"):
        select(sample, exclude=typo)


def test_an_unknown_state_is_refused_with_the_known_ones(sample: Checkpoint) -> None:
    with pytest.raises(UsageError, match="state exp_avgg: expected one of exp_avg, fp32, step"):
        select(sample, states=["exp_avgg"])


@pytest.mark.parametrize(
    "options",
    [
        {"exclude": ["*"]},
        {"include": ["norm.scale"], "states": ["exp_avg"]},
        {"states": ["step"]},
    ],
)
def test_a_selection_of_nothing_is_refused(sample: Checkpoint, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="nothing is selected"):
        select(sample, **options)
