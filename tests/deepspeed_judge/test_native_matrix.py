"""Every topology to every other: DeepSpeed trains at one, reshard writes, DeepSpeed goes on.

The sources are trained here, at every stage and degree, by one recipe a family: the same model,
seed, and rows of every step, which every data-parallel degree divides. So all runs of a family are
one run but for the order of sums, and each is the judge of the others: what an engine holds after
loading must be bit-equal to what the source's engines held, and its losses must be those of the
uninterrupted run within the noise that DeepSpeed shows between the two topologies by itself.

A few cells run always, all of them with ``RESHARD_MATRIX=1`` (``make test-matrix``).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from reshard.formats.stated_layouts import read_stated_layouts
from scripts.deepspeed_lab.recipe import Recipe
from scripts.deepspeed_lab.results import Mixed, Resumed, Trained
from scripts.deepspeed_lab.topologies import MixRecipe
from tests.deepspeed_judge.judge import SEED, Judge, differences, recipe_of, same_bits
from tests.formats.native.sources import converted
from tests.truth import case_named

pytestmark = pytest.mark.deepspeed

WHOLE = bool(os.environ.get("RESHARD_MATRIX"))
OTHER_SEED = 7
STAGES, DEGREES = (0, 1, 2, 3), (1, 2, 3, 4)
LEAST_NOISE = {"fp32": 5e-6, "bf16": 4e-3, "fp16": 5e-4}
"""A unit in the last place of a loss of 5 is 5e-7 in fp32; half precision has 8 and 11 bits."""

PLAIN = Recipe(model="odd", world=1, stage=1, rows=12)
LLAMA = Recipe(model="llama", model_args={"kv": 4}, world=4, stage=1, rows=4)
FEW_HEADS = replace(LLAMA, model_args={"heads": 8, "kv": 2})

LLAMA_LAYOUT = r"""
[layouts]
'model\.embed_tokens\.weight' = "replicated"
'.*norm\.weight' = "replicated"
'.*\.(q|k|v|gate|up)_proj\.weight' = "column_parallel"
'.*\.(o|down)_proj\.weight' = "row_parallel"
'lm_head\.weight' = "column_parallel"
"""
"""How AutoTP of DeepSpeed 0.19.8 cuts a Llama; a run with one tensor rank stores nothing."""

Pair = tuple[Recipe, Recipe]


def at(recipe: Recipe, stage: int, dp: int, tp: int = 1) -> Recipe:
    """The run of the recipe at another topology."""
    return replace(recipe, stage=stage, world=dp * tp, tp=tp)


def every_stage_and_degree() -> Iterator[Pair]:
    """ZeRO-0 to 3 at dp 1 to 4, each to each."""
    topologies = [at(PLAIN, stage, dp) for stage in STAGES for dp in DEGREES]
    return ((source, target) for source in topologies for target in topologies)


def half_precision(dtype: str) -> Iterator[Pair]:
    """Each stage trained at one degree, to every stage and degree.

    In fp16 an engine without ZeRO trains otherwise than one with it (docs/native.md), so there is
    no uninterrupted run to compare such a pair with.
    """
    half = replace(PLAIN, dtype=dtype)
    stages = STAGES if dtype == "bf16" else STAGES[1:]
    for stage, dp in ((0, 3), (1, 1), (2, 3), (3, 4)):
        if stage in stages:
            yield from ((at(half, stage, dp), at(half, *to)) for to in _grid(stages))


def _grid(stages: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    return ((stage, dp) for stage in stages for dp in DEGREES)


def tensor_parallel() -> Iterator[Pair]:
    """tp2dp2, tp4dp1 and tp1dp4, each to each, within a stage and to another one."""
    spreads = [(4, 1), (2, 2), (1, 4)]
    for before, after in ((0, 1), (1, 1), (1, 3), (2, 0), (2, 2), (3, 2), (3, 3)):
        for one in spreads:
            yield from ((at(LLAMA, before, *one), at(LLAMA, after, *other)) for other in spreads)
    # more tensor ranks than key/value heads
    yield from ((at(FEW_HEADS, 1, 4), at(FEW_HEADS, 1, 4 // tp, tp)) for tp in (2, 4))


ALWAYS: list[Pair] = [
    (at(PLAIN, 2, 3), at(PLAIN, 3, 4)),
    (at(PLAIN, 3, 1), at(PLAIN, 1, 3)),
    (at(LLAMA, 1, 4), at(LLAMA, 3, 1, 4)),
]


def pairs() -> Iterator[Any]:
    """Every pair that is asked for, as a parameter of a test."""
    whole = [
        *every_stage_and_degree(),
        *half_precision("bf16"),
        *half_precision("fp16"),
        *tensor_parallel(),
    ]
    for source, target in whole if WHOLE else ALWAYS:
        yield pytest.param(source, target, id=f"{label(source)}->{label(target)}")


def label(recipe: Recipe) -> str:
    """The topology in a word; a name for the run."""
    heads = f"-kv{recipe.model_args['kv']}" if "kv" in recipe.model_args else ""
    kind = "adapter" if recipe.excludes_frozen else f"{recipe.model}{heads}"
    return f"{kind}-{recipe.dtype}-z{recipe.stage}-dp{recipe.dp}-tp{recipe.tp}"


@pytest.fixture(scope="module")
def trained(judge: Judge, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function: the run of a recipe, and the folder that it saved in. Trains once each."""
    done: dict[str, tuple[Trained, Path]] = {}

    def run(recipe: Recipe) -> tuple[Trained, Path]:
        name = label(recipe)
        if name not in done:
            folder = tmp_path_factory.mktemp("trained")
            held = judge.lab.run("train", recipe, folder, SEED, world=recipe.world)
            done[name] = held, folder
        return done[name]

    return run


