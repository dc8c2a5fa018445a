"""The model's configuration, ``config.json``, as trainers keep it beside their checkpoints.

Theory. It is looked for in the folder of the checkpoint, in the folder around it, and where the
user says; the first one counts. Models of several parts have one under ``text_config``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from reshard.errors import CheckpointError

CONFIG = "config.json"
LARGEST_CONFIG = 1 << 22
"""Bytes that a configuration may have."""


def configuration(folder: str, also: Iterable[str] = ()) -> Mapping[str, object]:
    """Return the configuration beside a checkpoint, empty where there is none.

    Parameters
    ----------
    folder
        The tag folder.
    also
        Further folders to look in.

    Raises
    ------
    CheckpointError
        It is there and is no sound JSON.
    """
    for place in (Path(folder), Path(folder).parent, *map(Path, also)):
        path = place / CONFIG
        if path.is_file() and path.stat().st_size <= LARGEST_CONFIG:
            return _read(path)
    return {}


def _read(path: Path) -> Mapping[str, object]:
    try:
        config = json.loads(path.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            "the configuration beside the checkpoint is no sound JSON",
            file=path,
            found=str(error),
            next_step="mend it, or move it away",
        ) from error
    if not isinstance(config, Mapping):
        return {}
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, Mapping) else config
