"""What a picture shows, read back from its SVG."""

from __future__ import annotations

from dataclasses import dataclass
from xml.etree import ElementTree as ET

from reshard.cli.pictures.svg import SVG, svg_document
from reshard.cli.pictures.tensor_scene import tensor_scene
from reshard.formats.checkpoint import Region, StoredTensor
from reshard.formats.dtypes import DType
from reshard.geometry import ParamAffineMap

Rect = tuple[float, float, float, float]


def stored(map_: ParamAffineMap, name: str = "w") -> StoredTensor:
    """A tensor whose holders each have a file."""
    regions = {h: Region(f"/ckpt/rank_{h}.pt", 64, 0) for h in map_.shard_shapes}
    return StoredTensor(name, "fp32", DType.named("float32"), map_, regions)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A parsed SVG."""

    root: ET.Element

    def groups(self, kind: str) -> list[ET.Element]:
        """The groups of one kind."""
        return [g for g in self.root.iter(f"{{{SVG}}}g") if g.get("class") == kind]

    def rects(self, kind: str, holder: int | None = None) -> list[Rect]:
        """Every rectangle of a kind, stripes not counted."""
        return [
            rect_of(rect)
            for group in self.groups(kind)
            if holder is None or group.get("data-holder") == str(holder)
            for rect in group.iter(f"{{{SVG}}}rect")
            if rect.get("class") != "hatched"
        ]

    def texts(self) -> list[str]:
        """Every visible text."""
        return [text.text or "" for text in self.root.iter(f"{{{SVG}}}text")]

    def titles(self, kind: str) -> list[str]:
        """The title of every group of a kind."""
        return [group.findtext(f"{{{SVG}}}title") or "" for group in self.groups(kind)]


def rect_of(rect: ET.Element) -> Rect:
    """Place and size of a rectangle."""
    x, y, width, height = (float(rect.get(word, "nan")) for word in ("x", "y", "width", "height"))
    return x, y, width, height


def drawn(tensor: StoredTensor) -> Drawn:
    """Draw a tensor, and read the SVG back."""
    return Drawn(ET.fromstring(svg_document(tensor_scene(tensor, "sample, dp1"))))
