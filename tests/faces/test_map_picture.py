"""`reshard map --svg --png --html`: the right areas, hatches, padding and words; names are text."""

from __future__ import annotations

import io
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from reshard.cli import main
from reshard.cli.pictures.map_page import map_page
from reshard.cli.pictures.png import png_bytes
from reshard.cli.pictures.tensor_scene import tensor_scene
from reshard.formats.checkpoint import Checkpoint, Topology
from reshard.geometry import AffinePiece, ParamAffineMap
from reshard.layouts.builders import contiguous_split_map, replicated_map, segmented_map
from tests.faces.drawn import Drawn, drawn, stored
from tests.truth import ROOT

HOSTILE = "<script>alert('w')</script>\x1b[2J]]>&\u202e\"'"


def areas(picture: Drawn, kind: str, holder: int) -> float:
    return sum(width * height for _, _, width, height in picture.rects(kind, holder))


def full_area(picture: Drawn) -> float:
    ((_, _, width, height),) = picture.rects("sheet")
    return width * height


def interleaved(ranks: int, rows: int, columns: int, block: int) -> ParamAffineMap:
    """Rank `r` has every `ranks`-th block of rows."""
    period = ranks * block
    blocks = rows // period
    return ParamAffineMap(
        (rows, columns),
        dict.fromkeys(range(ranks), (blocks * block, columns)),
        {
            rank: [
                AffinePiece(
                    (blocks, block * columns),
                    rank * block * columns,
                    (period * columns, 1),
                    0,
                    (block * columns, 1),
                    (rank,),
                )
            ]
            for rank in range(ranks)
        },
    )


@pytest.mark.parametrize(
    "map_",
    [
        contiguous_split_map((97, 32), [49, 48], 0),
        contiguous_split_map((64, 64), [8] * 8, 1),
        contiguous_split_map((40, 6, 3, 3), [10, 10, 20], 0),
        contiguous_split_map((1000,), [250] * 4, 0),
        interleaved(4, 64, 16, 2),
        interleaved(64, 131072, 16384, 4),
        contiguous_split_map((128256, 16384), [2004] * 64, 0),
        contiguous_split_map((128256, 16384), [256] * 64, 1),
    ],
    ids=["uneven", "columns", "convolution", "vector", "blocks", "64 blocks", "64", "64 columns"],
)
def test_every_holder_has_its_share_of_the_area(map_: ParamAffineMap) -> None:
    picture = drawn(stored(map_))
    whole = full_area(picture)
    for index, rank in enumerate(map_.ranks):
        share = sum(piece.numel for piece in map_.pieces_by_rank[rank]) / map_.numel
        assert areas(picture, "piece", index) == pytest.approx(share * whole, rel=0.02)


def test_a_large_tensor_is_a_small_picture() -> None:
    tensor = stored(interleaved(64, 131072, 16384, 4))
    picture = drawn(tensor)
    assert len(picture.rects("piece")) <= 64 * 24
    assert "Not to scale: 512 bands of 4 rows are drawn as 2." in picture.texts()
    assert len(picture.groups("shard")) == 64


def test_replicas_are_hatched_and_drawn_once() -> None:
    map_ = segmented_map((6, 4), [(4, False), (2, True)], 0, 2, [[2, 2]])
    picture = drawn(stored(map_))
    hatched = [
        group
        for group in picture.groups("piece")
        if any(rect.get("class") == "hatched" for rect in group)
    ]
    assert [group.get("data-holder") for group in hatched] == ["0"]
    assert "also on 1" in picture.titles("piece")[1]
    assert "hatched: replicas, the same elements on holders 0,1" in picture.texts()
    assert areas(picture, "piece", 0) == pytest.approx(4 / 6 * full_area(picture), rel=0.01)


def test_padding_is_marked_in_the_shard_and_counted() -> None:
    map_ = contiguous_split_map((512, 64), [128] * 4, 0).narrow(0, 0, 450)
    picture = drawn(stored(map_))
    (padding,) = picture.rects("padding")
    assert [group.get("data-holder") for group in picture.groups("padding")] == ["3"]
    held = areas(picture, "shard", 3)
    assert held / (padding[2] * padding[3]) == pytest.approx((450 - 384) / 128, rel=0.02)
    assert "padding: 3,968 elements of shards that are no part of F" in picture.texts()


def test_what_nobody_holds_shows_through() -> None:
    map_ = ParamAffineMap((4, 4), {0: (8,)}, {0: [AffinePiece((8,), 0, (1,), 0, (1,), (0,))]})
    picture = drawn(stored(map_))
    assert areas(picture, "piece", 0) == pytest.approx(full_area(picture) / 2, rel=0.01)
    assert "8 elements of F that nobody holds" in picture.texts()
    assert sheet_paint(picture) == "f-missing"


def sheet_paint(picture: Drawn) -> str | None:
    (group,) = picture.groups("sheet")
    return next(element.get("class") for element in group if element.tag.endswith("rect"))


def test_what_is_held_and_not_drawn_is_not_called_missing() -> None:
    odd = AffinePiece((1000, 2), 0, (7, 3), 0, (2, 1), (0,))
    whole = AffinePiece((700, 10), 0, (10, 1), 0, (10, 1), (1,))
    map_ = ParamAffineMap((700, 10), {0: (2000,), 1: (7000,)}, {0: [odd], 1: [whole]})
    picture = drawn(stored(map_))
    assert "Not drawn, too irregular: 1 piece." in picture.texts()
    assert sheet_paint(picture) == "f-padding"


