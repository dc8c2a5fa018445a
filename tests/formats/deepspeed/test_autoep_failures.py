"""Fused experts that do not fit together: each failure the tutorial names, and those it does not.

The tutorial's own words for the outcome are in the names: what raises ``FileNotFoundError`` there
is a :class:`MissingFileError`, what raises ``NotImplementedError`` an :class:`UnsupportedError`,
what raises ``RuntimeError`` a :class:`CheckpointError`; and where it says that weights are still
written, they are, and the report says which states are absent.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.errors import (
    CheckpointError,
    DocumentError,
    LayoutError,
    MissingFileError,
    ReplicaMismatchError,
    UnsupportedError,
)
from reshard.formats.checkpoint import Checkpoint, Role
from tests.formats.deepspeed.mixture_files import Full, Mixture, expert_file, write
from tests.formats.deepspeed.reading import doubled, nameless, opened, rewrite, wrong_states

MIXTURE = Mixture(((0, 1), (2, 3)), edp=2)
MODEL, OPTIMIZER = "mp_rank_*", "*_optim_states.pt"
PREFIX = "model.layers.0.mlp.experts"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(MIXTURE, tmp_path / "step3")


def only(states: tuple[str, ...], full: Full) -> Full:
    """The truth without the states of experts that are not in ``states``."""
    return {
        name: {s: v for s, v in held.items() if s in states or name == "dense.weight"}
        for name, held in full.items()
    }


def absent_from(checkpoint: Checkpoint) -> str:
    (problem,) = checkpoint.problems
    return str(problem)


# --------------------------------------------------------------------------- the tutorial's list


def test_expert_files_without_metadata(folder: Path) -> None:
    rewrite(folder, MODEL, lambda model: model.pop("ds_autoep_layers"))
    with pytest.raises(CheckpointError, match=r"without AutoEP metadata.*layer_0_expert_0"):
        opened(folder)


def test_a_missing_expert_file_is_a_file_not_found(folder: Path) -> None:
    (folder / expert_file(1, 2)).unlink()
    with pytest.raises(FileNotFoundError, match="layer_1_expert_2_mp_rank_00") as caught:
        opened(folder)
    assert isinstance(caught.value, MissingFileError)


def test_two_mp_ranks_of_one_expert_are_not_implemented(folder: Path) -> None:
    shutil.copy(folder / expert_file(0, 3), folder / expert_file(0, 3, mp=1))
    with pytest.raises(NotImplementedError, match="more than one model-parallel rank") as caught:
        opened(folder)
    assert isinstance(caught.value, UnsupportedError)
    assert "found mp_rank 0, 1" in str(caught.value)


def test_the_legacy_key_is_read(folder: Path) -> None:
    def rename(model: dict[str, Any]) -> None:
        model["autoep_layers"] = model.pop("ds_autoep_layers")

    rewrite(folder, MODEL, rename)
    assert wrong_states(opened(folder), MIXTURE.full()) == []


def test_metadata_without_a_placement_means_the_uniform_one(folder: Path) -> None:
    def drop(model: dict[str, Any]) -> None:
        for entry in model["ds_autoep_layers"]:
            del entry["expert_placement"]

    rewrite(folder, MODEL, drop)
    assert wrong_states(opened(folder), MIXTURE.full()) == []


def without(state: str) -> Callable[[dict[str, Any]], object]:
    return lambda kept: kept["optimizer_state_dict"]["base_optimizer_state"]["state"][1].pop(state)


def test_absent_states_of_experts_are_reported_and_weights_written(folder: Path) -> None:
    rewrite(folder, OPTIMIZER, without("exp_avg"))
    checkpoint = opened(folder)
    assert wrong_states(checkpoint, only(("fp32", "exp_avg_sq"), MIXTURE.full())) == []
    assert (f"{PREFIX}.w1", "exp_avg") not in checkpoint.tensors
    assert "optimizer states are absent (exp_avg)" in absent_from(checkpoint)


def test_a_state_that_one_rank_lacks_is_absent(folder: Path) -> None:
    rewrite(folder, "zero_pp_rank_2_*", without("exp_avg_sq"))
    checkpoint = opened(folder)
    assert wrong_states(checkpoint, only(("fp32", "exp_avg"), MIXTURE.full())) == []
    assert "absent (exp_avg_sq)" in absent_from(checkpoint)


def drop_group(kept: dict[str, Any]) -> None:
    body = kept["optimizer_state_dict"]
    body["base_optimizer_state"]["state"].pop(1)
    body["base_optimizer_state"]["param_groups"].pop(1)
    for key in ("single_partition_of_fp32_groups", "group_paddings", "partition_count"):
        body[key].pop(1)


def test_absent_expert_shards_leave_the_weights_of_the_expert_files(folder: Path) -> None:
    rewrite(folder, OPTIMIZER, drop_group)
    checkpoint = opened(folder)
    assert wrong_states(checkpoint, only(("fp32",), MIXTURE.full())) == []
    assert "absent (exp_avg, exp_avg_sq, step)" in absent_from(checkpoint)
    assert checkpoint.tensors[f"{PREFIX}.w1", "fp32"].role is Role.PARAMETER


def test_frozen_experts_come_from_the_expert_files(folder: Path) -> None:
    """Nobody trains them, so nothing is absent."""
    rewrite(folder, OPTIMIZER, drop_group)
    rewrite(folder, MODEL, lambda model: model["param_shapes"].pop())
    checkpoint = opened(folder)
    assert wrong_states(checkpoint, only(("fp32",), MIXTURE.full())) == []
    assert checkpoint.tensors[f"{PREFIX}.w1", "fp32"].role is Role.FROZEN
    assert checkpoint.problems == ()


def test_without_any_optimizer_file_the_weights_are_delivered(folder: Path) -> None:
    def with_weights(model: dict[str, Any]) -> None:
        model["module"]["dense.weight"] = MIXTURE.full()["dense.weight"]["fp32"]

    rewrite(folder, MODEL, with_weights)
    for file in folder.glob(OPTIMIZER):
        file.unlink()
    checkpoint = opened(folder)
    weights = {name: {"fp32": held["fp32"]} for name, held in MIXTURE.full().items()}
    assert wrong_states(checkpoint, weights) == []
    assert {tensor.role for tensor in checkpoint.tensors.values()} == {Role.PARAMETER}
    assert "every optimizer state is absent" in absent_from(checkpoint)


def test_one_missing_optimizer_file_is_not_best_effort(folder: Path) -> None:
    (folder / "zero_pp_rank_3_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(MissingFileError, match="zero_pp_rank_3"):
        opened(folder)


# --------------------------------------------------------------------------- left-over files


@pytest.mark.parametrize("stray", [expert_file(0, 4), expert_file(2, 0)])
def test_a_file_of_an_expert_that_is_not_there_is_refused(folder: Path, stray: str) -> None:
    shutil.copy(folder / expert_file(0, 0), folder / stray)
    with pytest.raises(CheckpointError, match=stray):
        opened(folder)


def test_an_expert_file_that_holds_another_expert_is_refused(folder: Path) -> None:
    rewrite(folder, OPTIMIZER, drop_group)
    shutil.copy(folder / expert_file(0, 0), folder / expert_file(0, 1))
    with pytest.raises(CheckpointError, match="carries the name of another expert"):
        opened(folder)
    nameless(folder / expert_file(0, 1))
    with pytest.raises(CheckpointError, match=r"expected model.layers.0.mlp.experts.w1.1"):
        opened(folder)


@pytest.mark.parametrize("pattern", ["layer_*_expert_*", "layer_1_expert_2_*"])
def test_expert_files_of_another_run(folder: Path, tmp_path: Path, pattern: str) -> None:
    doubled(folder, pattern)
    with pytest.raises(ReplicaMismatchError, match="not its master weights rounded"):
        reshard.convert(folder, tmp_path / "universal", fsync=False)


# --------------------------------------------------------------------------- metadata


Edit = Callable[[dict[str, Any]], object]


def placed(edit: Edit) -> Edit:
    return lambda model: edit(model["ds_autoep_layers"][0]["expert_placement"])


def entry(**values: object) -> Edit:
    return lambda model: model["ds_autoep_layers"][0].update(values)


MALFORMED: list[tuple[str, Edit, str]] = [
    ("unknown version", placed(lambda d: d.update(version=2)), "unknown version.*expected 1"),
    ("an expert twice", placed(lambda d: d["ranks"][0].update(experts=[1, 1])), "twice"),
    ("an expert nowhere", placed(lambda d: d["ranks"][0].update(experts=[1])), "no rank"),
    ("no such expert", placed(lambda d: d["ranks"][0].update(experts=[0, 1, 9])), "not exist"),
    ("a bool for an expert", placed(lambda d: d["ranks"][0].update(experts=[0, True])), "numbers"),
    ("a rank twice", placed(lambda d: d["ranks"][1].update(rank=0)), "a rank twice"),
    ("a rank gone", placed(lambda d: d["ranks"].pop()), "ranks"),
    ("another number of experts", entry(num_experts=3), "contradicts its layer"),
    ("another degree", entry(ep_size=4), "contradicts its layer"),
    ("no such EP rank", entry(ep_rank=2), "ep_rank is no rank"),
    ("another local number", entry(num_local_experts=3), "num_local_experts contradicts"),
    ("an unknown format", entry(checkpoint_format="tar"), "unknown checkpoint_format"),
    ("ZeRO-3 in another stage", entry(checkpoint_format="zero3_partitioned"), "unknown version"),
    ("a prefix twice", entry(expert_key_prefix="model.layers.1.mlp.experts"), "one expert_key"),
    ("a number twice", entry(moe_layer_id=1), "have one moe_layer_id"),
    ("no list", lambda model: model.update(ds_autoep_layers={}), "expected a list, found dict"),
]


@pytest.mark.parametrize(
    ("edit", "text"), [pytest.param(*rest, id=name) for name, *rest in MALFORMED]
)
def test_malformed_metadata_is_refused_by_name(folder: Path, edit: Edit, text: str) -> None:
    rewrite(folder, MODEL, edit)
    with pytest.raises((CheckpointError, LayoutError, UnsupportedError), match=text) as caught:
        opened(folder)
    assert "mp_rank_00_model_states.pt" in str(caught.value)
    assert "\n" not in str(caught.value)


def with_maps(model: dict[str, Any], offset: int = 0, version: int = 1) -> None:
    """Add the maps that DeepSpeed writes beside the placement, the first one shifted."""
    sizes = {"w1": [3, 2], "w2": [2, 3], "w3": [3, 2]}
    for layer in model["ds_autoep_layers"]:
        params = {}
        for weight, (rows, columns) in sizes.items():
            strides = [rows * columns, columns, 1]
            ranks = {}
            for rank in range(2):
                start = 2 * rank * rows * columns + (offset if weight == "w2" else 0)
                piece = {
                    "shape": [2, rows, columns],
                    "source": [start, strides],
                    "dest": [0, strides],
                    "locations": [rank],
                }
                ranks[rank] = {"shard_shape": [2, rows, columns], "pieces": [piece]}
            shape = [4, rows, columns]
            name = f"{layer['expert_key_prefix']}.{weight}"
            params[name] = {"logical_shape": shape, "ranks": ranks}
        layer["affine_maps"] = {"version": version, "params": params}


def test_stored_maps_that_agree_are_read(folder: Path) -> None:
    rewrite(folder, MODEL, with_maps)
    assert wrong_states(opened(folder), MIXTURE.full()) == []


def test_a_stored_map_that_contradicts_the_placement_is_refused(folder: Path) -> None:
    rewrite(folder, MODEL, lambda model: with_maps(model, offset=6))
    with pytest.raises(LayoutError, match=r"rank ep 0, parameter model.layers.0.mlp.experts.w2"):
        opened(folder)


def test_a_malformed_map_is_refused_with_its_place(folder: Path) -> None:
    rewrite(folder, MODEL, lambda model: with_maps(model, offset=-6))
    with pytest.raises(DocumentError, match=r"ranks\.0\.pieces\[0\].*mp_rank_00"):
        opened(folder)


def test_stored_maps_of_another_version_are_refused(folder: Path) -> None:
    rewrite(folder, MODEL, lambda model: with_maps(model, version=2))
    with pytest.raises(DocumentError, match="unknown version of expert maps"):
        opened(folder)


def test_a_layer_without_its_maps_is_refused(folder: Path) -> None:
    def incomplete(model: dict[str, Any]) -> None:
        with_maps(model)
        del model["ds_autoep_layers"][1]["affine_maps"]["params"]["model.layers.1.mlp.experts.w3"]

    rewrite(folder, MODEL, incomplete)
    with pytest.raises(CheckpointError, match="no map of an expert parameter"):
        opened(folder)


def test_shapes_must_hold_the_experts_that_the_placement_says(folder: Path) -> None:
    def third(model: dict[str, Any]) -> None:
        shapes = model["param_shapes"][1]
        shapes[f"{PREFIX}.w1"] = (3, 3, 2)

    rewrite(folder, MODEL, third)
    with pytest.raises(CheckpointError, match="another number of experts than the placement"):
        opened(folder)


# --------------------------------------------------------------------------- the order of ranks


def config_as_path(content: dict[str, Any]) -> None:
    content["ds_config"] = "/home/user/ds_config.json"


@pytest.mark.parametrize("data_first", [False, True])
def test_without_a_configuration_the_weights_tell_the_order(
    tmp_path: Path, data_first: bool
) -> None:
    mixture = Mixture(MIXTURE.placement, edp=2, data_first=data_first)
    folder = write(mixture, tmp_path / "step3")
    rewrite(folder, "*", config_as_path)
    assert wrong_states(opened(folder), mixture.full()) == []


def test_an_order_that_the_weights_do_not_tell_is_refused(folder: Path) -> None:
    rewrite(folder, MODEL, config_as_path)
    rewrite(folder, "layer_*", lambda expert: [tensor.zero_() for tensor in expert.values()])
    with pytest.raises(UnsupportedError, match="use_data_before_expert_parallelism"):
        opened(folder)


def test_an_order_that_is_no_boolean_is_refused(folder: Path) -> None:
    order = {"use_data_before_expert_parallelism": "yes"}
    rewrite(folder, MODEL, lambda model: model.update(ds_config=order))
    with pytest.raises(CheckpointError, match="is no boolean"):
        opened(folder)
