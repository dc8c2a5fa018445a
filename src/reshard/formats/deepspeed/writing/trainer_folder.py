"""What lies in a trainer's folder beside the checkpoint: files to carry, and what stays behind.

Theory. A file is carried when its bytes are the folder's own. What is not is named, with the
reason, and never silently gone: other checkpoints, RNG states of another topology, links that lead
nowhere or out of the folder, and all that is no regular file. A link out of the folder is not
followed, for it may lead anywhere (to a cache, another run, the root of the file system); a link
to a folder that the walk is in has no end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reshard.formats.deepspeed.writing.rank_bound import RNG_FILE
from reshard.formats.deepspeed.writing.writer import POINTER
from reshard.formats.folders import holds_checkpoint
from reshard.formats.manifest import MANIFEST_NAME

SHOWN = 16
"""Names in one note; of more, the first."""

CARRIED = ""
"""The reason that leaves nothing behind."""
RNG = "of ranks of another topology"
CHECKPOINT = "other checkpoints (convert each)"
OWN = "of which the output has its own"
NOWHERE = "links that lead nowhere"
OUTWARD = "links that lead out of the folder (copy what they point to)"
ENDLESS = "links to a folder that they lie in"
EMPTY = "empty folders"
SPECIAL = "no regular files"


@dataclass(frozen=True, slots=True)
class TrainerFolder:
    """The files beside a checkpoint."""

    carried: tuple[Path, ...]
    """Files whose bytes go to the output, in order."""
    notes: tuple[str, ...]
    """What stays behind, a line for each reason."""


def survey_trainer_folder(folder: Path, tag: str, *, same_ranks: bool) -> TrainerFolder:
    """Sort what lies in a trainer's folder.

    Parameters
    ----------
    folder
        The folder.
    tag
        Its checkpoint that is written anew.
    same_ranks
        Whether the output has the ranks of the source, so that their RNG states go with it.
    """
    found = _Walk(folder.resolve(), same_ranks=same_ranks)
    carried = []
    left: dict[str, list[str]] = {}
    for path, reason in found.sorted_out(folder, ()):
        if reason == CARRIED:
            carried.append(path)
        elif path.parent != folder or path.name not in (tag, POINTER):
            left.setdefault(reason, []).append(path.relative_to(folder).as_posix())
    notes = tuple(f"left out, {reason}: {_named(names)}" for reason, names in left.items())
    return TrainerFolder(tuple(carried), notes)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


class _Walk:
    """A walk that stays in one folder."""

    __slots__ = ("_root", "_same_ranks")

    def __init__(self, root: Path, *, same_ranks: bool) -> None:
        self._root = root
        self._same_ranks = same_ranks

    def sorted_out(self, folder: Path, above: tuple[Path, ...]) -> Iterator[tuple[Path, str]]:
        """Yield what is in a folder, in order, each with the reason that leaves it behind."""
        above = (*above, folder.resolve())
        for path in sorted(folder.iterdir()):
            reason = self._strayed(path, above) or self._unfit(path)
            if reason or not path.is_dir():
                yield path, reason
            else:
                yield from self.sorted_out(path, above)

    def _strayed(self, path: Path, above: tuple[Path, ...]) -> str:
        if not path.is_symlink():
            return CARRIED
        if not path.exists():
            return NOWHERE
        end = path.resolve()
        if not end.is_relative_to(self._root):
            return OUTWARD
        return ENDLESS if end in above else CARRIED

    def _unfit(self, path: Path) -> str:
        if path.is_dir():
            if holds_checkpoint(path):
                return CHECKPOINT
            return CARRIED if any(path.iterdir()) else EMPTY
        if not path.is_file():
            return SPECIAL
        if path.name in (POINTER, MANIFEST_NAME):
            return OWN
        return RNG if RNG_FILE.fullmatch(path.name) and not self._same_ranks else CARRIED
