"""From rules and the tensors at hand to joins: which tensor of the other side is made of which.

Theory. A rule says how tensors relate; how many there are and how large they are is seen in the
checkpoint. Captures that both sides have tell one use of a rule from the next (layer 3 from layer
4). Every use must be whole: each label once for each place along the axes that count tensors.
Extents come from shapes, and from the sizes of the file where shapes leave them open. A name that
no rule takes, or two take, is refused.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from reshard.errors import UsageError, count_text
from reshard.geometry.join import Join, identity_join, inverted, leading_join, spelled_join
from reshard.geometry.spelling import Spelling, solved
from reshard.names.patterns import Pattern
from reshard.names.rules import Rule, Rules, kept_rule

Shape = tuple[int, ...]
_Place = tuple[str, tuple[int, ...]]
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor of the other side, and what it is made of."""

    name: str
    """Its name there."""
    sources: tuple[str, ...]
    """The tensors at hand; source ``k`` is rank ``k`` of the join."""
    join: Join
    """Which element of which source each of its elements is."""
    rule: Rule
    """The rule that says so."""

    @property
    def is_same(self) -> bool:
        """Whether it is one tensor as it was, under another name."""
        return not self.rule.axes and self.left_out == 0

    @property
    def left_out(self) -> int:
        """Elements of the source that are padding, and no part of it."""
        if self.rule.axes:
            return 0
        return prod(self.join.map.shard_shapes[0]) - self.join.map.numel


@dataclass(frozen=True, slots=True)
class Solution:
    """Every tensor of the other side, in the order of the first source of each."""

    side: str
    """The side that the tensors at hand are of."""
    made: tuple[Made, ...]
    """The tensors of the other side."""
    dropped: tuple[str, ...]
    """Tensors at hand that the other side does not have."""
    unused: tuple[Rule, ...]
    """Rules that met nothing."""


@dataclass(slots=True)
class _Use:
    """One use of a rule: what the shared captures are, and the tensors of it."""

    captures: dict[str, str]
    found: dict[_Place, str] = field(default_factory=dict)


def side_of(rules: Rules, names: Iterable[str]) -> str:
    """Return the side that names are of: the one of which the rules take the most.

    A name that is kept may be of either side, so it counts only where nothing else does.
    """
    listed = frozenset(names)
    taken = {
        side: {name for name in listed if _is_taken(rules, side, name, listed)}
        for side in rules.sides
    }
    kept = {name for name in listed if rules.keeps(name)}
    return max(rules.sides, key=lambda side: (len(taken[side] | kept), len(taken[side])))


def _is_taken(rules: Rules, side: str, name: str, names: Container[str]) -> bool:
    return rules.drops(side, name) or any(_met(rule, side, name, names) for rule in rules.rules)


def _met(
    rule: Rule, side: str, name: str, names: Container[str]
) -> tuple[str, dict[str, str]] | None:
    """The label and captures by which a rule takes a name of a side, among the names there."""
    first = {side: rule.whole} if side == rule.whole_side else rule.parts
    patterns = [
        *first.items(),
        *((label, one) for label in first for one in rule.others.get(side, ())),
    ]
    for label, pattern in patterns:
        captures = pattern.match(name)
        if captures is not None:
            needed = rule.beside.get(side)
            return (label, captures) if not needed or needed.filled(captures) in names else None
    return None


def solve(
    rules: Rules, side: str, shapes: Mapping[str, Shape], sizes: Mapping[str, int]
) -> Solution:
    """Make the tensors of the other side.

    Parameters
    ----------
    rules
        What relates the sides.
    side
        The side that the tensors are of.
    shapes
        The tensors at hand, with their shapes.
    sizes
        Extents of axes that are known beforehand.

    Raises
    ------
    UsageError
        A name that no rule takes or that two take, a use of a rule that is not whole, a shape that
        does not fit, an extent that nothing says, or two tensors that get one name.
    """
    uses: dict[int, dict[tuple[str, ...], _Use]] = {}
    dropped, strange, kept = [], [], []
    for name in shapes:
        if rules.drops(side, name):
            dropped.append(name)
            continue
        met = [
            (at, found)
            for at, rule in enumerate(rules.rules)
            if (found := _met(rule, side, name, shapes))
        ]
        if not met and rules.keeps(name):
            kept.append(name)
        elif not met:
            strange.append(name)
        elif len(met) > 1:
            raise _two_rules(rules, name, [rules.rules[at] for at, _ in met])
        else:
            at, (label, captures) = met[0]
            _enter(rules.rules[at], uses.setdefault(at, {}), label, captures, name, side=side)
    if strange:
        raise _no_rule(rules, side, strange)
    joins = _Joins(rules, side, shapes, sizes)
    made = [
        one for at, found in uses.items() for use in found.values() for one in joins.of(at, use)
    ]
    made += [
        Made(name, (name,), identity_join(name, shapes[name]), kept_rule(name, rules.sides))
        for name in kept
    ]
    _require_distinct(made, rules)
    order = {name: at for at, name in enumerate(shapes)}
    made.sort(key=lambda one: order[one.sources[0]])
    unused = tuple(rule for at, rule in enumerate(rules.rules) if at not in uses)
    return Solution(side, tuple(made), tuple(dropped), unused)