@pytest.mark.parametrize(("source", "target"), list(pairs()))
def test_deepspeed_goes_on_elsewhere(
    source: Recipe,
    target: Recipe,
    judge: Judge,
    trained: Callable[[Recipe], tuple[Trained, Path]],
    tmp_path: Path,
) -> None:
    before, folder = trained(source)
    root = converted(folder, tmp_path / "out", **options(source, target, tmp_path))
    after: Resumed = judge.lab.run(
        "resume", target, root, None, OTHER_SEED, False, world=target.world
    )
    assert after.held.drift == []
    assert differences(before.held.full, after.held.full) == []
    for kind in ("frozen", "buffers"):
        expected, held = getattr(before.held, kind), getattr(after.held, kind)
        assert expected.keys() == held.keys()
        assert all(same_bits(held[name].float(), expected[name].float()) for name in expected)
    assert steps(after) == steps(before) != set()
    assert after.held.groups == before.held.groups
    assert (after.global_steps, after.client_state) == (3, {"iteration": 3})
    if source == target:
        assert after.losses == before.next_losses
        return
    anew, _ = trained(target)
    limit = max(LEAST_NOISE[source.dtype], 3 * spread(anew.next_losses, before.next_losses))
    assert spread(after.losses, before.next_losses) <= limit


def steps(run: Trained | Resumed) -> set[float]:
    """Every ``step`` that any rank's optimizer keeps."""
    return {step for rank in run.held.steps for step in rank}


def options(source: Recipe, target: Recipe, folder: Path) -> dict[str, Any]:
    """The topology, and how the model is cut where the source cannot know."""
    found: dict[str, Any] = {"stage": target.stage, "dp": target.dp, "tp": target.tp}
    if target.tp > 1:
        found["kv_heads"] = target.model_args["kv"]
    if target.tp > 1 and source.tp == 1:
        stated = folder / "llama.toml"
        stated.write_text(LLAMA_LAYOUT)
        found["layouts"] = read_stated_layouts(stated)
    return found


