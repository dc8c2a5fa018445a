"""Files of rules: which names of one side are which names of the other.

Theory. A file names two *sides* and lists joins between them. One side of a join is one name; the
other is one name, or several by label. ``axes`` spell the dims of each (:mod:`reshard.geometry.
spelling`); where a join has none, the tensor is the same on both sides. Nothing in a file says in
which direction to go, so it is read either way::

    sides = ["transformers", "megatron"]

    [sizes]
    g = "num_key_value_heads"
    d = "head_dim | hidden_size / num_attention_heads"

    [[join]]
    transformers = "model.norm.weight"
    megatron = "decoder.final_layernorm.weight"

    [[join]]
    transformers = { q = "q_proj.weight", k = "k_proj.weight", v = "v_proj.weight" }
    megatron = "linear_qkv.weight"
    axes = { q = "(g r d) h", k = "(g d) h", v = "(g d) h", megatron = "(g [q k v]) h" }

    [drop]
    transformers = ["*.inv_freq"]

Where one name is written several ways, a list gives them; the first is the one that is written.
``padded = { megatron = "v" }`` says that the first dim is padded there, beyond the size ``v``: what
is beyond is left out. ``beside = { transformers = "mlp.gate.weight" }`` lets a join count on a side
only where that other name is. ``like = "llama"`` takes over all that another file says.

*sizes* are numbers, or keys of the model's ``config.json``: a product or quotient of them, and
alternatives after ``|``, of which the first counts whose keys are there. They are needed only where
shapes leave an extent open. A capture that one side lacks counts tensors along the axis of its
name. *drop* lists names of a side that the other does not have; they are left out, which is said.
*keep* lists names that are the same on both sides, where no join takes them.
``...`` in a spelling stands for all dims that are not named.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from reshard.errors import DocumentError
from reshard.names.patterns import Pattern

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_WORDS = frozenset(("sides", "models", "like", "note", "sizes", "join", "drop", "keep"))
_JOIN_WORDS = frozenset(("axes", "padded", "beside", "note"))


@dataclass(frozen=True, slots=True)
class Rule:
    """One join between the sides."""

    whole_side: str
    """The side that has one name."""
    whole: Pattern
    """That name."""
    parts: Mapping[str, Pattern]
    """The names of the other side, by label."""
    axes: Mapping[str, str]
    """Spellings of the dims, by label; the whole's under the name of its side. May be empty."""
    text: str
    """How it is called in messages."""
    others: Mapping[str, tuple[Pattern, ...]]
    """Of a side, other ways to write its name, which are read and never written."""
    padded: Mapping[str, str]
    """Of a side, the size beyond which the first dim is padding there."""
    beside: Mapping[str, Pattern]
    """Of a side, the name that must be there too for the rule to count."""

    @property
    def part_side_captures(self) -> frozenset[str]:
        """Captures that the parts have and the whole has not: they count tensors."""
        return next(iter(self.parts.values())).captures - self.whole.captures


@dataclass(frozen=True, slots=True)
class Rules:
    """All that a file says."""

    sides: tuple[str, str]
    """What the two sides are called."""
    rules: tuple[Rule, ...]
    """The joins, in the order of the file."""
    sizes: Mapping[str, int | str]
    """Extents of axes: numbers, or expressions over keys of ``config.json``."""
    drop: Mapping[str, tuple[str, ...]]
    """Glob patterns of the names of a side that the other lacks."""
    keep: tuple[str, ...]
    """Glob patterns of names that both sides have, where no rule takes them."""
    models: tuple[str, ...]
    """The ``model_type`` of the models that the file is for; empty for any."""
    source: str
    """Where it is from, for messages."""

    def other(self, side: str) -> str:
        """Return the other side."""
        return self.sides[1] if side == self.sides[0] else self.sides[0]

    def keeps(self, name: str) -> bool:
        """Whether a name that no rule takes is the same on both sides."""
        return any(fnmatchcase(name, pattern) for pattern in self.keep)

    def drops(self, side: str, name: str) -> bool:
        """Whether a name of a side is one that the other does not have."""
        return any(fnmatchcase(name, pattern) for pattern in self.drop.get(side, ()))


def kept_rule(name: str, sides: tuple[str, str]) -> Rule:
    """Return the rule of a name that is the same on both sides."""
    same = Pattern(name)
    return Rule(sides[1], same, {sides[0]: same}, {}, f"keep ({name})", {}, {}, {})


def rules_of(text: str, source: str, like: Callable[[str], Rules] | None = None) -> Rules:
    """Read the text of a file of rules.

    Parameters
    ----------
    text
        TOML.
    source
        Where it is from, for messages.
    like
        Finds another file by its name.

    Raises
    ------
    DocumentError
        It is no TOML, or a word or value in it is not as it should be.
    """
    try:
        root = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise DocumentError(
            "the rules of names are no TOML", file=source, found=str(error)
        ) from error
    try:
        return _rules(root, source, like)
    except _MalformedError as error:
        raise DocumentError(
            f"the rules of names are malformed: {error}",
            file=source,
            next_step="see docs/names.md for the words of such a file",
        ) from error


class _MalformedError(Exception):
    """What is wrong, in words."""


def _rules(root: Mapping[str, object], source: str, like: Callable[[str], Rules] | None) -> Rules:
    _require_words(root, _WORDS, "the file")
    made = _own_rules(root, source)
    if "like" not in root:
        return made
    if like is None:
        raise _MalformedError("a file that others are like is like no other")
    base = like(_text(root["like"], "like"))
    if base.sides != made.sides:
        raise _MalformedError(
            f"it is like {base.source}, whose sides are {' and '.join(base.sides)}"
        )
    return replace(
        made,
        rules=(*base.rules, *made.rules),
        sizes={**base.sizes, **made.sizes},
        keep=(*base.keep, *made.keep),
        drop={side: (*base.drop.get(side, ()), *made.drop.get(side, ())) for side in made.sides},
    )


