"""The map of one parameter: which pieces every rank's shard is made of.

Theory. ``ParamAffineMap`` is the relation *element of F ↔ element of a shard*. Read from shards
to ``F`` it rebuilds the parameter, read the other way it extracts a shard; both are one loop over
pieces with the copy reversed. It is a relation and not a function because of replication: one
element of ``F`` may live on many ranks, and the map says on which (``locations``) without
choosing one.

A map is a value: frozen, hashable, equal by its pieces as they are listed. ``same_elements()``
asks whether two say the same, however they are cut; ``canonical()`` gives the spelling that such
maps share. ``validate()`` proves the properties that composition
relies on; a map that is only held, printed or written need not be valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from reshard.errors import DocumentError, InvalidMapError, UsageError
from reshard.geometry import equality, movement, validation
from reshard.geometry.buffers import Tensor
from reshard.geometry.document import (
    Entry,
    read_entry,
    read_params,
    write_entry,
    write_params,
)
from reshard.geometry.folding import fold_table
from reshard.geometry.holes import gaps
from reshard.geometry.index_math import row_major_strides
from reshard.geometry.links import Link, make_link, meet
from reshard.geometry.map_value import MapValue
from reshard.geometry.matching import matched
from reshard.geometry.ordering import classes_of, kinds_of, order_by, starts_of
from reshard.geometry.piece_table import PieceTable
from reshard.geometry.tables import LinkTable

SCALE_POWER: Mapping[str, int] = MappingProxyType({"fp32": 1, "exp_avg": -1, "exp_avg_sq": -2})
"""The power of a piece's scale by which a shard holds each state of Adam (§2.1)."""


