"""A checkpoint under the names of another side: tensors, numbers, ties, groups and all.

Theory. Every tensor of the other side is a join of tensors that are stored, and each of these has a
map to where its bytes lie; so its own map is the composition, and no byte is touched before the
plan is run. All elementwise states of a parameter move by one join, which is why the optimizer goes
along. What is not an element has to agree where parameters become one: numbers such as ``step``,
the parameter group, the element type, the role.

What a join cannot carry is refused: states that are not elementwise (Adafactor's rows and columns),
and optimizers whose update looks at the matrix (Muon, Shampoo), for the run would go on as another
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from reshard.errors import UnsupportedError, UsageError, count_text
from reshard.formats.checkpoint import Checkpoint, Extra, Role, Scalar, StoredTensor, TensorKey
from reshard.formats.renaming import GROUPS, renamed_extras
from reshard.geometry import ParamAffineMap
from reshard.geometry.join import Join
from reshard.names.rules import Rules
from reshard.names.sizes import known_sizes
from reshard.names.solving import Made, Solution, side_of, solve

WEIGHTS = "fp32"
"""The state under which weights are, whatever their element type."""

_OF_MATRICES = ("muon", "shampoo", "soap", "galore", "adafactor")
"""Optimizers, by a word of their names, whose update of an element looks at the whole matrix."""


@dataclass(frozen=True, slots=True)
class Translation:
    """How a checkpoint is spelled on the other side."""

    rules: Rules
    """What relates the sides."""
    solution: Solution
    """Every tensor of the other side."""

    @property
    def target_side(self) -> str:
        """The side that it is translated to."""
        return self.rules.other(self.solution.side)

    def notes(self) -> list[str]:
        """Return what the user should know."""
        joined = sum(not made.is_same for made in self.solution.made)
        count = count_text(len(self.solution.made), "tensor")
        said = [
            f"names of {self.target_side}, by {self.rules.source}: {count}, {joined} laid out anew"
        ]
        if self.solution.dropped:
            said.append(
                f"left out, as the rules say that {self.target_side} does not have them: "
                + ", ".join(self.solution.dropped)
            )
        said += [
            f"left out, as padding: {count_text(made.left_out, 'element')} of {made.sources[0]}"
            for made in self.solution.made
            if made.left_out
        ]
        return said


def translation_of(
    checkpoint: Checkpoint, rules: Rules, config: Mapping[str, object], side: str | None = None
) -> Translation:
    """Solve the rules for the tensors of a checkpoint.

    Parameters
    ----------
    checkpoint
        What is to be translated.
    rules
        What relates the sides.
    config
        The model's configuration, empty where there is none.
    side
        The side that the checkpoint is of; None for the one that its names are of.

    Raises
    ------
    UsageError
        The rules do not take all of it, or not without contradiction.
    """
    shapes = {name: _shape_of(checkpoint, name) for name in checkpoint.names}
    found = side or side_of(rules, (*checkpoint.names, *checkpoint.aliases))
    return Translation(rules, solve(rules, found, shapes, known_sizes(rules.sizes, config)))


def _shape_of(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    states = {tensor.state: tensor.shape for tensor in checkpoint.states_of(name)}
    return states.get(WEIGHTS, next(iter(states.values())))


def translated(
    checkpoint: Checkpoint, translation: Translation, *, weights_only: bool = False
) -> Checkpoint:
    """Return a checkpoint under the names of the other side.

    Parameters
    ----------
    checkpoint
        The one that the translation was made for.
    translation
        Its tensors on the other side.
    weights_only
        Whether the weights alone are wanted, so that no optimizer is asked.

    Raises
    ------
    UsageError
        Parameters that become one differ in a number, group, element type or role.
    UnsupportedError
        A state or an optimizer that a join cannot carry.
    """
    made = translation.solution.made
    states = _States(checkpoint, weights_only=weights_only)
    if not weights_only:
        _refuse_matrix_optimizers(checkpoint, made)
    tensors: dict[TensorKey, StoredTensor] = {}
    scalars: dict[TensorKey, Scalar] = {}
    for one in made:
        tensors.update({tensor.key: tensor for tensor in states.tensors_of(one)})
        scalars.update(states.scalars_of(one))
    owners = _owners(made)
    _require_one_group(checkpoint.extras, made)
    return replace(
        checkpoint,
        tensors=tensors,
        scalars=scalars,
        aliases=_aliases(checkpoint, translation, owners),
        extras=renamed_extras(
            checkpoint.extras,
            {one.name: one.sources for one in made},
            {one.sources[0]: one.name for one in made if one.is_same},
        ),
        cuts={
            one.name: checkpoint.cuts[one.sources[0]]
            for one in made
            if one.is_same and one.sources[0] in checkpoint.cuts
        },
    )


def _owners(made: Iterable[Made]) -> dict[str, tuple[str, ...]]:
    """What each tensor at hand becomes: names of the other side."""
    owners: dict[str, tuple[str, ...]] = {}
    for one in made:
        for source in one.sources:
            owners[source] = (*owners.get(source, ()), one.name)
    return owners


class _States:
    """The states of what is made; those of equal geometry are composed once."""

    def __init__(self, checkpoint: Checkpoint, *, weights_only: bool) -> None:
        self.weights_only = weights_only
        self.states: dict[str, dict[str, StoredTensor]] = {}
        for tensor in checkpoint.tensors.values():
            self.states.setdefault(tensor.name, {})[tensor.state] = tensor
        self.numbers: dict[str, dict[str, Scalar]] = {}
        for (name, state), scalar in checkpoint.scalars.items():
            self.numbers.setdefault(name, {})[state] = scalar
        self.composed: dict[
            tuple[Join, tuple[ParamAffineMap, ...]],
            tuple[ParamAffineMap, tuple[tuple[int, int], ...]],
        ] = {}

    def tensors_of(self, one: Made) -> list[StoredTensor]:
        """Every state of a tensor of the other side."""
        held = [self.states[name] for name in one.sources]
        first = held[0]
        wanted = [state for state in first if state == WEIGHTS or not self.weights_only]
        for name, states in zip(one.sources, held, strict=True):
            if set(states) != set(first) and not self.weights_only:
                raise _unlike(one, name, "states", sorted(first), sorted(states))
        return [self._joined(one, [states[state] for states in held]) for state in wanted]

    def _joined(self, one: Made, parts: Sequence[StoredTensor]) -> StoredTensor:
        first = parts[0]
        if one.is_same:
            return replace(first, name=one.name)
        for part in parts:
            if (part.dtype, part.role) != (first.dtype, first.role):
                raise _unlike(
                    one,
                    part.name,
                    f"element types or roles of {first.state}",
                    f"{first.dtype}, {first.role.value}",
                    f"{part.dtype}, {part.role.value}",
                )
        self._require_elementwise(one, parts)
        maps = tuple(part.map for part in parts)
        key = (one.join, maps)
        found = self.composed.get(key)
        if found is None:
            found = self.composed[key] = one.join.through(maps)
        composed, origins = found
        return StoredTensor(
            name=one.name,
            state=first.state,
            dtype=first.dtype,
            map=composed,
            regions={
                new: parts[part].regions[holder] for new, (part, holder) in enumerate(origins)
            },
            role=first.role,
            provenance=f"{', '.join(one.sources[:2])}{', …' if len(one.sources) > 2 else ''}",
        )

    def _require_elementwise(self, one: Made, parts: Sequence[StoredTensor]) -> None:
        for part, wanted in zip(parts, one.join.map.shard_shapes.values(), strict=True):
            if part.shape != wanted:
                raise UnsupportedError(
                    "a state is not elementwise, so it cannot be joined or split",
                    parameter=part.name,
                    state=part.state,
                    expected=f"shape {wanted}",
                    found=f"shape {part.shape}",
                    next_step="carry the weights alone, with --names-states weights",
                )

    def scalars_of(self, one: Made) -> dict[TensorKey, Scalar]:
        """The numbers of a tensor of the other side, on which its sources agree."""
        if self.weights_only:
            return {}
        held = [self.numbers.get(name, {}) for name in one.sources]
        for name, numbers in zip(one.sources, held, strict=True):
            if numbers != held[0]:
                raise _unlike(one, name, "numbers", _said(held[0]), _said(numbers))
        return {(one.name, state): scalar for state, scalar in held[0].items()}


def _said(numbers: Mapping[str, Scalar]) -> str:
    return ", ".join(f"{state} {scalar.value}" for state, scalar in numbers.items()) or "none"


def _unlike(one: Made, name: str, what: str, expected: object, found: object) -> UsageError:
    return UsageError(
        f"parameters that become one have different {what}",
        parameter=f"{name} (into {one.name})",
        expected=f"{expected} as of {one.sources[0]}",
        found=found,
        next_step="carry the weights alone, with --names-states weights",
    )


def _refuse_matrix_optimizers(checkpoint: Checkpoint, made: Iterable[Made]) -> None:
    """Refuse joins where an update of an element depends on where in the matrix it is."""
    words = {word for word in _optimizer_words(checkpoint) for kind in _OF_MATRICES if kind in word}
    if not words:
        return
    trained = {
        tensor.name for tensor in checkpoint.tensors.values() if tensor.role is Role.PARAMETER
    }
    for one in made:
        if not one.is_same and trained & set(one.sources):
            raise UnsupportedError(
                "the optimizer looks at whole matrices, so their moments cannot be joined or split",
                parameter=one.sources[0],
                found=", ".join(sorted(words)),
                next_step="carry the weights alone, with --names-states weights",
            )


def _optimizer_words(checkpoint: Checkpoint) -> Iterable[str]:
    """What the checkpoint calls its optimizer, in lower case."""
    config = checkpoint.extras.get("ds_config")
    stated = config.value if config is not None else None
    optimizer = stated.get("optimizer") if isinstance(stated, Mapping) else None
    kind = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    if isinstance(kind, str):
        yield kind.lower()
    groups = checkpoint.extras.get("param_groups")
    for group in groups.value if groups is not None and isinstance(groups.value, list) else ():
        if isinstance(group, Mapping) and group.get("use_muon") is True:
            yield "muon"
    yield from {state.lower() for _, state in checkpoint.tensors}


# ----------------------------------------------------------------------------- ties and groups


def _aliases(
    checkpoint: Checkpoint, translation: Translation, owners: Mapping[str, tuple[str, ...]]
) -> dict[str, str]:
    made = {}
    side, rules = translation.solution.side, translation.rules
    for alias, owner in checkpoint.aliases.items():
        if rules.drops(side, alias):
            continue
        name = _renamed_alias(rules, side, alias)
        become = owners.get(owner, ())
        if name is None or len(become) != 1:
            raise UsageError(
                "a tied name has no name of its own on the other side",
                file=rules.source,
                parameter=alias,
                found=f"tied to {owner}",
                next_step=f"add a [[join]] for it, or list it under drop.{side}",
            )
        if name != become[0]:
            made[name] = become[0]
    return made


def _renamed_alias(rules: Rules, side: str, alias: str) -> str | None:
    """The other name of a tied one, where some rule takes it alone and as it is."""
    for rule in rules.rules:
        if rule.axes:
            continue
        (part,) = rule.parts.values()
        here, there = (rule.whole, part) if side == rule.whole_side else (part, rule.whole)
        captures = here.match(alias)
        if captures is not None:
            return there.filled(captures)
    return alias if rules.keeps(alias) else None


def _require_one_group(extras: Mapping[str, Extra], made: Iterable[Made]) -> None:
    groups = extras.get(GROUPS)
    if groups is None or not isinstance(groups.value, Sequence):
        return
    group_of = {str(name): number for number, group in enumerate(groups.value) for name in group}
    for one in made:
        numbers = {name: group_of.get(name) for name in one.sources}
        for name, number in numbers.items():
            if number != numbers[one.sources[0]]:
                raise _unlike(one, name, "parameter groups", numbers[one.sources[0]], number)
