"""Validation: the properties that make a map usable, proved from its pieces alone.

Theory. A map is sound when

* (bounds) no piece reaches outside ``F`` or outside its shard;
* (write-once) every element of a shard is written by exactly one piece;
* (P1) every element of ``F`` is held by some rank;
* (P3) no piece adds several elements of ``F`` into one of the shard: its dest side is injective;
* (P5) every element of a piece is held by exactly the ranks of its ``locations``, all by the
  same scale.

All of them are statements about overlaps and volumes of strided blocks. An
:class:`~reshard.geometry.refinement.Arrangement` decides them exactly, in time that depends on the
number of pieces and not on the number of elements. Where strides have too little in common for its
grid, pieces are met two by two (:mod:`reshard.geometry.pairs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reshard.errors import InvalidMapError, UnsupportedError, count_text
from reshard.geometry.disjointness import names_once
from reshard.geometry.holes import holes_of
from reshard.geometry.index_math import numel
from reshard.geometry.links import Link, meet
from reshard.geometry.ordering import Ints, classes_of, kinds_of, starts_of
from reshard.geometry.pairs import folds_on_itself, shared_count, touching_pairs
from reshard.geometry.piece import AffinePiece
from reshard.geometry.piece_table import PieceTable
from reshard.geometry.refinement import Arrangement, Groups
from reshard.geometry.tables import LinkTable, apart, folding_rows


@dataclass(frozen=True, slots=True)
class Subject:
    """A map under proof."""

    total: int
    """Number of elements of ``F``."""
    shapes: Mapping[int, tuple[int, ...]]
    """Shard shape of every rank."""
    table: PieceTable
    """Its non-empty pieces."""
    parameter: str | None
    """Its name, for messages."""
    partial: bool
    """Whether holes in ``F`` and in shards are accepted."""

    def piece(self, row: int) -> AffinePiece:
        """Return the piece of a row, for a message."""
        (owned,) = self.table.take(np.array([row])).pieces().values()
        return owned[0]

    def refuse(
        self, what: str, broken: str, row: int, offset: int, **said: object
    ) -> InvalidMapError:
        """Return the error for one piece."""
        return InvalidMapError(
            f"{what}: {self.piece(row)}",
            broken=broken,
            ranks=(int(self.table.rank[row]),),
            piece=int(self.table.index[row]),
            offset=offset,
            parameter=self.parameter,
            **said,  # type: ignore[arg-type]
        )


def prove(subject: Subject) -> None:
    """Prove all properties of a map.

    Raises
    ------
    InvalidMapError
        ``broken`` names the property; the other attributes say where.
    """
    _check_bounds(subject)
    _check_written_once(subject)
    _check_holders(subject)


def _check_bounds(subject: Subject) -> None:
    table = subject.table
    room = _rooms(subject)
    sides = (
        ("F", table.link.near_stop(), np.full(len(table), subject.total)),
        ("its shard", table.link.far_stop(), room),
    )
    for name, stop, size in sides:
        beyond = np.flatnonzero(stop > size)
        if len(beyond):
            row = int(beyond[0])
            raise subject.refuse(
                f"a piece reaches outside {name}",
                "bounds",
                row,
                int(stop[row]) - 1,
                expected=f"offsets below {int(size[row])}",
            )


def _rooms(subject: Subject) -> Ints:
    sizes = {rank: numel(shape) for rank, shape in subject.shapes.items()}
    return np.array([sizes[rank] for rank in subject.table.rank.tolist()], np.int64)


def _check_written_once(subject: Subject) -> None:
    table = subject.table
    dest = table.link.turned().normalised()
    for row in folding_rows(dest).tolist():
        _check_injective(subject, row, dest.take(np.array([row])).links()[0])
    if not names_once(dest, table.rank):
        arrangement = Arrangement(dest, np.arange(len(table)), table.rank)
        _refuse_written_twice(subject, arrangement)
    if not subject.partial:
        _check_filled(subject, dest)


def _check_injective(subject: Subject, row: int, link: Link) -> None:
    if folds_on_itself(link):
        raise subject.refuse(
            "several elements of F go to one element of the shard", "P3", row, link.near
        )


def _refuse_written_twice(subject: Subject, arrangement: Arrangement) -> None:
    parts, _, owners = arrangement.parts()
    twice = np.flatnonzero(owners.counts > 1)
    first = twice[np.argmin(parts.near[twice])]
    raise subject.refuse(
        "an element of the shard is written twice, last by",
        "write-once",
        int(owners.of(int(first))[-1]),
        int(parts.near[first]),
        expected="every element once",
    )


def _check_filled(subject: Subject, dest: LinkTable) -> None:
    written = subject.table.numel_by_rank()
    for rank, shape in subject.shapes.items():
        size = numel(shape)
        if written.get(rank, 0) < size:
            holes = holes_of(dest.take(np.flatnonzero(subject.table.rank == rank)), size)
            raise InvalidMapError(
                "an element of the shard is written by no piece",
                broken="write-once",
                ranks=(rank,),
                offset=holes.start,
                parameter=subject.parameter,
                expected=count_text(size, "element"),
                found=f"holes {holes}",
            )


def _check_holders(subject: Subject) -> None:
    table = subject.table
    alone = all(len(ranks) == 1 for ranks in table.holders)
    if alone and apart(table.link, np.zeros_like(table.rank)):
        _check_own_rank(subject)
        covered = int(table.link.numel().sum())
    else:
        covered = _check_overlaps(subject)
    if not subject.partial and covered < subject.total:
        holes = holes_of(table.link, subject.total)
        raise InvalidMapError(
            "an element of F is held by no rank",
            broken="P1",
            offset=holes.start,
            parameter=subject.parameter,
            expected=count_text(subject.total, "element"),
            found=f"holes {holes}",
        )


def _check_overlaps(subject: Subject) -> int:
    """Prove P5 of pieces that overlap; return the number of elements that they cover."""
    table = subject.table
    try:
        arrangement = Arrangement(table.link, table.rank)
    except UnsupportedError:
        if not names_once(table.link, table.rank):
            raise
        return _check_in_pairs(subject)
    _check_locations(subject, arrangement)
    _check_scales(subject)
    return arrangement.volume()


def _check_in_pairs(subject: Subject) -> int:
    """Do the same by meeting pieces two by two, where no rank holds an element twice.

    Two pieces that share an element must have the same locations. The ranks of these then hold
    all of a piece when the elements that it shares are as many as its own, for each other rank.
    """
    table = subject.table
    _check_own_rank(subject)
    links = table.link.links()
    shared = [0] * len(links)
    pairs = touching_pairs(table.link, np.zeros_like(table.rank))
    for i, j in zip(pairs[0].tolist(), pairs[1].tolist(), strict=True):
        count = shared_count(links[i], links[j])
        if count and (table.place[i] != table.place[j] or table.scale[i] != table.scale[j]):
            raise _differing(subject, i, j, meet(links[i], links[j])[0].near)
        shared[i] += count
        shared[j] += count
    covered = [0] * len(table.holders)
    for row, (link, place) in enumerate(zip(links, table.place.tolist(), strict=True)):
        size, others = numel([n for n, _, _ in link.dims]), len(table.holders[place]) - 1
        if shared[row] != size * others:
            raise subject.refuse(
                "the locations are not the ranks that hold it",
                "P5",
                row,
                link.near,
                expected=f"{count_text(size * others, 'element')} that others hold",
                found=shared[row],
            )
        covered[place] += size
    return sum(size // len(ranks) for size, ranks in zip(covered, table.holders, strict=True))


def _differing(subject: Subject, row: int, other: int, offset: int) -> InvalidMapError:
    """Return the error of two pieces that share an element and differ in locations or scale."""
    table = subject.table
    said = [table.holders[table.place[k]] for k in (row, other)]
    if said[0] == said[1]:
        kinds = sorted({float(table.scale[k]) for k in (row, other)})
        what = "an element is held by several scales, here by"
        return subject.refuse(what, "P5", row, offset, found=kinds)
    return subject.refuse(
        "the locations are not those of another piece with the same element",
        "P5",
        row,
        offset,
        expected=list(said[1]),
        found=list(said[0]),
    )


def _check_own_rank(subject: Subject) -> None:
    table = subject.table
    order, label = classes_of([table.place, table.rank])
    wrong = [
        row
        for row in order[starts_of(label)].tolist()
        if int(table.rank[row]) not in table.holders[table.place[row]]
    ]
    if wrong:
        row = min(wrong)
        raise subject.refuse(
            "the locations are not the ranks that hold it",
            "P5",
            row,
            int(table.link.near[row]),
            expected=[int(table.rank[row])],
            found=list(table.holders[table.place[row]]),
        )


def _check_locations(subject: Subject, arrangement: Arrangement) -> None:
    table = subject.table
    parts, rows, owners = arrangement.parts()
    claimed = _groups(table.holders)
    sets = table.place[rows]
    wrong = claimed.counts[sets] != owners.counts
    alike = np.flatnonzero(~wrong)
    mine, counts = owners.gathered(alike)
    theirs, _ = claimed.gathered(sets[alike])
    wrong[np.repeat(alike, counts)[mine != theirs]] = True
    if wrong.any():
        part = int(np.argmax(wrong))
        row = int(rows[part])
        raise subject.refuse(
            "the locations are not the ranks that hold it",
            "P5",
            row,
            int(parts.near[part]),
            expected=list(owners.of(part)),
            found=list(table.holders[table.place[row]]),
        )


def _groups(sets: Sequence[tuple[int, ...]]) -> Groups:
    start = np.cumsum([0, *[len(ranks) for ranks in sets]])
    return Groups(start, np.array([rank for ranks in sets for rank in ranks], np.int64))


def _check_scales(subject: Subject) -> None:
    table = subject.table
    kinds, kind = kinds_of(table.scale)
    if len(kinds) < 2:
        return
    parts, rows, owners = Arrangement(table.link, kind).parts()
    mixed = np.flatnonzero(owners.counts > 1)
    if len(mixed):
        part = int(mixed[0])
        raise subject.refuse(
            "an element is held by several scales, here by",
            "P5",
            int(rows[part]),
            int(parts.near[part]),
            found=kinds[list(owners.of(part))].tolist(),
        )