def _own_rules(root: Mapping[str, object], source: str) -> Rules:
    sides = _texts(root.get("sides"), "sides")
    if len(sides) != 2 or sides[0] == sides[1] or {*sides} & (_WORDS | _JOIN_WORDS):
        raise _MalformedError(f"sides are two names, not {sides!r}")
    joins = root.get("join")
    if not isinstance(joins, list) or not joins:
        raise _MalformedError("there is no [[join]]")
    rules = tuple(_rule(one, (sides[0], sides[1]), at + 1) for at, one in enumerate(joins))
    drop = _table(root.get("drop", {}), "drop")
    _require_words(drop, frozenset(sides), "drop")
    return Rules(
        (sides[0], sides[1]),
        rules,
        {
            str(axis): _size(size, axis)
            for axis, size in _table(root.get("sizes", {}), "sizes").items()
        },
        {side: _texts(globs, f"drop.{side}") for side, globs in drop.items()},
        _texts(root.get("keep", []), "keep"),
        _texts(root.get("models", []), "models"),
        source,
    )


def _rule(entry: object, sides: tuple[str, str], number: int) -> Rule:
    where = f"join {number}"
    table = _table(entry, where)
    _require_words(table, frozenset(sides) | _JOIN_WORDS, where)
    listed = {side: _listed(table.get(side), where) for side in sides}
    several = [
        side for side in sides if len(listed[side][0]) > 1 or isinstance(table[side], Mapping)
    ]
    if len(several) > 1:
        raise _MalformedError(f"{where} needs one name on one of its sides")
    whole_side = _whole_side(sides, several, listed)
    part_side = sides[0] if whole_side == sides[1] else sides[1]
    (whole,) = listed[whole_side][0].values()
    parts = listed[part_side][0]
    if not isinstance(table[part_side], Mapping):
        parts = {part_side: next(iter(parts.values()))}
    axes = _table(table.get("axes", {}), f"{where}.axes")
    rule = Rule(
        whole_side,
        Pattern(whole),
        {label: Pattern(name) for label, name in parts.items()},
        {label: _text(spelling, f"{where}.axes") for label, spelling in axes.items()},
        f"{where} ({whole})",
        {side: tuple(map(Pattern, listed[side][1])) for side in sides if listed[side][1]},
        _of_sides(table.get("padded", {}), sides, f"{where}.padded"),
        {
            side: Pattern(name)
            for side, name in _of_sides(table.get("beside", {}), sides, f"{where}.beside").items()
        },
    )
    _require_sound(rule, where)
    return rule


def _whole_side(
    sides: tuple[str, str],
    several: list[str],
    listed: Mapping[str, tuple[Mapping[str, str], tuple[str, ...]]],
) -> str:
    """The side with one name; of two such, the one with fewer captures, as a stack has."""
    if several:
        return sides[0] if several == [sides[1]] else sides[1]
    counts = [len(Pattern(*listed[side][0].values()).captures) for side in sides]
    return sides[0] if counts[0] < counts[1] else sides[1]


def _listed(value: object, where: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """The names of a side by label, and other ways to write the one name."""
    if isinstance(value, Mapping) and value:
        return {str(label): _text(name, where) for label, name in value.items()}, ()
    names = (value,) if isinstance(value, str) else _texts(value, where)
    if not names:
        raise _MalformedError(f"{where} names nothing on one of its sides")
    return {"": names[0]}, names[1:]


def _of_sides(value: object, sides: tuple[str, str], where: str) -> dict[str, str]:
    table = _table(value, where)
    _require_words(table, frozenset(sides), where)
    return {side: _text(text, where) for side, text in table.items()}


def _require_sound(rule: Rule, where: str) -> None:
    """Refuse what could not be read in both directions."""
    captures = {pattern.captures for pattern in rule.parts.values()}
    if len(captures) != 1:
        raise _MalformedError(f"the names of {where} have different captures")
    spelled, wanted = {*rule.axes}, {rule.whole_side, *rule.parts}
    if spelled and spelled != wanted:
        raise _MalformedError(f"axes of {where} spell {sorted(spelled)}, not {sorted(wanted)}")
    if not spelled and (len(rule.parts) > 1 or captures != {rule.whole.captures}):
        raise _MalformedError(f"{where} joins tensors, so it needs axes")
    if not rule.whole.captures <= next(iter(captures)):
        raise _MalformedError(f"the one name of {where} has a capture that the others lack")
    if rule.axes and (rule.others or rule.padded):
        raise _MalformedError(f"{where} has axes, so each name is written one way and not padded")
    for pattern in (rule.whole, *rule.parts.values(), *rule.beside.values()):
        pattern.match("")  # a malformed one is refused here


def _size(value: object, axis: object) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _MalformedError(f"the size of {axis} is a number or names keys of config.json")
    return value


def _require_words(table: Mapping[str, object], words: frozenset[str], where: str) -> None:
    unknown = sorted(set(table) - words)
    if unknown:
        raise _MalformedError(
            f"{where} has no word {unknown[0]!r} (it has {', '.join(sorted(words))})"
        )


def _table(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise _MalformedError(f"{where} is no table")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise _MalformedError(f"{where} needs a text, not {value!r}")
    return value


def _texts(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise _MalformedError(f"{where} is no list of texts")
    return tuple(value)
