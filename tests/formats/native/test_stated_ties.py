"""What a layout file says of two names of one parameter must be one thing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from reshard.errors import LayoutError
from reshard.formats.registry import open_checkpoint
from reshard.formats.stated_layouts import read_stated_layouts
from tests.formats.edited import nothing, with_info
from tests.formats.native.sources import compared, content, converted, write
from tests.truth import Case, case_named

TIED = "golden/llama_z1_tp2_tied_bias"
EMBED, HEAD = r"model\.embed_tokens\.weight", r"lm_head\.weight"
LAYERS: Mapping[str, object] = {
    r".*norm\.weight": "replicated",
    r".*\.(q|k|v|gate|up)_proj\.(weight|bias)": "column_parallel",
    r".*\.(o|down)_proj\.weight": "row_parallel",
    r".*\.(o|down)_proj\.bias": "replicated",
}


def file_of(folder: Path, **words: object) -> Path:
    rules = {**LAYERS, **{{"embed": EMBED, "head": HEAD}[key]: word for key, word in words.items()}}
    (folder / "layout.json").write_text(json.dumps({"layouts": rules}))
    return folder / "layout.json"


@pytest.fixture(scope="module")
def never_cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Llama of one tensor rank, whose files say nothing of cuts."""
    folder = tmp_path_factory.mktemp("never_cut")
    converted(case_named(TIED).path, folder / "ckpt", stage=1, dp=1)
    (folder / "ckpt/latest").write_text("step3")
    return with_info(Case("whole", folder), folder / "bare", nothing)


def test_both_names_stated_the_same_are_cut_as_deepspeed_cut_them(
    never_cut: Path, tmp_path: Path
) -> None:
    layouts = read_stated_layouts(
        file_of(tmp_path, embed="column_parallel", head="column_parallel")
    )
    options = {"stage": 1, "dp": 1, "tp": 2, "kv_heads": 2, "layouts": layouts}
    write(open_checkpoint(never_cut), tmp_path / "out", **options)
    assert compared(case_named(TIED).path, tmp_path / "out").equal
    for rank in range(2):
        name = f"mp_rank_{rank:02d}_model_states.pt"
        mine = content(tmp_path / "out/step3" / name)["module"]
        assert mine == content(case_named(TIED).tag_path / name)["module"]


CONTRADICTIONS = [
    ("replicated", "column_parallel"),
    ("column_parallel", "replicated"),
    ("column_parallel", "row_parallel"),
    ("column_parallel", {"layout": "column_parallel", "original_vocab_size": 97}),
]


@pytest.mark.parametrize(("embed", "head"), CONTRADICTIONS)
def test_names_that_a_target_would_cut_differently_are_refused(
    embed: object, head: object, never_cut: Path, tmp_path: Path
) -> None:
    layouts = read_stated_layouts(file_of(tmp_path, embed=embed, head=head))
    options = {"stage": 1, "dp": 1, "tp": 2, "kv_heads": 2, "layouts": layouts}
    with pytest.raises(LayoutError, match="two names of one parameter") as caught:
        write(open_checkpoint(never_cut), tmp_path / "out", **options)
    said = str(caught.value)
    assert "layout.json, parameter lm_head.weight, tied to model.embed_tokens.weight" in said
    assert rf"'{EMBED}'" in said
    assert rf"'{HEAD}'" in said
    assert "state the same for both names" in said


@pytest.mark.parametrize(("embed", "head"), [("column_parallel", "row_parallel")])
def test_names_that_a_source_would_be_read_by_differently_are_refused(
    embed: object, head: object, tmp_path: Path
) -> None:
    file = file_of(tmp_path, embed=embed, head=head)
    with pytest.raises(LayoutError, match=r"two names .* tied to model\.embed_tokens\.weight"):
        open_checkpoint(case_named(TIED).path, layout=file)


def test_one_name_is_enough_and_other_words_may_mean_the_same(tmp_path: Path) -> None:
    split = {"layout": "contiguous_split", "partition_dim": 0}
    for words in ({"embed": "column_parallel"}, {"embed": "column_parallel", "head": split}):
        found = open_checkpoint(case_named(TIED).path, layout=file_of(tmp_path, **words))
        assert found.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
