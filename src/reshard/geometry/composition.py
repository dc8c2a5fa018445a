"""Composition: ``M_t ∘ M_s⁻¹``, from the shards of one layout to those of another.

Theory. Both maps describe the same ``F``. A source piece and a target piece share a block of
``F`` (:func:`reshard.geometry.links.meet`); that block, seen from both shards, is a copy. ``F``
itself is never made. Three things keep the result small and sure:

* of the holders of an element only one is read: the replica policy picks it per set of
  locations, and P5 makes that set exact;
* what a source rank holds twice is read once;
* copies are grouped by pair of ranks and scale before they are folded.

Geometrically equal pairs of maps, such as those of the layers of a model, are planned once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from reshard.errors import CompositionError
from reshard.geometry.affine_map import ParamAffineMap
from reshard.geometry.folding import fold
from reshard.geometry.index_math import numel
from reshard.geometry.links import Link, from_source, make_link, meet
from reshard.geometry.notation import ranges_text
from reshard.geometry.plan import Segment, TransferPlan, _target_link
from reshard.geometry.refinement import Arrangement, layers
from reshard.geometry.replicas import Choose, lowest_rank
from reshard.geometry.validation import gaps

Group = tuple[int, int, float, int]
"""Target rank, source rank, scale, layer: what may be folded together."""
Held = list[tuple[int, float, int, Link]]
"""Source rank, scale, layer and link of blocks that can be read; a layer repeats no element."""


def compose(
    target: ParamAffineMap,
    source: ParamAffineMap,
    *,
    choose: Choose = lowest_rank,
    partial: bool = False,
) -> TransferPlan:
    """Return the copies that fill the target shards from the source shards.

    Parameters
    ----------
    target, source
        Valid maps of the same logical tensor (or views of it: only the number of elements must
        agree).
    choose
        Replica policy ``(locations, target_rank) -> source rank``; hashable.
    partial
        Accept target elements that have no source; they are then named by ``plan.unfilled``.

    Raises
    ------
    CompositionError
        When the logical tensors differ in size, the policy answers with a rank that does not
        hold the element, or (unless ``partial``) a target element has no source.

    Examples
    --------
    >>> from reshard.geometry import AffinePiece, ParamAffineMap
    >>> def rows(*heights):
    ...     at = [4 * sum(heights[:r]) for r in range(len(heights))]
    ...     piece = [AffinePiece((n, 4), a, (4, 1), 0, (4, 1), [r])
    ...              for r, (n, a) in enumerate(zip(heights, at))]
    ...     return ParamAffineMap((sum(heights), 4), {r: (n, 4) for r, n in enumerate(heights)},
    ...                           {r: [p] for r, p in enumerate(piece)})
    >>> print(compose(rows(2, 4), rows(3, 3)))
    3 segments, 24 elements
      0[0 + 8×1] → 0[0 + 8×1]
      0[8 + 4×1] → 1[0 + 4×1]
      1[0 + 12×1] → 1[4 + 12×1]
    """
    return _compose(target, source, choose, partial)


@lru_cache(maxsize=4096)
def _compose(
    target: ParamAffineMap, source: ParamAffineMap, choose: Choose, partial: bool
) -> TransferPlan:
    _check_sizes(target, source)
    chosen = _Chosen(source, choose)
    copies: dict[Group, list[Link]] = {}
    for rank in target.ranks:
        _copies(target, rank, chosen.for_target(rank), copies)
    plan = _folded(target, source, copies)
    if plan.unfilled and not partial:
        rank, holes = next(iter(plan.unfilled.items()))
        raise CompositionError(
            "target elements have no source",
            rank=rank,
            found=ranges_text(holes),
            next_step="compose with partial=True to accept that",
        )
    return plan


def alternates(
    target: ParamAffineMap, source: ParamAffineMap, plan: TransferPlan
) -> TransferPlan:
    """Return every copy that could have been made and that ``plan`` does not make.

    For each target element: one copy from each other holder, and from each other place of the
    same holder's shard. An executor compares them with what the plan wrote to prove P2 in the
    same pass. Segments have the form of a plan's; target elements repeat over holders, so the
    result does not :meth:`~TransferPlan.verify`.
    """
    copies: dict[Group, list[Link]] = {}
    held = _blocks(source)
    for rank in target.ranks:
        _copies(target, rank, held, copies)
    taken: dict[Group, list[Link]] = {}
    for segment in plan.segments:
        group = (segment.target_rank, segment.source_rank, segment.scale, 0)
        taken.setdefault(group, []).append(_target_link(segment))
    left = {group: _without(links, taken.get(group, [])) for group, links in copies.items()}
    segments = [s for group, links in left.items() for s in _segments(group, fold(links))]
    return TransferPlan(source.shard_shapes, target.shard_shapes, _ordered(segments), {})


def _check_sizes(target: ParamAffineMap, source: ParamAffineMap) -> None:
    if target.numel != source.numel:
        raise CompositionError(
            "the maps describe tensors of different sizes",
            expected=f"{target.numel} elements {target.logical_shape}",
            found=f"{source.numel} elements {source.logical_shape}",
            next_step="narrow one of them to what they share",
        )


def _blocks(source: ParamAffineMap) -> Held:
    groups: dict[tuple[int, float], list[Link]] = {}
    for rank, piece in source.pieces():
        if piece.numel:
            groups.setdefault((rank, piece.scale), []).append(from_source(piece))
    return [
        (*group, depth, link)
        for group, links in groups.items()
        for depth, layer in enumerate(layers(links))
        for link in layer
    ]


class _Chosen:
    """The source blocks that a target rank reads, under a policy."""

    __slots__ = ("_choose", "_known", "_locations", "_source")

    def __init__(self, source: ParamAffineMap, choose: Choose) -> None:
        self._source = source
        self._choose = choose
        self._locations = sorted({piece.locations for _, piece in source.pieces()})
        self._known: dict[tuple[int, ...], Held] = {}

    def for_target(self, rank: int) -> Held:
        """Return blocks that together hold each element of the source once."""
        answers = tuple([self._ask(locations, rank) for locations in self._locations])
        if answers not in self._known:
            self._known[answers] = self._held(dict(zip(self._locations, answers, strict=True)))
        return self._known[answers]

    def _ask(self, locations: tuple[int, ...], rank: int) -> int:
        answer = self._choose(locations, rank)
        if answer not in locations:
            raise CompositionError(
                "the replica policy chose a rank that does not hold the element",
                rank=answer,
                expected=list(locations),
            )
        return answer

    def _held(self, answer: dict[tuple[int, ...], int]) -> Held:
        groups: dict[tuple[int, float], list[Link]] = {}
        for rank, piece in self._source.pieces():
            if piece.numel and answer[piece.locations] == rank:
                groups.setdefault((rank, piece.scale), []).append(from_source(piece))
        return [(*group, 0, link) for group, links in groups.items() for link in layers(links)[0]]


def _copies(
    target: ParamAffineMap, rank: int, held: Held, copies: dict[Group, list[Link]]
) -> None:
    """Add the copies into the shard of one target rank, near side the target shard."""
    for piece in target.pieces_by_rank[rank]:
        if not piece.numel:
            continue
        link = from_source(piece)
        start, stop = link.near, link.near_stop
        for source_rank, scale, layer, other in held:
            if other.near < stop and start < other.near_stop:
                for part in meet(link, other):
                    dims = [(n, f, g) for n, _, f, g in part.dims]
                    group = (rank, source_rank, piece.scale / scale, layer)
                    copies.setdefault(group, []).append(make_link(part.first, part.second, dims))


def _folded(
    target: ParamAffineMap, source: ParamAffineMap, copies: dict[Group, list[Link]]
) -> TransferPlan:
    segments = []
    links: dict[int, list[Link]] = {}
    for group, found in copies.items():
        merged = fold(found)
        segments += _segments(group, merged)
        links.setdefault(group[0], []).extend(merged)
    unfilled = {}
    for rank, shape in target.shard_shapes.items():
        size = numel(shape)
        written = links.get(rank, [])
        if sum(numel([n for n, _, _ in link.dims]) for link in written) < size:
            unfilled[rank] = gaps(written, size)
    return TransferPlan(source.shard_shapes, target.shard_shapes, _ordered(segments), unfilled)


def _segments(group: Group, links: Iterable[Link]) -> Iterator[Segment]:
    target_rank, source_rank, scale, _ = group
    for near, far, dims in links:
        shape, to, of = zip(*dims, strict=True) if dims else ((), (), ())
        yield Segment(shape, source_rank, far, of, target_rank, near, to, scale)


def _ordered(segments: list[Segment]) -> list[Segment]:
    return sorted(segments, key=lambda s: (s.target_rank, s.target_offset, s.source_rank))


def _without(links: list[Link], taken: list[Link]) -> list[Link]:
    """Return the parts of some copies into one rank that a plan does not already make."""
    if not taken:
        return links
    if fold(links) == fold(taken):
        return []
    arrangement = Arrangement([*links, *taken], [0] * len(links) + [1] * len(taken))
    return [
        part.link
        for index in range(len(links))
        for part in arrangement.parts(index)
        if part.owners == {0}
    ]
