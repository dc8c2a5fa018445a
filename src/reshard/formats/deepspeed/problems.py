"""What is to be said about the files of a native checkpoint that can be read all the same.

Theory. A pickle whose checksum does not hold may be damaged, so the file is to be copied again,
with one exception. When AutoEP is folded over tensor-parallel ranks, `engine.py`
(`autoep_expert_writer`, DeepSpeed 0.19.8: every data-parallel rank below `ep_size`) lets several
ranks write one expert's file at once, with the same content; what results is whole, and has the
checksum of another writer's pickle. A copy would be no different, so this is only noted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from reshard.formats.checkpoint import Problem
from reshard.formats.deepspeed.optimizer_records import OptimizerStates
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.model_keys import client_state, text_keyed
from reshard.formats.survey import AGAIN
from reshard.formats.torch_archive import WRONG_CHECKSUM, Archive, same_value

_SEVERAL_WRITERS = (
    "the checksum of the pickle does not hold, as where several ranks wrote the file at once, "
    "which DeepSpeed lets them do with files of experts"
)

Cell = tuple[int, int]
"""`(data-parallel rank, model-parallel rank)`."""


def problems_of(
    models: Mapping[Cell, ModelStates],
    ranks: Mapping[Cell, OptimizerStates],
    layouts: Sequence[str],
) -> Iterator[Problem]:
    """Everything about the files themselves.

    Parameters
    ----------
    models, ranks
        The model-state and optimizer files by cell.
    layouts
        What was found odd about the layouts that the files state.
    """
    if ranks and not ranks[0, 0].param_groups:
        yield Problem(
            "the optimizer file keeps no hyperparameters (elastic_checkpoint)",
            ranks[0, 0].file,
            next_step="set them in the configuration of the run that resumes",
        )
    yield from (Problem(note, models[0, 0].file) for note in layouts)
    for archive in (one.archive for files in (models, ranks) for one in files.values()):
        yield from problems_inside(archive)
    yield from _other_client_states(models)


def problems_inside(archive: Archive, *, of_expert: bool = False) -> Iterator[Problem]:
    """Everything inside one file, with what to do unless DeepSpeed itself writes such files.

    Parameters
    ----------
    archive
        The open file.
    of_expert
        Whether it holds the weights of one expert; see the theory.
    """
    for text in archive.problems:
        if of_expert and text == WRONG_CHECKSUM:
            yield Problem(_SEVERAL_WRITERS, archive.path)
        else:
            yield Problem(text, archive.path, next_step=AGAIN)


def weights_alone(folder: str) -> Problem:
    """Say that no optimizer file is there."""
    return Problem(
        "there is no optimizer file: every optimizer state is absent, and the weights are those "
        "of the model, in its dtype",
        folder,
        next_step="to resume, copy the *_optim_states.pt files here, or name their folder with "
        "--also",
    )


def _other_client_states(models: Mapping[Cell, ModelStates]) -> Iterator[Problem]:
    """Under ZeRO-3 every rank saves a client state; those of a column may differ."""
    for (dp, mp), model in sorted(models.items(), key=lambda item: item[0]):
        if dp == 0:
            continue
        own = client_state(text_keyed(models[0, mp].archive.root))
        other = client_state(text_keyed(model.archive.root))
        keys = [k for k in {**own, **other} if not same_value(own.get(k), other.get(k))]
        if keys:
            yield Problem(
                f"the client state of data-parallel rank {dp} differs from that of rank 0, "
                f"which is taken: {', '.join(keys)}",
                model.file,
            )
