"""A survey of a native DeepSpeed folder: every file by itself, then the grid of ranks.

Theory. As for the reader, the grid is what the model-state files *state*. Here they may contradict
each other, so what most of them state counts, and the others are what is wrong. Then every cell of
the grid is looked for, and every file that lies outside it is left over from another run.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from reshard.errors import ReshardError
from reshard.formats.checkpoint import Problem, Topology
from reshard.formats.deepspeed.experts import read_autoep
from reshard.formats.deepspeed.grid import minority_first, stated_text
from reshard.formats.deepspeed.names import (
    FileKind,
    FileName,
    missing_file_name,
    parse_file_name,
)
from reshard.formats.deepspeed.numbered import has_optimizer
from reshard.formats.deepspeed.optimizer_records import stage_of
from reshard.formats.deepspeed.own_names import wrongly_named
from reshard.formats.deepspeed.problems import problems_inside
from reshard.formats.deepspeed.rank_files import MOST_RANKS
from reshard.formats.deepspeed.records import ModelStates, ParallelDegrees, read_model_states
from reshard.formats.deepspeed.sequence_parallel import as_data_rank, degree_in_names
from reshard.formats.folders import TagFolder
from reshard.formats.survey import Findings, Presence, RankFile, Survey
from reshard.formats.torch_archive import Archive, read_archive, short_repr

_MODELS = (FileKind.MODEL, FileKind.ZERO3_MODEL)
_GRID = (*_MODELS, FileKind.OPTIMIZER)
_MOVE = "move it away: it is left over from another run"
_COPY = "copy it from the node that wrote it, or name that folder with --also"
_STATE = "state them with --layout FILE (docs/layouts.md); reshard annotate writes them in for good"
SHOWN = 6

Cell = tuple[int, int]
Stated = TypeVar("Stated", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _Degrees:
    """What one model-state file states."""

    dp: int
    mp: int
    split: ParallelDegrees | None

    def __str__(self) -> str:
        whole = self.split is not None and self.split.pp * self.split.tp == self.mp
        return f"dp {self.dp}, {self.split if whole else f'mp {self.mp}'}"


def survey_deepspeed(folder: TagFolder) -> Survey:
    """Open every file of a native folder, and collect what is wrong."""
    return _Survey(folder).result()


class _Survey:
    """One survey under way."""

    def __init__(self, folder: TagFolder) -> None:
        self.folder = folder
        self.findings = Findings()
        self.paths: dict[FileName, Path] = {}
        self.archives: list[Archive] = []
        self.models: dict[FileName, ModelStates] = {}
        self.stages: Counter[int] = Counter()
        self.damaged: set[FileName] = set()
        self.whole = True
        self.sequence = 1

    def result(self) -> Survey:
        """Look at everything."""
        self._list()
        for name, path in self.paths.items():
            self._open(name, path)
        self._require_own_names()
        self._by_data_rank()
        dp, pp, tp = self._degrees()
        self._require_one_step()
        missing, stale = self._grid(dp, pp * tp)
        self.whole &= not (missing or stale or self.damaged)
        layouts = tp == 1 or not self.models or any(m.info for m in self.models.values())
        if not layouts:
            self.findings.add(
                f"the files do not say how parameters are cut over {tp} tensor-parallel ranks",
                next(iter(self.models.values())).file,
                _STATE,
            )
        return Survey(
            (*self._present(stale), *self._missed(missing)),
            tuple(_one_for_each_move(self.findings.problems)),
            Topology(self._stage(), dp, tp, pp, self._ep()) if self.models else None,
            whole=self.whole,
            states_layouts=layouts,
        )

    # ----- file by file

    def _list(self) -> None:
        for name, places in self.folder.listing().items():
            parsed = parse_file_name(name)
            if parsed is None:
                continue
            if len({path.stat().st_size for path in places}) > 1:
                self._wrong(
                    f"two folders hold a {name} of different sizes",
                    " and ".join(map(str, places)),
                    "move the stale one away",
                )
            if parsed in self.paths:
                self._wrong(
                    f"two files claim to be of the same rank ({self.paths[parsed].name})",
                    places[0],
                    "move the one that is left over from another run away",
                )
            else:
                self.paths[parsed] = places[0]

    def _wrong(self, what: str, file: object, fix: str) -> None:
        self.findings.add(what, file, fix)
        self.whole = False

    def _open(self, name: FileName, path: Path) -> None:
        if name.kind in _MODELS:
            model = self.findings.opened(path, lambda at: read_model_states(at, name.dp, name.mp))
            archive = None if model is None else model.archive
            if model is not None:
                self.models[name] = model
        else:
            archive = self.findings.opened(path, read_archive)
            if archive is not None and name.kind is FileKind.OPTIMIZER:
                self._count_stage(archive)
        if archive is None:
            self.damaged.add(name)
        else:
            self.archives.append(archive)
            of_expert = name.kind is FileKind.EXPERT
            self.findings.problems += problems_inside(archive, of_expert=of_expert)

    def _count_stage(self, archive: Archive) -> None:
        """Note the stage of an optimizer file; what it lacks, the reader says."""
        with contextlib.suppress(ReshardError):
            self.stages[stage_of(archive)] += 1

    def _require_own_names(self) -> None:
        carried = {archive.path: archive.name for archive in self.archives}
        for file, whose, fix in wrongly_named(carried):
            what = f"a file carries the name of another {whose} ({carried[file]}.pt)"
            self._wrong(what, file, fix)

    def _by_data_rank(self) -> None:
        """Take the ranks of a sequence out of the names."""
        degree = degree_in_names(self.paths, self.models.values())
        self.sequence = degree
        self.paths = {as_data_rank(name, degree): path for name, path in self.paths.items()}
        self.models = {as_data_rank(name, degree): one for name, one in self.models.items()}
        self.damaged = {as_data_rank(name, degree) for name in self.damaged}

    # ----- together

    def _degrees(self) -> tuple[int, int, int]:
        """Data, pipeline and tensor degree that most files state; names tell it without them."""
        if not self.models:
            if not self.damaged & {name for name in self.paths if name.kind in _MODELS}:
                self._wrong("there is no model-state file", self.folder.path, _COPY)
            self.whole = False
            return self._named_degrees()
        stated = {
            model.file: _Degrees(model.dp_world_size or 1, model.mp_world_size or 1, model.degrees)
            for model in self.models.values()
        }
        most = self._most(stated, "other degrees than the other files")
        dp, mp, split = most.dp, most.mp, most.split
        if split is not None and split.pp * split.tp == mp:
            return dp, split.pp, split.tp
        layers = Counter(name.layer for name in self.paths if name.kind is FileKind.LAYER)
        tp = max(layers.values(), default=mp)
        return (dp, mp // tp, tp) if mp % tp == 0 else (dp, 1, mp)

    def _named_degrees(self) -> tuple[int, int, int]:
        named = [name for name in self.paths if name.kind in _GRID]
        dp = max((name.dp + 1 for name in named), default=1)
        return dp, 1, max((name.mp + 1 for name in named), default=1)

    def _require_one_step(self) -> None:
        roots = ((model.file, model.archive.root) for model in self.models.values())
        steps = {
            file: root.get("global_steps") for file, root in roots if isinstance(root, Mapping)
        }
        hashable = {file: step for file, step in steps.items() if isinstance(step, Hashable)}
        if hashable:
            self._most(hashable, "another step (global_steps) than the other files")

    def _most(self, stated: Mapping[str, Stated], what: str) -> Stated:
        """What most files state; each of the others is a problem."""
        counted = Counter(stated.values())
        (most, number), *others = counted.most_common()
        if others and others[0][1] == number:
            said = stated_text(minority_first(stated), _said)
            self._wrong(f"files state {what}: {said}", self.folder.path, _MOVE)
            return most
        for file, value in stated.items():
            if value != most:
                self._wrong(
                    f"the file states {what} (expected {_said(most)}, found {_said(value)})",
                    file,
                    _MOVE,
                )
        return most

    # ----- the grid

    def _grid(self, dp: int, mp: int) -> tuple[dict[FileKind, list[Cell]], set[FileName]]:
        """Cells without a file, and files outside the grid."""
        if dp * mp > MOST_RANKS:
            self._wrong("the files state more ranks than any run has", self.folder.path, _MOVE)
            return {}, set()
        held = {kind: self._cells(kind) for kind in _GRID}
        wanted = self._wanted(held, dp, mp)
        missing = {
            kind: [cell for cell in cells if cell not in held[kind]]
            for kind, cells in wanted.items()
        }
        stale = {
            name
            for kind, cells in wanted.items()
            for cell, name in held[kind].items()
            if cell not in set(cells)
        }
        self._tell_grid({kind: cells for kind, cells in missing.items() if cells}, stale, wanted)
        return missing if any(missing.values()) else {}, stale

    def _wanted(
        self, held: Mapping[FileKind, Mapping[Cell, FileName]], dp: int, mp: int
    ) -> dict[FileKind, list[Cell]]:
        """The cells of every kind of file that is to be there."""
        every = [(d, m) for d in range(dp) for m in range(mp)]
        wanted: dict[FileKind, list[Cell]] = {}
        if held[FileKind.OPTIMIZER]:  # without any, by right or not: the reader knows
            wanted[FileKind.OPTIMIZER] = every
        if held[FileKind.ZERO3_MODEL] and held[FileKind.MODEL]:
            self._wrong(
                "model-state files of ZeRO-3 and of another stage lie in one folder",
                self.folder.path,
                "one set is left over from another run; move it away",
            )
        elif held[FileKind.ZERO3_MODEL]:
            wanted[FileKind.ZERO3_MODEL] = every
        elif held[FileKind.MODEL]:
            wanted[FileKind.MODEL] = [(0, m) for m in range(mp)]
        return wanted

    def _tell_grid(
        self,
        missing: Mapping[FileKind, list[Cell]],
        stale: Iterable[FileName],
        wanted: Mapping[FileKind, list[Cell]],
    ) -> None:
        for kind, cells in missing.items():
            self._wrong(
                f"{len(cells)} of {len(wanted[kind])} files of {kind.value} missing: "
                + _listed([self._file_of(kind, cell) for cell in cells]),
                self.folder.path,
                _COPY,
            )
        for name in sorted(stale, key=lambda name: self.paths[name].name):
            self._wrong(
                f"a file of a rank that this checkpoint does not have (dp {name.dp}, mp {name.mp})",
                self.paths[name],
                _MOVE,
            )

    def _cells(self, kind: FileKind) -> dict[Cell, FileName]:
        return {(name.dp, name.mp): name for name in self.paths if name.kind is kind}

    def _file_of(self, kind: FileKind, cell: Cell) -> str:
        """The name of a file that is missing."""
        present = (self.paths[name].name for name in self._cells(kind).values())
        dp, mp = cell
        column = dp % self.sequence if self.sequence > 1 else mp
        return missing_file_name(kind, dp, column, present)

    def _present(self, stale: set[FileName]) -> Iterable[RankFile]:
        for name, path in sorted(self.paths.items(), key=lambda entry: _order(entry[0])):
            presence = (
                Presence.DAMAGED
                if name in self.damaged
                else Presence.STALE
                if name in stale
                else Presence.PRESENT
            )
            on_grid = name.kind in _GRID
            yield RankFile(
                name.kind.value,
                name.dp if on_grid and name.kind is not FileKind.MODEL else None,
                name.mp if on_grid else None,
                presence,
                str(path),
                path.stat().st_size,
            )

    def _missed(self, missing: Mapping[FileKind, list[Cell]]) -> Iterable[RankFile]:
        for kind, cells in missing.items():
            for dp, mp in cells:
                file = str(self.folder.path / self._file_of(kind, (dp, mp)))
                rank = None if kind is FileKind.MODEL else dp
                yield RankFile(kind.value, rank, mp, Presence.MISSING, file)

    def _stage(self) -> int | None:
        """What most optimizer files say; without any, the names or the model-state files."""
        if self.stages:
            return self.stages.most_common(1)[0][0]
        if any(name.kind is FileKind.ZERO3_MODEL for name in self.paths):
            return 3
        return 0 if any(has_optimizer(model.archive) for model in self.models.values()) else None

    def _ep(self) -> int:
        """What AutoEP states; the degree of DeepSpeed's own MoE layers is the reader's to find."""
        with contextlib.suppress(ReshardError):
            autoep = read_autoep(self.models.values())
            return 1 if autoep is None else autoep.ep_size
        return 1


def _order(name: FileName) -> tuple[str, int, int, int, int]:
    return name.kind.value, name.layer, name.expert, name.dp, name.mp


def _said(value: object) -> str:
    return str(value) if isinstance(value, _Degrees) else short_repr(value)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _one_for_each_move(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Problems, with all that speaks for moving one file away told as one."""
    merged: dict[tuple[str, str] | int, Problem] = {}
    for number, found in enumerate(problems):
        key = (found.file, found.next_step) if found.next_step == _MOVE else number
        first = merged.get(key)
        both = found if first is None else replace(first, what=f"{first.what}; {found.what}")
        merged[key] = both
    yield from merged.values()
