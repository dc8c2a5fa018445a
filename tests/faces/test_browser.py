"""The pages in a real browser: what is drawn has the right colours and areas; scripts run."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.cli.pictures.colours import PAINTS, holder_colours
from reshard.cli.pictures.map_page import map_page
from reshard.cli.pictures.svg import svg_document
from reshard.cli.pictures.tensor_scene import tensor_scene
from reshard.formats.checkpoint import Checkpoint, StoredTensor, Topology
from reshard.layouts.builders import contiguous_split_map
from tests.faces.browser import Browser, colours_of, find_browser
from tests.faces.drawn import drawn, stored
from tests.faces.test_map_picture import HOSTILE

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
        ("map.html", map_page(checkpoint_of(tensor), tensor, scene, ())),
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
    page = map_page(checkpoint_of(tensor), tensor, tensor_scene(tensor, "sample"), ())
    file.write_text(page)
    document = browser.document(file)
    title = document.split("<title>", 1)[1].split("</title>", 1)[0]
    assert title.startswith("&lt;script&gt;document.title='taken'")
    assert "0 of 0 rows" in document  # our own script did run
