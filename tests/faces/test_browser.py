"""The pages in a real browser: what is drawn has the right colours and areas; scripts run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from reshard.cli import main
from reshard.cli.pictures.colours import PAINTS, holder_colours
from reshard.cli.pictures.map_page import map_page
from reshard.cli.pictures.svg import svg_document
from reshard.cli.pictures.tensor_scene import tensor_scene
from reshard.formats.checkpoint import Checkpoint, StoredTensor, Topology
from reshard.layouts.builders import contiguous_split_map
from tests.faces.browser import Browser, colours_of, find_browser
from tests.faces.drawn import drawn, stored
from tests.faces.test_map_picture import HOSTILE
from tests.truth import EXAMPLE

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    return find_browser(tmp_path_factory.mktemp("browser"))


def checkpoint_of(tensor: StoredTensor) -> Checkpoint:
    return Checkpoint("sample", "/ckpt", Topology(), {tensor.key: tensor})


def test_a_picture_alone_shows_each_holder_its_area(browser: Browser, tmp_path: Path) -> None:
    tensor = stored(contiguous_split_map((512, 64), [128] * 4, 0).narrow(0, 0, 450))
    file = tmp_path / "map.svg"
    file.write_text(svg_document(tensor_scene(tensor, "sample")))
    seen = colours_of(browser.screenshot(file))
    picture = drawn(tensor)
    for index, colour in enumerate(holder_colours(4)):
        areas = [
            width * height
            for kind in ("piece", "shard", "holder", "key")
            for _, _, width, height in picture.rects(kind, None if kind == "key" else index)
            if kind != "key" or index == 0
        ]
        assert seen[colour.light] == pytest.approx(sum(areas), rel=0.06)
    assert seen[PAINTS["padding"].light] > 500


def test_it_follows_the_appearance_of_the_system(browser: Browser, tmp_path: Path) -> None:
    tensor = stored(contiguous_split_map((64, 64), [32, 32], 0))
    scene = tensor_scene(tensor, "sample")
    for name, text in (
        ("map.svg", svg_document(scene)),
        ("map.html", map_page(checkpoint_of(tensor), tensor, ())),
    ):
        file = tmp_path / name
        file.write_text(text)
        seen = colours_of(browser.screenshot(file, dark=True))
        assert seen[PAINTS["paper"].dark] > 100_000
        for colour in holder_colours(2):
            assert seen[colour.dark] > 10_000
            assert colour.light not in seen


def test_a_hostile_name_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    tensor = stored(
        contiguous_split_map((8, 4), [4, 4], 0), "<script>document.title='taken'</script>" + HOSTILE
    )
    file = tmp_path / "map.html"
    page = map_page(checkpoint_of(tensor), tensor, ())
    file.write_text(page)
    document = browser.document(file)
    title = document.split("<title>", 1)[1].split("</title>", 1)[0]
    assert title.startswith("&lt;script&gt;document.title='taken'")
    assert "0 of 0 rows" in document  # our own script did run


CLICKS = """
<script>
(function () {
  var part = document.querySelectorAll(".filtered")[1];
  part.querySelectorAll("th button")[4].click();
  var field = part.querySelector("input");
  field.value = "q_proj layers.1";
  field.dispatchEvent(new Event("input"));
})();
</script>
"""


def test_the_table_of_tensors_sorts_and_filters(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert main(["inspect", str(EXAMPLE), "--html", str(file)]) == 0
    file.write_text(file.read_text().replace("</body>", f"{CLICKS}</body>"))
    document = browser.document(file)
    assert 'aria-sort="ascending"' in document
    assert "1 of 21 rows" in document
    tensors = document.split("<h2>Tensors</h2>")[1].split("</tbody>")[0]
    counts = [int(number) for number in re.findall(r'data-sort="(\d+)">[\d,]+</td><td', tensors)]
    elements = counts[::3]  # then bytes, and holders
    assert len(elements) == 21
    assert elements == sorted(elements)


def test_the_grid_of_ranks_is_green_and_red(browser: Browser, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "ckpt")
    (tmp_path / "ckpt/step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    file = tmp_path / "page.html"
    assert main(["inspect", str(tmp_path / "ckpt"), "--html", str(file)]) == 2
    seen = colours_of(browser.screenshot(file))
    assert seen[PAINTS["good"].light] > 5 * 2000
    assert seen[PAINTS["bad"].light] > 2000
    assert seen[PAINTS["notice"].light] > 5000
    assert seen[PAINTS["missing"].light] > 100  # the edge of what is to be mended


BROKEN = """
<script>
(function () {
  var broken = [], range = document.createRange();
  document.querySelectorAll("td, th").forEach(function (cell) {
    var walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), node;
    while ((node = walker.nextNode())) {
      var words = /\\S+/g, word;
      while ((word = words.exec(node.data))) {
        range.setStart(node, word.index);
        range.setEnd(node, word.index + word[0].length);
        var lines = new Set();
        Array.prototype.forEach.call(range.getClientRects(), function (box) {
          lines.add(Math.round(box.top));
        });
        if (lines.size > 1) { broken.push(word[0]); }
      }
    }
  });
  document.title = "width " + innerWidth + ", broken: " + broken.join(" ");
})();
</script>
"""


@pytest.mark.parametrize("width", [600, 1200])
def test_no_word_of_a_table_is_broken(browser: Browser, tmp_path: Path, width: int) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    pages = {
        "inspect": ["inspect", str(EXAMPLE)],
        "map": ["map", str(EXAMPLE), name],
        "plan": ["convert", str(EXAMPLE), str(tmp_path / "out"), "--dry-run"],
    }
    for kind, words in pages.items():
        file = tmp_path / f"{kind}.html"
        assert main([*words, "--html", str(file)]) == 0
        file.write_text(file.read_text().replace("</body>", f"{BROKEN}</body>"))
        document = browser.document(file, width=width)
        assert f"<title>width {width}, broken: </title>" in document


def test_the_heat_of_a_plan_is_seen(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    assert (
        main(["convert", str(EXAMPLE), str(tmp_path / "o"), "--dry-run", "--html", str(file)]) == 0
    )
    for dark in (False, True):
        seen = colours_of(browser.screenshot(file, dark=dark))
        blue = [
            number
            for colour, number in seen.items()
            if int(colour[5:7], 16) > int(colour[1:3], 16) + 30
        ]
        assert sum(blue) > 4_000


POINT = """
<script>
document.querySelector("g.piece[data-holder='1'] rect").dispatchEvent(
  new PointerEvent("pointerover", {bubbles: true})
);
</script>
"""


def test_a_holder_lights_up_under_the_pointer(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "map.html"
    name = "model.layers.0.self_attn.o_proj.weight"
    assert main(["map", str(EXAMPLE), name, "--html", str(file)]) == 0
    file.write_text(file.read_text().replace("</body>", f"{POINT}</body>"))
    document = browser.document(file)
    assert re.search(r'<svg[^>]* class="dimmed"', document)
    lit = re.findall(r'<g class="(\w+) lit" data-holder="(\d)">', document)
    assert lit == [("piece", "1"), ("holder", "1"), ("shard", "1")]
