"""Composition is ``rebuild`` then ``extract`` without the full tensor in between."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings

from reshard.errors import CompositionError
from reshard.geometry import (
    Choose,
    ParamAffineMap,
    Segment,
    TransferPlan,
    alternates,
    balance_of,
    balanced,
    compose,
    distribute,
    follow,
    invert,
    lowest_rank,
    same_rank_first,
)
from tests.properties import dense_oracle as dense
from tests.properties.strategies import (
    SETTINGS,
    Case,
    cases,
    examples,
    exploded,
    reordered,
    respelled,
)

POLICIES: tuple[Choose, ...] = (lowest_rank, same_rank_first, balanced)


def pair(case: Case, *, scaled: bool = False) -> tuple[ParamAffineMap, ParamAffineMap]:
    return case.map("target", scaled=scaled), case.map("source", scaled=scaled)


def without_a_rank(case: Case, one: ParamAffineMap) -> ParamAffineMap:
    """A map that lost one of its ranks, its locations still exact."""
    gone = case.random("gone").choice(one.ranks)
    pieces = {
        rank: [
            piece.held_by(ranks)
            for piece in owned
            if (ranks := [r for r in piece.locations if r != gone])
        ]
        for rank, owned in one.pieces_by_rank.items()
        if rank != gone
    }
    shapes = {rank: shape for rank, shape in one.shard_shapes.items() if rank != gone}
    return ParamAffineMap(one.logical_shape, shapes, pieces)


# ------------------------------------------------------------------------------ what it copies


@pytest.mark.parametrize("choose", POLICIES)
@SETTINGS
@given(case=cases)
def test_each_target_element_is_copied_once_from_a_place_that_holds_it(
    choose: Choose, case: Case
) -> None:
    target, source = pair(case, scaled=True)
    plan = compose(target, source, choose=choose)
    wanted, held = dense.places(target), dense.places(source)
    made = {(tr, t): (sr, o, scale) for tr, t, sr, o, scale in dense.copies(plan)}
    assert len(dense.copies(plan)) == len(made)
    assert made.keys() == wanted.keys()
    for place, (s, scale) in wanted.items():
        sr, o, factor = made[place]
        there, theirs = held[sr, o]
        assert there == s
        assert factor * theirs == scale
    assert not plan.unfilled


@SETTINGS
@given(cases)
def test_applying_a_plan_is_rebuilding_then_extracting(case: Case) -> None:
    target, source = pair(case, scaled=True)
    full = np.random.default_rng(case.seed).integers(-99, 99, case.total).astype(np.float32)
    shards = {rank: source.extract(full, rank) for rank in source.ranks}
    moved = compose(target, source).apply(shards)
    again = source.rebuild(shards)
    for rank in target.ranks:
        expected = target.extract(again, rank)
        assert moved[rank].shape == expected.shape
        assert moved[rank].tobytes() == expected.tobytes()


@SETTINGS
@given(cases)
def test_the_default_reads_the_lowest_holder_and_same_rank_first_the_own(case: Case) -> None:
    target, source = pair(case)
    held, wanted = dense.holders(source), dense.places(target)
    for tr, t, sr, _, _ in dense.copies(compose(target, source)):
        assert sr == min(held[wanted[tr, t][0]])
    for tr, t, sr, _, _ in dense.copies(compose(target, source, choose=same_rank_first)):
        ranks = held[wanted[tr, t][0]]
        assert sr == (tr if tr in ranks else min(ranks))


@SETTINGS
@given(cases)
def test_no_choice_of_replicas_is_better_balanced_than_balanced(case: Case) -> None:
    target, source = pair(case)
    plan = compose(target, source, choose=balanced)
    balance = balance_of(target, source, plan)
    assert balance.busiest == balance.bound
    for other in (lowest_rank, same_rank_first):
        theirs = balance_of(target, source, compose(target, source, choose=other))
        assert theirs.bound == balance.bound <= theirs.busiest


@SETTINGS
@given(cases)
def test_alternates_are_the_other_holders_of_each_element(case: Case) -> None:
    target, source = pair(case)
    plan = compose(target, source)
    others = dense.copies(alternates(target, source, plan))
    everything = {
        (tr, t, sr, o)
        for (tr, t), (s, _) in dense.places(target).items()
        for (sr, o), (there, _) in dense.places(source).items()
        if there == s
    }
    made = {copy[:4] for copy in dense.copies(plan)}
    assert {copy[:4] for copy in others} == everything - made
    assert not dense.repeats(others)


# ------------------------------------------------------------------------------ its form


@SETTINGS
@given(cases)
def test_a_plan_does_not_depend_on_how_its_maps_are_spelled(case: Case) -> None:
    target, source = pair(case, scaled=True)
    plan = compose(target, source)
    rnd = case.random("spelling")
    for spell in (reordered, respelled, exploded):
        other = compose(spell(rnd, target), spell(rnd, source))
        assert dense.same_copies(other, plan), spell.__name__
        again = compose(spell(case.random("spelling"), target), source)
        assert json.dumps(again.to_dict()) == json.dumps(
            compose(spell(case.random("spelling"), target), source).to_dict()
        )


@SETTINGS
@given(cases)
def test_segments_are_in_normal_form_and_in_order(case: Case) -> None:
    plan = compose(*pair(case, scaled=True))
    places = [(s.target_rank, s.target_offset) for s in plan.segments]
    assert places == sorted(places)
    for segment in plan.segments:
        assert min(segment.shape, default=2) > 1
        assert list(segment.target_strides) == sorted(segment.target_strides, reverse=True)
    assert [s for _, group in plan.into() for s in group] == list(plan.segments)


@SETTINGS
@given(cases)
def test_a_plan_is_the_same_after_json(case: Case) -> None:
    target, source = pair(case, scaled=True)
    plan = compose(target, without_a_rank(case, source), partial=True)
    again = TransferPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert hash(again) == hash(plan)
    assert json.dumps(again.to_dict()) == json.dumps(plan.to_dict())


# ------------------------------------------------------------------------------ its algebra


@SETTINGS
@given(cases)
def test_going_by_way_of_a_third_layout_is_going_directly(case: Case) -> None:
    first, middle, last = (case.map(name, scaled=True) for name in ("a", "b", "c"))
    there, on = compose(middle, first), compose(last, middle)
    assert dense.same_copies(follow(on, there), compose(last, first))


@SETTINGS
@given(cases)
def test_following_is_associative(case: Case) -> None:
    a, b, c, d = (case.map(name, scaled=True) for name in "abcd")
    ab, bc, cd = compose(b, a), compose(c, b), compose(d, c)
    assert dense.same_copies(follow(cd, follow(bc, ab)), follow(follow(cd, bc), ab))


@SETTINGS
@given(cases)
def test_the_inverse_brings_back_whatever_was_read(case: Case) -> None:
    target, source = pair(case, scaled=True)
    plan = compose(target, source)
    back = invert(plan)
    back.verify()
    read = {(sr, o) for _, _, sr, o, _ in dense.copies(plan)}
    assert {copy[:2] for copy in dense.copies(back)} == read
    for tr, t, sr, o, scale in dense.copies(follow(back, plan)):
        assert (tr, t, scale) == (sr, o, 1.0)


@SETTINGS
@given(cases)
def test_composing_is_following_the_inverse_of_the_source_by_the_target(case: Case) -> None:
    target, source = pair(case, scaled=True)
    assert dense.same_copies(follow(target, invert(source)), compose(target, source))
    gathered = invert(source)
    gathered.verify()
    assert dict(gathered.target_shapes) == {0: (case.total,)}
    for _, s, rank, d, scale in dense.copies(gathered):
        there, theirs = dense.places(source)[rank, d]
        assert (there, scale) == (s, 1 / theirs)
        assert rank == min(dense.holders(source)[s])


@SETTINGS
@given(cases)
def test_a_map_stands_for_the_plan_from_the_full_tensor_to_its_shards(case: Case) -> None:
    one = case.map(scaled=True)
    plan = distribute(one)
    plan.verify()
    assert {(r, d): (s, scale) for r, d, _, s, scale in dense.copies(plan)} == dense.places(one)
    full = np.random.default_rng(case.seed).integers(-99, 99, case.total).astype(np.float32)
    for rank, shard in plan.apply({0: full}).items():
        assert shard.tobytes() == one.extract(full, rank).tobytes()


@SETTINGS
@given(cases)
def test_a_layout_composed_with_itself_stays_where_it_is(case: Case) -> None:
    one = case.map()
    plan = compose(one, one, choose=same_rank_first)
    places = dense.places(one)
    for tr, t, sr, o, _ in dense.copies(plan):
        assert tr == sr
        assert places[tr, t] == places[sr, o]


# ------------------------------------------------------------------------------ its proof


@SETTINGS
@given(cases)
def test_what_no_rank_holds_is_named_and_only_accepted_when_asked(case: Case) -> None:
    target, source = case.map("target"), without_a_rank(case, case.map("source"))
    held = dense.holders(source)
    missing: dict[int, set[int]] = {}
    for (rank, d), (s, _) in dense.places(target).items():
        if s not in held:
            missing.setdefault(rank, set()).add(d)
    plan = compose(target, source, partial=True)
    plan.verify()
    assert dict(plan.unfilled) == {r: tuple(dense.ranges(ds)) for r, ds in missing.items()}
    assert dense.plan_is_sound(plan)
    if missing:
        with pytest.raises(CompositionError) as refused:
            compose(target, source)
        assert refused.value.rank == min(missing)


@settings(SETTINGS, max_examples=examples(200))
@given(cases)
def test_verify_accepts_exactly_the_sound_plans(case: Case) -> None:
    target, source = pair(case)
    plan = compose(target, without_a_rank(case, source), partial=True)
    plan.verify()
    other = tampered(case.random("tamper"), plan)
    if dense.plan_is_sound(other):
        other.verify()
    else:
        with pytest.raises(CompositionError):
            other.verify()


WRONG = {
    "source offset below 0": Segment((8,), 0, -1, (1,), 0, 0, (1,)),
    "target offset below 0": Segment((8,), 0, 0, (1,), 0, -1, (1,)),
    "source stride below 0": Segment((8,), 0, 7, (-1,), 0, 0, (1,)),
    "target stride below 0": Segment((8,), 0, 0, (1,), 0, 7, (-1,)),
    "source stride that wraps at 64 bits": Segment((8,), 0, 0, (2**62,), 0, 0, (1,)),
    "source offset of more than 64 bits": Segment((8,), 0, 2**70, (1,), 0, 0, (1,)),
    "scale that is not a number": Segment((8,), 0, 0, (1,), 0, 0, (1,), float("nan")),
    "scale of 0": Segment((8,), 0, 0, (1,), 0, 0, (1,), 0.0),
}


@pytest.mark.parametrize("name", WRONG)
def test_verify_refuses_a(name: str) -> None:
    with pytest.raises(CompositionError):
        TransferPlan({0: (8,)}, {0: (8,)}, [WRONG[name]], {}).verify()


def test_verify_refuses_holes_of_an_unknown_rank() -> None:
    with pytest.raises(CompositionError):
        TransferPlan({}, {0: (0,)}, [], {7: [range(1)]}).verify()


def tampered(rnd: Random, plan: TransferPlan) -> TransferPlan:
    """A plan with one thing changed."""
    segments, holes = list(plan.segments), dict(plan.unfilled)
    shapes = dict(plan.target_shapes)
    if not segments or rnd.random() < 0.2:
        rank = rnd.choice(list(shapes))
        if rnd.random() < 0.5:
            rank = rnd.choice([rank, 77])
            holes[rank] = (*holes.get(rank, ()), range(1))
        else:
            shapes[rank] = (*shapes[rank], rnd.choice([1, 2]))
        return TransferPlan(plan.source_shapes, shapes, segments, holes)
    index = rnd.randrange(len(segments))
    one, by = segments[index], rnd.choice([-1, 1, 3])
    other = rnd.choice(segments)
    changes = [
        [],
        [one, one],
        [replace(one, target_offset=one.target_offset + by)],
        [replace(one, source_offset=one.source_offset + by)],
        [replace(one, source_rank=one.source_rank + by if one.source_rank + by >= 0 else 99)],
        [replace(one, target_rank=other.target_rank, target_offset=other.target_offset)],
        [replace(one, target_strides=tuple(s + 1 for s in one.target_strides))],
        [replace(one, source_strides=tuple(s + 1 for s in one.source_strides))],
        [replace(one, shape=tuple(n + 1 for n in one.shape))],
    ]
    segments[index : index + 1] = rnd.choice(changes)
    return TransferPlan(plan.source_shapes, shapes, segments, holes)
