"""One seed: which folder is changed how, what reshard makes of it, and what that is worth."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from scripts.attack import damage, edits, mixtures
from scripts.attack.excuses import excuse
from scripts.attack.families import FAMILIES, Honest, differences, prepare
from scripts.attack.pool import Ended, Server
from scripts.attack.room import Mutation, NothingToDoError, Room, link_tree

KINDS: dict[str, tuple[Mutation, int]] = {
    "bit in a tensor": (damage.flip("tensor"), 2),
    "bit in a pickle": (damage.flip("pickle"), 2),
    "bit in a local header": (damage.flip("local"), 3),
    "bit in a zip directory": (damage.flip("directory"), 3),
    "bit in a header or index": (damage.flip("header"), 1),
    "bit in JSON": (damage.flip("json"), 1),
    "bit in DCP chunks": (damage.flip("chunks"), 1),
    "bit in a DCP index": (damage.flip("index"), 1),
    "bytes of a pickle": (damage.overwrite("pickle"), 1),
    "bytes of a local header": (damage.overwrite("local"), 1),
    "bytes of a zip directory": (damage.overwrite("directory"), 1),
    "pickle, checksum renewed": (damage.sealed_pickle, 5),
    "cut short": (damage.truncate, 2),
    "extended": (damage.extend, 2),
    "bytes out or in": (damage.hole, 2),
    "safetensors header": (damage.edit_header, 2),
    "JSON document": (damage.edit_document, 2),
    "key removed": (edits.remove_key, 5),
    "key renamed": (edits.rename_key, 3),
    "entries exchanged": (edits.exchange, 4),
    "entries in another order": (edits.reorder, 2),
    "value changed": (edits.change_value, 6),
    "value changed in all files": (edits.change_everywhere, 3),
    "stored map changed": (edits.change_map, 4),
    "file deleted": (mixtures.delete, 3),
    "files exchanged": (mixtures.exchange, 5),
    "file copied over another": (mixtures.copy_over, 5),
    "a file of another run": (mixtures.mixed("run", mixtures.one_file), 3),
    "files of another run": (mixtures.mixed("run", mixtures.some_files), 3),
    "a kind of files of another run": (mixtures.mixed("run", mixtures.one_kind), 3),
    "a file of another step": (mixtures.mixed("step", mixtures.one_file), 2),
    "files of another step": (mixtures.mixed("step", mixtures.some_files), 2),
    "a kind of files of another step": (mixtures.mixed("step", mixtures.one_kind), 2),
    "file added": (mixtures.added, 3),
    "odd name": (mixtures.renamed, 1),
    "link, pipe, folder": (mixtures.linked, 3),
}
"""What is done to a folder, and how often for each other."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one folder."""

    number: int
    family: str
    kind: str
    did: str
    target: str
    outcome: str
    why: str
    """The error line, what differs, or what excuses it."""
    differs: tuple[str, ...]
    said: str
    cpu: float
    memory: int

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


class Campaign:
    """All folders of one seed; each number is the same folder every time."""

    def __init__(
        self, seed: int, cache: Path, home: Path, names: frozenset[str] | None = None
    ) -> None:
        self.seed, self._home = seed, home
        with Server(home / "told_prepare") as server:

            def convert(source: Path, destination: Path, *options: str) -> None:
                destination.parent.mkdir(parents=True, exist_ok=True)
                ended = server.run("convert", source, destination, "--no-fsync", "-q", *options)
                if ended.code:
                    raise RuntimeError(f"an honest folder is refused: {source}: {ended.err}")

            wanted = [f for f in FAMILIES if names is None or f.name in names]
            found = [prepare(family, cache, convert) for family in wanted]
        self.honest = [one for one in found if one is not None]

    def server(self, which: int) -> Server:
        """Return a server that has everything imported."""
        one = next(one for one in self.honest if not one.family.made_by)
        warm = ("convert", one.folder, self._home / f"warm{which}" / "x", "-q", "--no-fsync")
        return Server(self._home / f"told{which}", warm)

    def judge(self, number: int, server: Server, which: int, keep: Path | None = None) -> Verdict:
        """Make the folder of this number, convert it, and judge."""
        honest = self.honest[number % len(self.honest)]
        place = (keep or self._home) / f"folder{number}"
        output = self._home / f"output{which}"
        kind, did, chance = self._change(number, honest, place)
        at = 0 if chance.random() < 0.8 else len(honest.family.targets) - 1
        target = honest.family.targets[at]
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir()
        ended = server.run(
            "convert",
            place / honest.family.inner,
            output / "x",
            "--no-fsync",
            "--workers",
            "1",
            *target,
        )
        outcome, why, differs = self._outcome(kind, did, ended, output, honest, at)
        if not keep:
            shutil.rmtree(place, ignore_errors=True)
        name = honest.family.name
        told = " ".join(target)
        return Verdict(
            number, name, kind, did, told, outcome, why, differs, ended.out, ended.cpu, ended.memory
        )

    def _change(self, number: int, honest: Honest, place: Path) -> tuple[str, str, Random]:
        chance = Random(f"{self.seed}:{honest.family.name}:{number}")
        weights = [weight for _, weight in KINDS.values()]
        while True:
            shutil.rmtree(place, ignore_errors=True)
            link_tree(honest.folder, place)
            kind = chance.choices([*KINDS], weights)[0]
            with contextlib.suppress(NothingToDoError):
                return kind, KINDS[kind][0](Room(place, honest.others, chance)), chance

    def _outcome(
        self, kind: str, did: str, ended: Ended, output: Path, honest: Honest, at: int
    ) -> tuple[str, str, tuple[str, ...]]:
        if ended.fault:
            return ended.fault, ended.err[-600:], ()
        if ended.code:
            left = [path.name for path in output.rglob("*")]
            return (
                ("traceback", f"left behind: {left}", ()) if left else ("refused", ended.line, ())
            )
        differs = tuple(differences(output, honest.results[at]))
        if not differs:
            return "exact", "", ()
        reason = excuse(kind, did, differs, ended.out, honest.family.name)
        return ("undecidable", reason, differs[:20]) if reason else ("wrong", "", differs[:20])