class ParamAffineMap(MapValue):
    """The pieces of one parameter, by the rank whose shard they fill.

    Parameters
    ----------
    logical_shape
        Shape of the logical tensor ``F``, in elements.
    shard_shapes
        Shape of each rank's shard. A shard may have any number of dimensions.
    pieces_by_rank
        The pieces of each rank; a rank that is left out has none.

    Raises
    ------
    InvalidMapError
        (``broken="form"``) when a shape is malformed, or pieces are given for a rank without a
        shard.

    Examples
    --------
    Two ranks hold the columns of a 2×4 matrix:

    >>> from reshard.geometry import AffinePiece
    >>> half = [AffinePiece((2, 2), 2 * r, (4, 1), 0, (2, 1), [r]) for r in (0, 1)]
    >>> split = ParamAffineMap((2, 4), {0: (2, 2), 1: (2, 2)}, {0: [half[0]], 1: [half[1]]})
    >>> print(split)
    2×4 over 2 ranks
      0 (2×2): F[0 + 2×4 2×1] → [0 + 2×2 2×1] on 0
      1 (2×2): F[2 + 2×4 2×1] → [0 + 2×2 2×1] on 1
    >>> split.validate()
    >>> split.extract(np.arange(8).reshape(2, 4), 1).tolist()
    [[2, 3], [6, 7]]
    """

    __slots__ = ()

    # -- properties --------------------------------------------------------------------------

    def validate(self, parameter: str | None = None, *, partial: bool = False) -> None:
        """Prove that the map is usable: bounds, write-once, P1, P3 and P5, exactly.

        Parameters
        ----------
        parameter
            Its name, for the message.
        partial
            Accept shards with elements that no piece writes, and ``F`` with elements that no
            rank holds: what :meth:`narrow` or missing ranks leave of a valid map.

        Raises
        ------
        InvalidMapError
            Its attributes say which property is broken, by which ranks, piece and offset.
        """
        if partial not in self._proved:
            validation.prove(
                validation.Subject(self.numel, self._shapes, self.table, parameter, partial)
            )
            # What has no holes is sound where holes are accepted, too.
            object.__setattr__(self, "_proved", self._proved | {partial, True})

    def uncovered_offsets(self) -> list[range]:
        """Return the elements of ``F`` that no rank holds, as maximal ranges, ascending.

        Raises
        ------
        UnsupportedError
            When there are more than :data:`~reshard.geometry.holes.MOST_HOLES` ranges.

        Examples
        --------
        >>> from reshard.geometry import AffinePiece
        >>> piece = AffinePiece((2, 2), 0, (4, 1), 0, (2, 1), [0])
        >>> ParamAffineMap((2, 4), {0: (2, 2)}, {0: [piece]}).uncovered_offsets()
        [range(2, 4), range(6, 8)]
        """
        return gaps(self.table.link, self.numel)

    def holders(self, offset: int) -> tuple[int, ...]:
        """Return the ranks whose shards hold one element of ``F``, ascending.

        Raises
        ------
        UsageError
            When ``F`` has no such element.
        """
        if not 0 <= offset < self.numel:
            raise UsageError("no such element", expected=f"0 … {self.numel - 1}", found=offset)
        link = self.table.link
        near = np.flatnonzero((link.near <= offset) & (offset < link.near_stop()))
        point = Link(offset, 0, ())
        touched = [meet(one, point) for one in link.take(near).links()]
        ranks = self.table.rank[near].tolist()
        return tuple(sorted({rank for rank, hit in zip(ranks, touched, strict=True) if hit}))

    def canonical(self) -> ParamAffineMap:
        """Return the same relation in its canonical form: maximally merged and folded.

        Empty pieces are dropped, others merged within each rank, set of locations and scale.
        """
        return folded_map(self.logical_shape, self._shapes, self.table.turned())

    def same_elements(self, other: ParamAffineMap) -> bool:
        """Tell whether another map says the same of every element, however the two are cut.

        Shapes must agree, and every element of a shard must be the same element of ``F``, held
        by the same ranks and by the same scale. The answer is exact for all maps that write each
        element of a shard once, of any size; maps that do not (:meth:`validate` refuses them) are
        the same when their canonical forms are.

        >>> from reshard.geometry import AffinePiece
        >>> halves = [AffinePiece((2,), at, (1,), at, (1,), [0]) for at in (2, 0)]
        >>> whole = [AffinePiece((4,), 0, (1,), 0, (1,), [0])]
        >>> one, other = (ParamAffineMap((4,), {0: (4,)}, {0: each}) for each in (halves, whole))
        >>> one == other, one.same_elements(other)
        (False, True)
        """
        if self.logical_shape != other.logical_shape or self._shapes != other._shapes:
            return False
        if self == other:
            return True
        if equality.writes_once(self.table) and equality.writes_once(other.table):
            return equality.same_elements(self.table, other.table)
        return self.canonical() == other.canonical()

    # -- restriction -------------------------------------------------------------------------

    def narrow(self, dim: int, start: int, length: int) -> ParamAffineMap:
        """Return the map of ``F.narrow(dim, start, length)`` over the same shards.

        Elements of the shards that lie outside the range are no longer written by any piece, so
        the result validates as ``partial``.

        Raises
        ------
        UsageError
            When the range is not inside the dimension.
        """
        shape = self.logical_shape
        if not 0 <= dim < len(shape) or not 0 <= start <= start + length <= shape[dim]:
            raise UsageError(
                "no such range", dim=dim, expected=f"inside {shape}", found=(start, length)
            )
        small = (*shape[:dim], length, *shape[dim + 1 :])
        strides = row_major_strides(shape)
        window = zip(small, strides, row_major_strides(small), strict=True)
        windows = [make_link(start * strides[dim], 0, window)] if 0 not in small else []
        table = self.table
        found = matched(table.link, LinkTable.of(windows))
        part = table.take(found.first)
        return folded_map(
            small,
            self._shapes,
            PieceTable(part.rank, part.index, found.link, part.scale, part.place, part.holders),
        )

    # -- movement ----------------------------------------------------------------------------

    def extract(self, full: Tensor, rank: int, scale_power: int = 1) -> Tensor:
        """Return one rank's shard, cut out of the full tensor.

        Parameters
        ----------
        full
            The logical tensor, NumPy or torch, any dtype; only its number of elements matters.
        rank
            Whose shard.
        scale_power
            The shard holds ``F * scale ** scale_power``; see :data:`SCALE_POWER`.

        Raises
        ------
        UsageError
            When the tensor has another number of elements, or the rank has no shard.
        ScaledStateError
            When a scaled piece would have to scale an optimizer state.
        """
        return movement.extract(self, full, rank, scale_power)

    def rebuild(self, shards: Mapping[int, Tensor], scale_power: int = 1) -> Tensor:
        """Return the full tensor, put together from shards.

        Ranks may be missing when the others hold all of ``F``. Wherever several shards hold the
        same element, their bits are compared.

        Parameters
        ----------
        shards
            Shard of each rank, NumPy or torch, all of one dtype.
        scale_power
            The shards hold ``F * scale ** scale_power``; see :data:`SCALE_POWER`.

        Raises
        ------
        ReplicaMismatchError
            (P2) when two shards hold an element by different bits.
        InvalidMapError
            (``broken="P1"``) when an element is in none of the given shards.
        UsageError
            When a shard has the wrong number of elements, or dtypes differ.
        ScaledStateError
            When a scaled piece would have to scale an optimizer state.
        """
        return movement.rebuild(self, shards, scale_power)

    # -- documents ---------------------------------------------------------------------------

    def to_dict(self) -> dict[str, object]:
        """Return the map as the plain scalars and lists of §6.2."""
        return write_entry((self.logical_shape, self._shapes, self._owned()))

    @classmethod
    def from_dict(cls, entry: object, path: str = "map") -> ParamAffineMap:
        """Return the map that :meth:`to_dict` (or DeepSpeed) wrote.

        Raises
        ------
        DocumentError
            With the path of the first malformed value.
        """
        return _built(read_entry(entry, path), path)


