r"""Other names for parameters: the way from one code's names to another's.

Theory. A renaming is a list of rules and, or, a table. A *rule* ``OLD=NEW`` is a regular expression
and what its first match in a name becomes (``\1`` is the first group); rules are applied one after
another, each to what those before it made of the name. A *table* names whole parameters. Nothing is
lost on the way: a rule or an entry that meets no name is a mistake, and two parameters may not get
one name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from reshard.errors import DocumentError, UsageError
from reshard.formats.checkpoint import Checkpoint, Extra
from reshard.formats.model_dtypes import MODULE_EXTRA

GROUPS = "groups"
"""The extra that names the parameters of each optimizer group."""

OF_OTHER_NAMES = ("universal_checkpoint_info", "pipeline", "experts_are_cut")
"""Extras that speak of parameters by names or patterns that are no more."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: a regular expression, what its first match becomes, and how the user wrote it."""

    pattern: re.Pattern[str]
    new: str
    text: str


@dataclass(frozen=True, slots=True)
class Renaming:
    r"""Rules and a table, which is applied first.

    Examples
    --------
    >>> renaming = renaming_of([r"^module\.=", r"h\.(\d+)=layers.\1"])
    >>> renaming.names(["module.h.0.w", "module.h.1.w"])
    {'module.h.0.w': 'layers.0.w', 'module.h.1.w': 'layers.1.w'}
    """

    rules: tuple[Rule, ...] = ()
    """In the order in which they are applied."""
    table: Mapping[str, str] = field(default_factory=dict)
    """Whole names, old -> new."""
    table_file: str = ""
    """Where the table is from, for messages."""

    def __bool__(self) -> bool:
        return bool(self.rules or self.table)

    def names(self, old: Iterable[str], *, chosen: Container[str] | None = None) -> dict[str, str]:
        """Return the new name of every name, of which the chosen ones have to differ.

        Raises
        ------
        UsageError
            A rule or an entry meets no name, or two names become one.
        """
        known = dict.fromkeys(old)
        self._require_entries(known)
        renamed = {name: self.table.get(name, name) for name in known}
        for rule in self.rules:
            renamed = self._applied(rule, renamed)
        _require_distinct(
            {old: new for old, new in renamed.items() if chosen is None or old in chosen}
        )
        return renamed

    def _applied(self, rule: Rule, names: Mapping[str, str]) -> dict[str, str]:
        met = False
        made = {}
        for old, name in names.items():
            try:
                made[old], count = rule.pattern.subn(rule.new, name, count=1)
            except (re.error, IndexError) as error:
                raise UsageError(
                    "a renaming refers to a group that its expression does not have",
                    found=f"--rename {rule.text!r} ({error})",
                ) from error
            met = met or bool(count)
        if not met:
            raise UsageError(
                "a renaming meets no parameter",
                found=f"--rename {rule.text!r}",
                next_step="reshard inspect --tensors '*' lists the names",
            )
        return made

    def _require_entries(self, known: Container[str]) -> None:
        for name in self.table:
            if name not in known:
                raise UsageError(
                    "the table of names names a parameter that is not there",
                    file=self.table_file or None,
                    parameter=name,
                    next_step="reshard inspect --tensors '*' lists the names",
                )


def renaming_of(rules: Sequence[str] = (), table: str | os.PathLike[str] | None = None) -> Renaming:
    """Read a renaming.

    Parameters
    ----------
    rules
        Each ``OLD=NEW``, cut at its last ``=``.
    table
        A JSON file with one object, old name -> new name.

    Raises
    ------
    UsageError
        A rule has no ``=`` or is no regular expression.
    DocumentError
        The file is no such object.
    """
    entries = {} if table is None else _read_table(Path(table))
    return Renaming(tuple(map(_rule, rules)), entries, "" if table is None else str(table))


def _rule(text: str) -> Rule:
    old, sign, new = text.rpartition("=")
    if not sign or not old:
        raise UsageError("not a renaming", expected="OLD=NEW", found=repr(text))
    try:
        return Rule(re.compile(old), new, text)
    except re.error as error:
        raise UsageError(
            "not a regular expression", found=f"{old!r} in --rename {text!r}: {error}"
        ) from error