def spread(one: list[float], other: list[float]) -> float:
    """The largest difference of two lists of losses."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


# --------------------------------------------------------------------------- adapters

ADAPTER = Recipe(
    model="llama",
    world=2,
    stage=2,
    dtype="bf16",
    freeze="embed_tokens|q_proj",
    excludes_frozen=True,
    rows=12,
)
ADAPTED: list[Pair] = [
    (at(ADAPTER, before, 2), at(ADAPTER, *after))
    for before, after in ((2, (3, 3)), (3, (2, 3)), (1, (2, 1)), (1, (3, 4)), (3, (1, 1)))
]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(*pair, id=f"{label(pair[0])}->{label(pair[1])}")
        for pair in (ADAPTED if WHOLE else ADAPTED[:1])
    ],
)
def test_an_adapter_goes_on_without_the_weights_that_it_was_saved_without(
    source: Recipe, target: Recipe, judge: Judge, trained: Any, tmp_path: Path
) -> None:
    """The frozen weights are those of the base model, which a run loads before its checkpoint."""
    before, folder = trained(source)
    root = converted(folder, tmp_path, stage=target.stage, dp=target.dp)
    after: Resumed = judge.lab.run("resume", target, root, None, SEED, False, world=target.world)
    assert differences(before.held.full, after.held.full) == []
    assert {"model.embed_tokens.weight"} < before.held.frozen.keys()
    assert spread(after.losses, before.next_losses) <= LEAST_NOISE["bf16"]


# --------------------------------------------------------------------------- other models

FAMILIES: dict[str, tuple[int, str]] = {
    "codegenfused_tp2_z1_fp32": (
        8,
        r"""
        [layouts]
        'transformer\.wte\.weight' = "replicated"
        '.*\.ln_\w+\.(weight|bias)' = "replicated"
        '.*\.qkv_proj\.weight' = { layout = "fused_qkv", kind = "codegen" }
        '.*\.fc_in\.(weight|bias)' = "column_parallel"
        '.*\.(fc_out|out_proj)\.weight' = "row_parallel"
        '.*\.fc_out\.bias' = "replicated"
        'lm_head\..*' = "replicated"
        """,
    ),
    "yuan_tp2_z1_fp32": (
        8,
        r"""
        [layouts]
        'model\.embed_tokens\.weight' = "replicated"
        '.*norm\.(weight|bias)' = "replicated"
        '.*\.v_proj\.weight' = { layout = "shared_qk", num_heads = 8, partition_dim = 0 }
        '.*\.o_proj\.weight' = { layout = "shared_qk", num_heads = 8, partition_dim = 1 }
        '.*\.(gate|up)_proj\.weight' = "column_parallel"
        '.*\.down_proj\.weight' = "row_parallel"
        'lm_head\.weight' = "replicated"
        """,
    ),
    "megatron_tp2dp2_z1_fp32": (4, ""),
}
"""Number of heads, and how AutoTP cuts the model; the last one stores that itself, padding too."""

CODEGEN_4 = ("codegenfused_tp2_z1_fp32", 4)
"""DeepSpeed does not cut its eight heads over four ranks."""


@pytest.mark.skipif(not WHOLE, reason="a part of the whole matrix")
@pytest.mark.parametrize(
    ("family", "tp"), [pair for pair in product(FAMILIES, (2, 4)) if pair != CODEGEN_4]
)
def test_fused_shared_and_padded_weights_are_cut_as_stated(
    family: str, tp: int, judge: Judge, trained: Any, tmp_path: Path
) -> None:
    case = case_named(f"0.19.8/{family}")
    heads, layout = FAMILIES[family]
    target = recipe_of(case).spread(world=tp, tp=tp, stage=1)
    before, folder = trained(at(target, 1, 1))
    (tmp_path / "layout.toml").write_text(layout)
    stated = read_stated_layouts(tmp_path / "layout.toml") if layout else None
    multiple = None if layout else 8
    found = {"kv_heads": heads, "layouts": stated, "vocab_multiple": multiple}
    root = converted(folder, tmp_path / "out", stage=1, dp=1, tp=tp, **found)
    after = judge.lab.run("resume", target, root, None, OTHER_SEED, False, world=tp)
    assert after.held.drift == []
    assert differences(before.held.full, after.held.full) == []
    assert spread(after.losses, before.next_losses) <= LEAST_NOISE["fp32"]


# --------------------------------------------------------------------------- experts

SPREADS = (1, 2, 4)
"""Expert-parallel degrees, all on four ranks: the same rows, so the same run."""

MixPair = tuple[MixRecipe, MixRecipe]


def expert_pairs() -> Iterator[Any]:
    """Every degree to every other, within a stage and to another; AutoEP and DeepSpeed's own."""
    kinds = [("fp32", False, (1, 1)), ("fp32", False, (2, 3)), ("fp32", False, (3, 2))]
    kinds += [("bf16", False, (3, 1)), ("fp32", True, (1, 2)), ("bf16", True, (2, 1))]
    for dtype, native, (before, after) in kinds:
        recipe = MixRecipe(world=4, ep=1, dtype=dtype, native=native)
        for one, other in product(SPREADS, SPREADS):
            pair = replace(recipe, stage=before, ep=one), replace(recipe, stage=after, ep=other)
            name = f"{dtype}-{'moe' if native else 'autoep'}-{pair[0]}->{pair[1]}"
            yield pytest.param(*pair, id=name.replace(" ", "-"))


@pytest.fixture(scope="module")
def trained_experts(judge: Judge, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function: the run of a recipe, and the folder that it saved in. Trains once each."""

    @functools.cache
    def run(recipe: MixRecipe) -> tuple[Mixed, Path]:
        folder = tmp_path_factory.mktemp("experts")
        return judge.lab.run("train_mixture", recipe, folder, SEED, world=recipe.world), folder

    return run


@pytest.mark.skipif(not WHOLE, reason="a part of the whole matrix; see test_native_experts.py")
@pytest.mark.parametrize(("source", "target"), list(expert_pairs()))
def test_experts_go_on_elsewhere(
    source: MixRecipe, target: MixRecipe, judge: Judge, trained_experts: Any, tmp_path: Path
) -> None:
    before, folder = trained_experts(source)
    topology = {"stage": target.stage, "dp": target.dp, "ep": target.ep}
    root = converted(folder, tmp_path, **topology)
    world = target.world
    after: Mixed = judge.lab.run("resume_mixture_natively", target, root, OTHER_SEED, world=world)
    assert differences(before.full, after.full) == []
    assert before.weights.keys() == after.weights.keys()
    assert all(same_bits(held, after.weights[name]) for name, held in before.weights.items())
    anew, _ = trained_experts(target)
    limit = max(LEAST_NOISE[source.dtype], 3 * spread(anew.losses, before.losses))
    assert spread(after.losses, before.losses) <= (0.0 if source == target else limit)
