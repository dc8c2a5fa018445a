"""The steps that the optimizer made, against those that the trainer counted.

Theory. The model-state files count the steps of the trainer, and of these the ones that an overflow
made void; the optimizer files keep how many steps each flat group made. ZeRO gives every group a
gradient at every step, so in files of one save the two tell one story::

    step = global_steps - skipped_steps

but for what honest runs do:

* one more, where the run began with DeepSpeed 0.13.1 or older, which took an empty step first (bf16
  without ZeRO still does);
* many more under ZeRO-3, where a run that was resumed from a universal folder has one `step` for
  all its N groups, and each of them increases it: the files then hold one storage for all, and
  `step` is ahead by N - 1 for every step since;
* fewer, where the optimizer was begun anew at a resume (`load_optimizer_states=False`).

The last cannot be told from optimizer files of an earlier save, so it is a contradiction that the
user may accept. Without ZeRO both numbers are in one file, and a parameter that has no gradient
makes no step: only more is odd.

Source: `engine.py` (`_take_model_step`, `_load_checkpoint`), `stage_1_and_2.py`, `stage3.py`
(`step`, `_initialize_optimizer_states`), DeepSpeed 0.12 to 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from reshard.errors import CheckpointError
from reshard.formats.checkpoint import Problem, Scalar, TensorKey
from reshard.formats.deepspeed.grid import minority_first, stated_text
from reshard.formats.deepspeed.optimizer_records import OptimizerStates
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.parsing import Cursor
from reshard.formats.step_values import STEP
from reshard.formats.torch_archive import TensorRecord

_VERSION = re.compile(r"(\d+)\.(\d+)")
_WITHOUT_FIRST_STEP = (0, 14)
"""The first DeepSpeed that takes no empty step."""

_ACCEPT = "--replicas first takes the files as they are"
_MIXED = f"files of two saves lie in one folder: take all of them from one save; {_ACCEPT}"


def counted_steps(model: ModelStates) -> int | None:
    """The steps that a model-state file counts and no overflow made void; None without counters."""
    root = Cursor(model.archive.root, model.file)
    counters = root.maybe("global_steps"), root.maybe("skipped_steps")
    if counters[0] is None:
        return None
    return counters[0].integer() - (0 if counters[1] is None else counters[1].integer())


def step_contradictions(
    columns: Sequence[ModelStates],
    ranks: Mapping[tuple[int, int], OptimizerStates],
    scalars: Mapping[TensorKey, Scalar],
) -> Iterator[CheckpointError]:
    """What optimizer and counters say against each other.

    Parameters
    ----------
    columns
        Model-state files by model-parallel rank; they agree on the counters.
    ranks
        The optimizer files, none without ZeRO.
    scalars
        The steps of all parameters, by name.
    """
    counted = counted_steps(columns[0])
    made = _made(ranks.values())
    if not ranks and counted is not None:
        yield from _without_zero(counted, scalars, columns[0].file)
    elif len(set(made.values())) > 1:
        yield CheckpointError(
            "optimizer files have made different numbers of steps",
            file=minority_first(made)[0][0][0],
            found=stated_text(minority_first(made)),
            next_step=_MIXED,
        )
    elif made and counted is not None:
        yield from _against_counters(counted, next(iter(made.values())), list(ranks.values()))


def odd_steps(
    columns: Sequence[ModelStates], ranks: Mapping[tuple[int, int], OptimizerStates]
) -> Iterator[Problem]:
    """Say what an honest run may do, and seldom does."""
    counted, made = counted_steps(columns[0]), _made(ranks.values())
    if counted is None or not made:
        return
    (file, highest), *_ = made.items()
    rank = next(rank for rank in ranks.values() if rank.file == file)
    found = _VERSION.match(rank.version or columns[0].version)
    is_new = found is not None and (int(found[1]), int(found[2])) >= _WITHOUT_FIRST_STEP
    if highest == counted + 1 and is_new:
        yield Problem(
            f"the optimizer made one step more ({highest:g}) than is counted ({counted}), as runs "
            "that began with DeepSpeed 0.13.1 or older did; if this one did not, its optimizer "
            "files are of the next step",
            file,
        )
    elif highest > counted + 1 and _explained(highest - counted, list(ranks.values())):
        yield Problem(
            f"the optimizer counts {highest:g} steps where {counted} were made: its groups share "
            "one `step`, which each of them increases, as after a resume from a universal folder",
            file,
        )


def _made(ranks: Iterable[OptimizerStates]) -> dict[str, float]:
    """File -> the most steps that a group of it made; files without steps are left out."""
    held = {
        rank.file: [group.scalars[STEP].value for group in rank.groups if STEP in group.scalars]
        for rank in ranks
    }
    return {file: max(steps) for file, steps in held.items() if steps}


def _against_counters(
    counted: int, made: float, ranks: Sequence[OptimizerStates]
) -> Iterator[CheckpointError]:
    if made < counted:
        yield CheckpointError(
            "the optimizer made fewer steps than the model-state files count",
            file=ranks[0].file,
            expected=f"step {counted}",
            found=f"step {made:g}",
            next_step="files of two saves lie in one folder: take all of them from one save; if "
            f"the optimizer was begun anew at a resume, {_ACCEPT}",
        )
    elif made > counted + 1 and not _explained(made - counted, ranks):
        yield CheckpointError(
            "the optimizer made more steps than the model-state files count",
            file=ranks[0].file,
            expected=f"step {counted}",
            found=f"step {made:g}",
            next_step=_MIXED,
        )


def _explained(ahead: float, ranks: Sequence[OptimizerStates]) -> bool:
    """Whether groups that share one step put it ahead, perhaps after an empty first one."""
    groups = [_shared_step(rank) for rank in ranks]
    return all(n > 1 and (ahead % (n - 1) == 0 or (ahead - 1) % (n - 1) == 0) for n in groups)


def _shared_step(rank: OptimizerStates) -> int:
    """Number of groups of a ZeRO-3 file that have the very same `step`, 1 if they do not."""
    if rank.stage != 3 or not all(STEP in group.scalars for group in rank.groups):
        return 1
    optimizer = Cursor(rank.archive.root, rank.file).at("optimizer_state_dict")
    states = optimizer.at("optimizer_state_dict").at("state")
    steps = [states.at(group).at(STEP).value for group in range(len(rank.groups))]
    places = {step.offset if isinstance(step, TensorRecord) else None for step in steps}
    return len(steps) if len(places) == 1 and None not in places else 1


def _without_zero(
    counted: int, scalars: Mapping[TensorKey, Scalar], file: str
) -> Iterator[CheckpointError]:
    ahead = {
        name: scalar.value
        for (name, state), scalar in scalars.items()
        if state == STEP and scalar.value > counted + 1
    }
    if ahead:
        name, made = next(iter(ahead.items()))
        yield CheckpointError(
            "the optimizer made more steps than are counted in the same file",
            file=file,
            parameter=name,
            expected=f"at most step {counted}",
            found=f"step {made:g}",
            next_step="the file was edited, or its optimizer brought steps of another run; "
            f"{_ACCEPT}",
        )
