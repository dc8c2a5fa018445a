"""Every element lands where the rule says, for shapes and degrees that rules trip over."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard.formats.registry import open_checkpoint
from tests.formats.native.sources import content, made_up, values_of, write

ROUND_ROBIN = {"stage": 1, "round_robin_gradients": True}
ALIGNED = {"stage": 1, "parameter_alignment": True}

shape = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)
group = st.lists(shape, min_size=1, max_size=5)


@given(
    groups=st.lists(group, min_size=1, max_size=3),
    stage=st.integers(0, 3),
    dp=st.integers(1, 9),
    zero=st.sampled_from([{}, ROUND_ROBIN, ALIGNED, {"sub_group_size": 6}]),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_is_written_is_read_back(
    tmp_path: Path, groups: list[list[tuple[int, ...]]], stage: int, dp: int, zero: dict[str, Any]
) -> None:
    named = [{f"g{k}.p{i}": s for i, s in enumerate(shapes)} for k, shapes in enumerate(groups)]
    source, values = made_up(tmp_path / "source", named, config={"zero_optimization": zero})
    write(source, tmp_path / "out", stage=stage, dp=dp)
    found = values_of(tmp_path / "out")
    assert found.keys() == values.keys()
    assert all(np.array_equal(found[key], values[key]) for key in values)


def test_five_elements_over_eight_ranks(tmp_path: Path) -> None:
    source, _ = made_up(tmp_path / "s", [{"w": (5,)}, {"other": (3, 11)}])
    write(source, tmp_path / "out", stage=1, dp=8)
    paddings, lengths = [], []
    for rank in range(8):
        file = content(tmp_path / f"out/step3/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        body = file["optimizer_state_dict"]
        paddings.append(body["group_paddings"][0])
        lengths.append(body["single_partition_of_fp32_groups"][0][1])
        assert body["base_optimizer_state"]["state"][0]["exp_avg"][1] == (2,)
    assert paddings == [0, 0, 1, 2, 2, 2, 2, 2]
    assert lengths == [(2,), (2,), (1,), (0,), (0,), (0,), (0,), (0,)]


def test_a_prime_number_of_elements_goes_from_four_ranks_to_six(tmp_path: Path) -> None:
    source, values = made_up(tmp_path / "s", [{"a": (89,), "b": (2, 7)}, {"c": (101,)}])
    write(source, tmp_path / "four", stage=3, dp=4)
    write(open_checkpoint(tmp_path / "four"), tmp_path / "six", stage=2, dp=6)
    found = values_of(tmp_path / "six")
    assert all(np.array_equal(found[key], values[key]) for key in values)
    file = content(tmp_path / "six/step3/zero_pp_rank_5_mp_rank_00_optim_states.pt")
    assert file["optimizer_state_dict"]["group_paddings"] == [5, 7]


@pytest.mark.parametrize("dp", [1, 3])
def test_zero3_is_split_into_sub_groups_as_configured(tmp_path: Path, dp: int) -> None:
    shapes = {f"w{k}": (k + 1, 5) for k in range(12)}
    source, values = made_up(tmp_path / "s", [shapes, {"v": (7,)}])
    write(source, tmp_path / "out", stage=3, dp=dp, sub_group_size=20)
    file = content(tmp_path / "out/step3/zero_pp_rank_0_mp_rank_00_optim_states.pt")
    body = file["optimizer_state_dict"]
    blocks = [-(-math.prod(shape) // dp) for shape in shapes.values()]
    groups = body["optimizer_state_dict"]["param_groups"]
    assert sum(len(group["params"]) for group in groups) == len(body["fp32_flat_groups"]) > 4
    assert groups[1]["params"] == [len(body["fp32_flat_groups"]) - 1]
    assert all(flat[1][0] >= 20 for flat in body["fp32_flat_groups"][:-2])
    assert sum(flat[1][0] for flat in body["fp32_flat_groups"]) == sum(blocks) + -(-7 // dp)
    found = values_of(tmp_path / "out")
    assert all(np.array_equal(found[key], values[key]) for key in values)


def test_round_robin_deals_to_the_ranks_of_the_target(tmp_path: Path) -> None:
    names = [f"p{k}" for k in range(7)]
    config = {"zero_optimization": ROUND_ROBIN}
    source, _ = made_up(tmp_path / "s", [dict.fromkeys(names, (3,))], config=config)
    target = write(source, tmp_path / "out", stage=2, dp=3)
    model = content(tmp_path / "out/step3/mp_rank_00_model_states.pt")
    assert list(model["param_shapes"][0]) == ["p0", "p3", "p6", "p1", "p4", "p2", "p5"]
    assert any("round_robin" in note for note in target.notes)


def test_alignment_is_written_down_as_deepspeed_compares_it(tmp_path: Path) -> None:
    config = {"zero_optimization": ALIGNED}
    source, _ = made_up(tmp_path / "s", [{"a": (5,), "b": (8,), "c": (3,)}], config=config)
    write(source, tmp_path / "out", stage=1, dp=2)
    file = content(tmp_path / "out/step3/zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert file["optimizer_state_dict"]["param_alignment_paddings"] == [[3, 0, 0]]
    assert file["optimizer_state_dict"]["param_slice_mappings"][0].keys() == {"a", "b"}
