"""Real DeepSpeed loads native checkpoints that reshard wrote, each by its ordinary loader.

Each cell is a checkpoint and a topology. The engine of that topology is initialised with another
seed, so nothing is right by luck: every state, every frozen parameter and every buffer that it
holds after ``load_checkpoint`` must be bit-equal to the truth, parameter groups and counters too.
Then it trains on, and its losses must be those of the uninterrupted run: exactly on the same
topology, else within the noise of re-ordering. How large that is DeepSpeed says itself: it trains
the same run from the start on the other topology (:func:`trained_anew`).

A dozen and a half of cells run always, the whole matrix with ``RESHARD_MATRIX=1``
(``make test-matrix``).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from tests.deepspeed_judge.conftest import Converted
from tests.deepspeed_judge.judge import SEED, Judge, differences, recipe_of
from tests.formats.native.sources import converted as convert_to_native
from tests.truth import Case, case_named

pytestmark = pytest.mark.deepspeed

Cell: TypeAlias = dict[str, Any]
"""Options of the writer: stage, dp, tp, …"""

OTHER_SEED = 7
STAGES, DEGREES = (0, 1, 2, 3), (1, 2, 3, 4)
LEAST_NOISE = 5e-6
"""Losses are around 5 to 12; a unit in the last place of them is about 1e-6 in fp32."""

ALWAYS: dict[str, list[Cell]] = {
    "golden/odd_z1_dp2_fp32": [
        {"stage": 1, "dp": 2},
        {"stage": 0, "dp": 1},
        {"stage": 1, "dp": 4},
        {"stage": 2, "dp": 3},
        {"stage": 3, "dp": 4},
    ],
    "golden/odd_z1_dp2_sgdm": [{"stage": 3, "dp": 2}],
    "golden/odd_z1_dp2_bf16opt": [{"stage": 1, "dp": 4}],
    "golden/odd_z2_dp2_bf16": [{"stage": 2, "dp": 2}, {"stage": 3, "dp": 4}],
    "golden/odd_z2_dp2_round_robin": [{"stage": 2, "dp": 4}, {"stage": 3, "dp": 1}],
    "golden/odd_z3_dp2_sub_groups": [{"stage": 3, "dp": 4}, {"stage": 1, "dp": 1}],
    "golden/odd_z3_dp4_bf16": [{"stage": 1, "dp": 2}],
    "golden/llama_z1_tp2dp2_fp32": [
        {"stage": 1, "dp": 4},
        {"stage": 1, "dp": 1, "tp": 4, "kv_heads": 2},
        {"stage": 3, "dp": 2, "tp": 2},
    ],
    "golden/llama_z1_tp4_empty_shards": [{"stage": 1, "dp": 2, "tp": 2}],
    "golden/llama_z1_tp2_tied_bias": [{"stage": 2, "dp": 2, "tp": 2}],
    "golden/llama_z3_tp2dp2_frozen": [{"stage": 2, "dp": 4}],
}

ALL_STAGES = [{"stage": stage, "dp": dp} for stage in STAGES for dp in DEGREES]
ZERO = [cell for cell in ALL_STAGES if cell["stage"] > 0]
TENSOR = [
    {"stage": stage, "dp": dp, "tp": tp, "kv_heads": heads}
    for stage, dp, tp, heads in (
        (1, 4, 1, 2), (2, 2, 1, 2), (3, 4, 1, 2), (0, 1, 1, 2),
        (1, 2, 2, 2), (2, 1, 2, 2), (3, 2, 2, 2), (3, 1, 2, 2), (0, 1, 2, 2),
        (1, 1, 4, 2), (2, 1, 4, 2),
    )
]  # fmt: skip
"""DeepSpeed cannot train the model with four tensor ranks under ZeRO-3: it has two heads."""

WHOLE: dict[str, list[Cell]] = {
    "golden/odd_z1_dp2_fp32": ALL_STAGES,
    "golden/odd_z1_dp2_unused": ZERO,
    "golden/odd_z1_dp2_sgdm": ZERO,
    "golden/odd_z1_dp2_bf16opt": [{"stage": 1, "dp": dp} for dp in DEGREES],
    "golden/odd_z2_dp2_bf16": ALL_STAGES,
    "golden/odd_z2_dp2_round_robin": ALL_STAGES,
    "golden/odd_z3_dp2_one_group": ALL_STAGES,
    "golden/odd_z3_dp2_sub_groups": ALL_STAGES,
    "golden/odd_z3_dp4_bf16": ALL_STAGES,
    "golden/odd_z3_dp2_sgdm": ZERO,
    "golden/llama_z1_tp2dp2_fp32": TENSOR,
    "golden/llama_z2_tp2dp2_bf16": TENSOR,
    "golden/llama_z3_tp2dp2_fp32": TENSOR,
    "golden/llama_z1_tp2_uneven": [
        {"stage": 1, "dp": 1, "tp": 3},
        {"stage": 2, "dp": 2, "tp": 2},
        {"stage": 3, "dp": 2, "tp": 1},
    ],
    "golden/llama_z1_tp4_empty_shards": [
        {"stage": 1, "dp": 1, "tp": 4},
        {"stage": 1, "dp": 2, "tp": 2},
        {"stage": 3, "dp": 4},
    ],
    "golden/llama_z1_tp2_frozen": TENSOR,
    "golden/llama_z3_tp2dp2_frozen": TENSOR,
    "0.19.8/plain_sched_z1_dp2": ZERO,
    "0.19.8/plain_amsgrad_z1_dp2": ZERO,
    "0.19.8/plain_fp16forced_z1_dp2": ZERO,
    "0.19.8/plain_lion_z1_dp2": ZERO,
    "0.19.8/codegenfused_tp4_z1_fp32": [
        {"stage": 1, "dp": 4, "tp": 1},
        {"stage": 2, "dp": 2, "tp": 2},
        {"stage": 3, "dp": 1, "tp": 2},
    ],
    "0.19.8/yuan_tp2_z1_fp32": [
        {"stage": 1, "dp": 1, "tp": 4, "kv_heads": 8},
        {"stage": 3, "dp": 2, "tp": 1},
    ],
    "0.19.8/megatron_tp2dp2_z1_fp32": [
        {"stage": 1, "dp": dp, "tp": tp, "vocab_multiple": 8} for dp, tp in ((4, 1), (2, 2), (1, 4))
    ],
    "0.12.6/plain_z1_dp2_fp32": [{"stage": 3, "dp": 2}],
}


def cells() -> Iterator[Any]:
    """Every cell that is asked for, as a parameter of a test."""
    matrix = WHOLE if os.environ.get("RESHARD_MATRIX") else ALWAYS
    for name, targets in matrix.items():
        for cell in targets:
            label = "-".join(f"{key}{value}" for key, value in cell.items())
            yield pytest.param(name, cell, id=f"{name}->{label}")


@pytest.fixture(scope="session")
def trained_anew(judge: Judge, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function: the losses of steps 3 to 5 when DeepSpeed trains from the start."""

    @functools.cache
    def losses(name: str, stage: int, dp: int, tp: int) -> list[float]:
        recipe = recipe_for(case_named(name), {"stage": stage, "dp": dp, "tp": tp})
        folder = tmp_path_factory.mktemp("anew")
        trained = judge.lab.run("train", recipe, folder, SEED, world=recipe.world)
        found: list[float] = trained.next_losses
        return found

    return losses


