"""A scene as PNG, by Pillow.

Theory. The same marks at twice their size, in the light colours, with the font that Pillow carries:
the picture is the same on every machine. Pillow is an optional extra, for it serves this alone.
"""

from __future__ import annotations

import importlib.util
import io
from typing import TYPE_CHECKING

from reshard.cli.pictures.colours import PAINTS
from reshard.cli.pictures.scene import Line, Rect, Scene, Text
from reshard.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

_SCALE = 2
_STRIPES_APART = 10
_STRIPES_STRENGTH = 120
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def require_pillow() -> None:
    """Refuse when the package that draws is not there.

    Raises
    ------
    UsageError
        Pillow is not installed.
    """
    if importlib.util.find_spec("PIL") is None:
        raise UsageError(
            "a PNG needs the package Pillow",
            next_step="pip install 'reshard[png]', or draw it with --svg or --html",
        )


def png_bytes(scene: Scene) -> bytes:
    """Return a scene as the bytes of a PNG file.

    Raises
    ------
    UsageError
        Pillow is not installed.
    """
    require_pillow()
    from PIL import Image, ImageDraw

    size = (round(scene.width * _SCALE), round(scene.height * _SCALE))
    image = Image.new("RGB", size, PAINTS["paper"].light)
    draw = ImageDraw.Draw(image)
    for group in scene.groups:
        for mark in group.marks:
            match mark:
                case Rect():
                    _rect(image, draw, mark, scene)
                case Text():
                    _text(draw, mark)
                case Line():
                    ends = [_SCALE * end for end in (mark.x1, mark.y1, mark.x2, mark.y2)]
                    draw.line(ends, fill=PAINTS[mark.paint].light, width=_SCALE)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _rect(image: Image, draw: ImageDraw, rect: Rect, scene: Scene) -> None:
    left, top = round(rect.x * _SCALE), round(rect.y * _SCALE)
    right = max(left + 1, round((rect.x + rect.width) * _SCALE))
    bottom = max(top + 1, round((rect.y + rect.height) * _SCALE))
    paints = PAINTS | {f"h{index}": colour for index, colour in enumerate(scene.colours)}
    draw.rectangle((left, top, right - 1, bottom - 1), fill=paints[rect.paint].light)
    if rect.hatched:
        _hatch(image, (left, top, right, bottom))
    if rect.edge:
        draw.rectangle((left, top, right, bottom), outline=paints[rect.edge].light, width=_SCALE)


def _hatch(image: Image, box: tuple[int, int, int, int]) -> None:
    """Lay stripes over a part of the image, in step with those of its neighbours."""
    from PIL import Image, ImageDraw

    left, top, right, bottom = box
    width, height = right - left, bottom - top
    mask = Image.new("L", (width, height), 0)
    stripes = ImageDraw.Draw(mask)
    phase = (left + top) % _STRIPES_APART
    for at in range(-phase, width + height, _STRIPES_APART):
        stripes.line((at, 0, at - height, height), fill=_STRIPES_STRENGTH, width=2)
    image.paste(PAINTS["hatch"].light, box, mask)


def _text(draw: ImageDraw, text: Text) -> None:
    draw.text(
        (text.x * _SCALE, text.y * _SCALE),
        text.text,
        fill=PAINTS[text.paint].light,
        font=_font(text.size),
        anchor=_ANCHORS[text.anchor],
        stroke_width=0.5 if text.bold else 0,
    )


def _font(size: float) -> FreeTypeFont | ImageFont:
    from PIL import ImageFont

    return ImageFont.load_default(size * _SCALE)
