"""Whether a universal folder still holds all that was written into it.

Theory. The tree is its own index, so a parameter that was lost leaves no gap in it. Two things in
the folder say what there should be. The manifest, where reshard wrote the folder, lists every file.
The model-state files, whoever wrote it, list the trained parameters under `param_shapes`: each of
them has a folder with its weights, unless the folder holds no weights at all. (Frozen parameters
are not among them: DeepSpeed's converter writes none.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

from reshard.errors import MissingFileError, count_text
from reshard.formats.parsing import Cursor
from reshard.formats.states import WEIGHTS


def require_parameters(
    zero: Path,
    models: Iterable[Cursor],
    states: Mapping[str, set[str]],
    aliases: Iterable[str],
) -> None:
    """Refuse a folder without a parameter that its model-state files list.

    Parameters
    ----------
    zero
        The folder of the parameters.
    models
        The roots of the model-state files.
    states
        The states that are there, by parameter.
    aliases
        Names that need no folder, being those of another's weights.

    Raises
    ------
    MissingFileError
        A parameter, or the weights of one, are not there.
    """
    weights = {name for name, held in states.items() if WEIGHTS in held}
    there = weights or states.keys()
    listed = {name: model.file for model in models for name in chain(*trained_groups(model))}
    lost = [name for name in listed if name not in there and name not in set(aliases)]
    if lost:
        raise MissingFileError(
            f"a parameter is missing that the model-state file {Path(listed[lost[0]]).name} lists",
            file=zero / lost[0] / f"{WEIGHTS}.pt",
            parameter=lost[0],
            expected=count_text(len(listed), "parameter"),
            found=f"all but {len(lost)}",
            next_step="copy its folder again, or convert again",
        )


def trained_groups(model: Cursor) -> list[list[str]]:
    """The trained parameters that a model-state file lists, by group."""
    groups = model.maybe("param_shapes")
    listed = groups.each() if groups and isinstance(groups.value, (list, tuple)) else []
    return [[name for name, _ in group.named()] for group in listed]
