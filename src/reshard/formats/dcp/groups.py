"""Parameter groups of a DCP optimizer, from either form, as every format keeps them.

Theory. The nested form has groups as they were. The flattened form repeats every hyperparameter for
every parameter and forgets the groups; those with equal hyperparameters are one group then, which
is all that a loader of that form asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from reshard.errors import CheckpointError
from reshard.formats.dcp.tree import PARAMS, Optimizer
from reshard.formats.parsing import Cursor
from reshard.formats.torch_archive import same_value

Value = Callable[[str], Cursor]
"""Reads an object: FQN of an entry -> its value, and the file for messages."""


@dataclass(frozen=True, slots=True)
class Group:
    """The names of the parameters of one group, and its hyperparameters."""

    names: tuple[object, ...]
    settings: Mapping[str, object]


def read_groups(optimizer: Optimizer, value: Value) -> list[Group]:
    """The groups, in order.

    Parameters
    ----------
    optimizer
        Entries of the optimizer.
    value
        Reads one of them.

    Raises
    ------
    CheckpointError
        A group does not name its parameters, or numbers are missing.
    """
    if optimizer.flattened:
        return _of_parameters(optimizer, value)
    if (0, "") in optimizer.settings:
        return [_group(group) for group in value(optimizer.settings[0, ""]).each()]
    return _of_numbers(optimizer, value)


def _group(cursor: Cursor) -> Group:
    settings = {name: entry.value for name, entry in cursor.named() if name != PARAMS}
    return Group(tuple(name.value for name in cursor.at(PARAMS).each()), settings)


def _of_numbers(optimizer: Optimizer, value: Value) -> list[Group]:
    numbered: dict[int | str, dict[str, Cursor]] = {}
    for (number, key), entry in optimizer.settings.items():
        numbered.setdefault(number, {})[key] = value(entry)
    groups = []
    for number in range(len(numbered)):
        keys = numbered.get(number)
        if keys is None or PARAMS not in keys:
            raise CheckpointError(
                f"group {number} of the optimizer does not name its parameters",
                found=f"groups {sorted(map(str, numbered))}",
                next_step="the save is not whole; take another checkpoint",
            )
        names = tuple(name.value for name in keys[PARAMS].each())
        groups.append(Group(names, {key: one.value for key, one in keys.items() if key != PARAMS}))
    return groups


def _of_parameters(optimizer: Optimizer, value: Value) -> list[Group]:
    settings: dict[str, dict[str, object]] = {}
    for (name, key), entry in optimizer.settings.items():
        settings.setdefault(str(name), {})[key] = value(entry).value
    groups: list[tuple[list[str], dict[str, object]]] = []
    for name, unsorted in settings.items():
        # Orders of keys differ between parameters of one group: ranks write in any order.
        own = dict(sorted(unsorted.items()))
        known = next((group for group in groups if same_value(group[1], own)), None)
        if known is None:
            groups.append(([name], own))
        else:
            known[0].append(name)
    return [Group(tuple(names), own) for names, own in groups]
