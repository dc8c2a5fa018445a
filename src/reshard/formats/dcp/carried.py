"""What reshard adds to a DCP folder, so that nothing it was given is lost on the way through it.

Theory. DCP has no word for counters, schedulers, which parameters are frozen, or which settings of
a group the source did not have. They are one more object under the key ``reshard`` at the root of
the tree. A loader asks for the keys of its own state dict and never for this one. Only plain values
go into it (no classes), so that a tool that loads everything, as ``dcp_to_torch_save`` does, needs
nothing but torch to read it.

==================  ===============================================================
``version``         of this object
``roles``           name -> ``"frozen"`` or ``"buffer"``; others are parameters
``supplied``        first name of a group -> hyperparameters that the source did not state
``extras``          ``global_steps``, ``client_state``, … as in `Checkpoint.extras`
==================  ===============================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reshard.formats.checkpoint import COMPARED_EXTRAS, Role
from reshard.formats.model_keys import CARRIED
from reshard.formats.parsing import Cursor

KEY = "reshard"
VERSION = 1

_ELSEWHERE = ("param_groups", "universal_checkpoint_info")
"""Extras that the optimizer's entries hold, and that speak of the source's topology."""

CARRIED_EXTRAS = tuple(
    dict.fromkeys(key for key in (*COMPARED_EXTRAS, *CARRIED) if key not in _ELSEWHERE)
)
"""Extras that the object may hold."""


@dataclass(frozen=True, slots=True)
class Carried:
    """The object, behind the border."""

    roles: Mapping[str, Role] = field(default_factory=dict)
    supplied: Mapping[str, frozenset[str]] = field(default_factory=dict)
    extras: Mapping[str, object] = field(default_factory=dict)


def parse_carried(value: object, file: str) -> Carried:
    """Parse the object.

    Raises
    ------
    CheckpointError
        It is not what :func:`carried_object` makes.
    """
    root = Cursor(value, file, KEY)
    if root.at("version").integer() != VERSION:
        raise root.at("version").unexpected(f"version {VERSION}")
    roles = {}
    for name, word in root.at("roles").named():
        if word.value not in (Role.FROZEN.value, Role.BUFFER.value):
            raise word.unexpected("frozen or buffer")
        roles[name] = Role(word.value)
    supplied = {
        name: frozenset(key.text() for key in group.each())
        for name, group in root.at("supplied").named()
    }
    extras = {
        name: value.value for name, value in root.at("extras").named() if name in CARRIED_EXTRAS
    }
    return Carried(roles, supplied, extras)


def carried_object(carried: Carried) -> dict[str, object]:
    """The object as a tree of plain values."""
    return {
        "version": VERSION,
        "roles": {name: role.value for name, role in carried.roles.items()},
        "supplied": {name: sorted(keys) for name, keys in carried.supplied.items()},
        "extras": dict(carried.extras),
    }
