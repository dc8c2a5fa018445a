"""A run that goes on under another trainer: its next losses are those that it would have had.

Real DeepSpeed engines and FSDP2, in one job: three steps, everything moved into a trainer that was
made with another seed (what does not arrive would show), three more steps of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from scripts.deepspeed_lab.client import Lab
from scripts.deepspeed_lab.recipe import Recipe
from tests.deepspeed_judge.judge import differences, recipe_of
from tests.truth import case_named

pytestmark = pytest.mark.deepspeed

CLOSE = 5e-6
"""Losses are around 5; another topology adds the same gradients in another order."""
FSDP = -1


@dataclass(frozen=True, slots=True)
class Pair:
    """Two trainers of the same ranks: model, ranks, stage and tensor degree of each."""

    model: str
    world: int
    source: tuple[int, int]
    target: tuple[int, int]

    def recipes(self) -> tuple[Recipe, Recipe]:
        """The recipe of each; ZeRO-3 shares one step between groups, so one group there."""
        groups = 3 not in (self.source[0], self.target[0])
        one, other = (
            Recipe(self.model, world=self.world, stage=stage, tp=tp, two_groups=groups)
            for stage, tp in (self.source, self.target)
        )
        return one, other

    def __str__(self) -> str:
        word = [
            f"{'fsdp' if stage < 0 else f'z{stage}'}tp{tp}"
            for stage, tp in (self.source, self.target)
        ]
        return f"{self.model}{self.world}-{word[0]}->{word[1]}"


PAIRS = [
    Pair("odd", 2, (1, 1), (3, 1)),
    Pair("odd", 4, (3, 1), (FSDP, 1)),
    Pair("odd", 3, (FSDP, 1), (2, 1)),
    Pair("llama", 4, (FSDP, 2), (3, 1)),
    Pair("llama", 4, (2, 1), (FSDP, 2)),
    Pair("llama", 4, (FSDP, 1), (FSDP, 2)),
    Pair("odd", 2, (2, 1), (1, 1)),
    Pair("llama", 4, (FSDP, 1), (2, 2)),
    Pair("llama", 4, (1, 2), (FSDP, 2)),
]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """DeepSpeed, imported once in a process of its own."""
    with Lab() as lab:
        yield lab


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_next_losses_are_those_of_the_uninterrupted_run(lab: Lab, pair: Pair) -> None:
    was, now, plan = lab.run("hand_over", *pair.recipes(), world=pair.world)
    assert now == pytest.approx(was, abs=CLOSE, rel=0), plan
    assert len(set(was)) == 3


@pytest.mark.parametrize(
    ("name", "world", "tp"), [("llama_z1_tp2dp2_fp32", 4, 2), ("odd_z3_dp2_one_group", 4, 1)]
)
def test_fsdp2_goes_on_from_a_checkpoint_of_deepspeed(
    lab: Lab, name: str, world: int, tp: int
) -> None:
    case = case_named(f"golden/{name}")
    target = recipe_of(case).spread(world=world, tp=tp, stage=FSDP)
    states, losses = lab.run("take_from_disk", target, case.path, world=world)
    assert differences(case.truth().full, states) == []
    if recipe_of(case).dtype == "fp32":
        assert losses == pytest.approx(case.topology["next_losses"], abs=CLOSE, rel=0)
