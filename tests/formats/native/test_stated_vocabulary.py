"""A vocabulary whose padding the user states: readers of the target must know of it too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reshard import convert
from reshard.cli import main
from reshard.errors import LayoutError, UsageError
from reshard.formats.registry import open_checkpoint
from reshard.formats.stated_layouts import StatedLayouts, read_stated_layouts
from tests.formats.edited import nothing, with_info
from tests.formats.native.sources import content, converted, made_up, values_of, write
from tests.truth import Case, case_named

INFO = "universal_checkpoint_info"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TABLE = {"layout": "column_parallel", "original_vocab_size": 97}
LLAMA: Mapping[str, object] = {
    r"model\.embed_tokens\.weight": TABLE,
    r".*norm\.weight": "replicated",
    r".*\.(q|k|v|gate|up)_proj\.weight": "column_parallel",
    r".*\.(o|down)_proj\.weight": "row_parallel",
    r"lm_head\.weight": "column_parallel",
}


@pytest.fixture(scope="module")
def never_cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one tensor rank, whose files say nothing of cuts."""
    folder = tmp_path_factory.mktemp("never_cut")
    converted(case_named("golden/llama_z1_tp2dp2_fp32").path, folder / "ckpt", stage=1, dp=1)
    (folder / "ckpt/latest").write_text("step3")
    return with_info(Case("whole", folder), folder / "bare", nothing)


def stated(folder: Path, layout: Mapping[str, object]) -> StatedLayouts:
    file = folder / "layout.json"
    file.write_text(json.dumps({"layouts": layout}))
    return read_stated_layouts(file)


def info_of(folder: Path) -> dict[str, Any]:
    files = sorted((folder / "step3").glob("mp_rank*"))
    first, *others = (content(file).get(INFO) for file in files)
    assert all(other == first for other in others)
    return dict(first)


def vocabulary_of(folder: Path) -> tuple[object, object, object]:
    info = info_of(folder)
    return (
        info.get("vocabulary_parameter_patterns"),
        info.get("original_vocab_size"),
        info.get("padded_vocab_size"),
    )


def heights(folder: Path, name: str) -> list[int]:
    files = sorted((folder / "step3").glob("mp_rank*"))
    return [content(file)["module"][name][1][0] for file in files]