def _enter(
    rule: Rule,
    uses: dict[tuple[str, ...], _Use],
    label: str,
    captures: dict[str, str],
    name: str,
    *,
    side: str,
) -> None:
    shared = {word: captures[word] for word in sorted(rule.whole.captures)}
    use = uses.setdefault(tuple(shared.values()), _Use(shared))
    place: tuple[int, ...] = ()
    if side != rule.whole_side:
        counted = _counted(rule)
        if not all(captures[axis].isdecimal() for axis in counted):
            raise UsageError(
                "a part of a name is no number, and counts tensors of a join",
                parameter=name,
                expected=f"a number for {', '.join(counted)}",
            )
        place = tuple(int(captures[axis]) for axis in counted)
    first = use.found.setdefault((label, place), name)
    if first != name:
        raise UsageError(
            "two tensors would get one name",
            parameter=name,
            found=f"{first} and {name}, both by {rule.text}",
        )


def _counted(rule: Rule) -> tuple[str, ...]:
    """The axes that count tensors, in the order in which the whole names them."""
    if not rule.axes:
        return ()
    return tuple(
        axis
        for axis in Spelling.of(rule.axes[rule.whole_side].replace("...", "")).axes
        if axis in rule.part_side_captures
    )


class _Joins:
    """Makes the joins of one solution; those of equal rules and shapes once."""

    def __init__(
        self, rules: Rules, side: str, shapes: Mapping[str, Shape], sizes: Mapping[str, int]
    ) -> None:
        self.rules = rules
        self.side = side
        self.shapes = shapes
        self.sizes = sizes
        self.known: dict[object, Join] = {}
        self.split: dict[object, dict[_Place, Join]] = {}

    def of(self, at: int, use: _Use) -> Iterator[Made]:
        """Yield what one use of a rule makes."""
        rule = self.rules.rules[at]
        if rule.whole_side == self.side:
            yield from self._parts(at, rule, use)
        elif not rule.axes:
            yield self._one(rule, rule.whole, use)
        else:
            yield self._whole(at, rule, use)

    def _one(self, rule: Rule, pattern: Pattern, use: _Use) -> Made:
        """A tensor as it is, without what is padding on the side at hand."""
        (name,) = use.found.values()
        shape = self.shapes[name]
        size = self.sizes.get(rule.padded.get(self.side, ""))
        if size is not None and shape and size < shape[0]:
            return Made(
                pattern.filled(use.captures), (name,), leading_join(name, shape, size), rule
            )
        return Made(pattern.filled(use.captures), (name,), identity_join(name, shape), rule)

    def _whole(self, at: int, rule: Rule, use: _Use) -> Made:
        name = rule.whole.filled(use.captures)
        counts = self._counts(rule, use, name)
        shapes = self._part_shapes(rule, use)
        key = (at, tuple(shapes.items()), tuple(counts.items()))
        join = self.known.get(key)
        if join is None:
            join = self.known[key] = self._spelled(rule, shapes, counts, name)
        return Made(name, tuple(use.found[part] for part in join.parts), join, rule)

    def _counts(self, rule: Rule, use: _Use, name: str) -> dict[str, int]:
        """How many tensors there are along each axis that counts them; all must be there."""
        axes = _counted(rule)
        counts = {
            axis: 1 + max(place[at] for _, place in use.found) for at, axis in enumerate(axes)
        }
        wanted = len(rule.parts)
        for count in counts.values():
            wanted *= count
        if len(use.found) != wanted:
            raise UsageError(
                "some of the tensors that are joined are not there",
                parameter=name,
                expected=f"{count_text(wanted, 'tensor')} "
                f"({', '.join(pattern.text for pattern in rule.parts.values())})",
                found=_listed(sorted(use.found.values())),
                next_step="select all of them or none",
            )
        return counts

    def _part_shapes(self, rule: Rule, use: _Use) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        for (label, _), name in use.found.items():
            first = shapes.setdefault(label, self.shapes[name])
            if first != self.shapes[name]:
                raise UsageError(
                    "tensors that are stacked have different shapes",
                    parameter=name,
                    expected=first,
                    found=self.shapes[name],
                )
        return {label: shapes[label] for label in rule.parts}

    def _parts(self, at: int, rule: Rule, use: _Use) -> Iterator[Made]:
        if not rule.axes:
            yield self._one(rule, next(iter(rule.parts.values())), use)
            return
        (name,) = use.found.values()
        shape = self.shapes[name]
        images = self.split.get((at, shape))
        if images is None:
            whole = self._spelled(rule, {rule.whole_side: shape}, {}, name)
            images = self.split[at, shape] = inverted([whole])
        counted = _counted(rule)
        for (label, place), join in images.items():
            numbers = dict(zip(counted, map(str, place), strict=True))
            yield Made(rule.parts[label].filled({**use.captures, **numbers}), (name,), join, rule)

    def _spelled(
        self, rule: Rule, shapes: Mapping[str, Shape], counts: Mapping[str, int], name: str
    ) -> Join:
        spelled = _expanded(rule, shapes)
        whole = spelled[rule.whole_side]
        parts = {label: spelled[label] for label in rule.parts}
        try:
            sizes = solved(
                [(spelled[label], shape) for label, shape in shapes.items()],
                parts,
                {**self.sizes, **counts},
            )
            _require_solved(whole, parts, sizes)
            join = spelled_join(whole, parts, sizes)
            _require_shapes(join, shapes, rule)
        except UsageError as error:
            raise UsageError(
                f"the shapes do not fit {rule.text} of the rules: {error.what}",
                file=self.rules.source,
                parameter=name,
                expected=error.expected,
                found=error.found,
                next_step=error.next_step,
            ) from error
        join.validate(name)
        return join


