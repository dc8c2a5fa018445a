"""`inspect --html` and `convert --dry-run --html`: the right rows, cells, sums; names are text."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

from reshard import api
from reshard.cli import main
from reshard.cli.pictures.inspection_page import inspection_page
from reshard.cli.pictures.page import node, page, table
from reshard.cli.pictures.plan_page import plan_page
from reshard.cli.pictures.traffic import grouped, matrix_of, traffic_of
from reshard.cli.units import format_bytes
from reshard.formats.checkpoint import Topology
from reshard.formats.survey import Presence, RankFile, Survey
from reshard.planning import Plan
from tests.faces.test_map_picture import HOSTILE
from tests.truth import EXAMPLE, case_named

Capture = pytest.CaptureFixture[str]

MODEL = "mp_rank_{:02d}_model_states.pt"
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt"
VOID = {"meta", "input", "br", "link"}


@dataclass(slots=True)
class Table:
    """A table of a page: cells as text, with their classes."""

    kind: str
    rows: list[list[str]] = field(default_factory=list)
    classes: list[list[str]] = field(default_factory=list)


class Page(HTMLParser):
    """What a page holds; tags that are not closed in order are a failure."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: list[Table] = []
        self.scripts = 0
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        assert not {name for name in named if name.startswith("on")}
        assert "src" not in named
        assert "href" not in named
        if tag not in VOID:
            self._open.append(tag)
        self.scripts += tag == "script"
        if tag == "table":
            self.tables.append(Table(named.get("class") or ""))
        if tag == "tr":
            self.tables[-1].rows.append([])
            self.tables[-1].classes.append([])
        if tag in {"td", "th"}:
            self.tables[-1].rows[-1].append("")
            self.tables[-1].classes[-1].append(named.get("class") or "")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if {"td", "th"} & set(self._open):
            self.tables[-1].rows[-1][-1] += data


def written(path: Path) -> Page:
    return Page(path.read_text())


def said(capsys: Capture, *arguments: object, code: int = 0) -> str:
    assert main([str(word) for word in arguments]) == code
    return capsys.readouterr().out


def present(name: str) -> str:
    """The cell of a file of the example."""
    return f"present{format_bytes((EXAMPLE / 'step3' / name).stat().st_size)}"


# ------------------------------------------------------------------------------ inspect