def test_the_target_states_the_padding_that_the_user_stated(
    never_cut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stated(tmp_path, LLAMA)
    words = ["convert", str(never_cut), str(tmp_path / "out/step3"), "--no-fsync", "--verify"]
    words += ["--to", "deepspeed", "--stage", "1", "--dp", "2", "--tp", "2", "--kv-heads", "2"]
    words += ["--vocab-multiple", "8", "--layout", str(tmp_path / "layout.json")]
    assert main(words) == 0, capsys.readouterr().err
    assert heights(tmp_path / "out", EMBED) == [56, 56]
    assert vocabulary_of(tmp_path / "out") == ([r"^model\.embed_tokens\.weight$"], 97, 112)


def test_padding_never_becomes_content_on_a_way_of_conversions(
    never_cut: Path, tmp_path: Path
) -> None:
    truth = values_of(never_cut)
    layouts = stated(tmp_path, LLAMA)
    options = {"stage": 1, "dp": 1, "kv_heads": 2, "layouts": layouts}
    write(open_checkpoint(never_cut), tmp_path / "0", tp=2, vocab_multiple=8, **options)
    way = [(4, 8, 128), (1, 8, 104), (2, 8, 112), (1, 1, 97), (2, 8, 112)]
    for number, (tp, multiple, rows) in enumerate(way, 1):
        (tmp_path / f"{number - 1}/latest").write_text("step3")
        source = open_checkpoint(tmp_path / str(number - 1))
        write(source, tmp_path / str(number), stage=2, dp=2, tp=tp, vocab_multiple=multiple)
        assert sum(heights(tmp_path / str(number), EMBED)) == rows
        assert vocabulary_of(tmp_path / str(number))[1:] == (97, rows)
        held = values_of(tmp_path / str(number))
        assert held.keys() == truth.keys()
        assert all(np.array_equal(held[key], value) for key, value in truth.items())


def test_one_padded_rank_is_not_stated_to_be_replicated(never_cut: Path, tmp_path: Path) -> None:
    layouts = stated(tmp_path, LLAMA)
    source = open_checkpoint(never_cut)
    write(source, tmp_path / "out", stage=1, dp=1, tp=1, vocab_multiple=8, layouts=layouts)
    assert info_of(tmp_path / "out") == {
        "universal_checkpoint_version": 0.4,
        "vocabulary_parameter_patterns": [r"^model\.embed_tokens\.weight$"],
        "original_vocab_size": 97,
        "padded_vocab_size": 104,
    }
    source = open_checkpoint(tmp_path / "out")
    with pytest.raises(LayoutError, match=r"how 11 parameters are cut over 2 .* is not known"):
        write(source, tmp_path / "two", stage=1, dp=1, tp=2, vocab_multiple=8)


def test_vocabularies_of_two_sizes_are_refused(tmp_path: Path) -> None:
    source, _ = made_up(tmp_path / "source", [{"a": (5, 2), "b": (7, 2)}])
    rule = {"layout": "contiguous_split", "partition_dim": 0, "original_vocab_size": 5}
    layouts = stated(tmp_path, {"a": rule, "b": {**rule, "original_vocab_size": 7}})
    options = {"stage": 1, "dp": 1, "tp": 2, "vocab_multiple": 4, "layouts": layouts}
    with pytest.raises(UsageError, match=r"vocabularies of different sizes .* 5 of a, 7 of b"):
        write(source, tmp_path / "out", **options)


def test_an_info_of_autotp_cannot_state_padding(tmp_path: Path) -> None:
    source = open_checkpoint(case_named("golden/llama_z1_tp2dp2_fp32").path)
    layouts = stated(tmp_path, {**LLAMA})
    options = {"stage": 1, "dp": 1, "tp": 4, "vocab_multiple": 8, "layouts": layouts}
    with pytest.raises(UsageError, match=r"AutoTP pads no vocabulary.*embed_tokens"):
        write(source, tmp_path / "out", kv_heads=2, **options)


@pytest.mark.parametrize("rows", [200, 98, 96, 50])
def test_a_size_that_whole_tensors_contradict_is_refused(
    rows: int, never_cut: Path, tmp_path: Path
) -> None:
    rule = {**TABLE, "original_vocab_size": rows}
    layouts = stated(tmp_path, {**LLAMA, r"model\.embed_tokens\.weight": rule})
    for tp in (1, 2):
        options = {"stage": 1, "dp": 1, "tp": tp, "kv_heads": 2, "layouts": layouts}
        with pytest.raises(LayoutError, match="original_vocab_size contradicts") as caught:
            write(open_checkpoint(never_cut), tmp_path / "out", vocab_multiple=8, **options)
        said = str(caught.value)
        assert f"layout.json, parameter {EMBED}" in said
        assert f"expected {rows} rows, by " in said
        assert "found 97 rows" in said


def test_a_source_with_fewer_rows_than_stated_is_refused(never_cut: Path, tmp_path: Path) -> None:
    stated(tmp_path, {r"model\.embed_tokens\.weight": {**TABLE, "original_vocab_size": 98}})
    with pytest.raises(LayoutError, match=r"expected at least 98 rows, by .* found 97 rows"):
        open_checkpoint(never_cut, layout=tmp_path / "layout.json")


def test_rows_that_a_file_leaves_out_of_a_whole_table_are_in_the_report(
    never_cut: Path, tmp_path: Path
) -> None:
    stated(tmp_path, {r"model\.embed_tokens\.weight": {**TABLE, "original_vocab_size": 90}})
    report = convert(
        never_cut, tmp_path / "u", to="universal", layout=tmp_path / "layout.json", fsync=False
    )
    said = [one.what for one in report.source.problems if "left out" in one.what]
    assert len(said) == 1
    assert f"7 of 97 rows of {EMBED} are left out" in said[0]
    assert "layout.json is 90" in said[0]
    whole, held = values_of(never_cut), values_of(tmp_path / "u")
    assert np.array_equal(held[EMBED, "exp_avg"], whole[EMBED, "exp_avg"][:90])


@pytest.mark.parametrize("word", ["replicated", "row_parallel"])
def test_a_padded_table_that_is_not_split_along_its_rows_is_named(
    word: str, never_cut: Path, tmp_path: Path
) -> None:
    rule = {"layout": word, "original_vocab_size": 97}
    layouts = stated(tmp_path, {**LLAMA, r"model\.embed_tokens\.weight": rule})
    options = {"stage": 1, "dp": 1, "tp": 2, "kv_heads": 2, "layouts": layouts}
    with pytest.raises(LayoutError, match="a padded table that is not split along dim 0") as caught:
        write(open_checkpoint(never_cut), tmp_path / "out", vocab_multiple=8, **options)
    assert f"parameter {EMBED}" in str(caught.value)


def test_a_multiple_that_pads_nothing_is_said(never_cut: Path, tmp_path: Path) -> None:
    options = {"stage": 1, "dp": 1, "tp": 2, "kv_heads": 2, "vocab_multiple": 8}
    plain = stated(tmp_path, {**LLAMA, r"model\.embed_tokens\.weight": "replicated"})
    target = write(open_checkpoint(never_cut), tmp_path / "out", layouts=plain, **options)
    assert [note for note in target.notes if "--vocab-multiple 8 pads nothing" in note]
    layouts = stated(tmp_path, LLAMA)
    target = write(open_checkpoint(never_cut), tmp_path / "out2", layouts=layouts, **options)
    assert not [note for note in target.notes if "--vocab-multiple" in note]


@pytest.mark.deepspeed
def test_deepspeeds_converter_leaves_the_padding_out(never_cut: Path, tmp_path: Path) -> None:
    from scripts.deepspeed_lab import jobs

    options = {"stage": 1, "dp": 1, "kv_heads": 2, "layouts": stated(tmp_path, LLAMA)}
    write(open_checkpoint(never_cut), tmp_path / "out", tp=2, vocab_multiple=8, **options)
    jobs.convert_with_deepspeed(tmp_path / "out/step3", tmp_path / "u", False, True)
    for (name, state), value in values_of(never_cut).items():
        theirs = torch.load(tmp_path / "u/zero" / name / f"{state}.pt", weights_only=False)
        assert np.array_equal(theirs["param"].numpy(), value), (name, state)
