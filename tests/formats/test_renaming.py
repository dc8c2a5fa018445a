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
