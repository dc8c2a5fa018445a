"""Renamings: rules in order, tables, and everything that would lose or merge names."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.errors import DocumentError, UsageError
from reshard.formats.renaming import renamed, renaming_of
from tests.truth import case_named

NAMES = ["module.h.0.w", "module.h.1.w", "module.norm"]


def test_rules_apply_one_after_another() -> None:
    renaming = renaming_of([r"^module\.=", r"^h\.(\d)=layers.\1", "^norm=final_norm"])
    assert list(renaming.names(NAMES).values()) == ["layers.0.w", "layers.1.w", "final_norm"]


def test_only_the_first_match_is_replaced() -> None:
    assert renaming_of(["w=v"]).names(["w.w"]) == {"w.w": "v.w"}


def test_a_rule_is_cut_at_its_last_sign() -> None:
    assert renaming_of(["(?=w)=v."]).names(["a.w"]) == {"a.w": "a.v.w"}


def test_a_table_comes_before_the_rules(tmp_path: Path) -> None:
    table = tmp_path / "names.json"
    table.write_text('{"module.norm": "module.n"}')
    names = renaming_of([r"^module\.="], table).names(NAMES)
    assert names["module.norm"] == "n"


def test_names_may_change_places(tmp_path: Path) -> None:
    table = tmp_path / "names.json"
    table.write_text('{"a": "b", "b": "a"}')
    assert renaming_of((), table).names(["a", "b"]) == {"a": "b", "b": "a"}


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (["w"], "not a renaming: expected OLD=NEW, found 'w'"),
        (["=w"], "not a renaming: expected OLD=NEW, found '=w'"),
        (["(=w"], r"not a regular expression: found '\('"),
        (["none=w"], "a renaming meets no parameter: found --rename 'none=w'"),
        ([r"w=\3"], "refers to a group that its expression does not have"),
        (
            [r"\.[01]\.=."],
            "two parameters would get one name: parameter module.h.w: .*module.h.0.w",
        ),
        ([r"^module\.norm$="], "leaves a parameter without a name: parameter module.norm"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(rules: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        renaming_of(rules).names(NAMES)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("{", DocumentError, "the table of names is no JSON"),
        ('{"a": 1}', DocumentError, "not a table of names"),
        ("[]", DocumentError, "not a table of names"),
        ('{"a": "b", "a": "c"}', DocumentError, "a name is there twice"),
        ('{"a": "b"}', UsageError, "names a parameter that is not there: .*parameter a"),
    ],
)
def test_a_table_that_is_none_is_refused(
    text: str, kind: type[Exception], said: str, tmp_path: Path
) -> None:
    table = tmp_path / "names.json"
    table.write_text(text)
    with pytest.raises(kind, match=said):
        renaming_of((), table).names(NAMES)


def test_a_missing_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the table of names cannot be read: .*none.json"):
        renaming_of((), tmp_path / "none.json")


def test_everything_that_names_a_parameter_follows() -> None:
    import reshard

    before = reshard.open_checkpoint(case_named("golden/llama_z1_tp2_tied_bias").path)
    after = renamed(before, renaming_of(["^model=m", "^lm_head=head"]), before)
    assert after.aliases == {"head.weight": "m.embed_tokens.weight"}
    assert {name for name, _ in after.scalars} == set(after.names)
    assert after.copies
    assert {copy.name for copy in after.copies} <= set(after.names)
    assert {tensor.key for tensor in after.tensors.values()} == set(after.tensors)
    groups, module = after.extras["groups"].value, after.extras["module"].value
    assert {name for group in groups for name in group} == set(after.names)  # type: ignore[attr-defined]
    assert set(module) == {*after.names, *after.aliases}  # type: ignore[call-overload]


def test_names_that_are_left_out_take_no_name() -> None:
    import reshard

    whole = reshard.open_checkpoint(case_named("golden/llama_z1_tp2_tied_bias").path)
    kept = sorted(set(whole.names) - set(whole.aliases.values()))[:1]
    rules = renaming_of(["^.*$=one"])
    with pytest.raises(UsageError, match="two parameters would get one name"):
        renamed(whole, rules, whole)
    assert renamed(reshard.select(whole, include=kept), rules, whole).names == ("one",)


@pytest.mark.parametrize("to", ["universal", "dcp", "deepspeed"])
def test_every_target_takes_names_moments_included(to: str, tmp_path: Path) -> None:
    import numpy as np

    import reshard

    source = case_named("golden/llama_z1_tp2_tied_bias").path
    options = reshard.NativeOptions(stage=1, dp=2) if to == "deepspeed" else None
    rules = renaming_of(["^=_orig_mod."])
    reshard.convert(source, tmp_path / "out", to=to, rename=rules, options=options)
    before, after = reshard.open_checkpoint(source), reshard.open_checkpoint(tmp_path / "out")
    assert set(after.names) == {f"_orig_mod.{name}" for name in before.names}
    assert {f"_orig_mod.{old}" for old in before.aliases} == set(after.aliases)
    for name, state in before.tensors:
        new = f"_orig_mod.{name}"
        expected = reshard.read(source, name, state=state)[name]
        np.testing.assert_array_equal(
            reshard.read(tmp_path / "out", new, state=state)[new], expected
        )
    steps = {scalar.value for scalar in before.scalars.values()}
    assert {scalar.value for scalar in after.scalars.values()} == steps
    assert reshard.verify(source, tmp_path / "out", rename=rules).equal
