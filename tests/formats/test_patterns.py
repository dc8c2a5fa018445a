"""Patterns out of files: those that trainers write match, those that could take forever do not."""

from __future__ import annotations

import re
import time

import pytest

from reshard.errors import LayoutError
from reshard.formats.patterns import PatternTable, bounded_pattern

WRITTEN = (
    r"^transformer\.layers\.\d+\.attention\.dense\.weight$",
    r".*word_embeddings.*\.weight",
    r"(model\.)?layers\.[0-9]+\.(mlp|attn)\..*\.(weight|bias)",
    r"(?:lm_head|embed)\.weight\Z",
    r"^(?!(lm_head|.*experts.*)\.(up\.|weight)).*",
)
NAMES = (
    "transformer.layers.3.attention.dense.weight",
    "model.layers.12.mlp.up.weight",
    "layers.1.attn.q.bias",
    "word_embeddings.weight",
    "lm_head.weight",
)


@pytest.mark.parametrize("text", WRITTEN)
def test_what_trainers_write_matches_as_ever(text: str) -> None:
    pattern = bounded_pattern(text, "a file")
    assert [pattern.match(name) for name in NAMES] == [bool(re.match(text, n)) for n in NAMES]


@pytest.mark.parametrize(
    "text",
    [
        r"(a+)+$", r"(a|a)*$", r"(a|ab)*c", r"(.*)*x", r"((a?){30}){30}", r"(a*b*)*c", r"(a)\1",
        r"(?=a*)*b", r"(\w+\.)*x",
    ],
)  # fmt: skip
def test_what_could_take_forever_is_refused(text: str) -> None:
    with pytest.raises(LayoutError, match="a pattern could take forever to match"):
        bounded_pattern(text, "a file")


@pytest.mark.parametrize("text", [".*" * 12 + "x", "a?" * 40 + "a" * 40, "a*" * 9 + "b"])
def test_too_many_ways_are_refused_where_a_name_allows_them(text: str) -> None:
    table = PatternTable.of([(text, 1)], "a file")
    start = time.process_time()
    with pytest.raises(LayoutError, match="a pattern could take forever to match"):
        table.matching("a" * 60)
    assert time.process_time() - start < 1


def test_a_name_of_any_length_is_matched_where_that_is_quick() -> None:
    assert bounded_pattern("a.*b", "a file").match("a" * 100_000 + "b")
