"""Real DeepSpeed trains experts, reshard writes natively, DeepSpeed's ordinary loader goes on.

The engine of the target is initialised with another seed. Every state and every weight that it
holds after loading must be bit-equal to what the first run held when it saved, and the next losses
must be the same: exactly on the same topology, else within the noise of re-ordering.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.errors import UnsupportedError, UsageError
from reshard.formats.deepspeed.writing import NativeOptions, lay_out_deepspeed
from reshard.formats.registry import open_checkpoint
from reshard.formats.stated_layouts import read_stated_layouts
from scripts.deepspeed_lab.results import Mixed
from scripts.deepspeed_lab.topologies import MixRecipe
from tests.deepspeed_judge.judge import SEED, Judge, differences
from tests.formats.native.sources import compared, content, converted, write

pytestmark = pytest.mark.deepspeed

SOURCES: dict[str, MixRecipe] = {
    "ep2": MixRecipe(world=2, ep=2),
    "ep2 zero3 dp4": MixRecipe(world=4, ep=2, stage=3),
    "ep2 data first bf16": MixRecipe(world=4, ep=2, stage=2, dtype="bf16", data_first=True),
    "ep2 folded tp2": MixRecipe(world=4, ep=2, tp=2),
    "native ep2": MixRecipe(world=2, ep=2, native=True),
    "native over tp2": MixRecipe(world=4, ep=2, tp=2, native=True),
    "native cut by tp2": MixRecipe(world=4, ep=2, tp=2, native=True, cut_experts=True),
    "native frozen zero2": MixRecipe(world=4, ep=2, tp=2, stage=2, native=True, frozen=True),
    "frozen": MixRecipe(world=2, ep=2, frozen=True),
    "zero0 bf16": MixRecipe(world=2, ep=2, stage=0, dtype="bf16"),
    "zero0 folded tp2": MixRecipe(world=4, ep=2, tp=2, stage=0),
    "dealt": MixRecipe(world=4, ep=2, stage=2, round_robin=True),
    "native dealt": MixRecipe(world=4, ep=2, stage=2, native=True, round_robin=True),
    "native zero0": MixRecipe(world=2, ep=2, stage=0, native=True),
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
    ("native over tp2", MixRecipe(world=2, ep=1, stage=2, native=True)),
    ("native over tp2", MixRecipe(world=4, ep=4, tp=2, stage=0, native=True)),
    ("native cut by tp2", SOURCES["native cut by tp2"]),
    ("native cut by tp2", MixRecipe(world=2, ep=2, native=True)),
    ("native frozen zero2", SOURCES["native frozen zero2"]),
    ("frozen", MixRecipe(world=4, ep=4, stage=2, frozen=True)),
    ("zero0 bf16", MixRecipe(world=4, ep=4, stage=3, dtype="bf16")),
    ("zero0 folded tp2", SOURCES["zero0 folded tp2"]),
    ("native zero0", MixRecipe(world=2, ep=1, stage=1, native=True)),
    ("native dealt", SOURCES["native dealt"]),
]

MORE: list[tuple[str, MixRecipe]] = [
    ("native over tp2", SOURCES["native over tp2"]),
    ("native cut by tp2", MixRecipe(4, 1, 2, stage=0, native=True, cut_experts=True)),
    ("native frozen zero2", MixRecipe(world=2, ep=1, stage=0, native=True, frozen=True)),
    ("zero0 bf16", SOURCES["zero0 bf16"]),
    ("zero0 folded tp2", MixRecipe(world=2, ep=2, stage=0)),
    ("ep2", MixRecipe(world=4, ep=4, stage=0)),
    ("native zero0", SOURCES["native zero0"]),
    ("dealt", MixRecipe(world=4, ep=4, round_robin=True)),
    ("native dealt", MixRecipe(world=4, ep=1, native=True, round_robin=True)),
]
"""Only with ``RESHARD_MATRIX=1`` (``make test-matrix``)."""

STATED = """
[layouts]
'^(?!OWNER\\.(up|down\\.weight)).*' = "replicated"
'OWNER\\.up\\..*' = { layout = "contiguous_split", partition_dim = 0 }
'OWNER\\.down\\.weight' = { layout = "contiguous_split", partition_dim = 1 }
"""
"""The model has no heads, so none decide about widths."""

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


def options(recipe: MixRecipe) -> dict[str, Any]:
    return {"stage": recipe.stage, "dp": recipe.dp, "tp": recipe.tp, "ep": recipe.ep}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(*pair, id=f"{pair[0]} to {pair[1]}")
        for pair in (*PAIRS, *(MORE if os.environ.get("RESHARD_MATRIX") else ()))
    ],
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
    if target.native and target.dp != SOURCES[source].dp:
        # the balance loss is of each rank's own rows; DeepSpeed says itself how much that does
        anew = judge.lab.run("train_mixture", target, tmp_path / "n", SEED, world=target.world)
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
    frozen = open_checkpoint(trained("frozen")[1])
    with pytest.raises(UnsupportedError, match=r"no frozen experts under ZeRO-3: .*experts\.w"):
        lay_out_deepspeed(frozen, tag="t", options=NativeOptions(stage=3, dp=2, ep=2))
    native = open_checkpoint(trained("native ep2")[1])
    with pytest.raises(UnsupportedError, match=r"own MoE layers .* under which DeepSpeed trains"):
        lay_out_deepspeed(native, tag="t", options=NativeOptions(stage=3, dp=2, ep=2))


@pytest.mark.parametrize("cut_experts", [False, True], ids=["whole", "cut"])
def test_a_stated_layout_decides_over_tensor_ranks(
    cut_experts: bool, judge: Judge, trained: Callable[[str], Run], tmp_path: Path
) -> None:
    """One tensor rank says nothing of cuts; experts are whole unless the user states their cut."""
    before, folder = trained("native ep2")
    owner = r"(between|second\.mlp\.1|.*deepspeed_experts.*)" if cut_experts else "between"
    stated = tmp_path / "layout.toml"
    stated.write_text(STATED.replace("OWNER", owner))
    target = MixRecipe(4, 2, 2, native=True, cut_experts=cut_experts)
    chosen = {**options(target), "kv_heads": 2, "layouts": read_stated_layouts(stated)}
    out = tmp_path / "o"
    notes = write(open_checkpoint(folder), out, **chosen).notes
    assert any("experts are whole" in note for note in notes) is not cut_experts
    after: Mixed = judge.lab.run(
        "resume_mixture_natively", target, out, SEED + 1, world=target.world
    )
    assert differences(before.full, after.full) == []
    assert spread(before.losses, after.losses) <= 5e-6


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
