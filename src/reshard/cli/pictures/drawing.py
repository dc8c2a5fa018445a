"""The files that the options ``--svg``, ``--png`` and ``--html`` name.

Theory. What can be refused is refused before anything is read: an ending that does not fit, a
package that is missing. The pictures are drawn only when all of them can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.cli.pictures.files import require_ending, write_picture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.api import Checkpoint, ConversionReport, Inspection
    from reshard.errors import ReshardError
    from reshard.formats.checkpoint import StoredTensor
    from reshard.formats.registry import ReadOptions


@dataclass(frozen=True, slots=True)
class MapPictures:
    """Where the pictures of a map go, each None when it is not wanted."""

    svg: str | None = None
    png: str | None = None
    html: str | None = None

    def check(self) -> None:
        """Refuse what cannot be drawn, before anything is read."""
        for kind, path in self.wanted():
            require_ending(path, f".{kind}")
        if self.png is not None:
            from reshard.cli.pictures.png import require_pillow

            require_pillow()

    def wanted(self) -> Iterator[tuple[str, str]]:
        """Yield `(kind, path)` of every picture that is wanted."""
        for kind in ("svg", "png", "html"):
            path = getattr(self, kind)
            if path is not None:
                yield kind, path

    def draw(self, checkpoint: Checkpoint, tensor: StoredTensor) -> None:
        """Draw and write every picture that is wanted."""
        if not any(self.wanted()):
            return
        from reshard.api import piece_ranges
        from reshard.cli.pictures.map_page import map_page
        from reshard.cli.pictures.svg import svg_document
        from reshard.cli.pictures.tensor_scene import tensor_scene

        scene = tensor_scene(tensor, f"{checkpoint.format}, {checkpoint.topology}")
        if self.svg is not None:
            write_picture(self.svg, svg_document(scene))
        if self.html is not None:
            write_picture(self.html, map_page(checkpoint, tensor, piece_ranges(tensor)))
        if self.png is not None:
            from reshard.cli.pictures.png import png_bytes

            write_picture(self.png, png_bytes(scene))


def draw_inspection(
    path: str,
    folder: str,
    also: Sequence[str],
    layout: str | None,
    reading: ReadOptions | None,
    found: Inspection | ReshardError,
) -> None:
    """Write the page of a checkpoint, or of a folder that could not be opened as one.

    Parameters
    ----------
    path
        Where the page goes.
    folder, also, layout, reading
        As they were given.
    found
        What inspecting found, or why it could not.
    """
    from reshard.api import Inspection, diagnose
    from reshard.cli.pictures.inspection_page import inspection_page

    diagnosis = diagnose(folder, also=also, layout=layout, reading=reading)
    if isinstance(found, Inspection):
        write_picture(path, inspection_page(diagnosis, found, None))
    else:
        write_picture(path, inspection_page(diagnosis, None, str(found)))


def draw_plan(path: str, report: ConversionReport) -> None:
    """Write the page of a conversion that was planned."""
    from reshard.cli.pictures.plan_page import plan_page

    write_picture(path, plan_page(report))
