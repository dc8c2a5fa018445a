"""What cannot be written exactly is refused by name, before anything is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reshard.errors import CheckpointError, LayoutError, ReshardError, UnsupportedError, UsageError
from reshard.formats.checkpoint import Checkpoint, Extra, Scalar
from reshard.formats.deepspeed.writing import NativeOptions, lay_out_deepspeed
from reshard.formats.dtypes import DTYPES
from reshard.formats.registry import open_checkpoint
from tests.formats.native.sources import made_up
from tests.truth import case_named


def lay_out(checkpoint: Checkpoint, **options: Any) -> None:
    chosen = NativeOptions(**{"stage": 1, "dp": 2, **options})
    lay_out_deepspeed(checkpoint, tag="step3", options=chosen)


def without(key: str) -> Callable[[Checkpoint], Checkpoint]:
    def change(source: Checkpoint) -> Checkpoint:
        return replace(source, extras={k: v for k, v in source.extras.items() if k != key})

    return change


def without_tensor(source: Checkpoint) -> Checkpoint:
    kept = {key: tensor for key, tensor in source.tensors.items() if key[0] != "a"}
    return replace(source, tensors=kept)


def with_another_step(source: Checkpoint) -> Checkpoint:
    return replace(source, scalars={**source.scalars, ("b", "step"): Scalar(4.0)})


def without_a_state(source: Checkpoint) -> Checkpoint:
    kept = {key: tensor for key, tensor in source.tensors.items() if key != ("b", "exp_avg")}
    return replace(source, tensors=kept)


def with_a_config_path(source: Checkpoint) -> Checkpoint:
    return replace(source, extras={**source.extras, "ds_config": Extra("ds.json")})


def with_an_unlisted_parameter(source: Checkpoint) -> Checkpoint:
    return replace(source, extras={**source.extras, "groups": Extra([["a"], ["c"]])})


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (without("groups"), CheckpointError, "which parameters are in which optimizer group"),
        (without("param_groups"), CheckpointError, "hyperparameters of every optimizer group"),
        (without("model_files"), CheckpointError, "does not say global_steps"),
        (without_tensor, CheckpointError, "needs every trained parameter"),
        (with_an_unlisted_parameter, CheckpointError, "in no optimizer group"),
        (with_another_step, UnsupportedError, "differ in what the optimizer keeps"),
        (without_a_state, UnsupportedError, "differ in what the optimizer keeps"),
        (with_a_config_path, UnsupportedError, "in which element type the model runs"),
    ],
)
def test_what_a_source_lacks_is_named(
    change: Callable[[Checkpoint], Checkpoint], kind: type[ReshardError], text: str, tmp_path: Path
) -> None:
    source, _ = made_up(tmp_path, [{"a": (3,), "b": (2, 2)}, {"c": (5,)}])
    with pytest.raises(kind, match=text):
        lay_out(change(source))


def test_an_unnamed_element_type_can_be_chosen(tmp_path: Path) -> None:
    source, _ = made_up(tmp_path, [{"a": (3,)}])
    options = NativeOptions(stage=2, dp=2, dtype=DTYPES["bfloat16"])
    target = lay_out_deepspeed(with_a_config_path(source), tag="t", options=options)
    assert any("does not hold its ds_config" in note for note in target.notes)


def test_a_cut_that_nobody_states_is_refused_with_all_names(tmp_path: Path) -> None:
    source, _ = made_up(tmp_path, [{"a": (4, 4), "b": (4,)}])
    with pytest.raises(LayoutError, match=r"how 2 parameters .* a, b: .*--layout FILE") as refused:
        lay_out(source, tp=2)
    assert "--kv-heads" not in str(refused.value)


def test_heads_that_maps_leave_open_are_asked_for() -> None:
    source = open_checkpoint(case_named("golden/llama_z1_tp2dp2_fp32").path)
    with pytest.raises(LayoutError, match=r"q_proj.weight, .* leave open .*--kv-heads"):
        lay_out(source, tp=4)
    lay_out(source, tp=4, kv_heads=2)


def test_heads_that_contradict_the_configuration_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(case_named("golden/llama_z1_tp2dp2_fp32").path, folder)
    (folder / "config.json").write_text('{"num_attention_heads": 4, "num_key_value_heads": 2}')
    source = open_checkpoint(folder)
    lay_out(source, tp=4)
    lay_out(source, tp=4, kv_heads=2)
    with pytest.raises(
        UsageError,
        match=r"another number of key/value heads .* expected 2, .* found --kv-heads 4; next: ",
    ):
        lay_out(source, tp=4, kv_heads=4)


@pytest.mark.parametrize("heads", [3, 5, 100])
def test_heads_that_divide_nothing_are_refused(heads: int) -> None:
    source = open_checkpoint(case_named("golden/llama_z1_tp2dp2_fp32").path)
    with pytest.raises(
        UsageError,
        match=rf"divides no extent .* expected a divisor of one of .* --kv-heads {heads}; next: ",
    ):
        lay_out(source, tp=4, kv_heads=heads)


def test_one_head_where_the_maps_show_two_is_told_from_a_missing_layout() -> None:
    source = open_checkpoint(case_named("golden/llama_z1_tp2dp2_fp32").path)
    with pytest.raises(LayoutError, match=r"correct --kv-heads \(1 does not fit its maps\)"):
        lay_out(source, tp=4, kv_heads=1)


@pytest.mark.parametrize(
    ("tp", "heads", "configured", "said"),
    [
        (4, 2, None, "2 key/value heads (--kv-heads), 1+1+0+0 of them on the 4 tensor ranks"),
        (4, 4, None, "4 key/value heads (--kv-heads), 1+1+1+1 of them on the 4 tensor ranks"),
        (4, None, 2, "2 key/value heads (config.json), 1+1+0+0 of them on the 4 tensor ranks"),
        (1, 2, None, None),
    ],
)
def test_the_number_of_heads_that_decided_is_reported(
    tp: int, heads: int | None, configured: int | None, said: str | None, tmp_path: Path
) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(case_named("golden/llama_z1_tp2dp2_fp32").path, folder)
    if configured:
        (folder / "config.json").write_text(f'{{"num_key_value_heads": {configured}}}')
    options = NativeOptions(stage=1, dp=1, tp=tp, kv_heads=heads)
    target = lay_out_deepspeed(open_checkpoint(folder), tag="t", options=options)
    found = [note for note in target.notes if "key/value heads" in note]
    assert (
        found
        == [f"the attention is cut for {said}; a model with another number cannot load it"][
            : said is not None
        ]
    )


def test_elastic_checkpoints_keep_no_hyperparameters() -> None:
    source = open_checkpoint(case_named("0.19.8/plain_elastic_z1_dp2").path)
    with pytest.raises(
        CheckpointError, match=r"hyperparameters of every .* expected 2 groups, found 0; next: Deep"
    ):
        lay_out(source, stage=1)


def test_zero3_in_fp16_needs_a_scaler_that_another_type_has_not(tmp_path: Path) -> None:
    source, _ = made_up(tmp_path, [{"a": (3,)}])
    options = NativeOptions(stage=3, dp=2, dtype=DTYPES["float16"])
    with pytest.raises(UnsupportedError, match=r"loss scaler .* choose --stage 1 or 2"):
        lay_out_deepspeed(source, tag="t", options=options)


@pytest.mark.parametrize(
    "options", [{"stage": 4, "dp": 1}, {"stage": 1, "dp": 0}, {"stage": 1, "dp": 3, "ep": 2}]
)
def test_topologies_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        NativeOptions(**options)
