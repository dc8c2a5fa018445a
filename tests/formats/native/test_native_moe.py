"""DeepSpeed's own MoE layers: the order of experts on other ranks, or a refusal by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reshard.errors import UnsupportedError
from reshard.formats.checkpoint import Checkpoint, Extra
from reshard.formats.deepspeed.native_moe import EXPERTS_ARE_CUT
from reshard.formats.deepspeed.writing import NativeOptions, lay_out_deepspeed
from reshard.formats.pipelines import PIPELINE, Pipeline, PipelineLayer, PipelineStage
from tests.formats.native.sources import Shapes, content, made_up, run

FIRST, SECOND = (f"{layer}.deepspeed_moe.experts.deepspeed_experts." for layer in ("a", "b"))
OF_TWO_RANKS = [f"{layer}{expert}.w" for expert in range(4) for layer in (FIRST, SECOND)]
"""What two ranks with two experts a layer would list, were each to list expert by expert."""

IN_ORDER = [
    f"{layer}{2 * rank + expert}.w"
    for rank in range(2)
    for layer in (FIRST, SECOND)
    for expert in range(2)
]
"""What they do list: rank by rank, layer by layer, expert by expert."""


def source_of(
    folder: Path, *groups: list[str], names: tuple[str, ...] = ("ep_size_2",) * 2, **config: Any
) -> Checkpoint:
    shapes: list[Shapes] = [{"dense": (5,)}, *(dict.fromkeys(group, (3, 2)) for group in groups)]
    source, _ = made_up(folder, shapes, config={"zero_optimization": {"stage": 1, **config}})
    experts = [{"lr": 0.1, "moe": True, "name": name} for name in names[: len(groups)]]
    return replace(source, extras={**source.extras, "param_groups": Extra([{"lr": 0.1}, *experts])})


def lay_out(source: Checkpoint, **options: Any) -> Any:
    chosen = NativeOptions(**{"stage": 1, "dp": 4, "ep": 4, **options})
    return lay_out_deepspeed(source, tag="step3", options=chosen)


def test_every_rank_lists_its_experts_layer_by_layer(tmp_path: Path) -> None:
    source = source_of(tmp_path / "s", IN_ORDER)
    run(source, lay_out(source, ep=1), tmp_path / "one")
    shapes = content(tmp_path / "one/mp_rank_00_model_states.pt")["param_shapes"]
    assert list(shapes[1]) == [f"{layer}{n}.w" for layer in (FIRST, SECOND) for n in range(4)]
    run(source, lay_out(source), tmp_path / "four")
    shapes = content(tmp_path / "four/mp_rank_00_model_states.pt")["param_shapes"]
    assert list(shapes[1]) == [f"{FIRST}0.w", f"{SECOND}0.w"]
    body = content(tmp_path / "four/zero_pp_rank_3_mp_rank_00_optim_states.pt")
    mapping = body["optimizer_state_dict"]["param_slice_mappings"][1]
    assert list(mapping) == [f"{FIRST}0.w", f"{SECOND}0.w"]


def test_each_ranks_experts_are_dealt_out_by_themselves(tmp_path: Path) -> None:
    """Two ranks share the two layers' experts of an EP rank, so every second one is the first's."""
    listed = [
        name
        for rank in range(2)
        for first in range(2)
        for name in IN_ORDER[4 * rank + first : 4 * rank + 4 : 2]
    ]
    source = source_of(tmp_path / "s", listed, round_robin_gradients=True)
    source = replace(source, topology=replace(source.topology, stage=1, dp=4))
    run(source, lay_out(source, dp=1, ep=1), tmp_path / "one")
    shapes = content(tmp_path / "one/mp_rank_00_model_states.pt")["param_shapes"]
    assert list(shapes[1]) == [f"{layer}{n}.w" for layer in (FIRST, SECOND) for n in range(4)]


@pytest.mark.parametrize(
    ("groups", "more", "options", "message"),
    [
        ([OF_TWO_RANKS], {}, {}, "does not list experts in the order of the model"),
        (
            [IN_ORDER[::4], IN_ORDER[2::4]],
            {},
            {},
            "no parameter group has experts of every layer",
        ),
        (
            [IN_ORDER[:2] + IN_ORDER[4:6], IN_ORDER[2:4] + IN_ORDER[6:]],
            {"names": ("ep_size_2", "ep_size_4")},
            {},
            "found layers of several expert-parallel degrees: ep_size_2, ep_size_4",
        ),
        ([IN_ORDER], {}, {"stage": 3}, "found --stage 3, under which DeepSpeed trains none"),
        ([IN_ORDER], {}, {"tp": 2, "ep": 1}, "leaves out the files of some tensor ranks"),
        ([IN_ORDER], {}, {"dp": 1, "tp": 4, "ep": 2}, "expected an --ep that 4 divides"),
    ],
)
def test_what_is_not_known_is_refused(
    groups: list[list[str]],
    more: dict[str, Any],
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
) -> None:
    source = source_of(tmp_path, *groups, **more)
    with pytest.raises(UnsupportedError, match=message):
        lay_out(source, **options)


def test_experts_that_nobody_trains_are_refused_under_zero(tmp_path: Path) -> None:
    source, _ = made_up(tmp_path, [{"dense": (5,)}], frozen=dict.fromkeys(IN_ORDER, (3, 2)))
    with pytest.raises(UnsupportedError, match=r"nothing but frozen experts.*choose --stage 0"):
        lay_out(source)


def test_parts_of_experts_stay_within_a_tensor_rank(tmp_path: Path) -> None:
    """Where tensor ranks have parts of every expert, each has expert-parallel groups of its own."""
    source = source_of(tmp_path, IN_ORDER)
    source = replace(source, extras={**source.extras, EXPERTS_ARE_CUT: Extra(value=True)})
    with pytest.raises(UnsupportedError, match="found --ep 4, which does not divide --dp 2"):
        lay_out(source, dp=2, tp=2, ep=4)


def test_a_pipeline_layer_without_trained_tensors_belongs_to_no_stage(tmp_path: Path) -> None:
    experts = [f"1.moe.deepspeed_moe.experts.deepspeed_experts.{n}.w" for n in range(2)]
    shapes: list[Shapes] = [{"0.w": (5,)}, dict.fromkeys(experts, (3, 2))]
    source, _ = made_up(tmp_path, shapes, frozen={"2.w": (4,)})
    layers = [PipelineLayer(0, "0", {}), PipelineLayer(1, "1", {}), PipelineLayer(2, "2", {})]
    stage = PipelineStage((("0.w",), tuple(experts)), frozenset())
    extras = {
        "param_groups": Extra([{"lr": 0.1}, {"lr": 0.1, "moe": True, "name": "ep_size_1"}]),
        PIPELINE: Extra(Pipeline(tuple(layers), (stage,))),
    }
    source = replace(source, extras={**source.extras, **extras})
    with pytest.raises(UnsupportedError, match=r"so its stage is not known: parameter 2\.w"):
        lay_out(source, dp=1, ep=1)