def test_a_map_of_very_many_pieces_stays_a_picture() -> None:
    pieces = [AffinePiece((1,), 2 * k, (1,), k, (1,), (k % 2,)) for k in range(6000)]
    held = {0: pieces[::2], 1: [AffinePiece((12000,), 0, (1,), 0, (1,), (1,))]}
    map_ = ParamAffineMap((12000,), {0: (6000,), 1: (12000,)}, held)
    several = {rank: [piece for piece in held[rank] for _ in range(2)] for rank in (0,)}
    crowded = ParamAffineMap((12000,), map_.shard_shapes, {**held, **several})
    picture = drawn(stored(crowded))
    said = "Not all is drawn: the first 5,000 of 6,001 pieces of F."
    assert said in picture.texts()
    assert len(picture.groups("piece")) == 5000


@pytest.mark.parametrize("shape", [(), (0, 4), (1,)])
def test_the_smallest_tensors_are_drawn(shape: tuple[int, ...]) -> None:
    picture = drawn(stored(replicated_map(shape, 2)))
    assert len(picture.groups("holder")) == 2


def test_titles_tell_it_to_who_cannot_see() -> None:
    root = drawn(stored(contiguous_split_map((8, 4), [4, 4], 0), "layer.w")).root
    named = {element.get("id", ""): element.text for element in root if element.get("id")}
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == " ".join(named)
    assert named["picture-title"] == "Map of layer.w · fp32"
    assert "prefers-color-scheme: dark" in "".join(e.text or "" for e in root if "style" in e.tag)


def test_the_title_of_a_piece_is_exact() -> None:
    picture = drawn(stored(contiguous_split_map((8, 4), [4, 4], 0)))
    assert picture.titles("piece")[1] == (
        "holder 1, piece 0: F[16 + 4×4 4×1] → [0 + 4×4 4×1] on 1; 16 elements; rank_1.pt"
    )


def test_a_hostile_name_is_text_everywhere() -> None:
    tensor = stored(contiguous_split_map((8, 4), [4, 4], 0), HOSTILE)
    checkpoint = Checkpoint("sample", f"/{HOSTILE}", Topology(), {tensor.key: tensor})
    page = map_page(checkpoint, tensor, ())
    assert page.count("<script>") == 1  # ours
    assert "<script>alert" not in page
    assert "\x1b" not in page
    picture = drawn(tensor)
    assert any(text.startswith("<script>alert('w')</script>\\x1b") for text in picture.texts())
    assert not [element for element in picture.root.iter() if element.tag.endswith("script")]


def test_png_has_the_colours_where_the_svg_has_them() -> None:
    image_module = pytest.importorskip("PIL.Image")
    tensor = stored(contiguous_split_map((64, 64), [16, 48], 0))
    scene = tensor_scene(tensor, "sample")
    image = image_module.open(io.BytesIO(png_bytes(scene))).convert("RGB")
    assert image.size == (round(2 * scene.width), round(2 * scene.height))
    picture = drawn(tensor)
    for holder in (0, 1):
        ((x, y, width, height),) = picture.rects("piece", holder)
        colour = scene.colours[holder].light
        at = (round(2 * (x + width * 0.25)), round(2 * (y + height * 0.25)))
        assert "#{:02x}{:02x}{:02x}".format(*image.getpixel(at)) == colour


def test_png_without_pillow_says_how_to_get_it(
    sample: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert main(["map", sample.path, "embed.weight", "--png", str(tmp_path / "w.png")]) == 2
    assert capsys.readouterr() == (
        "",
        (
            "error: a PNG needs the package Pillow; next: pip install 'reshard[png]', or draw it "
            "with --svg or --html\n"
        ),
    )


# ------------------------------------------------------------------------------- the command


def test_all_three_are_written_and_named(
    sample: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("PIL.Image")
    files = {kind: tmp_path / f"w.{kind}" for kind in ("svg", "png", "html")}
    options = [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
    assert main(["map", sample.path, "embed.weight", *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line.split() for line in out.splitlines()[-3:]] == [
        [kind, str(file)] for kind, file in files.items()
    ]
    ET.fromstring(files["svg"].read_text())
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    page = files["html"].read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "http" not in page.replace("http-equiv", "")
    assert sorted(path.name for path in tmp_path.glob("*w.*")) == ["w.html", "w.png", "w.svg"]


@pytest.mark.parametrize("option", ["svg", "png", "html"])
def test_a_file_of_the_checkpoint_cannot_be_replaced_by_mistake(
    option: str, sample: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = Path(sample.path) / "rank_0.bin"
    before = victim.read_bytes()
    assert main(["map", sample.path, "embed.weight", f"--{option}", str(victim)]) == 2
    assert victim.read_bytes() == before
    assert capsys.readouterr().err == (
        f"error: the name of the picture does not say what it is: {victim}: expected a name that "
        f"ends in .{option}; next: give it a name like picture.{option}\n"
    )


def test_a_folder_that_is_not_there_is_refused(
    sample: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nowhere" / "w.svg"
    assert main(["map", sample.path, "embed.weight", "--svg", str(file)]) == 2
    assert capsys.readouterr().err == (
        f"error: the picture cannot be written: {file}: found No such file or directory; next: "
        "choose a folder that exists and can be written\n"
    )


def test_the_picture_in_the_readme_is_the_one_that_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = re.search(r"\$ reshard (map .* --svg) (\S+)\n", (ROOT / "README.md").read_text())
    assert command is not None
    verb, path, *more = command[1].split()
    file = tmp_path / command[2]
    assert main([verb, str(ROOT / path), *more, str(file)]) == 0
    capsys.readouterr()
    assert file.read_text() == (ROOT / "docs" / "pictures" / command[2]).read_text()
