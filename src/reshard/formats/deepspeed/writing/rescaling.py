"""From the map of a parameter at one tensor-parallel degree to its map at another.

Theory. A map says how one run cut a parameter; another degree is cut by the *rule* that made it.
The rule is not stored, but few can have made a given map, and a map shows which. It is read in two
steps, without a look at what the parameter is:

1. *structure*: along one dim, ranks hold ranges; ranges that follow each other over all ranks are a
   block that is split, a range that all ranks hold is a block that is replicated. So every
   combination of row, column, sub-parameter and fused layouts becomes a list of blocks. Two layouts
   of AutoTP are no blocks, CodeGen's and that of shared QK heads, and are tried by formula.
2. *widths*: a block is split by heads or nearly evenly
   (:func:`~reshard.layouts.autotp.shard_sizes`). The number of key/value heads decides, and which
   layers follow it AutoTP tells by the layer's name; both spellings that it uses are tried.

Every rule that reproduces all maps that are known of the parameter is a *candidate*. Heads belong
to the model, so one number must explain all parameters together (:class:`Rescaling`). When all
candidates agree on the wanted degree the layout is defined; when they do not, it is refused, and
the number of heads settles it. A scaled map (a bias divided by the number of ranks) is no rule that
AutoTP has, and is refused too.

Sources: `module_inject/tp_shard.py`, `layers.py`, `fusedqkv_utils.py`, DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from reshard.errors import LayoutError
from reshard.geometry import AffinePiece, ParamAffineMap, compose
from reshard.layouts.autotp import ModelNumbers, follows_heads, shard_sizes
from reshard.layouts.builders import replicated_map, row_major_strides, segmented_map
from reshard.layouts.fused import codegen_map, shared_qk_map
from reshard.layouts.ranges import Range, ranges_map

Shape = tuple[int, ...]

Rule = Callable[[int, ModelNumbers, str], ParamAffineMap]
"""`(degree, numbers of the model, name for the layer) -> map`; refuses what it cannot cut."""

SHARED_HEADS = ("v_proj", "o_proj")
"""Layers that AutoTP cuts by shared QK heads, in the models that have them."""

BY_HEADS, NEARLY_EVEN = "attention", "mlp"
"""Names that stand for layers that AutoTP cuts by heads, and for those that it never does."""

AMBIGUOUS = "its maps at other degrees leave open how it is cut at this one"
UNEXPLAINED = "no rule that is known made its map, or the rule cannot cut it so"


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of how one parameter is cut; equal for parameters that are cut alike."""

    shape: Shape
    """Shape of the parameter."""
    layers: tuple[str, ...]
    """What stands for the name of its layer; both where it is open whether heads decide."""
    shares_heads: bool
    """Whether the layer may be one of shared QK heads."""
    maps: tuple[tuple[int, ParamAffineMap], ...]
    """`(degree, map over that many ranks)`, degrees of at least 2."""

    @classmethod
    def of(cls, name: str, shape: Shape, maps: Mapping[int, ParamAffineMap]) -> Known:
        """What is known of a parameter.

        AutoTP knew its layer by a name with or without the path; both are taken into account.
        """
        layer = name.rpartition(".")[0]
        leaf = layer.rpartition(".")[2]
        kinds = [BY_HEADS if follows_heads(name) else NEARLY_EVEN for name in (layer, leaf)]
        ordered = tuple((degree, maps[degree].canonical()) for degree in sorted(maps))
        return cls(shape, tuple(dict.fromkeys(kinds)), leaf in SHARED_HEADS, ordered)


# --------------------------------------------------------------------------- structure


