"""Any placement of experts comes out as one tensor, whatever the stage and the order of ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import UnsupportedError
from tests.formats.deepspeed.mixture_files import Mixture, write
from tests.formats.deepspeed.reading import opened, rewrite, wrong_states

EVEN = ((0, 1), (2, 3))
UNEVEN = ((3,), (0, 2, 1))
REPLICATED = ((0, 1, 2), (2, 3, 0))
WITH_EMPTY = ((2, 0, 1, 3), ())


def exact(mixture: Mixture) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = opened(write(mixture, Path(folder) / "step3"))
        assert wrong_states(checkpoint, mixture.full()) == []
        assert {scalar.value for scalar in checkpoint.scalars.values()} == {3.0}
        assert checkpoint.problems == ()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("edp", [1, 3])
@pytest.mark.parametrize("placement", [EVEN, UNEVEN, REPLICATED, WITH_EMPTY])
def test_every_state_of_every_expert_is_exact(
    placement: tuple[tuple[int, ...], ...], edp: int, stage: int
) -> None:
    exact(Mixture(placement, edp=edp, stage=stage))


@pytest.mark.parametrize("stage", [1, 3])
def test_both_orders_of_ranks(stage: int) -> None:
    exact(Mixture(EVEN, edp=2, stage=stage, data_first=True))


def test_a_rank_without_experts_may_be_the_first_under_zero3_only(tmp_path: Path) -> None:
    exact(Mixture(((), (0, 1)), stage=3))
    with pytest.raises(UnsupportedError, match=r"rank ep 0, parameter model\.layers\.0"):
        opened(write(Mixture(((), (0, 1))), tmp_path / "step3"))


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    """Any placement of up to five experts over up to four EP ranks, and any way to spread it."""
    experts = draw(st.integers(1, 5))
    ep = draw(st.integers(1, 4))
    ranks = [draw(st.lists(st.integers(0, experts - 1), unique=True)) for _ in range(ep)]
    nowhere = set(range(experts)) - {expert for held in ranks for expert in held}
    ranks[0] += draw(st.permutations(sorted(nowhere)))
    stage = draw(st.sampled_from([1, 3]))
    if stage == 1 and not ranks[0]:
        ranks[0] = [0]
    return Mixture(
        tuple(map(tuple, ranks)),
        edp=draw(st.integers(1, 3)),
        stage=stage,
        data_first=draw(st.booleans()),
        layers=draw(st.integers(1, 2)),
    )


@settings(max_examples=40, deadline=None)
@given(mixtures())
def test_random_placements_are_exact(mixture: Mixture) -> None:
    exact(mixture)


def as_last_stage(value: Any) -> Any:
    """The same content with the names of the other end of a pipeline."""
    if isinstance(value, dict):
        return type(value)((as_last_stage(k), as_last_stage(v)) for k, v in value.items())
    if isinstance(value, list):
        return [as_last_stage(item) for item in value]
    if isinstance(value, str):
        return value.replace("layers.0", "layers.9").replace("dense.weight", "tail.weight")
    return value


def test_layers_are_counted_anew_on_every_pipeline_stage(tmp_path: Path) -> None:
    """Both stages have a layer 0; the number of the rank in the file names tells them apart."""
    mixture = Mixture(UNEVEN, edp=2, layers=1)
    folder = write(mixture, tmp_path / "step3")
    for file in sorted(folder.iterdir()):
        content = as_last_stage(torch.load(file, weights_only=False))
        torch.save(content, folder / file.name.replace("mp_rank_00", "mp_rank_01"))
    degrees = {"pp_degree": 2, "tp_degree": 1}
    stated = {"mp_world_size": 2, "checkpoint_parallel_dimensions": degrees}
    rewrite(folder, "mp_rank_*", lambda model: model.update(stated))
    checkpoint = opened(folder)
    assert wrong_states(checkpoint, {**mixture.full(), **as_last_stage(mixture.full())}) == []
    assert (checkpoint.topology.pp, checkpoint.topology.ep) == (2, 2)


def test_the_universal_loader_is_told_how_to_cut_experts(tmp_path: Path) -> None:
    checkpoint = opened(write(Mixture(EVEN), tmp_path / "step3"))
    keys = checkpoint.extras["restore_keys"].value
    assert isinstance(keys, dict)
    assert keys["model.layers.0.mlp.experts.w2"] == {
        "cat_dim": 0,
        "is_expert_param": True,
        "ep_num_experts": 4,
    }
    assert "dense.weight" not in keys
    assert checkpoint.topology.ep == 2


def test_a_part_may_be_longer_than_one_expert() -> None:
    """Three ranks share two experts of six elements: borders fall inside and between experts."""
    exact(Mixture(((1, 0),), edp=3, layers=1))


def test_values_are_told_apart() -> None:
    full = Mixture(EVEN).full()
    everything = torch.cat([t.flatten() for states in full.values() for t in states.values()])
    assert len(set(everything.tolist())) == len(everything)
