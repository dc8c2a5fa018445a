"""Sequence and context parallelism: ranks that share a batch's tokens and hold whole weights.

Theory. Ulysses, and context parallelism as frameworks put it on DeepSpeed, cut activations and no
weight. For ZeRO its ranks are data-parallel ones: `dp_world_size` counts them, and the flat buffers
are cut over them too. But DeepSpeed's own `mpu` for it (`runtime/sequence_parallel/
parallel_state_sp.py`) answers questions after the *model*-parallel rank and degree with those of
the sequence, and so two statements of a checkpoint are of another thing than they say:

* `checkpoint_parallel_dimensions` (0.19) has the sequence's degree as `tp_degree`;
* file names have the sequence's rank as `mp_rank` (before 0.19): `D % degree` for data rank D.

`mp_world_size` is right in both, and the files prove it: no rank of a further column is there, and
each data-parallel rank has one file. That evidence counts, and what contradicts it is in the
report. Files of two columns, or of a run whose degree does not divide the data-parallel one, are no
such thing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from reshard.formats.checkpoint import Problem
from reshard.formats.deepspeed.names import FileKind, FileName
from reshard.formats.deepspeed.records import ModelStates

_OF_RANKS = (FileKind.ZERO3_MODEL, FileKind.OPTIMIZER)
_OF_COLUMNS = (FileKind.MODEL, *_OF_RANKS)


def degree_in_names(names: Iterable[FileName], models: Collection[ModelStates]) -> int:
    """The sequence's degree where file names hold its ranks, else 1."""
    if not models or any(model.mp_world_size != 1 for model in models):
        return 1
    ranks = [name for name in names if name.kind in _OF_RANKS]
    degree = max((name.mp for name in ranks), default=0) + 1
    divides = all((model.dp_world_size or 1) % degree == 0 for model in models)
    return degree if divides and all(name.mp == name.dp % degree for name in ranks) else 1


def as_data_rank(name: FileName, degree: int) -> FileName:
    """The name of a rank's file with the data-parallel rank alone."""
    return replace(name, mp=0) if degree > 1 and name.kind in _OF_RANKS else name


def degree_stated(model: ModelStates, names: Iterable[FileName]) -> int | None:
    """The sequence's degree among the stated dimensions; None where they are of something else.

    Parameters
    ----------
    model
        A model-state file that states `checkpoint_parallel_dimensions`.
    names
        Every file of the folder, by data-parallel rank.
    """
    dp, mp, split = model.dp_world_size or 1, model.mp_world_size or 1, model.degrees
    if split is None:
        return 1
    degree, rest = divmod(split.pp * split.tp, mp)
    columns = (name.mp for name in names if name.kind in _OF_COLUMNS)
    fits = degree > 0 and not rest and dp % degree == 0
    return degree if fits and (degree == 1 or max(columns, default=0) < mp) else None


def sequence_note(model: ModelStates, in_names: int) -> Problem | None:
    """Say which statements were overruled.

    Parameters
    ----------
    model
        A model-state file.
    in_names
        As `degree_in_names` tells.
    """
    mp, split = model.mp_world_size or 1, model.degrees
    if in_names > 1:
        what = f"the mp ranks in the names of the files are those of {in_names} sequence ranks"
    elif split is not None and split.pp * split.tp != mp:
        degree = split.pp * split.tp // mp
        what = f"checkpoint_parallel_dimensions ({split}) hold a sequence-parallel degree, {degree}"
    else:
        return None
    return Problem(
        f"{what}; mp_world_size, {mp}, is what the files prove, and was taken", model.file
    )