def recipe_for(case: Case, cell: Cell) -> Any:
    """The case's run on the cell's topology, with the options of ZeRO that the case has."""
    tp = cell.get("tp", 1)
    zero = case.topology.get("zero", {})
    return recipe_of(case).spread(world=cell["dp"] * tp, tp=tp, stage=cell["stage"], zero=zero)


def spread(one: list[float], other: list[float]) -> float:
    """The largest difference of two lists of losses."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def is_home(case: Case, cell: Cell) -> bool:
    """Whether the cell is the case's own topology."""
    home = (case.stage, case.topology["world"] // case.tp, case.tp)
    return home == (cell["stage"], cell["dp"], cell.get("tp", 1))


def stage_of_reference(case: Case, stage: int) -> int:
    """The stage under which DeepSpeed resumes from a universal folder, to compare with.

    There is no universal loading without ZeRO, and under ZeRO-3 it gives every optimizer group the
    hyperparameters of the first.
    """
    has_groups = case.topology.get("two_groups", True)
    return 1 if stage == 0 or (stage == 3 and has_groups) else stage


@pytest.mark.parametrize(("name", "cell"), list(cells()))
def test_deepspeed_loads_it_and_goes_on(
    judge: Judge, converted: Converted, trained_anew: Any, tmp_path: Path, name: str, cell: Cell
) -> None:
    case = case_named(name)
    truth = case.truth()
    root = convert_to_native(case.path, tmp_path, **cell)
    recipe = recipe_for(case, cell)
    resumed = judge.lab.run("resume", recipe, root, None, OTHER_SEED, False, world=recipe.world)
    assert resumed.held.drift == []
    assert differences(truth.full, resumed.held.full) == []
    for kind in ("frozen", "buffers"):
        expected, held = getattr(truth, kind), getattr(resumed.held, kind)
        assert {name: held[name].float() for name in expected}.keys() == expected.keys()
        assert all(torch.equal(held[name].float(), expected[name].float()) for name in expected)
    assert {step for rank in resumed.held.steps for step in rank} == truth.steps
    assert resumed.global_steps == 3
    assert resumed.client_state == {"iteration": 3}
    if truth.param_groups:
        assert resumed.held.groups == truth.param_groups
    if is_home(case, cell):
        assert resumed.losses == case.topology["next_losses"]
        return
    anew = functools.partial(trained_anew, name)
    expected, origin = case.topology["next_losses"], case.topology["next_losses"]
    if cell["dp"] == 3:
        # Four rows do not divide by three, so the run is another: DeepSpeed's own resume there.
        stage = stage_of_reference(case, cell["stage"])
        folder, tag = converted(case), f"{case.tag}_universal"
        own = judge.resume(case, folder, tag, world=3, tp=1, stage=stage)
        expected, origin = own.losses, anew(stage, 3, 1)
    limit = spread(anew(cell["stage"], cell["dp"], cell.get("tp", 1)), origin)
    assert spread(resumed.losses, expected) <= max(LEAST_NOISE, 3 * limit)
