"""Colours of holders: distinct for a few, ordered for many, readable on light and on dark.

Theory. Hues are spread evenly over the circle of OKLCH, in which equal steps look equal and equal
lightness *is* equally light, so that one colour of text is readable on all of them. Neighbours
alternate between two lightnesses: with 64 holders their hues alone would be too close. OKLCH after
B. Ottosson, "A perceptual color space for image processing" (2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, radians, sin

_FIRST_HUE = 255.0
_LIGHT = ((0.83, 0.100), (0.74, 0.115))
_DARK = ((0.50, 0.105), (0.41, 0.095))


@dataclass(frozen=True, slots=True)
class Colour:
    """One colour in both appearances, as ``#rrggbb``."""

    light: str
    dark: str


PAINTS: dict[str, Colour] = {
    "paper": Colour("#ffffff", "#14171c"),
    "panel": Colour("#f5f7fa", "#1c2128"),
    "ink": Colour("#1b1f26", "#e8ebf0"),
    "muted": Colour("#5c6675", "#9aa5b4"),
    "line": Colour("#cdd4de", "#3a424e"),
    "frame": Colour("#4a5260", "#8b95a5"),
    "seam": Colour("#ffffff", "#14171c"),
    "hatch": Colour("#1b1f26", "#f2f4f8"),
    "padding": Colour("#dfe3e9", "#2a3039"),
    "missing": Colour("#e5484d", "#c93a40"),
    "good": Colour("#cfe8d5", "#1f4a2c"),
    "bad": Colour("#f6c9cb", "#6b2427"),
    "notice": Colour("#f7e3b5", "#5f4a14"),
}
"""Paints that are named by what they mean."""


def holder_colours(count: int) -> list[Colour]:
    """Return one colour for each of so many holders.

    Examples
    --------
    >>> [colour.light for colour in holder_colours(2)]
    ['#9bcbff', '#d5a051']
    """
    hues = (_FIRST_HUE + 360.0 * index / max(1, count) for index in range(count))
    return [
        Colour(_hex(*_LIGHT[index % 2], hue), _hex(*_DARK[index % 2], hue))
        for index, hue in enumerate(hues)
    ]


def _hex(lightness: float, chroma: float, hue: float) -> str:
    a, b = chroma * cos(radians(hue)), chroma * sin(radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short,
    )
    return "#" + "".join(f"{_byte(value):02x}" for value in linear)


def _byte(linear: float) -> int:
    value = min(1.0, max(0.0, linear))
    encoded = 12.92 * value if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055
    return round(255 * encoded)
