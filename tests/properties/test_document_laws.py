"""Documents: what is written is read back equal, and whatever else is refused with a path."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings

from reshard.errors import CompositionError, DocumentError, InvalidMapError
from reshard.geometry import ParamAffineMap, TransferPlan, compose, maps_from_document
from reshard.geometry import maps_to_document as to_document
from tests.properties.strategies import SETTINGS, Case, cases, examples, respelled

JUNK: tuple[Any, ...] = (
    None, True, -1, 1.5, 2**63, 2**200, "x", "1", b"", [], {}, [[]], [-1], float("nan"),
    float("inf"), {"shape": []}, [0, [1]], 10**30, "__class__", ("a",), {1, 2}, object(),
)  # fmt: skip


def after_json(value: object) -> Any:
    return json.loads(json.dumps(value))


@SETTINGS
@given(cases)
def test_a_map_is_the_same_after_a_dictionary_and_after_json(case: Case) -> None:
    one = respelled(case.random(), case.map(scaled=True))
    written = one.to_dict()
    assert ParamAffineMap.from_dict(written) == one
    assert ParamAffineMap.from_dict(after_json(written)) == one
    assert ParamAffineMap.from_dict(after_json(written)).to_dict() == written
    assert one.canonical() == ParamAffineMap.from_dict(one.canonical().to_dict())


@SETTINGS
@given(cases)
def test_a_document_of_many_maps_keeps_names_and_maps(case: Case) -> None:
    maps = {"^a$": case.map("a", scaled=True), "": case.map("b"), "version": case.map("c")}
    document = to_document(maps)
    assert list(document) == ["version", "params"]
    assert document["version"] == 1
    assert maps_from_document(after_json(document), validate=True) == maps


@SETTINGS
@given(cases)
def test_only_plain_values_are_written_and_a_scale_of_one_is_not(case: Case) -> None:
    one = case.map(scaled=True)
    for value in values(one.to_dict()):
        assert type(value) in (int, float)
    for _, piece in one.pieces():
        (entry,) = pieces_of(ParamAffineMap((99,), {0: (99,)}, {0: [piece]}).to_dict())
        assert ("scale" in entry) == (piece.scale != 1.0)


def values(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        node = list(node.values())
    if isinstance(node, list):
        for item in node:
            yield from values(item)
    else:
        yield node


def pieces_of(entry: Any) -> list[Any]:
    return [piece for rank in entry["ranks"].values() for piece in rank["pieces"]]


# ------------------------------------------------------------------------------ hostile documents


def spoiled(rnd: Random, document: Any) -> Any:
    """A document with junk at a random place."""
    made = copy.deepcopy(document)
    node = made
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return made
        key = rnd.choice(keys)
        inner = node[key]
        if isinstance(inner, dict | list) and inner and rnd.random() < 0.8:
            node = inner
            continue
        if isinstance(node, dict) and rnd.random() < 0.3:
            node[rnd.choice(["x", "-1", "", "١", "0.5", 7, None])] = node.pop(key)
        elif rnd.random() < 0.2:
            del node[key]
        else:
            node[key] = rnd.choice(JUNK)
        return made


@settings(SETTINGS, max_examples=examples(250))
@given(cases)
def test_a_spoiled_map_document_is_read_or_refused_with_a_path(case: Case) -> None:
    document = to_document({"^w$": case.map(scaled=True)})
    if case.seed % 2:
        document = after_json(document)
    other = spoiled(case.random("spoil"), document)
    read, refusal = outcome(lambda: maps_from_document(other))
    if read is None:
        assert refusal.startswith("affine_map")
        assert len(refusal) < 1000
    else:
        assert maps_from_document(after_json(to_document(read))) == read


Result = TypeVar("Result")


def outcome(read: Callable[[], Result]) -> tuple[Result | None, str]:
    """What was read, or the text of the refusal; any other error is a failure."""
    try:
        return read(), ""
    except DocumentError as refused:
        return None, str(refused)


@settings(SETTINGS, max_examples=examples(200))
@given(cases)
def test_a_spoiled_plan_document_is_read_or_refused_with_a_path(case: Case) -> None:
    plan = compose(case.map("target", scaled=True), case.map("source", scaled=True))
    other = spoiled(case.random("spoil"), plan.to_dict())
    read, refusal = outcome(lambda: TransferPlan.from_dict(other))
    if read is None:
        assert refusal.startswith("plan")
    else:
        assert TransferPlan.from_dict(after_json(read.to_dict())) == read
        with contextlib.suppress(CompositionError):
            read.verify()


@pytest.mark.parametrize("scale", [0, 0.0, float("nan"), float("inf"), "2", True])
def test_a_plan_with_a_scale_without_inverse_is_refused(scale: object) -> None:
    segment = {"shape": [4], "source": [0, 0, [1]], "target": [0, 0, [1]], "scale": scale}
    plan = TransferPlan({0: (4,)}, {0: (4,)}, [], {}).to_dict() | {"segments": [segment]}
    with pytest.raises(DocumentError, match=r"plan\.segments\[0\]\.scale"):
        TransferPlan.from_dict(plan)


@pytest.mark.parametrize("key", ["1" * 5000, "-1", "x", "1.0", "١"])
def test_a_rank_that_is_no_small_number_is_refused(key: str) -> None:
    with pytest.raises(DocumentError):
        ParamAffineMap.from_dict({**ENTRY, "ranks": {key: {"shard_shape": [0], "pieces": []}}})
    plan = TransferPlan({}, {}, [], {}).to_dict() | {"source_shapes": {key: [1]}}
    with pytest.raises(DocumentError):
        TransferPlan.from_dict(plan)


PIECE = {"shape": [4], "source": [0, [1]], "dest": [0, [1]], "locations": [0]}
ENTRY = {"logical_shape": [4], "ranks": {"0": {"shard_shape": [4], "pieces": [PIECE]}}}


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"shape": [4, 4]}, "pieces[0]"),
        ({"shape": [-4]}, "pieces[0].shape[0]"),
        ({"shape": [True]}, "pieces[0].shape[0]"),
        ({"shape": "4"}, "pieces[0].shape"),
        ({"source": [0]}, "pieces[0].source"),
        ({"source": [0.0, [1]]}, "pieces[0].source[0]"),
        ({"dest": [0, [-1]]}, "pieces[0].dest[1][0]"),
        ({"locations": []}, "pieces[0]"),
        ({"locations": ["0"]}, "pieces[0].locations[0]"),
        ({"scale": 0}, "pieces[0]"),
        ({"scale": "2"}, "pieces[0].scale"),
        ({"scale": float("nan")}, "pieces[0]"),
        ({"other": 1}, "pieces[0]"),
        ({"source": [2**63, [1]]}, "pieces[0]"),
    ],
)
def test_the_path_leads_to_the_malformed_value(change: dict[str, Any], path: str) -> None:
    spoilt = copy.deepcopy(ENTRY)
    spoilt["ranks"]["0"]["pieces"][0] |= change  # type: ignore[index]
    with pytest.raises(DocumentError) as refused:
        maps_from_document({"version": 1, "params": {"^w$": spoilt}})
    assert str(refused.value).startswith(f'affine_map.params."^w$".ranks.0.{path}: ')


@pytest.mark.parametrize("version", [0, 2, "1", None, 1.0, True])
def test_other_versions_are_refused(version: object) -> None:
    with pytest.raises(DocumentError, match=r"affine_map\.version: unknown version"):
        maps_from_document({"version": version, "params": {}})
    plan = TransferPlan({}, {}, [], {}).to_dict() | {"version": version}
    with pytest.raises(DocumentError, match=r"plan\.version"):
        TransferPlan.from_dict(plan)


def test_a_rank_given_as_number_and_as_text_is_refused() -> None:
    twice = {**ENTRY, "ranks": {"0": {"shard_shape": [4], "pieces": []}, 0: {}}}
    with pytest.raises(DocumentError, match="rank given twice"):
        ParamAffineMap.from_dict(twice)


def test_reading_proves_maps_only_when_asked() -> None:
    document = {"version": 1, "params": {"^w$": {**ENTRY, "logical_shape": [5]}}}
    assert set(maps_from_document(document)) == {"^w$"}
    with pytest.raises(InvalidMapError) as refused:
        maps_from_document(document, validate=True)
    assert (refused.value.parameter, refused.value.broken) == ("^w$", "P1")
