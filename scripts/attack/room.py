"""The folder that is changed, and the means to change it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Room:
    """A copy of an honest folder whose files are shared with it until they are replaced."""

    folder: Path
    others: dict[str, Path]
    """The same checkpoint of another ``run`` and of a later ``step``: same files, other values."""
    chance: Random

    def files(self, *endings: str) -> list[Path]:
        """Every file, in order; only with these endings where some are given."""
        found = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return [path for path in found if not endings or path.name.endswith(endings)]

    def any_file(self, *endings: str) -> Path:
        """One of them."""
        return self.chance.choice(self.files(*endings))

    def in_other(self, other: str, path: Path) -> Path:
        """The file of the same name in another folder."""
        return self.others[other] / path.relative_to(self.folder)

    def name(self, path: Path) -> str:
        """Return its name within the folder."""
        return path.relative_to(self.folder).as_posix()


Mutation: TypeAlias = Callable[[Room], str]
"""Changes the folder, and returns what it did in words."""


class NothingToDoError(Exception):
    """The folder has nothing that this mutation changes."""


def link_tree(source: Path, destination: Path) -> None:
    """Copy a folder without copying its bytes."""
    shutil.copytree(source, destination, copy_function=os.link, symlinks=True)


def replace(path: Path, content: bytes) -> None:
    """Give a file other bytes, without touching those that share its old ones."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
