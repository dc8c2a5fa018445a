"""The grid of ranks: which files belong together, and whether all of them are there.

Theory. The ranks that wrote a checkpoint form a grid: data-parallel rank `D`, pipeline stage `P`,
tensor rank `T`, with `mp = P * tp + T` in the file names. File names alone do not give the degrees
(a file missing at the edge and a file left over by a larger run look like another degree), so they
are taken from what the files *state* and then every cell of the grid is demanded: one missing is an
error that names it, one too many (a stale rank) too. DeepSpeed infers the degrees from the names
and converts a folder with one left-over file into wrong tensors without a word.

Sources: `reshape_3d_utils.py`, `ds_to_universal.py` (`_build_zero3_rank_grid`), `engine.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from reshard.errors import CheckpointError, MissingFileError, count_text
from reshard.formats.checkpoint import SourceFile
from reshard.formats.deepspeed.names import (
    FileKind,
    FileName,
    missing_file_name,
    parse_file_name,
)
from reshard.formats.deepspeed.records import ModelStates, ParallelDegrees
from reshard.formats.deepspeed.sequence_parallel import (
    as_data_rank,
    degree_in_names,
    degree_stated,
)
from reshard.formats.folders import TagFolder
from reshard.formats.stamps import source_file
from reshard.formats.torch_archive import same_value, short_repr

_COMPARE_BYTES = 1 << 22
_COUNTERS = ("global_steps", "skipped_steps", "global_samples")
_SCHEDULED = ("last_batch_iteration", "last_epoch", "_step_count")
_SHOWN = 3
"""Files that are named of those that state one thing, and things of which that is told."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """The DeepSpeed files of a folder, by parsed name."""

    folder: TagFolder
    """The resolved folder."""
    files: Mapping[FileName, Path] = field(default_factory=dict)
    """Parsed name -> path."""
    sources: tuple[SourceFile, ...] = ()
    """The same, with what they were before any of them was opened."""
    sequence: int = 1
    """Degree of sequence parallelism where the files' own names have its ranks."""

    def of_kind(self, kind: FileKind) -> dict[FileName, Path]:
        """The files of one kind, ranks ascending."""
        chosen = [name for name in self.files if name.kind is kind]
        chosen.sort(key=lambda name: (name.layer, name.expert, name.dp, name.mp))
        return {name: self.files[name] for name in chosen}


def take_inventory(folder: TagFolder) -> Inventory:
    """List the DeepSpeed files of a folder and of its `also` folders.

    Raises
    ------
    CheckpointError
        When two folders hold a file of one name with different bytes, or two names mean one rank.
    """
    files: dict[FileName, Path] = {}
    for name, paths in folder.listing().items():
        parsed = parse_file_name(name)
        if parsed is None:
            continue
        for other in paths[1:]:
            _require_same_bytes(paths[0], other)
        if parsed in files:
            raise CheckpointError(
                "two files claim to be of the same rank",
                file=files[parsed],
                found=name,
                next_step="move the one that is left over from another run away",
            )
        files[parsed] = paths[0]
    sources = tuple(source_file(path, name.kind.value) for name, path in files.items())
    return Inventory(folder, files, sources)


def by_data_rank(
    inventory: Inventory, models: Mapping[tuple[int, int], ModelStates]
) -> tuple[Inventory, dict[tuple[int, int], ModelStates]]:
    """The files by data-parallel rank, where their names have ranks of a sequence."""
    degree = degree_in_names(inventory.files, models.values())
    if degree == 1:
        return inventory, dict(models)
    files = {as_data_rank(name, degree): path for name, path in inventory.files.items()}
    renamed = {(dp, 0): replace(model, mp=0) for (dp, _), model in models.items()}
    return replace(inventory, files=files, sequence=degree), renamed


def _require_same_bytes(first: Path, second: Path) -> None:
    same = first.stat().st_size == second.stat().st_size
    if same:
        with first.open("rb") as left, second.open("rb") as right:
            while same:
                block = left.read(_COMPARE_BYTES)
                same = block == right.read(_COMPARE_BYTES)
                if not block:
                    break
    if not same:
        raise CheckpointError(
            "two folders hold different files of one rank",
            file=first,
            found=second,
            next_step="move the stale one away",
        )