def _built(entry: Entry, path: str) -> ParamAffineMap:
    try:
        return ParamAffineMap(*entry)
    except InvalidMapError as error:
        raise DocumentError(f"{path}: {error}") from error


def folded_map(
    logical_shape: Sequence[int],
    shard_shapes: Mapping[int, Sequence[int]],
    table: PieceTable,
    *,
    by_runs: bool = False,
) -> ParamAffineMap:
    """Return the canonical map of pieces whose links are seen from the shard (near the shard).

    With ``by_runs`` the form depends on the elements alone, and may have more pieces than came.
    """
    order, label = classes_of([table.rank, table.place, kinds_of(table.scale)[1]])
    group = np.empty(len(order), np.int64)
    group[order] = label
    lead = order[starts_of(label)]
    link, group = fold_table(table.link, group, by_runs=by_runs)
    rows = lead[group]
    order = order_by([table.rank[rows], link.near])
    link, rows = link.take(order), rows[order]
    rank = table.rank[rows]
    index = np.arange(len(rank)) - np.searchsorted(rank, rank)
    folded = PieceTable(
        rank, index, link.turned().normalised(), table.scale[rows], table.place[rows], table.holders
    )
    return ParamAffineMap.from_table(logical_shape, shard_shapes, folded)


def maps_to_document(maps: Mapping[str, ParamAffineMap]) -> dict[str, object]:
    """Return the whole document of §6.2, ``{"version": 1, "params": {pattern: map}}``."""
    return write_params(
        {p: (m.logical_shape, m.shard_shapes, m.pieces_by_rank) for p, m in maps.items()}
    )


def maps_from_document(document: object, *, validate: bool = False) -> dict[str, ParamAffineMap]:
    """Return the maps of a whole document, by pattern.

    Parameters
    ----------
    document
        What JSON or a checkpoint gave.
    validate
        Also refuse maps that break P1, P3 or P5.

    Raises
    ------
    DocumentError
        When the document is malformed or of an unknown version.
    InvalidMapError
        When ``validate`` is set and a map is not valid.
    """
    maps: dict[str, ParamAffineMap] = {}
    known: dict[object, ParamAffineMap] = {}  # a model has tens of maps for thousands of names
    for pattern, entry in read_params(document).items():
        shape, shapes, pieces = entry
        content = (shape, tuple(shapes.items()), tuple(pieces.items()))
        if content not in known:
            known[content] = _built(entry, f'affine_map.params."{pattern}"')
        maps[pattern] = known[content]
    if validate:
        for pattern, one in maps.items():
            one.validate(pattern)
    return maps
