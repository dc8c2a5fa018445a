"""Where rules are from: a file of the user's, or one that comes with reshard.

Theory. ``--names`` takes a path, or ``preset:NAME``. A preset is named by its file
(``preset:llama``), or by the two sides (``preset:transformers-megatron``): then the ``model_type``
of the configuration beside the checkpoint decides which family it is. The order of the sides says
in which direction to go; a family alone goes whichever way the names of the checkpoint tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path

from reshard.errors import UnsupportedError, UsageError
from reshard.names.rules import Rules, rules_of

PREFIX = "preset:"
NOT_MOVED = {
    "gemma": "the weights of its norms differ by one between the two",
    "gemma2": "the weights of its norms differ by one between the two",
    "gemma3_text": "the weights of its norms differ by one between the two",
}
"""Models, by ``model_type``, of which transformers and Megatron-Core keep different numbers."""

LARGEST_FILE = 1 << 20
"""Bytes that a file of rules may have."""


def presets() -> tuple[str, ...]:
    """Return the names of the rules that come with reshard."""
    folder = resources.files("reshard.names") / "presets"
    return tuple(
        sorted(
            entry.name.removesuffix(".toml")
            for entry in folder.iterdir()
            if entry.name.endswith(".toml")
        )
    )


@lru_cache(maxsize=32)
def preset(name: str) -> Rules:
    """Return the rules of one preset."""
    file = resources.files("reshard.names") / "presets" / f"{name}.toml"
    return rules_of(file.read_text("utf-8"), PREFIX + name, preset)


def rules_for(given: str, config: Mapping[str, object]) -> tuple[Rules, str | None]:
    """Return the rules that the user names, and the side to start from where that is said.

    Parameters
    ----------
    given
        A path, or ``preset:NAME``.
    config
        The model's configuration, empty where there is none.

    Raises
    ------
    UsageError
        There is no such file or preset, or the family cannot be told.
    UnsupportedError
        The two sides of the family hold different numbers.
    DocumentError
        The file is malformed.
    """
    if not given.startswith(PREFIX):
        return _read(Path(given)), None
    name = given.removeprefix(PREFIX)
    if name in presets():
        return preset(name), None
    source, _, target = name.partition("-")
    pairs = {one: preset(one) for one in presets()}
    fitting = {one: rules for one, rules in pairs.items() if {source, target} == {*rules.sides}}
    if not fitting:
        raise UsageError(
            f"there is no preset {name!r}",
            expected=f"one of {', '.join(presets())}, or two sides like transformers-megatron",
        )
    kind = config.get("model_type")
    for rules in fitting.values():
        if kind in rules.models:
            return rules, source
    if kind in NOT_MOVED:
        raise UnsupportedError(
            "this family is not translated by moving elements",
            found=f"model_type {kind!r}: {NOT_MOVED[str(kind)]}",
        )
    raise UsageError(
        "which family of models this is cannot be told",
        expected=f"a config.json beside the checkpoint, with a model_type that is known "
        f"({', '.join(sorted({model for rules in fitting.values() for model in rules.models}))})",
        found=f"model_type {kind!r}" if kind else "none",
        next_step=f"name the family: --names {PREFIX}{next(iter(fitting))}",
    )


def _read(path: Path) -> Rules:
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise UsageError("the file of rules is too large", file=path)
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            "the file of rules cannot be read",
            file=path,
            found=getattr(error, "strerror", None) or str(error),
            next_step=f"check the path, or name a preset: {', '.join(presets())}",
        ) from error
    return rules_of(text, str(path), preset)