def _expanded(rule: Rule, shapes: Mapping[str, Shape]) -> dict[str, Spelling]:
    """The spellings, with names for the dims that ``...`` stands for."""
    counts = {
        len(shape) - len(Spelling.of(rule.axes[label].replace("...", "")).dims)
        for label, shape in shapes.items()
        if "..." in rule.axes[label]
    }
    if len(counts) > 1 or min(counts, default=0) < 0:
        raise UsageError("the dims that ... stands for are not as many everywhere")
    rest = " ".join(f"_{n}" for n in range(max(counts, default=0)))
    return {label: Spelling.of(text.replace("...", rest)) for label, text in rule.axes.items()}


def _require_solved(
    whole: Spelling, parts: Mapping[str, Spelling], sizes: Mapping[str, int]
) -> None:
    axes = {axis for spelling in (whole, *parts.values()) for axis in spelling.axes}
    unknown = sorted(axes - set(sizes))
    if unknown:
        raise UsageError(
            "nothing says the extent of an axis",
            expected=f"a size of {', '.join(unknown)}",
            found=f"known: {', '.join(sorted(axes & set(sizes))) or 'none'}",
            next_step="state it under [sizes], or put the config.json of the model beside it",
        )


def _require_shapes(join: Join, shapes: Mapping[str, Shape], rule: Rule) -> None:
    """Refuse extents that were known beforehand and contradict the shapes."""
    made = {label: join.map.shard_shapes[at] for at, (label, _) in enumerate(join.parts)}
    made[rule.whole_side] = join.map.logical_shape
    for label, shape in shapes.items():
        if made[label] != shape:
            raise UsageError(
                f"{label} has another shape than the sizes give", expected=made[label], found=shape
            )


def _require_distinct(made: Iterable[Made], rules: Rules) -> None:
    owners: dict[str, Made] = {}
    for one in made:
        first = owners.setdefault(one.name, one)
        if first is not one:
            raise UsageError(
                "two tensors would get one name",
                file=rules.source,
                parameter=one.name,
                found=f"{first.sources[0]} and {one.sources[0]}",
            )


def _two_rules(rules: Rules, name: str, met: list[Rule]) -> UsageError:
    return UsageError(
        "two rules take one name",
        file=rules.source,
        parameter=name,
        found=" and ".join(rule.text for rule in met),
        next_step="make the patterns of one of them narrower",
    )


def _no_rule(rules: Rules, side: str, names: list[str]) -> UsageError:
    return UsageError(
        f"{count_text(len(names), 'name')} of {side} that no rule takes",
        file=rules.source,
        found=_listed(names),
        next_step=f"add a [[join]], or list them under drop.{side}, or --exclude them",
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