def test_a_whole_checkpoint(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "page.html"
    out = said(capsys, "inspect", EXAMPLE, "--html", file)
    assert out.endswith(f"pictures\n  html  {file}\n")
    found = written(file)
    models, optimizers, files, tensors, scalars = found.tables
    assert models.rows == [
        ["", "mp 0", "mp 1"],
        ["every dp", *map(present, (MODEL.format(0), MODEL.format(1)))],
    ]
    assert optimizers.rows == [
        ["", "mp 0", "mp 1"],
        ["dp 0", *map(present, (OPTIM.format(0, 0), OPTIM.format(0, 1)))],
        ["dp 1", *map(present, (OPTIM.format(1, 0), OPTIM.format(1, 1)))],
    ]
    assert [row[1:] for row in optimizers.classes[1:]] == [["present"] * 2] * 2
    assert len(files.rows) == 1 + 6
    assert len(tensors.rows) == 1 + 21
    assert tensors.rows[1][:4] == [
        "model.embed_tokens.weight",
        "[97, 16]",
        "fp32, exp_avg, exp_avg_sq",
        "float32",
    ]
    assert len(scalars.rows) == 1 + 21
    assert found.scripts == 1
    assert "Healthy: nothing to mend." in found.text
    assert "All 6 files are there." in found.text


def test_a_broken_one_shows_what_is_missing(tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "ckpt")
    tag = tmp_path / "ckpt" / "step3"
    (tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    os.truncate(tag / "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", 500)
    file = tmp_path / "page.html"
    out = said(capsys, "inspect", tmp_path / "ckpt", "--html", file, code=2)
    assert out.endswith(f"pictures\n  html  {file}\n")
    found = written(file)
    grid = found.tables[1]
    assert grid.rows[1:] == [
        ["dp 0", present(OPTIM.format(0, 0)), "damaged500 B"],
        ["dp 1", "missing", present(OPTIM.format(1, 1))],
    ]
    assert grid.classes[1:] == [["", "present", "damaged"], ["", "missing", "present"]]
    assert "2 things to mend" in found.text
    assert "4 present; 1 missing; 1 damaged." in found.text
    assert "It cannot be opened: a file of optimizer states is missing: " in found.text
    assert "1 of 4 files of optimizer states missing: " in found.text
    assert "the file is cut short" in found.text


def test_a_universal_folder_has_no_grid(tmp_path: Path, capsys: Capture) -> None:
    api.convert(EXAMPLE, tmp_path / "out", fsync=False)
    file = tmp_path / "page.html"
    said(capsys, "inspect", tmp_path / "out", "--html", file)
    found = written(file)
    assert all(table.kind == "" for table in found.tables)
    assert "zero/lm_head.weight/fp32.pt" in found.text


def test_hostile_names_are_text() -> None:
    files = tuple(
        RankFile(HOSTILE, 0, mp, Presence.PRESENT, f"/{HOSTILE}/{mp}", 1) for mp in range(2)
    )
    diagnosis = api.Diagnosis(f"/{HOSTILE}", ((f"/{HOSTILE}", Survey(files)),), ())
    text = inspection_page(diagnosis, None, HOSTILE)
    found = Page(text)
    assert found.scripts == 1
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "Healthy" not in found.text  # what cannot be opened is not
    assert found.text.count("<script>alert('w')</script>") >= 4


def grids_of(topology: Topology) -> tuple[list[Table], str]:
    """The grids of a page of as many ranks, the first of which lacks its file."""
    files = tuple(
        RankFile(
            "optimizer states",
            dp,
            mp,
            Presence.PRESENT if dp + mp else Presence.MISSING,
            f"/f{dp}.{mp}",
            1,
        )
        for dp in range(topology.dp)
        for mp in range(topology.pp * topology.tp)
    )
    survey = Survey(files, topology=topology)
    text = inspection_page(api.Diagnosis("/c", (("/c", survey),), ()), None, "so")
    return [table for table in Page(text).tables if table.kind.startswith("grid")], text


def test_a_grid_of_many_ranks_says_what_it_leaves_out() -> None:
    grids, text = grids_of(Topology(1, dp=2000, tp=4))
    assert "not drawn: 976 more rows" in text
    assert sum(len(grid.rows) - 1 for grid in grids) == 1024


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (1, 8), (8, 1), (64, 1), (16, 4), (3, 12)])
def test_data_parallel_ranks_are_always_down(dp: int, tp: int) -> None:
    grids, _ = grids_of(Topology(1, dp=dp, tp=tp))
    for grid in grids:
        assert grid.rows[0] == ["", *(f"mp {mp}" for mp in range(tp))]
        assert len(grid.rows) <= 1 + (16 if tp <= 4 else dp)
    rows = [row for grid in grids for row in grid.rows[1:]]
    assert [row[0] for row in rows] == [f"dp {rank}" for rank in range(dp)]
    assert rows[0][1] == "missing"
    assert {cell for row in rows for cell in row[1:]} <= {"missing", "present1 B"}


def test_stages_of_a_pipeline_stand_over_their_tensor_ranks() -> None:
    (grid,), _ = grids_of(Topology(1, dp=2, tp=2, pp=2))
    assert grid.rows[0] == ["", "pp 0", "pp 1"]
    assert grid.rows[1] == ["", "mp 0tp 0", "mp 1tp 1", "mp 2tp 0", "mp 3tp 1"]
    assert [len(row) for row in grid.rows[2:]] == [5, 5]


def test_many_model_parallel_ranks_get_a_sign_each() -> None:
    (grid,), text = grids_of(Topology(1, dp=2, tp=8, pp=4))
    assert grid.kind == "grid dense"
    assert grid.rows[1] == ["mptp", *(f"{mp}{mp % 8}" for mp in range(32))]
    assert grid.rows[2] == ["dp 0", "✗", *"✓" * 31]
    assert grid.classes[2][1] == "missing"
    assert "optimizer states (✓ present, ✗ missing, ? left over, ! damaged)" in text


@pytest.mark.parametrize("words", [["--tensors", "nope*"], ["--also", "nowhere"]])
def test_a_request_that_makes_no_sense_makes_no_page(
    words: list[str], tmp_path: Path, capsys: Capture
) -> None:
    assert said(capsys, "inspect", EXAMPLE, *words, "--html", tmp_path / "p.html", code=2) == ""
    assert list(tmp_path.iterdir()) == []


def test_no_checkpoint_makes_no_page(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["inspect", str(tmp_path / "empty"), "--html", str(tmp_path / "p.html")]) == 2
    assert capsys.readouterr().err.startswith("error: no checkpoint here: ")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


# ------------------------------------------------------------------------------ the plan


def dry(case: str, out: Path, **options: object) -> api.ConversionReport:
    path = case_named(case).path
    return api.convert(path, out, dry_run=True, **options)  # type: ignore[arg-type]