def ranges_along(one: ParamAffineMap, dim: int) -> dict[int, list[Range]] | None:
    """The ranges of a dim that each rank holds, in the order of its shard.

    Returns
    -------
    dict or None
        None when ranks hold something else than whole slices of the other dims.

    Examples
    --------
    >>> from reshard.layouts.builders import sub_param_map
    >>> ranges_along(sub_param_map((8, 3), [4, 4], [[3, 1], [3, 1]], 0), 0)
    {0: [(0, 3), (4, 3)], 1: [(3, 1), (7, 1)]}
    >>> ranges_along(sub_param_map((8, 3), [8], [[3, 5]], 0), 1) is None
    True
    """
    shape = one.logical_shape
    step = row_major_strides(shape)[dim]
    extent = shape[dim]
    line = AffinePiece((extent,), 0, (step,), 0, (1,), (0,))
    probe = ParamAffineMap(shape, {0: (extent,)}, {0: (line,)})
    found: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in one.ranks}
    for part in compose(one, probe, partial=True).segments:
        axes = list(zip(part.shape, part.source_strides, part.target_strides, strict=True))
        run = axes.pop()[0] if axes and axes[-1][1] == 1 else 1
        for steps in product(*(range(extent) for extent, _, _ in axes)):
            moved = list(zip(steps, axes, strict=True))
            start = part.source_offset + sum(k * source for k, (_, source, _) in moved)
            place = part.target_offset + sum(k * target for k, (_, _, target) in moved)
            found[part.target_rank].append((place, start, run))
    ranges = {
        rank: _joined((start, run) for _, start, run in sorted(held))
        for rank, held in found.items()
    }
    try:
        same = ranges_map(shape, ranges, dim)
    except LayoutError:
        return None
    return ranges if same.same_elements(one) else None


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Ranges that follow each other as one: a map may cut them anywhere.

    Examples
    --------
    >>> _joined([(0, 1), (2, 1), (3, 2)])
    [(0, 1), (2, 3)]
    """
    joined: list[Range] = []
    for start, run in ranges:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + run)
        else:
            joined.append((start, run))
    return joined


def blocks_of(ranges: Mapping[int, Sequence[Range]]) -> list[tuple[int, bool]]:
    """Ranges of all ranks as blocks `(extent, replicated)` along the dim.

    Examples
    --------
    Four rows are split, the last two are on both ranks:

    >>> blocks_of({0: [(0, 2), (4, 2)], 1: [(2, 4)]})
    [(4, False), (2, True)]
    """
    ends = sorted(
        {end for held in ranges.values() for start, n in held for end in (start, start + n)}
    )
    blocks: list[tuple[int, bool]] = []
    last: int | None = None
    for start, stop in pairwise(ends):
        holders = [
            rank
            for rank, held in ranges.items()
            if any(first <= start < first + n for first, n in held)
        ]
        shared = len(holders) == len(ranges)
        # Within a split block ranks ascend; the next one begins with a rank that came before.
        if not shared and last is not None and holders and holders[0] > last:
            blocks[-1] = (blocks[-1][0] + stop - start, False)
        else:
            blocks.append((stop - start, shared))
        last = holders[0] if holders and not shared else None
    return blocks


# --------------------------------------------------------------------------- rules


def _replicated(shape: Shape) -> Rule:
    return lambda degree, _numbers, _layer: replicated_map(shape, degree)


def _blocks(shape: Shape, dim: int, blocks: Sequence[tuple[int, bool]]) -> Rule:
    def rule(degree: int, numbers: ModelNumbers, layer: str) -> ParamAffineMap:
        widths = [
            shard_sizes(size, degree, kv_heads=numbers.kv_heads, grain=numbers.grain, layer=layer)
            for size, replicated in blocks
            if not replicated
        ]
        return segmented_map(shape, blocks, dim, degree, widths)

    return rule


def _codegen(shape: Shape) -> Rule:
    return lambda degree, numbers, _layer: codegen_map(shape, degree, numbers)


def _shared_qk(shape: Shape, dim: int) -> Rule:
    def rule(degree: int, numbers: ModelNumbers, _layer: str) -> ParamAffineMap:
        return shared_qk_map(shape, numbers.kv_heads or 0, degree, dim)

    return rule


def rules_of(known: Known) -> Iterator[Rule]:
    """The rules that may have made a map; whether one did depends on the model's numbers."""
    _, one = known.maps[0]
    shape = known.shape
    if one.is_scaled:
        return
    if one.same_elements(replicated_map(shape, len(one.ranks))):
        yield _replicated(shape)
        return
    for dim in range(len(shape)):
        ranges = ranges_along(one, dim)
        if ranges is None:
            continue
        yield _blocks(shape, dim, blocks_of(ranges))
        if known.shares_heads:
            yield _shared_qk(shape, dim)
        if dim == 0:
            yield _codegen(shape)


# --------------------------------------------------------------------------- a whole model


@dataclass(frozen=True, slots=True)
class Rescaling:
    """Finds the maps of all parameters of a model at one degree."""

    degree: int
    """The wanted degree, at least 2."""
    kv_heads: int | None
    """Number of key/value heads, None when it is not known."""
    grain: int = 1
    """`tp_grain_size` of the configuration."""

    def maps(self, known: Mapping[str, Known]) -> tuple[dict[str, ParamAffineMap], dict[str, str]]:
        """The map of every parameter that has one, and for the others the reason in words.

        Parameters
        ----------
        known
            Parameter -> what is known of it.
        """
        subjects = {one: list(rules_of(one)) for one in dict.fromkeys(known.values())}
        answers: dict[Known, set[ParamAffineMap]] = {subject: set() for subject in subjects}
        for numbers in self._numbers(subjects):
            for subject, rules in subjects.items():
                answers[subject].update(self._candidates(subject, rules, numbers))
        maps = {}
        reasons = {}
        for name, one in known.items():
            if len(answers[one]) == 1:
                maps[name] = next(iter(answers[one]))
            else:
                reasons[name] = AMBIGUOUS if answers[one] else UNEXPLAINED
        return maps, reasons

    def _numbers(self, subjects: Mapping[Known, Sequence[Rule]]) -> list[ModelNumbers]:
        """The numbers of heads that explain the most parameters together: as a rule all."""
        if self.kv_heads is not None:
            return [ModelNumbers(kv_heads=self.kv_heads, grain=self.grain)]
        explained = {
            numbers: sum(
                any(True for _ in explaining(subject, rules, numbers))
                for subject, rules in subjects.items()
            )
            for numbers in (
                ModelNumbers(kv_heads=heads, grain=self.grain) for heads in _head_counts(subjects)
            )
        }
        most = max(explained.values())
        return [numbers for numbers, count in explained.items() if count == most]

    def _candidates(
        self, known: Known, rules: Iterable[Rule], numbers: ModelNumbers
    ) -> Iterator[ParamAffineMap]:
        for rule, layer in explaining(known, rules, numbers):
            try:
                yield rule(self.degree, numbers, layer).canonical()
            except LayoutError:
                continue


def explaining(
    known: Known, rules: Iterable[Rule], numbers: ModelNumbers
) -> Iterator[tuple[Rule, str]]:
    """Rules that reproduce every known map of a parameter, with the layer that they take it for."""
    for rule, layer in product(rules, known.layers):
        try:
            if all(rule(d, numbers, layer).same_elements(one) for d, one in known.maps):
                yield rule, layer
        except LayoutError:
            continue


def _head_counts(subjects: Iterable[Known]) -> list[int | None]:
    """Numbers of heads that can make a difference: what divides an extent, and none at all."""
    extents = {extent for known in subjects if BY_HEADS in known.layers for extent in known.shape}
    return [None, *sorted({heads for extent in extents for heads in _divisors(extent)})]


def _divisors(number: int) -> Iterator[int]:
    low = 1
    while low * low <= number:
        if number % low == 0:
            yield low
            yield number // low
        low += 1
