"""Files of rules: what each mistake in one says, and what of a checkpoint they do not take."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.errors import DocumentError, UnsupportedError, UsageError
from reshard.names.files import presets, rules_for
from reshard.names.rules import Rules, rules_of
from reshard.names.sizes import known_sizes
from reshard.names.solving import solve
from tests.truth import GOLDEN, case_named

SIDES = 'sides = ["a", "b"]\n'
JOIN = '[[join]]\na = "x.{i}"\nb = "y.{i}"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sides = [", "the rules of names are no TOML"),
        (JOIN, "sides is no list of texts"),
        ('sides = ["a", "a"]\n' + JOIN, "sides are two names"),
        (SIDES, r"there is no \[\[join\]\]"),
        (SIDES + "[sizes]\nd = true\n" + JOIN, "the size of d is a number or names keys"),
        (SIDES + "jion = 1\n" + JOIN, "the file has no word 'jion'"),
        (SIDES + JOIN + 'colour = "red"\n', "join 1 has no word 'colour'"),
        (SIDES + '[[join]]\na = "x"\n', "join 1"),
        (SIDES + '[[join]]\na = "x.{i}"\nb = "y"\n', "join 1 joins tensors, so it needs axes"),
        (
            SIDES + '[[join]]\na = "x.{i}"\nb = "y.{k}"\naxes = {a = "n", b = "n"}\n',
            "has a capture that",
        ),
        (SIDES + '[[join]]\na = "x"\nb = "y"\naxes = {a = "n"}\n', "axes of join 1 spell"),
        (
            SIDES
            + '[[join]]\na = {p = "x", q = "{i}"}\nb = "y"\naxes = {p="n",q="n",b="[p q]"}\n',
            "different captures",
        ),
        (SIDES + 'like = "llama"\n' + JOIN, "is like preset:llama, whose sides are"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_told(text: str, said: str) -> None:
    from reshard.names.files import preset

    with pytest.raises(DocumentError, match=said):
        rules_of(text, "mine.toml", preset)


def rules(joins: str) -> Rules:
    return rules_of(SIDES + joins, "mine.toml")


QKV = (
    '[[join]]\na = {q = "{i}.q", k = "{i}.k"}\nb = "{i}.qk"\n'
    'axes = {q = "(g r)", k = "g", b = "(g [q k])"}\n'
)
STACK = '[[join]]\na = "x.{i}"\nb = "y"\naxes = {a = "n", b = "i n"}\n'


@pytest.mark.parametrize(
    ("joins", "shapes", "said"),
    [
        (JOIN, {"x.1": (2,), "z": (3,)}, "1 name of a that no rule takes: .*found z"),
        (JOIN + '[[join]]\na = "x.1"\nb = "z"\n', {"x.1": (2,)}, "two rules take one name"),
        (STACK, {"x.0": (2,), "x.2": (2,)},
         "some of the tensors that are joined are not there: .*expected 3 tensors"),
        (STACK, {"x.0": (2,), "x.1": (3,)},
         "tensors that are stacked have different shapes"),
        (STACK, {"x.one": (2,)},
         "a part of a name is no number"),
        (QKV, {"0.q": (4,)}, "some of the tensors that are joined are not there"),
        (QKV, {"0.q": (5,), "0.k": (2,)}, "an extent is not what the spelling of its dim says"),
        (QKV, {"0.q": (4, 1), "0.k": (2,)}, "another number of dims than its spelling"),
        ('[[join]]\na = ["x", "w"]\nb = "y"\n', {"x": (1,), "w": (1,)}, "two tensors would get"),
    ],
)  # fmt: skip
def test_what_rules_do_not_take_is_refused(
    joins: str, shapes: dict[str, tuple[int, ...]], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        solve(rules(joins), "a", shapes, {})


def test_an_extent_that_nothing_says_is_asked_for() -> None:
    with pytest.raises(UsageError, match=r"nothing says the extent of an axis.*a size of g, r"):
        solve(rules(QKV), "b", {"0.qk": (6,)}, {})


@pytest.mark.parametrize(
    ("text", "value"),
    [("a", 6), ("missing | a / b", 3), ("a*b", 12), ("inner.c", 5), ("missing", None)],
)
def test_sizes_are_read_from_the_configuration(text: str, value: int | None) -> None:
    found = known_sizes({"x": text}, {"a": 6, "b": 2, "inner": {"c": 5}})
    assert found.get("x") == value


@pytest.mark.parametrize("text", ["a +", "a b", "a / b", "(a)"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="size"):
        known_sizes({"x": text}, {"a": 7, "b": 2})


def test_the_family_is_told_by_the_configuration() -> None:
    found, side = rules_for("preset:megatron-transformers", {"model_type": "mixtral"})
    assert (found.source, side) == ("preset:mixtral", "megatron")
    with pytest.raises(UsageError, match="which family of models this is cannot be told"):
        rules_for("preset:megatron-transformers", {})
    with pytest.raises(UnsupportedError, match=r"not translated by moving.*differ by one"):
        rules_for("preset:transformers-megatron", {"model_type": "gemma2"})
    with pytest.raises(UsageError, match="there is no preset 'lama': expected one of"):
        rules_for("preset:lama", {})
    with pytest.raises(UsageError, match="the file of rules cannot be read"):
        rules_for("nowhere.toml", {})
    assert len(presets()) >= 8


# ------------------------------------------------------------------------ whole checkpoints

LLAMA = "golden/llama_z1_tp2dp2_fp32"
CONFIG = (
    '{"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16}'
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A real checkpoint with its configuration beside it."""
    shutil.copytree(case_named(LLAMA).path, tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(CONFIG)
    return tmp_path / "run"


def test_every_state_is_that_of_the_truth(run: Path, tmp_path: Path) -> None:
    report = reshard.convert(run, tmp_path / "out", names="preset:llama", verify=True)
    assert report.sound
    found = reshard.read(tmp_path / "out")
    truth = case_named(LLAMA).truth().full
    at = "decoder.layers.0"
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        held = reshard.read(tmp_path / "out", state=state)
        gate, up = (truth[f"model.layers.0.mlp.{p}_proj.weight"][state] for p in ("gate", "up"))
        fused = torch.from_numpy(held[f"{at}.mlp.linear_fc1.weight"])
        assert torch.equal(fused, torch.cat([gate, up]))
        q, k, v = (truth[f"model.layers.0.self_attn.{p}_proj.weight"][state] for p in "qkv")
        rows = [
            part
            for g in (0, 1)
            for part in (q[8 * g : 8 * g + 8], k[4 * g : 4 * g + 4], v[4 * g : 4 * g + 4])
        ]
        assert torch.equal(
            torch.from_numpy(held[f"{at}.self_attention.linear_qkv.weight"]), torch.cat(rows)
        )
    assert len(found) == len(truth) - 3


def test_verify_and_inspect_take_names(run: Path, tmp_path: Path, capsys: Any) -> None:
    from reshard.cli import main

    reshard.convert(run, tmp_path / "out", names="preset:llama")
    assert reshard.verify(run, tmp_path / "out", names="preset:llama").equal
    assert not reshard.verify(run, tmp_path / "out").equal
    assert main(["inspect", str(run), "--names", "preset:llama"]) == 0
    said = capsys.readouterr().out
    assert "names of megatron, by preset:llama" in said
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in said
    assert "rules that meet nothing" in said


def changed(checkpoint: Any, **more: Any) -> Any:
    from dataclasses import replace

    return replace(checkpoint, **more)


def named(checkpoint: Any, **more: Any) -> Any:
    from reshard.api import named as translate

    return translate(checkpoint, "preset:llama", **more)


def test_parameters_that_become_one_must_agree(run: Path) -> None:
    checkpoint = reshard.open_checkpoint(run)
    key = ("model.layers.0.self_attn.k_proj.weight", "step")
    other = changed(checkpoint.scalars[key], value=2)
    late = changed(checkpoint, scalars={**checkpoint.scalars, key: other})
    with pytest.raises(
        UsageError, match=r"parameters that become one have different numbers: .*k_proj"
    ):
        named(late)
    moved: Any = checkpoint.extras["groups"].value
    swapped = [[n for n in group if n != key[0]] for group in moved]
    swapped[1].append(key[0])
    groups = {**checkpoint.extras, "groups": changed(checkpoint.extras["groups"], value=swapped)}
    with pytest.raises(
        UsageError, match="parameters that become one have different parameter groups"
    ):
        named(changed(checkpoint, extras=groups))
    fewer = {k: t for k, t in checkpoint.tensors.items() if k != (key[0], "exp_avg")}
    with pytest.raises(UsageError, match="parameters that become one have different states"):
        named(changed(checkpoint, tensors=fewer))
    carried = named(changed(checkpoint, tensors=fewer), states="weights").checkpoint
    assert {state for _, state in carried.tensors} == {"fp32"}
    assert not carried.scalars


def test_an_optimizer_of_matrices_is_refused(run: Path) -> None:
    checkpoint = reshard.open_checkpoint(run)
    config = {**checkpoint.extras["ds_config"].value, "optimizer": {"type": "Muon"}}  # type: ignore[dict-item]
    extras = {
        **checkpoint.extras,
        "ds_config": changed(checkpoint.extras["ds_config"], value=config),
    }
    with pytest.raises(UnsupportedError, match="the optimizer looks at whole matrices"):
        named(changed(checkpoint, extras=extras))
    assert named(changed(checkpoint, extras=extras), states="weights").translations


def test_a_state_that_is_not_elementwise_is_refused(run: Path) -> None:
    checkpoint = reshard.open_checkpoint(run)
    first = checkpoint.tensors["model.layers.0.mlp.gate_proj.weight", "fp32"]
    odd = {
        (name, "row"): changed(
            checkpoint.tensors["model.norm.weight", "fp32"], name=name, state="row"
        )
        for name in (first.name, first.name.replace("gate", "up"))
    }
    with pytest.raises(UnsupportedError, match="a state is not elementwise"):
        named(changed(checkpoint, tensors={**checkpoint.tensors, **odd}))


def test_a_name_that_no_rule_takes_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = GOLDEN / "odd_z1_dp2_fp32" / "ckpt"
    with pytest.raises(UsageError, match="names of transformers that no rule takes"):
        reshard.convert(source, tmp_path / "out", names="preset:llama")
    assert not (tmp_path / "out").exists()
