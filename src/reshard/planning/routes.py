"""Routes: the geometry of a pair of maps, planned once.

Theory. A fill wants rank `r` of a target map `M_t`; a stored tensor is described by a source map
`M_s`. The copies are `M_t ∘ M_s⁻¹` restricted to `r`, the copies that the replica choice left over
are its alternates, and both become ordered moves. The result depends on the two maps and `r` alone,
so it is kept: a model with thousands of tensors has tens of different pairs.
"""

from __future__ import annotations

from collections.abc import Iterable

from reshard.geometry import (
    AffinePiece,
    ParamAffineMap,
    Segment,
    TransferPlan,
    alternates,
    compose,
)
from reshard.planning.moves import Ints, Move, ordered
from reshard.planning.plan import Route

Pair = tuple[ParamAffineMap, ParamAffineMap]


class RouteBook:
    """The routes planned so far.

    Examples
    --------
    >>> piece = AffinePiece((2, 3), 0, (3, 1), 0, (3, 1), (0,))
    >>> whole = ParamAffineMap((2, 3), {0: (2, 3)}, {0: (piece,)})
    >>> book = RouteBook()
    >>> book.route(whole, whole, 0).moves
    (Move(shape=(6,), holder=0, source_offset=0, source_strides=(1,), target_offset=0,
    target_strides=(1,), scale=1.0),)
    """

    def __init__(self) -> None:
        self._routes: dict[tuple[Pair, int], Route] = {}
        self._plans: dict[Pair, tuple[TransferPlan, TransferPlan | None]] = {}
        self._targets: dict[object, ParamAffineMap] = {}

    def route(self, target: ParamAffineMap, source: ParamAffineMap, rank: int) -> Route:
        """The route into the shard of one target rank.

        Parameters
        ----------
        target, source
            Maps of the same logical tensor.
        rank
            The target rank.

        Returns
        -------
        Route
            Its moves may leave elements unwritten; `missing` says how many.
        """
        target = self._targets.setdefault(_content(target), target)
        key = ((target, source), rank)
        known = self._routes.get(key)
        if known is None:
            known = self._routes[key] = self._made(target, source, rank)
        return known

    def _made(self, target: ParamAffineMap, source: ParamAffineMap, rank: int) -> Route:
        plan, rest = self._composed(target, source)
        moves = tuple(_into(plan, rank))
        checks = tuple(_into(rest, rank)) if rest is not None else ()
        holders = tuple(sorted({segment.source_rank for segment in (*moves, *checks)}))
        number = {holder: index for index, holder in enumerate(holders)}
        return Route(
            numel=_numel(target.shard_shapes[rank]),
            holders=holders,
            moves=_moves(moves, number),
            checks=_moves(checks, number),
            origins=_origins(target, rank),
            source_map=source,
        )

    def _composed(
        self, target: ParamAffineMap, source: ParamAffineMap
    ) -> tuple[TransferPlan, TransferPlan | None]:
        pair = (target, source)
        known = self._plans.get(pair)
        if known is None:
            plan = compose(target, source, partial=True)
            held = sum(piece.numel for _, piece in source.pieces())
            rest = alternates(target, source, plan) if held > source.numel else None
            known = self._plans[pair] = (plan, rest)
        return known


def _content(target: ParamAffineMap) -> object:
    """What makes two target maps equal; a writer makes one for each of thousands of tensors.

    Cheaper than the hash of a map, which is made for maps of millions of pieces.
    """
    pieces = tuple(target.pieces_by_rank.items())
    return target.logical_shape, tuple(target.shard_shapes.items()), pieces


def _into(plan: TransferPlan, rank: int) -> Iterable[Segment]:
    return (segment for segment in plan.segments if segment.target_rank == rank)


def _moves(segments: Iterable[Segment], number: dict[int, int]) -> tuple[Move, ...]:
    moves = (
        move
        for segment in segments
        for move in ordered(
            Move(
                segment.shape,
                number[segment.source_rank],
                segment.source_offset,
                segment.source_strides,
                segment.target_offset,
                segment.target_strides,
                segment.scale,
            )
        )
    )
    return tuple(sorted(moves, key=lambda move: (move.target_offset, move.holder)))


def _origins(target: ParamAffineMap, rank: int) -> tuple[Move, ...]:
    """Where the shard's elements lie in the logical tensor; empty for the identity."""
    moves = tuple(
        move
        for piece in target.pieces_by_rank[rank]
        for move in ordered(
            Move(
                piece.shape,
                0,
                piece.source_offset,
                piece.source_strides,
                piece.dest_offset,
                piece.dest_strides,
            )
        )
    )
    identity = (Move((target.numel,), 0, 0, (1,), 0, (1,)),)
    return () if moves == identity else moves


def missing(route: Route) -> int:
    """Elements of the target shard that no move writes."""
    return route.numel - sum(move.numel for move in route.moves)


def identity_map(shape: Ints) -> ParamAffineMap:
    """The map of a tensor that one rank holds whole, row-major.

    Parameters
    ----------
    shape
        Shape of the logical tensor.
    """
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    row_major = tuple(reversed(strides))
    piece = AffinePiece(shape, 0, row_major, 0, row_major, (0,))
    return ParamAffineMap(shape, {0: shape}, {0: (piece,)})


def _numel(shape: Ints) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count
