"""Real DeepSpeed trains experts, reshard writes natively, DeepSpeed's ordinary loader goes on.

The engine of the target is initialised with another seed. Every state and every weight that it
holds after loading must be bit-equal to what the first run held when it saved, and the next losses
must be the same: exactly on the same topology, else within the noise of re-ordering.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import reshard
from reshard.errors import UnsupportedError, UsageError
from reshard.formats.deepspeed.writing import NativeOptions, lay_out_deepspeed
from reshard.formats.registry import open_checkpoint
from scripts.deepspeed_lab.results import Mixed
from scripts.deepspeed_lab.topologies import MixRecipe
from tests.deepspeed_judge.judge import SEED, Judge, differences
from tests.formats.native.sources import compared, content, converted

pytestmark = pytest.mark.deepspeed

SOURCES: dict[str, MixRecipe] = {
    "ep2": MixRecipe(world=2, ep=2),
    "ep2 zero3 dp4": MixRecipe(world=4, ep=2, stage=3),
    "ep2 data first bf16": MixRecipe(world=4, ep=2, stage=2, dtype="bf16", data_first=True),
    "ep2 folded tp2": MixRecipe(world=4, ep=2, tp=2),
    "native ep2": MixRecipe(world=2, ep=2, native=True),
}

PAIRS: list[tuple[str, MixRecipe]] = [
    ("ep2", SOURCES["ep2"]),
    ("ep2", MixRecipe(world=4, ep=4, stage=3)),
    ("ep2", MixRecipe(world=2, ep=1, stage=2)),
    ("ep2", MixRecipe(world=4, ep=2, stage=2)),
    ("ep2 zero3 dp4", SOURCES["ep2 zero3 dp4"]),
    ("ep2 zero3 dp4", MixRecipe(world=2, ep=2, stage=1)),
    ("ep2 zero3 dp4", MixRecipe(world=2, ep=1, stage=3)),
    ("ep2 data first bf16", SOURCES["ep2 data first bf16"]),
    ("ep2 data first bf16", MixRecipe(world=4, ep=4, dtype="bf16", data_first=True)),
    ("ep2 folded tp2", MixRecipe(world=4, ep=4)),
    ("ep2 folded tp2", SOURCES["ep2 folded tp2"]),
    ("ep2 folded tp2", MixRecipe(world=4, ep=4, tp=2)),
    ("ep2 folded tp2", MixRecipe(world=4, ep=2, tp=2, stage=3)),
    ("native ep2", SOURCES["native ep2"]),
    ("native ep2", MixRecipe(world=4, ep=4, native=True)),
    ("native ep2", MixRecipe(world=2, ep=1, stage=2, native=True)),
    ("native ep2", MixRecipe(world=4, ep=2, native=True)),
]

Run = tuple[Mixed, Path]


@pytest.fixture(scope="module")
def trained(judge: Judge, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Train each source once."""
    done: dict[str, Run] = {}

    def train(source: str) -> Run:
        if source not in done:
            folder, recipe = tmp_path_factory.mktemp("experts"), SOURCES[source]
            held = judge.lab.run("train_mixture", recipe, folder, SEED, world=recipe.world)
            done[source] = held, folder
        return done[source]

    return train


def options(recipe: MixRecipe) -> dict[str, int]:
    return {"stage": recipe.stage, "dp": recipe.dp, "tp": recipe.tp, "ep": recipe.ep}


@pytest.mark.parametrize(
    ("source", "target"),
    [pytest.param(*pair, id=f"{pair[0]} to {pair[1]}") for pair in PAIRS],
)
def test_deepspeed_loads_experts_and_goes_on(
    source: str, target: MixRecipe, judge: Judge, trained: Callable[[str], Run], tmp_path: Path
) -> None:
    before, folder = trained(source)
    out = converted(folder, tmp_path, **options(target))
    after: Mixed = judge.lab.run(
        "resume_mixture_natively", target, out, SEED + 1, world=target.world
    )
    assert differences(before.full, after.full) == []
    weights = [
        {name: {"weight": held} for name, held in run.weights.items()} for run in (before, after)
    ]
    assert differences(*weights) == []
    limit = 0.0 if target == SOURCES[source] else 1e-3 if target.dtype == "bf16" else 5e-6
    if target.native and target.world != SOURCES[source].world:
        # the balance loss is of each rank's own rows; DeepSpeed says itself how much that does
        recipe = replace(SOURCES[source], world=target.world)
        anew = judge.lab.run("train_mixture", recipe, tmp_path / "n", SEED, world=recipe.world)
        limit = 3 * spread(before.losses, anew.losses)
    assert spread(before.losses, after.losses) <= limit


def spread(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_ep2_to_ep4_to_ep1_and_back_is_equal(trained: Callable[[str], Run], tmp_path: Path) -> None:
    _, folder = trained("ep2")
    source = folder
    for number, step in enumerate(
        [
            {"stage": 3, "dp": 4, "ep": 4},
            {"stage": 2, "dp": 3, "ep": 1},
            {"stage": 1, "dp": 2, "ep": 2},
        ]
    ):
        source = converted(source, tmp_path / str(number), **step)
        assert compared(folder, source).equal


def test_experts_that_cannot_be_spread_are_refused(trained: Callable[[str], Run]) -> None:
    source = open_checkpoint(trained("ep2")[1])
    with pytest.raises(UsageError, match=r"does not divide the experts .* a divisor of 4"):
        lay_out_deepspeed(source, tag="t", options=NativeOptions(stage=1, dp=3, ep=3))
    with pytest.raises(UnsupportedError, match="no such experts with several tensor ranks"):
        lay_out_deepspeed(source, tag="t", options=NativeOptions(stage=1, dp=2, tp=2))
    with pytest.raises(UnsupportedError, match="ZeRO-1, 2 and 3 only"):
        lay_out_deepspeed(source, tag="t", options=NativeOptions(stage=0, dp=2, ep=2))
    native = open_checkpoint(trained("native ep2")[1])
    with pytest.raises(UnsupportedError, match=r"own MoE layers .* under which DeepSpeed trains"):
        lay_out_deepspeed(native, tag="t", options=NativeOptions(stage=3, dp=2, ep=2))


def test_native_experts_there_and_back_are_equal(
    trained: Callable[[str], Run], tmp_path: Path
) -> None:
    """Over a universal folder too; the optimizer files are DeepSpeed's own in the end."""
    _, folder = trained("native ep2")
    four = converted(folder, tmp_path / "4", stage=2, dp=4, ep=4)
    reshard.convert(four, tmp_path / "u" / "step3_universal", fsync=False)
    back = converted(tmp_path / "u" / "step3_universal", tmp_path / "2", stage=1, dp=2, ep=2)
    for source in (four, tmp_path / "u" / "step3_universal", back):
        assert compared(folder, source).equal
    for path in sorted((folder / "step3").glob("*.pt")):
        assert content(back / "step3" / path.name) == content(path), path.name
