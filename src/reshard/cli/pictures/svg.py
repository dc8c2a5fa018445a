"""A scene as SVG, alone in a file or inside a page.

Theory. The document is an element tree of the standard library, which escapes every text and
attribute. Colours stand twice: as attributes, for programs that read no style sheets, and as
classes, which follow ``prefers-color-scheme``. Nothing is loaded from anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree as ET

from reshard.cli.pictures.colours import PAINTS, Colour
from reshard.cli.pictures.scene import Group, Line, Mark, Rect, Scene, Text

SVG = "http://www.w3.org/2000/svg"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, 'DejaVu Sans Mono', monospace"


def svg_document(scene: Scene) -> str:
    """Return a scene as the text of an SVG file."""
    root = svg_element(scene)
    root.set("xmlns", SVG)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def svg_element(scene: Scene) -> ET.Element:
    """Return a scene as an ``<svg>`` element."""
    size = f"0 0 {_number(scene.width)} {_number(scene.height)}"
    root = ET.Element(
        "svg",
        {
            "viewBox": size,
            "width": _number(scene.width),
            "height": _number(scene.height),
            "role": "img",
            "aria-labelledby": "picture-title picture-description",
            "font-family": FONT,
        },
    )
    ET.SubElement(root, "title", {"id": "picture-title"}).text = scene.title
    ET.SubElement(root, "desc", {"id": "picture-description"}).text = scene.description
    ET.SubElement(root, "style").text = _style(scene)
    root.append(_definitions())
    paper = Rect(0, 0, scene.width, scene.height, "paper")
    root.append(_rect(paper, scene))
    root.extend(_group(group, scene) for group in scene.groups)
    return root


def _paints(scene: Scene) -> Iterator[tuple[str, Colour]]:
    yield from PAINTS.items()
    yield from ((f"h{index}", colour) for index, colour in enumerate(scene.colours))


def _style(scene: Scene) -> str:
    dark = "".join(
        f".f-{name}{{fill:{colour.dark}}}.s-{name}{{stroke:{colour.dark}}}"
        for name, colour in _paints(scene)
    )
    return (
        "g[data-holder]{transition:opacity .12s}"
        ".labels{pointer-events:none}"
        ".dimmed g[data-holder]:not(.lit){opacity:.15}"
        f"@media (prefers-color-scheme: dark){{{dark}}}"
    )


def _definitions() -> ET.Element:
    definitions = ET.Element("defs")
    hatch = ET.SubElement(
        definitions,
        "pattern",
        {
            "id": "hatch",
            "width": "7",
            "height": "7",
            "patternUnits": "userSpaceOnUse",
            "patternTransform": "rotate(45)",
        },
    )
    ET.SubElement(
        hatch,
        "rect",
        {
            "width": "1.6",
            "height": "7",
            "class": "f-hatch",
            "fill": PAINTS["hatch"].light,
            "fill-opacity": "0.5",
        },
    )
    return definitions


def _group(group: Group, scene: Scene) -> ET.Element:
    attributes = {"class": group.kind} if group.kind else {}
    if group.holder is not None:
        attributes["data-holder"] = str(group.holder)
    element = ET.Element("g", attributes)
    if group.title:
        ET.SubElement(element, "title").text = group.title
    for mark in group.marks:
        element.extend(_drawn(mark, scene))
    return element


def _drawn(mark: Mark, scene: Scene) -> Iterator[ET.Element]:
    match mark:
        case Rect():
            yield _rect(mark, scene)
            if mark.hatched:
                yield ET.Element("rect", _place(mark) | {"fill": "url(#hatch)", "class": "hatched"})
        case Text():
            yield _text(mark)
        case Line():
            yield _line(mark)


def _rect(rect: Rect, scene: Scene) -> ET.Element:
    attributes = _place(rect) | {
        "class": f"f-{rect.paint}",
        "fill": _colour(rect.paint, scene).light,
    }
    if rect.edge:
        attributes["class"] += f" s-{rect.edge}"
        attributes["stroke"] = _colour(rect.edge, scene).light
    return ET.Element("rect", attributes)


def _place(rect: Rect) -> dict[str, str]:
    return {
        "x": _number(rect.x),
        "y": _number(rect.y),
        "width": _number(rect.width),
        "height": _number(rect.height),
    }


def _text(text: Text) -> ET.Element:
    attributes = {
        "x": _number(text.x),
        "y": _number(text.y),
        "font-size": _number(text.size),
        "class": f"f-{text.paint}",
        "fill": PAINTS[text.paint].light,
    }
    if text.anchor != "start":
        attributes["text-anchor"] = text.anchor
    if text.bold:
        attributes["font-weight"] = "600"
    if text.mono:
        attributes["font-family"] = MONO
    element = ET.Element("text", attributes)
    element.text = text.text
    return element


def _line(line: Line) -> ET.Element:
    return ET.Element(
        "line",
        {
            "x1": _number(line.x1),
            "y1": _number(line.y1),
            "x2": _number(line.x2),
            "y2": _number(line.y2),
            "class": f"s-{line.paint}",
            "stroke": PAINTS[line.paint].light,
        },
    )


def _colour(paint: str, scene: Scene) -> Colour:
    return PAINTS[paint] if paint in PAINTS else scene.colours[int(paint[1:])]


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
