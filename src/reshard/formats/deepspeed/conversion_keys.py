"""The pattern keys of `universal_checkpoint_info`, lowered to maps.

Theory. Before maps there were patterns: regular expressions over names, in one list a layout (the
branches of :mod:`~reshard.formats.deepspeed.key_lowering`). Which list a name is in decides how its
shards are joined; a vocabulary list says beside that that rows from `original_vocab_size` on only
pad. All of it is resolved here, once, to a map a parameter. Nothing below asks for a name again.

*A parameter that no pattern names* is concatenated on dim 0. That is a rule of the schema and not a
gap: Megatron and AutoTP list what is replicated or cut on dim 1 and leave the column-parallel
weights out. It is applied only where the info is explicit, that is, where some list has an entry:
an empty info says nothing, and its parameters are refused. Two cases of it are refused
nevertheless, because concatenation would double a replicated vector and nothing would show: a
vector that stands alone (the weight of a norm that the list of replicated parameters forgot), and a
vector whose matrix is not concatenated itself. Infos of AutoTP name every replicated parameter, so
there the rule is sure.

*A mean* has no inverse. `parameter_to_average_patterns` is accepted for shards that are equal to
the last bit, which is what the executor demands of all replicas, and refused otherwise.

*Padding* is a restriction of the map: the rows are in the shards and are not read. AutoTP never
pads; there `original_vocab_size` is the extent of whichever table came first, and is not applied.

*Strictness.* A pattern that matches nothing, two that match one parameter, and a parameter that the
rules do not settle are objections; each can be waived by its own text or name, none wholesale.

Sources: `checkpoint/constants.py`, `checkpoint/ds_to_universal.py`, `module_inject/layers.py`
(`collect_autotp_universal_checkpoint_info`), DeepSpeed 0.19.8; facts §5, §6.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from reshard.errors import LayoutError, count_text
from reshard.formats.deepspeed.key_lowering import Branch, SubParams, lower
from reshard.formats.layout_source import (
    GovernedMap,
    LayoutSource,
    Shape,
    listed,
    located,
    require_fit,
)
from reshard.formats.patterns import BoundedPattern, PatternTable, bounded_pattern, quoted

DEFAULT = "no pattern, so one after the other on dim 0"
"""Provenance of a parameter that no pattern names."""

VOCABULARY = "vocabulary_parameter_patterns"


@dataclass(frozen=True, slots=True)
class KeyRule:
    """One pattern of one list."""

    branch: Branch | None
    """The layout that the list stands for; None for the vocabulary list, which is no layout."""
    text: str
    """The pattern as written."""
    sub_params: SubParams | None = None
    """The entry, for the branch of sub-parameters."""

    @property
    def pattern(self) -> BoundedPattern:
        """The pattern compiled; it matches from the start of a name."""
        return bounded_pattern(self.text, "universal_checkpoint_info")

    @property
    def key(self) -> str:
        """The key of `universal_checkpoint_info` that it is under."""
        return VOCABULARY if self.branch is None else self.branch.value

    def __str__(self) -> str:
        return f"{self.key} {quoted(self.text)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionKeys(LayoutSource):
    """All pattern keys of a checkpoint."""

    rules: PatternTable[KeyRule] = field(default_factory=PatternTable)
    """Patterns that select a layout, in the order in which DeepSpeed tries them."""
    vocabulary: PatternTable[KeyRule] = field(default_factory=PatternTable)
    """Patterns of tables whose last rows only pad."""
    vocabulary_size: int | None = None
    """Number of rows that count; None when it is not stated."""
    unsupported: PatternTable[str] = field(default_factory=PatternTable)
    """Patterns of parameters whose layout the writer could not describe, and its reasons."""
    experts: PatternTable[None] = field(default_factory=PatternTable)
    """Patterns of expert parameters, which the rules of tensor parallelism do not describe."""
    autotp: bool = False
    """Whether AutoTP wrote the info."""
    waived: frozenset[str] = frozenset()
    """Patterns and names to which no objection is made."""
    degree: int = 1
    """Number of tensor ranks."""
    file: str = ""
    """Where the info is from."""

    # ----- which rule governs a name

    @property
    def explicit(self) -> bool:
        """Whether a parameter without a pattern has been left out on purpose."""
        return self.autotp or bool(self.rules)

    def rules_of(self, name: str) -> list[KeyRule]:
        """The patterns that select a layout for a name, the one that counts first."""
        return self.rules.matching(name)

    def is_vocabulary(self, name: str) -> bool:
        """Whether a table of the vocabulary has this name."""
        return self.vocabulary.matches(name)

    def covers(self, name: str) -> bool:
        """See :class:`LayoutSource`."""
        if self.why_not(name) is not None:
            return False
        named = bool(self.rules_of(name)) or self.is_vocabulary(name)
        return named or self._defaults(name)

    def _defaults(self, name: str) -> bool:
        """Whether a name without a pattern is concatenated."""
        return self.degree > 1 and (self.explicit or name in self.waived)

    def why_not(self, name: str) -> str | None:
        """See :class:`LayoutSource`."""
        for reason in self.unsupported.matching(name):
            return f"AutoTP could not describe it: {reason}"
        if self.is_expert(name):
            return "an expert parameter, placed by its expert-parallel group"
        return None

    def is_expert(self, name: str) -> bool:
        """See :class:`LayoutSource`."""
        return self.experts.matches(name)

    # ----- lowering

    def map_of(self, name: str, shards: Mapping[int, Shape], degree: int) -> GovernedMap | None:
        """See :class:`LayoutSource`."""
        if not self.covers(name):
            return None
        rules = self.rules_of(name)
        rule = rules[0] if rules else None
        try:
            found, restore_keys = lower(
                rule.branch if rule else None, rule.sub_params if rule else None, shards, degree
            )
        except LayoutError as error:
            raise located(error, name, self.file) from error
        require_fit(name, found, shards, self.file)
        provenance = self._provenance(name, rule)
        return self.without_padding(name, GovernedMap(found, provenance, restore_keys))

    def _provenance(self, name: str, rule: KeyRule | None) -> str:
        tables = self.vocabulary.matching(name)
        if rule is None:
            return f"{tables[0]}, one after the other on dim 0" if tables else DEFAULT
        return str(rule)

    def without_padding(self, name: str, governed: GovernedMap) -> GovernedMap:
        """Leave the padding of a vocabulary out of a map, whoever stated it.

        Raises
        ------
        LayoutError
            When the number of rows that count is not stated.
        """
        if not self.is_vocabulary(name):
            return governed
        if self.vocabulary_size is None:
            raise LayoutError(
                "a vocabulary pattern matches, and original_vocab_size is not stated",
                file=self.file,
                parameter=name,
                next_step="state its layout with --layout FILE",
            )
        keys = {**governed.restore_keys, "vocab_tensor": True}
        shape = governed.map.logical_shape
        if self.autotp or not shape or shape[0] <= self.vocabulary_size:
            return replace(governed, restore_keys=keys)
        return GovernedMap(
            governed.map.narrow(0, 0, self.vocabulary_size),
            f"{governed.provenance}, rows from {self.vocabulary_size} on are padding",
            keys,
            padded=governed.map,
        )

    def restore_keys_of(
        self, name: str, shards: Mapping[int, Shape], degree: int
    ) -> Mapping[str, object]:
        """The keys for a loader without maps, where a map decides about the geometry.

        Patterns that do not fit the shards are superseded by the map and say nothing.
        """
        rules = self.rules_of(name)
        if not rules and not self._defaults(name):
            return {}
        try:
            return lower(
                rules[0].branch if rules else None,
                rules[0].sub_params if rules else None,
                shards,
                degree,
            )[1]
        except LayoutError:
            return {}

    # ----- objections

    def unused(self, names: Collection[str]) -> Iterator[str]:
        """See :class:`LayoutSource`."""
        for table in (self.rules, self.vocabulary):
            for text, rule in table.unmatched(names):
                if text not in self.waived:
                    yield f"no parameter matches {rule}"
        for waiver in sorted(self.waived.difference(self.rules.texts, self.vocabulary.texts)):
            if waiver not in names:
                yield f"what is waived is neither a pattern nor a parameter: {quoted(waiver)}"

    def unclear(self, shapes: Mapping[str, Mapping[int, Shape]]) -> Iterator[str]:
        """See :class:`LayoutSource`."""
        for name in shapes:
            if name in self.waived or self.why_not(name) is not None:
                continue
            rules = self.rules_of(name)
            tables = self.vocabulary.matching(name)
            if not _consistent(rules):
                yield f"{name} is matched by {' and by '.join(map(str, rules))}"
            elif len(tables) > 1:
                yield f"{name} is matched by {' and by '.join(map(str, tables))}"
            elif not rules and not tables and self._is_doubtful(name, shapes):
                yield f"no pattern covers {name}, a vector that may be whole on every rank"

    def _is_doubtful(self, name: str, shapes: Mapping[str, Mapping[int, Shape]]) -> bool:
        """Whether concatenating a parameter without a pattern may double a replicated one."""
        if self.autotp or not self._defaults(name):
            return False
        held = shapes[name]
        if any(len(shape) > 1 for shape in held.values()):
            return False
        module = name.rpartition(".")[0]
        return not any(
            other.rpartition(".")[0] == module
            and not self.rules_of(other)
            and _leading(shards) == _leading(held)
            for other, shards in shapes.items()
            if any(len(shape) > 1 for shape in shards.values())
        )

    def notes(self, shapes: Mapping[str, Mapping[int, Shape]]) -> Iterator[str]:
        """See :class:`LayoutSource`."""
        taken = [
            name
            for name in shapes
            if self._defaults(name) and not self.rules_of(name) and not self.is_vocabulary(name)
        ]
        if taken and not self.autotp:
            has = "has" if len(taken) == 1 else "have"
            yield f"{count_text(len(taken), 'parameter')} {has} {DEFAULT}: {listed(taken)}"


def _consistent(rules: list[KeyRule]) -> bool:
    """Whether at most one pattern selects a layout.

    AutoTP names a row-parallel weight of sub-parameters in both lists; the sub-parameters count.
    """
    branches = [rule.branch for rule in rules]
    return len(rules) < 2 or branches == [Branch.SUB_PARAMS, Branch.ROW]


def _leading(shards: Mapping[int, Shape]) -> dict[int, int]:
    """Extent of dim 0 on each rank."""
    return {rank: shape[0] for rank, shape in shards.items() if shape}
