"""What is asked of reshard, and what the oracle says to it.

Each law takes chance and asks one operation; it raises `AssertionError` where the answers differ.
What reshard refuses is an answer too: the oracle says whether it had to.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from reshard.errors import CompositionError, InvalidMapError, ReplicaMismatchError
from reshard.geometry import (
    AffinePiece,
    ParamAffineMap,
    Segment,
    TransferPlan,
    alternates,
    balance_of,
    balanced,
    canonicalise,
    coalesce,
    compose,
    cut_flat_range,
    distribute,
    follow,
    intersect,
    invert,
    locate,
    lowest_rank,
    maps_from_document,
    maps_to_document,
    nest,
    restrict,
    same_rank_first,
    trace_map,
)
from scripts.fuzz_geometry import dense
from scripts.fuzz_geometry.dense import Cut, Element, Group, Relation, Spelled, Spelling
from scripts.fuzz_geometry.drawing import draw_cut, draw_shape, in_elements, spell, tamper

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


# ------------------------------------------------------------------------------ there and back


def to_map(spelling: Spelling) -> ParamAffineMap:
    """Hand a spelling to reshard."""
    pieces = {
        rank: [AffinePiece(*piece.block, piece.locations, piece.scale) for piece in mine]
        for rank, mine in spelling.pieces.items()
    }
    return ParamAffineMap(spelling.shape, dict(spelling.shards), pieces)


def from_map(one: ParamAffineMap) -> Spelling:
    """Take what reshard made."""
    pieces = {rank: tuple(map(from_piece, mine)) for rank, mine in one.pieces_by_rank.items()}
    return Spelling(one.logical_shape, dict(one.shard_shapes), pieces)


def from_piece(piece: AffinePiece) -> Spelled:
    """Take a piece that reshard made."""
    source = piece.source_offset, piece.source_strides
    block = (piece.shape, *source, piece.dest_offset, piece.dest_strides)
    return Spelled(block, piece.locations, piece.scale)


def says(one: ParamAffineMap, wanted: Relation) -> None:
    """Ask that a map that reshard made says exactly this, and no element twice."""
    spelling = from_map(one)
    same(dense.relation(spelling), wanted)
    same(sum(math.prod(p.block[0]) for mine in spelling.pieces.values() for p in mine), len(wanted))


def same(found: object, wanted: object) -> None:
    """Ask that two things are equal."""
    if found != wanted:
        raise AssertionError(f"found  {found}\nwanted {wanted}")


def ask(truth: object) -> None:
    """Ask that something is true."""
    same(bool(truth), wanted=True)


@contextmanager
def refused(*kinds: type[Exception]) -> Iterator[None]:
    """Ask that what is done here is refused."""
    try:
        yield
    except kinds:
        return
    raise AssertionError(f"not refused, wanted {kinds}")


def drawn(rng: random.Random, *, partial: bool = False) -> Cut:
    """Draw a cut of some shape."""
    return draw_cut(rng, draw_shape(rng), partial=partial, scaled=rng.random() < 0.3)


def values(rng: random.Random, size: int) -> NDArray[np.float64]:
    """Draw distinct numbers that every factor scales exactly."""
    return np.array(rng.sample(range(1, 1000), size), np.float64)


def shards_of(cut: Cut, full: NDArray[np.float64]) -> dict[int, NDArray[np.float64]]:
    """Cut a tensor as the truth says; what is no element of it is 0."""
    scaled = np.append(full.reshape(-1) * cut.factors, 0.0)
    return {rank: scaled[index] for rank, index in cut.shards.items()}


# ------------------------------------------------------------------------------ one map


def validates(rng: random.Random) -> None:
    """`validate` refuses exactly what is broken, and names a property that is."""
    spelling = spell(rng, drawn(rng, partial=rng.random() < 0.4))
    for _ in range(rng.randrange(3)):
        spelling = tamper(rng, spelling)
    for partial in (False, True):
        wrong = dense.broken(spelling, partial=partial)
        try:
            to_map(spelling).validate(partial=partial)
        except InvalidMapError as error:
            if error.broken not in wrong:
                raise AssertionError(f"{error}: wanted {wrong}") from error
        else:
            same(wrong, set())


def tells_holes_and_holders(rng: random.Random) -> None:
    """`uncovered_offsets` and `holders` tell what is nowhere and what is where."""
    cut = drawn(rng, partial=True)
    one = to_map(spell(rng, cut))
    held = cut.holders()
    same(one.uncovered_offsets(), dense.ranges(n for n, ranks in enumerate(held) if not ranks))
    for offset in rng.sample(range(cut.numel), min(cut.numel, 3)):
        same(one.holders(offset), held[offset])


def extracts_and_rebuilds(rng: random.Random) -> None:
    """Shards are what the truth cuts, and give `F` again; replicas that differ are refused."""
    cut = drawn(rng)
    one = to_map(spell(rng, cut))
    full = values(rng, cut.numel).reshape(cut.shape)
    wanted = shards_of(cut, full)
    shards = {rank: one.extract(full, rank) for rank in one.ranks}
    for rank, shard in shards.items():
        same((shard.shape, shard.tolist()), (wanted[rank].shape, wanted[rank].tolist()))
    rebuilt = one.rebuild(shards)
    same((rebuilt.shape, rebuilt.tolist()), (full.shape, full.tolist()))
    places = cut.places()
    twice = [offset for offset in places if len(places[offset]) > 1]
    if twice:
        rank, at = rng.choice(places[rng.choice(twice)])
        shards[rank] = shards[rank].copy()
        shards[rank].reshape(-1)[at] += 1
        with refused(ReplicaMismatchError):
            one.rebuild(shards)
    some = rng.sample(one.ranks, rng.randint(1, len(one.ranks)))
    if any(not set(ranks) & set(some) for ranks in cut.holders()):
        with refused(InvalidMapError):
            one.rebuild({rank: wanted[rank] for rank in some})
    else:
        same(one.rebuild({rank: wanted[rank] for rank in some}).tolist(), full.tolist())


def folds(rng: random.Random) -> None:
    """The canonical form says the same in no more pieces, no more than runs, and is its own.

    Where the form of single elements is no larger than what came of a rank with one set of
    locations and one scale, it is that form.
    """
    cut = drawn(rng, partial=rng.random() < 0.3)
    spelling, other = spell(rng, cut), spell(rng, cut)
    one = to_map(spelling)
    form = one.canonical()
    says(form, cut.relation())
    same(form.canonical(), form)
    same(canonicalise(one), form)
    runs = dense.runs(cut.relation())
    came, became = _grouped(spelling), _grouped(from_map(form))
    for group, finest in _grouped(from_map(to_map(in_elements(cut)).canonical())).items():
        if len(became[group]) > min(len(came[group]), runs[group]):
            raise AssertionError(f"{len(came[group])} pieces became {len(became[group])}")
        if len(finest) <= len(came[group]):
            same(became[group], finest)
    ask(one.same_elements(to_map(other)))
    same(hash(form), hash(to_map(from_map(form))))


def _grouped(spelling: Spelling) -> dict[Group, list[Spelled]]:
    """Return the pieces that are not empty, by what may be merged."""
    found: dict[Group, list[Spelled]] = defaultdict(list)
    for rank, pieces in spelling.pieces.items():
        for piece in pieces:
            if 0 not in piece.block[0]:
                found[rank, piece.locations, piece.scale].append(piece)
    return found


def tells_apart(rng: random.Random) -> None:
    """`same_elements` is right about maps that were changed."""
    cut = drawn(rng, partial=rng.random() < 0.3)
    spelling = spell(rng, cut)
    other = tamper(rng, spell(rng, cut))
    if dense.broken(other, partial=True) & {"write-once", "bounds", "P3"}:
        return
    alike = dense.relation(spelling) == dense.relation(other)
    same(to_map(spelling).same_elements(to_map(other)), alike)
    same(to_map(other).same_elements(to_map(spelling)), alike)


def narrows(rng: random.Random) -> None:
    """`narrow` and `restrict` leave out all but a range of a dim."""
    cut = drawn(rng, partial=rng.random() < 0.3)
    if not cut.shape:
        return
    dim = rng.randrange(len(cut.shape))
    start = rng.randint(0, cut.shape[dim])
    length = rng.randint(0, cut.shape[dim] - start)
    one = to_map(spell(rng, cut))
    for renumber, found in (
        (True, one.narrow(dim, start, length)),
        (False, restrict(one, dim, start, length)),
    ):
        wanted = dense.narrowed(cut, dim, start, length, renumber=renumber)
        says(found, wanted.relation())
        same((found.logical_shape, dict(found.shard_shapes)), (wanted.shape, _shapes(cut)))


def _shapes(cut: Cut) -> dict[int, tuple[int, ...]]:
    return {rank: index.shape for rank, index in sorted(cut.shards.items())}


def nests(rng: random.Random) -> None:
    """`nest` cuts shards once more."""
    outer = drawn(rng, partial=rng.random() < 0.2)
    inner: dict[int, Cut] = {}
    for number, (rank, index) in enumerate(outer.shards.items()):
        if rng.random() < 0.9:
            part = draw_cut(rng, index.shape, partial=rng.random() < 0.2)
            shards = {holder + 10000 * number: held for holder, held in part.shards.items()}
            inner[rank] = Cut(part.shape, shards, part.factors)
    found = nest(
        to_map(spell(rng, outer)), {r: to_map(spell(rng, cut)) for r, cut in inner.items()}
    )
    wanted = dense.nested(outer, inner)
    says(found, wanted.relation())
    same(dict(found.shard_shapes), _shapes(wanted))


def locates(rng: random.Random) -> None:
    """`locate` finds the holders of pieces that only know their own rank."""
    cut = drawn(rng, partial=rng.random() < 0.3)
    pieces = {}
    for rank, index in cut.shards.items():
        mine = spell(rng, Cut(cut.shape, {rank: index}, cut.factors)).pieces[rank]
        pieces[rank] = [AffinePiece(*p.block, (rank,), p.scale) for p in mine]
    says(locate(cut.shape, _shapes(cut), pieces), cut.relation())


def traces(rng: random.Random) -> None:
    """`trace_map` finds the map of a function."""
    cut = drawn(rng)

    def partition(full: NDArray[np.float64], rank: int) -> NDArray[np.float64]:
        index = cut.shards[rank]
        return full.reshape(-1)[index] * cut.factors[index]

    found = trace_map(partition, cut.shape, cut.shards)
    says(found, cut.relation())
    same(dict(found.shard_shapes), _shapes(cut))


def is_written_and_read(rng: random.Random) -> None:
    """A map comes back from its document, alone and with its pattern."""
    cut = drawn(rng, partial=rng.random() < 0.3)
    one = to_map(spell(rng, cut))
    back = ParamAffineMap.from_dict(json.loads(json.dumps(one.to_dict())))
    says(back, cut.relation())
    same(dict(back.shard_shapes), _shapes(cut))
    document = json.loads(json.dumps(maps_to_document({"^w$": one})))
    says(maps_from_document(document, validate=not _has_holes(cut))["^w$"], cut.relation())


def _has_holes(cut: Cut) -> bool:
    padded = any((index < 0).any() for index in cut.shards.values())
    return padded or not all(cut.holders())


def cuts_pieces(rng: random.Random) -> None:
    """`cut_flat_range`, `intersect` and `coalesce` do with a piece what a loop does."""
    first, second = (_any_piece(rng) for _ in range(2))
    piece, other = (AffinePiece(*p.block, p.locations, p.scale) for p in (first, second))
    pairs = Counter(first.elements())
    same(Counter(from_piece(coalesce(piece)).elements()), pairs)
    lo, hi = sorted((rng.randrange(40), rng.randrange(40)))
    wanted = Counter((of, to - lo) for of, to in first.elements() if lo <= to < hi)
    same(_counted(cut_flat_range(piece, lo, hi)), wanted)
    there = {of for of, _ in second.elements()}
    same(_counted(intersect(piece, other)), Counter(p for p in first.elements() if p[0] in there))


def _counted(pieces: Iterable[AffinePiece]) -> Counter[tuple[int, int]]:
    return Counter(pair for piece in pieces for pair in from_piece(piece).elements())


def _any_piece(rng: random.Random) -> Spelled:
    cut = drawn(rng)
    mine = [piece for pieces in spell(rng, cut).pieces.values() for piece in pieces]
    return rng.choice(mine) if mine else Spelled(((1,), 3, (1,), 2, (1,)), (0,), 1.0)


# ------------------------------------------------------------------------------ two maps

Choose = Callable[[tuple[int, ...], int], int]


def _by_chance(locations: tuple[int, ...], target_rank: int) -> int:
    return locations[(target_rank * 7 + len(locations)) % len(locations)]


def composes(rng: random.Random) -> None:
    """A plan fills each target element from a holder, by the policy, with the right factor."""
    shape = draw_shape(rng)
    target = draw_cut(rng, shape, partial=rng.random() < 0.2, scaled=rng.random() < 0.2)
    source = draw_cut(rng, shape, partial=rng.random() < 0.2, scaled=rng.random() < 0.2)
    maps = to_map(spell(rng, target)), to_map(spell(rng, source))
    choose = rng.choice((lowest_rank, same_rank_first, balanced, _by_chance))
    holders = source.holders()
    if _has_holes(target) or not all(holders):
        with refused(CompositionError, InvalidMapError):
            compose(*maps, choose=choose)
    plan = compose(*maps, choose=choose, partial=True)
    plan.verify()
    copies = _copies(plan.segments)
    _fills(copies, target, source)
    _leaves(plan, copies, target)
    if choose is balanced:
        _is_balanced(copies, target, source)
    else:
        for (rank, at), (giver, _, _) in copies.items():
            offset = int(target.shards[rank].reshape(-1)[at])
            same(giver, choose(holders[offset], rank))
    _runs(rng, plan, target, source)
    back = TransferPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    same(back, plan)
    same(_others(alternates(*maps, plan)), _all_copies(target, source) - _pairs(copies))


Copy = tuple[int, int, float]
"""Source rank, offset there, factor."""


def _copies(segments: Iterable[Segment]) -> dict[Element, Copy]:
    found: dict[Element, Copy] = {}
    for one in segments:
        target = one.target_offset, one.target_strides
        block = (one.shape, one.source_offset, one.source_strides, *target)
        for of, to in dense.elements(block):
            if (one.target_rank, to) in found:
                raise AssertionError(f"written twice: {one}")
            found[one.target_rank, to] = one.source_rank, of, one.scale
    return found


def _fills(copies: Mapping[Element, Copy], target: Cut, source: Cut) -> None:
    held = source.holders()
    wanted = {
        (rank, at): offset
        for rank, index in target.shards.items()
        for at, offset in enumerate(index.reshape(-1).tolist())
        if offset >= 0 and held[offset]
    }
    same(
        {
            place: int(source.shards[giver].reshape(-1)[of])
            for place, (giver, of, _) in copies.items()
        },
        wanted,
    )
    factors = target.factors / source.factors
    for place, (_, _, scale) in copies.items():
        same(scale, float(factors[wanted[place]]))


def _leaves(plan: TransferPlan, copies: Mapping[Element, Copy], target: Cut) -> None:
    left = {
        rank: tuple(dense.ranges(at for at in range(index.size) if (rank, at) not in copies))
        for rank, index in target.shards.items()
    }
    same(dict(plan.unfilled), {rank: holes for rank, holes in sorted(left.items()) if holes})


def _is_balanced(copies: Mapping[Element, Copy], target: Cut, source: Cut) -> None:
    held = source.holders()
    demands: Counter[tuple[int, ...]] = Counter()
    for rank, at in copies:
        demands[held[int(target.shards[rank].reshape(-1)[at])]] += 1
    loads = Counter(giver for giver, _, _ in copies.values())
    least = dense.busiest(demands)
    same(max(loads.values(), default=0), least)


def _runs(rng: random.Random, plan: TransferPlan, target: Cut, source: Cut) -> None:
    full = values(rng, target.numel)
    held = np.array([bool(ranks) for ranks in source.holders()], bool)
    wanted = shards_of(target, np.where(held, full, 0.0))
    found = plan.apply(shards_of(source, full))
    for rank, shard in wanted.items():
        same(found[rank].tolist(), shard.tolist())


def _others(plan: TransferPlan) -> set[tuple[Element, Element]]:
    found: Counter[tuple[Element, Element]] = Counter()
    for one in plan.segments:
        sides = one.source_offset, one.source_strides, one.target_offset, one.target_strides
        for of, to in dense.elements((one.shape, *sides)):
            found[(one.target_rank, to), (one.source_rank, of)] += 1
    same([pair for pair, times in found.items() if times > 1], [])
    return set(found)


def _all_copies(target: Cut, source: Cut) -> set[tuple[Element, Element]]:
    places = source.places()
    return {
        ((rank, at), place)
        for rank, index in target.shards.items()
        for at, offset in enumerate(index.reshape(-1).tolist())
        if offset >= 0
        for place in places.get(offset, ())
    }


def _pairs(copies: Mapping[Element, Copy]) -> set[tuple[Element, Element]]:
    return {(to, (giver, of)) for to, (giver, of, _) in copies.items()}


def refuses_lies(rng: random.Random) -> None:
    """`compose` refuses a source or a target that is no map, whichever way it is broken."""
    shape = draw_shape(rng)
    honest = draw_cut(rng, shape)
    lie = tamper(rng, tamper(rng, spell(rng, draw_cut(rng, shape, scaled=rng.random() < 0.3))))
    if not dense.broken(lie, partial=True):
        return
    maps = [to_map(spell(rng, honest)), to_map(lie)]
    rng.shuffle(maps)
    with refused(CompositionError, InvalidMapError):
        compose(*maps, choose=rng.choice((lowest_rank, balanced)), partial=True)


def follows_and_inverts(rng: random.Random) -> None:
    """Plans compose and have inverses."""
    shape = draw_shape(rng)
    first, middle, last = (draw_cut(rng, shape, scaled=rng.random() < 0.2) for _ in range(3))
    one, two, three = (to_map(spell(rng, cut)) for cut in (first, middle, last))
    through = follow(compose(three, two), compose(two, one))
    through.verify()
    copies = _copies(through.segments)
    _fills(copies, last, first)
    _leaves(through, copies, last)
    from_full = _copies(distribute(three).segments)
    same(
        {place: (of, scale) for place, (_, of, scale) in from_full.items()},
        {place: (offset, scale) for place, (offset, _, scale) in last.relation().items()},
    )
    to_full = _copies(invert(one).segments)
    places = first.places()
    same({at for _, at in to_full}, set(range(first.numel)))
    for (_, offset), (rank, at, scale) in to_full.items():
        if (rank, at) not in places[offset] or scale != 1 / float(first.factors[offset]):
            raise AssertionError(f"element {offset} of F is not {rank, at}")


def balances_as_it_says(rng: random.Random) -> None:
    """`balance_of` tells the loads of a plan, and the least that could be."""
    shape = draw_shape(rng)
    target, source = draw_cut(rng, shape), draw_cut(rng, shape)
    maps = to_map(spell(rng, target)), to_map(spell(rng, source))
    plan = compose(*maps, choose=rng.choice((lowest_rank, balanced)))
    loads = Counter(giver for giver, _, _ in _copies(plan.segments).values())
    held = source.holders()
    demands = Counter(
        held[offset] for index in target.shards.values() for offset in index.reshape(-1).tolist()
    )
    told = balance_of(*maps, plan)
    same({rank: n for rank, n in told.loads if n}, dict(loads))
    same(told.bound, dense.busiest(demands))


LAWS: tuple[Callable[[random.Random], None], ...] = (
    validates,
    validates,
    tells_holes_and_holders,
    extracts_and_rebuilds,
    folds,
    tells_apart,
    narrows,
    nests,
    locates,
    traces,
    is_written_and_read,
    cuts_pieces,
    composes,
    composes,
    refuses_lies,
    follows_and_inverts,
    balances_as_it_says,
)
"""What a case draws from, one a case."""