# --------------------------------------------------------------------------- degrees


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees of the grid: data, pipeline and tensor parallel."""

    dp: int
    pp: int
    tp: int

    @property
    def mp(self) -> int:
        """Number of model-parallel ranks."""
        return self.pp * self.tp


def require_one_value(values: Mapping[str, object], what: str) -> None:
    """Refuse when files disagree about something they must agree on.

    Parameters
    ----------
    values
        File -> what it states; files that state nothing are left out by the caller.
    what
        The thing, for the message.
    """
    first = next(iter(values.values()), None)
    if not all(same_value(first, value) for value in values.values()):
        groups = minority_first(values)
        raise CheckpointError(
            f"ranks disagree on {what}",
            file=groups[0][0][0],
            found=stated_text(groups),
            next_step="files of different saves lie in one folder; move the stale ones away",
        )


Stated = tuple[list[str], object]
"""Files, and the value that they state."""


def minority_first(values: Mapping[str, object]) -> list[Stated]:
    """Group files by what they state, those with the fewest first: one of them is the odd one."""
    groups: list[Stated] = []
    for file, value in values.items():
        for files, stated in groups:
            if same_value(stated, value):
                files.append(file)
                break
        else:
            groups.append(([file], value))
    return sorted(groups, key=lambda group: len(group[0]))


def _value(value: object) -> str:
    return str(value) if isinstance(value, ParallelDegrees) else short_repr(value)


def stated_text(groups: Sequence[Stated], say: Callable[[object], str] = _value) -> str:
    """Write what groups of files state, in a line that does not grow with the number of ranks.

    Parameters
    ----------
    groups
        As `minority_first` gives them.
    say
        Writes one value.

    Examples
    --------
    >>> stated_text([(["ckpt/rank_7.pt"], 4), (["a", "b"], 3)])
    'rank_7.pt: 4; 2 others: 3'
    >>> stated_text([(["rank_0.pt"], 3), (["rank_1.pt"], 4)])
    'rank_0.pt: 3; rank_1.pt: 4'
    """
    *minorities, (most, value) = groups
    said = [f"{_names(files)}: {say(stated)}" for files, stated in minorities[:_SHOWN]]
    if len(minorities) > _SHOWN:
        said.append(f"{len(minorities) - _SHOWN} other values")
    is_majority = len(most) > len(groups[0][0])
    said.append(f"{f'{len(most)} others' if is_majority else _names(most)}: {say(value)}")
    return "; ".join(said)


def _names(files: Sequence[str]) -> str:
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return ", ".join(Path(file).name for file in files[:_SHOWN]) + more


def settle_degrees(models: Iterable[ModelStates], inventory: Inventory) -> Degrees:
    """The degrees that the model-state files state.

    `dp_world_size` and `mp_world_size` are in every file; how `mp` splits into pipeline and tensor
    is stated from about 0.19.7 on, and inferred before from the number of files of a pipeline
    layer; so it is where a sequence-parallel degree stands there (`sequence_parallel`).
    """
    models = list(models)
    statements: list[tuple[str, dict[str, object]]] = [
        ("dp_world_size", {model.file: model.dp_world_size for model in models}),
        ("mp_world_size", {model.file: model.mp_world_size for model in models}),
        ("the parallel dimensions", {model.file: model.degrees for model in models}),
        *((key, {model.file: _counter(model, key) for model in models}) for key in _COUNTERS),
        ("the steps of lr_scheduler", {model.file: _scheduled(model) for model in models}),
    ]
    for what, stated in statements:
        require_one_value(stated, what)
    first = models[0]
    dp, mp = first.dp_world_size or 1, first.mp_world_size or 1
    split = first.degrees
    if split is not None and split.pp * split.tp == mp:
        return Degrees(dp, split.pp, split.tp)
    if split is not None and degree_stated(first, inventory.files) is None:
        raise CheckpointError(
            "checkpoint_parallel_dimensions contradict mp_world_size",
            file=first.file,
            expected=f"pp x tp = {mp}",
            found=f"{split.pp} x {split.tp}",
        )
    tp = _layer_files_of_one_layer(inventory) or mp
    if mp % tp:
        raise CheckpointError(
            "the pipeline layer files do not fit mp_world_size",
            file=first.file,
            expected=f"a divisor of {count_text(mp, 'file')} a layer",
            found=tp,
        )
    return Degrees(dp, mp // tp, tp)


def _counter(model: ModelStates, key: str) -> object:
    root = model.archive.root
    return root.get(key) if isinstance(root, Mapping) else None


def _scheduled(model: ModelStates) -> object:
    """The counters of the scheduler, of DeepSpeed's own or one of torch."""
    state = _counter(model, "lr_scheduler")
    return {key: state.get(key) for key in _SCHEDULED} if isinstance(state, Mapping) else None


def _layer_files_of_one_layer(inventory: Inventory) -> int:
    """The most files that any pipeline layer has; one that lacks a file must not mislead."""
    layers = Counter(name.layer for name in inventory.of_kind(FileKind.LAYER))
    return max(layers.values(), default=0)


# --------------------------------------------------------------------------- completeness


def require_grid(
    inventory: Inventory, kind: FileKind, expected: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], Path]:
    """Every file of one kind on the grid, `(dp, mp)` -> path.

    Raises
    ------
    MissingFileError
        When a cell has no file.
    CheckpointError
        When a file lies outside the grid: left over from a larger run.
    """
    found = {(name.dp, name.mp): path for name, path in inventory.of_kind(kind).items()}
    wanted = list(expected)
    missing = [cell for cell in wanted if cell not in found]
    if missing:
        names = (path.name for path in found.values())
        dp, mp = missing[0]
        column = dp % inventory.sequence if inventory.sequence > 1 else mp
        raise MissingFileError(
            f"{len(missing)} of {len(wanted)} files of {kind.value} missing"
            if len(missing) > 1
            else f"a file of {kind.value} is missing",
            file=inventory.folder.path / missing_file_name(kind, dp, column, names),
            rank=f"dp {dp}, mp {mp}",
            expected=count_text(len(wanted), "file"),
            found=len(wanted) - len(missing),
            next_step="copy it from the node that wrote it, or name that folder with --also",
        )
    stale = sorted(set(found) - set(wanted))
    if stale:
        raise CheckpointError(
            "a file of a rank that this checkpoint does not have",
            file=found[stale[0]],
            rank=f"dp {stale[0][0]}, mp {stale[0][1]}",
            expected=f"{count_text(len(wanted), 'file')} of {kind.value}",
            found=len(found),
            next_step="it is left over from another run; move it away",
        )
    return found