def _read_table(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text("utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise UsageError(
            "the table of names cannot be read", file=path, found=error.strerror
        ) from error
    except (ValueError, RecursionError) as error:
        raise DocumentError("the table of names is no JSON", file=path, found=str(error)) from error
    if not isinstance(found, dict) or not all(isinstance(new, str) for new in found.values()):
        raise DocumentError("not a table of names", file=path, expected='{"OLD": "NEW", ...}')
    return found


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name is there twice")
    return entries


def _require_distinct(names: Mapping[str, str]) -> None:
    owners: dict[str, str] = {}
    for old, new in names.items():
        first = owners.setdefault(new, old)
        if not new or first != old:
            raise UsageError(
                "a renaming leaves a parameter without a name"
                if not new
                else "two parameters would get one name",
                parameter=new or old,
                found=None if not new else f"{first} and {old}",
            )


def renamed(checkpoint: Checkpoint, renaming: Renaming, whole: Checkpoint) -> Checkpoint:
    """Return a checkpoint, or what was selected of a `whole` one, under other names.

    A rule may meet names that were not selected: the same rules go with every selection. Two names
    may become one where only one of them was selected.
    """
    if not renaming:
        return checkpoint
    chosen = (*checkpoint.names, *checkpoint.aliases)
    new = renaming.names((*whole.names, *whole.aliases), chosen=chosen)
    kept = {old: new[old] for old in chosen}
    return replace(
        checkpoint,
        tensors={
            (new[name], state): replace(tensor, name=new[name])
            for (name, state), tensor in checkpoint.tensors.items()
        },
        scalars={
            (new.get(name, name), state): scalar
            for (name, state), scalar in checkpoint.scalars.items()
        },
        aliases={new[alias]: new.get(owner, owner) for alias, owner in checkpoint.aliases.items()},
        extras=_renamed_extras(checkpoint, kept),
        copies=tuple(
            replace(copy, name=new.get(copy.name, copy.name)) for copy in checkpoint.copies
        ),
        cuts={new.get(name, name): cut for name, cut in checkpoint.cuts.items()},
    )


def _renamed_extras(checkpoint: Checkpoint, kept: Mapping[str, str]) -> Mapping[str, Extra]:
    """What lies beside tensors that keep their layout: how experts are cut holds on."""
    extras = checkpoint.extras
    if all(old == new for old, new in kept.items()):
        return extras
    made = renamed_extras(extras, {new: (old,) for old, new in kept.items()}, kept)
    return made | {key: extras[key] for key in ("experts_are_cut",) if key in extras}


def left_behind(before: Checkpoint, after: Checkpoint) -> tuple[str, ...]:
    """Return a note on what a renaming does not carry."""
    lost = [key for key in before.extras if key not in after.extras]
    if not lost:
        return ()
    return (f"not carried, as it speaks of the old names: {', '.join(lost)}",)


def renamed_extras(
    extras: Mapping[str, Extra], origins: Mapping[str, Sequence[str]], same: Mapping[str, str]
) -> dict[str, Extra]:
    """Return what lies beside the tensors, under the names that these have become.

    Parameters
    ----------
    extras
        As they were read.
    origins
        Every new name, and the old ones that it is made of.
    same
        Old name -> new name, of the tensors that are laid out as they were.
    """
    carried = {key: extra for key, extra in extras.items() if key not in OF_OTHER_NAMES}
    files, keys = extras.get("model_files"), extras.get("restore_keys")
    if files is not None and isinstance(files.value, Sequence):
        carried["model_files"] = replace(files, value=[_nameless(part) for part in files.value])
    if keys is not None and isinstance(keys.value, Mapping):
        kept = {same[name]: value for name, value in keys.value.items() if name in same}
        carried["restore_keys"] = replace(keys, value=kept)
    module, groups = extras.get(MODULE_EXTRA), extras.get(GROUPS)
    if module is not None and isinstance(module.value, Mapping):
        entries = {str(name): kept for name, kept in module.value.items()}
        renamed = {new: entries[old[0]] for new, old in origins.items() if old[0] in entries}
        carried[MODULE_EXTRA] = replace(module, value=renamed)
    if groups is not None and isinstance(groups.value, Sequence):
        owners: dict[str, list[str]] = {}
        for new, sources in origins.items():
            for old in sources:
                owners.setdefault(old, []).append(new)
        listed = [
            [new for name in group for new in owners.get(str(name), ())] for group in groups.value
        ]
        carried[GROUPS] = replace(groups, value=[list(dict.fromkeys(names)) for names in listed])
    return carried


def _nameless(part: object) -> object:
    """What a model-state file says, without what it says of parameters by name."""
    if not isinstance(part, Mapping):
        return part
    return {key: value for key, value in part.items() if key not in OF_OTHER_NAMES}
