"""What is to be said about the files of a native checkpoint that can be read all the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from reshard.formats.checkpoint import Problem
from reshard.formats.deepspeed.optimizer_records import OptimizerStates
from reshard.formats.deepspeed.records import ModelStates
from reshard.formats.model_keys import client_state, text_keyed
from reshard.formats.torch_archive import same_value

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
        yield from (Problem(text, archive.path) for text in archive.problems)
    yield from _other_client_states(models)


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