def test_the_matrix_has_every_byte_of_every_holder(tmp_path: Path) -> None:
    report = dry("golden/odd_z3_dp4_bf16", tmp_path / "out")
    held: dict[str, int] = {}
    for tensor in report.source.tensors.values():
        for region in tensor.regions.values():
            name = Path(region.file).name
            held[name] = held.get(name, 0) + region.nbytes
    matrix = matrix_of(traffic_of(report.plan))
    sums = [sum(column) for column in zip(*matrix.cells, strict=True)]
    found = dict(zip(matrix.columns, sums, strict=True))
    assert sum(sums) == report.cost.read_nbytes - report.cost.compared_nbytes
    optimizer = {name: n for name, n in held.items() if "optim" in name}
    padded = {name: n for name, n in found.items() if "optim" in name}
    assert padded.keys() == optimizer.keys()
    for name, nbytes in padded.items():
        assert 0 < nbytes <= optimizer[name]


def test_the_plan_is_a_page(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "plan.html"
    out = said(capsys, "convert", EXAMPLE, tmp_path / "out", "--dry-run", "--html", file)
    assert out.endswith(f"pictures\n  html  {file}\n")
    report = api.convert(EXAMPLE, tmp_path / "out", dry_run=True)
    found = written(file)
    heat, outputs, routes = found.tables
    assert heat.kind == "grid heat"
    moved = report.cost.read_nbytes - report.cost.compared_nbytes
    assert heat.rows[-1][-1] == format_bytes(moved)
    assert len(outputs.rows) == 1 + report.cost.files
    assert len(routes.rows) == 1 + report.cost.routes
    assert not (tmp_path / "out").exists()
    assert "by a probe of the disks" in file.read_text()


def test_a_page_of_a_plan_needs_a_dry_run(tmp_path: Path, capsys: Capture) -> None:
    words = ["convert", str(EXAMPLE), str(tmp_path / "out"), "--html", str(tmp_path / "p.html")]
    assert main(words) == 2
    assert capsys.readouterr() == (
        "",
        "error: --html shows a plan; next: add --dry-run, or leave it out\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_the_page_of_an_empty_plan(tmp_path: Path) -> None:
    report = api.convert(EXAMPLE, tmp_path / "out", dry_run=True)
    empty = api.ConversionReport(
        **{name: getattr(report, name) for name in report.__dataclass_fields__ if name != "plan"},
        plan=Plan("universal", (), ()),
    )
    assert len(Page(plan_page(empty)).tables) == 3


def test_many_files_become_few_rows() -> None:
    names = [f"zero/model.layers.{n}.w/{s}.pt" for n in range(100) for s in ("fp32", "exp_avg")]
    assert set(grouped(names, most=100).values()) == {
        f"zero/model.layers.{n}.w" for n in range(100)
    }
    ranks = [f"zero_pp_rank_{n}_mp_rank_00_optim_states.pt" for n in range(200)]
    groups = grouped(ranks)
    assert list(groups) == ranks
    assert len(set(groups.values())) == 50
    assert groups[ranks[5]] == f"{ranks[4]} … {ranks[7]}"


# ------------------------------------------------------------------------------ the map


def test_the_page_of_a_map_says_each_fact_once(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "map.html"
    name = "model.layers.0.self_attn.o_proj.weight"
    said(capsys, "map", EXAMPLE, name, "--html", file, "--svg", tmp_path / "map.svg")
    body = file.read_text().split("</header>")[1]
    seen = re.sub(r"<(title|desc|script|style)\b.*?</\1>", "", body, flags=re.DOTALL)
    for fact in ("[16, 16]", "1.02 kB", "stored map", "4 pieces"):
        assert seen.count(fact) == 1, fact
    assert name not in seen
    alone = (tmp_path / "map.svg").read_text()
    assert f">{name} · fp32</text>" in alone
    assert "4 pieces over 4 holders</text>" in alone


# ------------------------------------------------------------------------------ elements


def test_elements_escape_and_nest() -> None:
    text = page("t", "s", table(("a", ">b"), [("<b>&", node("code", "</td>"))], filtered=True))
    found = Page(text)
    assert found.tables[0].rows == [["a", "b"], ["<b>&", "</td>"]]
    assert found.tables[0].classes == [["", "right"], ["", "right"]]
    assert "default-src 'none'" in text


def test_only_a_word_too_long_for_any_column_is_broken() -> None:
    rows = [("x" * 96, node("code", "y" * 97)), ("many short words " * 20, "z" * 97)]
    found = Page(page("t", "s", table(("a", ">b"), rows)))
    assert found.tables[0].classes[1:] == [["", "long"], ["", "long"]]


def test_a_table_too_long_for_a_browser_says_so() -> None:
    found = Page(page("t", "s", table((">n",), ([n] for n in range(20_001)))))
    assert len(found.tables[0].rows) == 1 + 20_000
    assert "the first 20,000 of 20,001 rows; --json has all" in found.text
