"""A join: a logical tensor as the disjoint union of affine images of others.

Theory. Codes cut the same numbers into tensors differently: one has ``q``, ``k`` and ``v``, another
their rows interleaved in one matrix; one a tensor a layer, another all layers stacked. Between such
spellings no number changes, elements only get other places. So a tensor of one spelling is a map
over the tensors of the other, just as it is a map over the ranks that hold shards of it. Unlike
ranks, tensors never share elements.

Composition is :func:`~reshard.geometry.nest`: through the join into a tensor, and through that
one's own map into its holders (:meth:`Join.through`). Nothing is gathered on the way. Joins that
use up the tensors they are made of can be turned around (:func:`inverted`), so a way there is a way
back.

:func:`spelled_join` builds a join from the axes of the tensors (:mod:`.spelling`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from reshard.errors import InvalidMapError
from reshard.geometry.affine_map import ParamAffineMap
from reshard.geometry.index_math import row_major_strides
from reshard.geometry.nesting import nest
from reshard.geometry.piece import AffinePiece
from reshard.geometry.spelling import Spelling, extents, inner_axes

Part = tuple[str, tuple[int, ...]]
"""A tensor that a join is made of: its label, and its place along the axes that count tensors."""


@dataclass(frozen=True, slots=True)
class Join:
    """A logical tensor, and which element of which other tensor each of its elements is.

    Examples
    --------
    Two vectors, one after the other, and the way back:

    >>> axes = {"a": Spelling.of("n"), "b": Spelling.of("m")}
    >>> both = spelled_join(Spelling.of("[a b]"), axes, {"n": 2, "m": 3})
    >>> both.parts
    (('a', ()), ('b', ()))
    >>> print(both.map)
    5 over 2 ranks
      0 (2): F[0 + 2×1] → [0 + 2×1] on 0
      1 (3): F[2 + 3×1] → [0 + 3×1] on 1
    >>> print(inverted([both])[("b", ())].map)
    3 over 1 rank
      0 (5): F[0 + 3×1] → [2 + 3×1] on 0
    """

    parts: tuple[Part, ...]
    """What it is made of; part ``k`` is rank ``k`` of the map."""
    map: ParamAffineMap
    """From the tensor to its parts, each in row-major order."""

    def validate(self, parameter: str | None = None) -> None:
        """Prove that each element of the tensor is one element of one part, and no two the same.

        Raises
        ------
        InvalidMapError
            Its attributes say which property is broken, by which part and offset.
        """
        self.map.validate(parameter, partial=True)
        holes = self.map.uncovered_offsets()
        if holes:
            raise InvalidMapError(
                "an element of a joined tensor is in none of its parts",
                broken="P1",
                offset=holes[0].start,
                parameter=parameter,
            )
        held = sum(piece.numel for _, piece in self.map.pieces())
        if held != self.map.numel:
            raise InvalidMapError(
                "two parts of a join hold the same element",
                broken="P5",
                parameter=parameter,
                expected=self.map.numel,
                found=held,
            )

    def through(
        self, held: Sequence[ParamAffineMap]
    ) -> tuple[ParamAffineMap, tuple[tuple[int, int], ...]]:
        """Compose with the map of each part.

        Parameters
        ----------
        held
            From each part to its holders.

        Returns
        -------
        map, origins
            From the tensor to holders, and of each of these the part and the holder of it; holders
            that have no element of the tensor are left out.
        """
        origins = [(part, rank) for part, one in enumerate(held) for rank in one.ranks]
        number = {origin: new for new, origin in enumerate(origins)}
        inner = {
            part: renumbered(one, {rank: number[part, rank] for rank in one.ranks})
            for part, one in enumerate(held)
        }
        whole = nest(self.map, inner)
        used = [rank for rank in whole.ranks if whole.pieces_by_rank[rank]]
        if not used:  # a tensor without elements
            used = list(whole.ranks)[:1]
        kept = renumbered(whole, {rank: new for new, rank in enumerate(used)})
        return kept, tuple(origins[rank] for rank in used)


def renumbered(one: ParamAffineMap, ranks: Mapping[int, int]) -> ParamAffineMap:
    """Return a map with other numbers for its ranks; those that have none are left out.

    >>> half = AffinePiece((2,), 0, (1,), 0, (1,), [0])
    >>> print(renumbered(ParamAffineMap((2,), {0: (2,)}, {0: [half]}), {0: 7}))
    2 over 1 rank
      7 (2): F[0 + 2×1] → [0 + 2×1] on 7
    """
    pieces = {
        ranks[rank]: [
            AffinePiece(
                *(piece.shape, piece.source_offset, piece.source_strides),
                *(piece.dest_offset, piece.dest_strides),
                tuple(ranks[holder] for holder in piece.locations if holder in ranks),
                piece.scale,
            )
            for piece in owned
        ]
        for rank, owned in one.pieces_by_rank.items()
        if rank in ranks
    }
    shapes = {ranks[rank]: shape for rank, shape in one.shard_shapes.items() if rank in ranks}
    return ParamAffineMap(one.logical_shape, shapes, pieces)


def inverted(joins: Sequence[Join]) -> dict[Part, Join]:
    """Return each part of some joins as a join of their tensors, which are numbered in order.

    The label of tensor ``k`` is ``str(k)``.

    Raises
    ------
    InvalidMapError
        A part is not used up, or used twice.
    """
    shapes: dict[Part, tuple[int, ...]] = {}
    pieces: dict[Part, dict[int, list[AffinePiece]]] = {}
    for number, join in enumerate(joins):
        for rank, piece in join.map.pieces():
            back = AffinePiece(
                *(piece.shape, piece.dest_offset, piece.dest_strides),
                *(piece.source_offset, piece.source_strides),
                (number,),
            )
            pieces.setdefault(join.parts[rank], {}).setdefault(number, []).append(back)
        shapes |= dict(zip(join.parts, join.map.shard_shapes.values(), strict=True))
    made = {}
    for part, shape in shapes.items():
        owned = pieces.get(part, {})
        wholes = sorted(owned)
        image = ParamAffineMap(shape, {n: joins[n].map.logical_shape for n in wholes}, owned)
        turned = renumbered(image, {n: at for at, n in enumerate(wholes)})
        made[part] = Join(tuple((str(n), ()) for n in wholes), turned)
        made[part].validate(part[0])
    return made


def identity_join(label: str, shape: Sequence[int]) -> Join:
    """Return the join of one tensor as it is.

    >>> identity_join("w", (2, 3)).map.logical_shape
    (2, 3)
    """
    extent = tuple(shape)
    strides = row_major_strides(extent)
    piece = AffinePiece(extent, 0, strides, 0, strides, (0,))
    return Join(((label, ()),), ParamAffineMap(extent, {0: extent}, {0: [piece]}))


def leading_join(label: str, shape: Sequence[int], count: int) -> Join:
    """Return the join of the first rows of a tensor, whose other rows are padding.

    >>> print(leading_join("w", (4, 2), 3).map)
    3×2 over 1 rank
      0 (4×2): F[0 + 6×1] → [0 + 6×1] on 0
    """
    rows = identity_join(label, shape).map.narrow(0, 0, count)
    return Join(((label, ()),), rows)


def spelled_join(whole: Spelling, parts: Mapping[str, Spelling], sizes: Mapping[str, int]) -> Join:
    """Return the join of tensors that are spelled by axes.

    Parameters
    ----------
    whole
        The joint tensor.
    parts
        What it is made of, by label: the labels of its brackets, or one part where it has none. An
        axis that a part lacks counts tensors: there is one for each place along it.
    sizes
        Extent of every axis.

    Examples
    --------
    One group of two query heads, a key and a value head, each one row wide:

    >>> parts = {label: Spelling.of("(g d)") for label in "kv"} | {"q": Spelling.of("(g r d)")}
    >>> qkv = spelled_join(Spelling.of("(g [q k v])"), parts, {"g": 2, "r": 2, "d": 1})
    >>> import numpy as np
    >>> shards = {"q": [0, 1, 2, 3], "k": [10, 11], "v": [20, 21]}
    >>> qkv.map.rebuild({n: np.array(shards[p]) for n, (p, _) in enumerate(qkv.parts)}).tolist()
    [0, 1, 10, 20, 2, 3, 11, 21]
    """
    shape = extents(whole, parts, sizes)
    strides, at = _strides_in(whole, shape, parts, sizes)
    listed: list[Part] = []
    shapes: dict[int, tuple[int, ...]] = {}
    pieces: dict[int, list[AffinePiece]] = {}
    for label in whole.labels or tuple(parts):
        spelling = parts[label]
        counted = [axis for axis in whole.axes if axis not in spelling.axes]
        own = extents(spelling, {}, sizes)
        near, _ = _strides_in(spelling, own, {}, sizes)
        far = {**strides, **_inner_strides(whole, spelling, at.stride, sizes)}
        axes = spelling.axes
        for place in product(*(range(sizes[axis]) for axis in counted)):
            number = len(listed)
            offset = at.starts.get(label, 0)
            offset += sum(far[axis] * n for axis, n in zip(counted, place, strict=True))
            listed.append((label, place))
            shapes[number] = own
            pieces[number] = [
                AffinePiece(
                    tuple(sizes[axis] for axis in axes),
                    offset,
                    tuple(far[axis] for axis in axes),
                    0,
                    tuple(near[axis] for axis in axes),
                    (number,),
                )
            ]
    return Join(tuple(listed), ParamAffineMap(shape, shapes, pieces).canonical())


@dataclass(frozen=True, slots=True)
class _Chain:
    """Where the chained parts of a tensor start, and the stride of a step along the chain."""

    starts: Mapping[str, int]
    stride: int = 0


def _strides_in(
    spelling: Spelling,
    shape: tuple[int, ...],
    parts: Mapping[str, Spelling],
    sizes: Mapping[str, int],
) -> tuple[dict[str, int], _Chain]:
    """Strides of the axes that a tensor names, in elements, and where its chain is."""
    strides: dict[str, int] = {}
    chain = _Chain({})
    for dim, step in zip(spelling.dims, row_major_strides(shape), strict=True):
        for token in reversed(dim):
            if isinstance(token, str):
                strides[token] = step
                step *= sizes[token]  # noqa: PLW2901 - grows from the innermost token outward
            else:
                starts, count = {}, 0
                for label in token:
                    starts[label] = count * step
                    count += prod(sizes[a] for a in inner_axes(spelling, parts[label]))
                chain = _Chain(starts, step)
                step *= count  # noqa: PLW2901
    return strides, chain


def _inner_strides(
    whole: Spelling, part: Spelling, step: int, sizes: Mapping[str, int]
) -> dict[str, int]:
    """Strides, in the whole, of the axes of a part that lie in the chain."""
    strides = {}
    for axis in reversed(inner_axes(whole, part)):
        strides[axis] = step
        step *= sizes[axis]
    return strides
