"""The paths of a universal folder, and the names that may not become one.

Theory. A universal folder is its own index: the state `exp_avg` of the parameter `a.weight` is the
file `zero/a.weight/exp_avg.pt`. Names come from a checkpoint that anybody may have written, so a
name that would leave the folder, or land on another file, is refused before anything is created.

Source: `ds_to_universal.py`, `universal_checkpoint.py` (`load_hp_checkpoint_state`), DeepSpeed
0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterable

from reshard.errors import CheckpointError

ZERO = "zero"
"""Folder of the parameters."""

OPTIMIZER_STATE = f"{ZERO}/optimizer_state.pt"
"""File of everything about the optimizer that is not a parameter's."""

STEP = "step"
"""The one scalar state that has a file of its own in a parameter's folder."""

_LONGEST = 255

LAYERS = "reshard_pipeline"
"""Key in `optimizer_state.pt` for the layers and stages of a pipeline, which the folder has none
of. (In a model-state file DeepSpeed would hand it to the client as its own state.)"""

SCALARS = "reshard_scalars"
"""Key in `optimizer_state.pt` for scalar states other than `step`, which the folder has no file
for."""


def state_path(name: str, state: str) -> str:
    """Path of a state's file, relative to the output folder.

    Raises
    ------
    CheckpointError
        When the name or the state cannot be a path inside the folder.
    """
    if "/" in state or not state.isprintable():
        raise _unsafe(name, state)
    path = f"{ZERO}/{name}/{state}.pt"
    for part in path.split("/"):
        if part in ("", ".", "..") or "\0" in part or "\\" in part:
            raise _unsafe(name, state)
        if _encoded_nbytes(name, state, part) > _LONGEST:
            raise _unsafe(name, state, f"a name of over {_LONGEST} bytes")
    return path


def _encoded_nbytes(name: str, state: str, part: str) -> int:
    try:
        return len(part.encode("utf-8"))
    except UnicodeEncodeError:
        raise _unsafe(name, state, "a lone surrogate, which is no text") from None


def _unsafe(name: str, state: str, found: str | None = None) -> CheckpointError:
    return CheckpointError(
        "a name cannot become a path inside the output folder",
        parameter=repr(name),
        state=repr(state),
        found=found,
        next_step="leave it out with --exclude",
    )


def require_distinct(paths: Iterable[str]) -> None:
    """Refuse when two files would be one, or a file would be another's folder."""
    files = list(paths)
    seen = set(files)
    if len(seen) != len(files):
        twice = next(path for index, path in enumerate(files) if path in files[:index])
        raise CheckpointError("two things would be written to one file", file=twice)
    for path in files:
        parts = path.split("/")
        for count in range(1, len(parts)):
            if "/".join(parts[:count]) in seen:
                raise CheckpointError(
                    "a file would have to be a folder as well",
                    file="/".join(parts[:count]),
                    found=path,
                    next_step="leave one of them out with --exclude",
                )
