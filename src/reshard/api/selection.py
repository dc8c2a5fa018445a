"""Narrowing a checkpoint to some parameters and states.

Theory. A selection is a smaller checkpoint: the same value with fewer tensors, so nothing behind
it needs to know. A pattern that matches nothing is a mistake, and so is a selection of nothing:
both are refused, for a run that quietly carries less than was meant looks like one that went
well.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from reshard.api.arguments import texts_of
from reshard.errors import UsageError
from reshard.formats.checkpoint import Checkpoint, Extra, Role, StoredTensor, TensorKey

GROUPS = "groups"
"""The extra that names the parameters of each group, in every format."""


def select(
    checkpoint: Checkpoint,
    *,
    include: Sequence[str] | str = (),
    exclude: Sequence[str] | str = (),
    states: Sequence[str] | str = (),
    trainable: bool = False,
) -> Checkpoint:
    """Return the checkpoint narrowed to some parameters and states.

    Where a list is asked for, one text stands for a list of one.

    Parameters
    ----------
    checkpoint
        What to choose from.
    include, exclude
        Glob patterns over names of parameters (a name itself is one too). A parameter is kept
        when it or a name tied to it matches one of `include`, if any, and it matches none of
        `exclude`.
    states
        States to keep, tensors and scalars alike; all when empty.
    trainable
        Keep only the parameters that are trained: no frozen ones, and no buffers.

    Raises
    ------
    UsageError
        A pattern or a state matches nothing, or nothing is left.
    """
    include, exclude = texts_of("include", include), texts_of("exclude", exclude)
    states = texts_of("states", states)
    for pattern in (*include, *exclude):
        require_match(pattern, (*checkpoint.names, *checkpoint.aliases))
    _require_states(checkpoint, states)
    kept = _kept_names(checkpoint, include, exclude)
    if trainable:
        kept &= {tensor.name for tensor in checkpoint.tensors.values() if _is_trained(tensor)}

    def keeps(key: TensorKey) -> bool:
        return key[0] in kept and (not states or key[1] in states)

    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if keeps(key)}
    if not tensors:
        raise UsageError(
            "nothing is selected",
            found="no tensor that --include, --exclude, --states and --trainable leave",
            next_step="reshard inspect --tensors '*' lists the names and states",
        )
    aliases = {
        alias: owner
        for alias, owner in checkpoint.aliases.items()
        if owner in kept and not matches(alias, exclude)
    }
    return replace(
        checkpoint,
        tensors=tensors,
        scalars={key: scalar for key, scalar in checkpoint.scalars.items() if keeps(key)},
        aliases=aliases,
        extras=_kept_extras(checkpoint.extras, kept),
    )


def _is_trained(tensor: StoredTensor) -> bool:
    return tensor.role is Role.PARAMETER


def _kept_extras(extras: Mapping[str, Extra], kept: frozenset[str]) -> Mapping[str, Extra]:
    """The extras, with only the kept names in the groups; a group may become empty and stays."""
    groups = extras.get(GROUPS)
    if groups is None or not isinstance(groups.value, Sequence):
        return extras
    names = [[name for name in group if name in kept] for group in groups.value]
    return {**extras, GROUPS: replace(groups, value=names)}


def _require_states(checkpoint: Checkpoint, states: Sequence[str]) -> None:
    held = {state for _, state in (*checkpoint.tensors, *checkpoint.scalars)}
    for state in states:
        if state not in held:
            raise UsageError(
                "no such state",
                state=state,
                expected=f"one of {', '.join(sorted(held))}",
                next_step=suggest_state(state, held),
            )


def _kept_names(
    checkpoint: Checkpoint, include: Sequence[str], exclude: Sequence[str]
) -> frozenset[str]:
    tied: dict[str, list[str]] = {}
    for alias, owner in checkpoint.aliases.items():
        tied.setdefault(owner, []).append(alias)
    return frozenset(
        name
        for name in checkpoint.names
        if not matches(name, exclude)
        and (not include or any(matches(n, include) for n in (name, *tied.get(name, ()))))
    )


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name is, or matches, one of some glob patterns."""
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def require_match(pattern: str, names: Sequence[str]) -> None:
    """Refuse a pattern that matches none of the names."""
    if not any(matches(name, (pattern,)) for name in names):
        raise UsageError(
            "a pattern matches no parameter", found=repr(pattern), next_step=suggest(pattern, names)
        )


def suggest_state(state: str, held: Iterable[str]) -> str:
    """Return a next step for a state that does not exist."""
    close = difflib.get_close_matches(state, sorted(held), n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else "name one of them"


def suggest(name: str, names: Iterable[str]) -> str:
    """Return a next step for a name that does not exist: the names most like it."""
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return "reshard inspect --tensors '*' lists the names"
