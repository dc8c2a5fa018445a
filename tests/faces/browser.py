"""A real browser, without a screen: what a page looks like, and what its script made of it."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from PIL.Image import Image

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--virtual-time-budget=2000",
)
SECONDS = 60


@dataclass(frozen=True, slots=True)
class Browser:
    """A browser, and a folder for what it keeps."""

    program: str
    folder: Path

    def _run(self, page: Path, *options: str, dark: bool = False) -> str:
        profile = f"--user-data-dir={self.folder / 'profile'}"
        appearance = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")
        command = (
            self.program,
            *FLAGS,
            profile,
            *(appearance if dark else ()),
            *options,
            page.as_uri(),
        )
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def document(self, page: Path, *, width: int = 1340) -> str:
        """The page after its script has run, as text."""
        return self._run(page, "--dump-dom", f"--window-size={width},1000")

    def screenshot(
        self, page: Path, *, width: int = 1340, height: int = 1400, dark: bool = False
    ) -> Image:
        """What is seen of the page."""
        from PIL import Image

        file = self.folder / f"{page.stem}{'-dark' if dark else ''}-seen.png"
        self._run(page, f"--screenshot={file}", f"--window-size={width},{height}", dark=dark)
        return Image.open(file).convert("RGB")


def find_browser(folder: Path) -> Browser:
    """Return a browser, or skip the test that asks and say why."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium runs this test")
    pytest.importorskip("PIL.Image", reason="reading a screenshot needs Pillow")
    return Browser(program, folder)


def colours_of(image: Image) -> dict[str, int]:
    """How many pixels there are of each colour."""
    data = image.tobytes()
    pixels = Counter(zip(data[::3], data[1::3], data[2::3], strict=True))
    return {"#{:02x}{:02x}{:02x}".format(*pixel): number for pixel, number in pixels.items()}
