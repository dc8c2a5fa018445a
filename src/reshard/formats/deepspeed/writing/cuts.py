"""How the target cuts a parameter over its model-parallel ranks.

Theory. A cut is a map from the parameter to columns, and the shapes of the shards as the target's
model has them. The two differ only for a padded vocabulary: the last rows of the padded table are
in no logical tensor, so the map leaves them out and they are written as zeros, which is what
DeepSpeed's own loader puts there. Only a table that is split along dim 0 is padded, so what is left
of a shard is its first rows, a prefix of its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from reshard.errors import LayoutError
from reshard.geometry import ParamAffineMap
from reshard.layouts.builders import contiguous_split_map, replicated_map
from reshard.layouts.ranges import resized

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """How one parameter is cut."""

    map: ParamAffineMap
    """From the parameter to columns; a shard that is padded has the shape of its real part."""
    shapes: Mapping[int, Shape]
    """Column -> shape of its shard, padding included."""

    @classmethod
    def exact(cls, target: ParamAffineMap) -> Cut:
        """The cut of a parameter without padding."""
        return cls(target, dict(target.shard_shapes))

    @classmethod
    def whole(cls, shape: Shape, columns: int) -> Cut:
        """The cut of a parameter that every column holds whole."""
        return cls.exact(replicated_map(shape, columns))

    @property
    def is_padded(self) -> bool:
        """Whether ranks hold rows that are in no logical tensor."""
        return dict(self.map.shard_shapes) != dict(self.shapes)

    def real_numel(self, column: int) -> int:
        """Elements of a column's shard that are not padding."""
        return prod(self.map.shard_shapes[column])


def moved(cut: Cut, by: int) -> Cut:
    """The same cut, for columns that are numbered from `by` on."""
    target = cut.map
    pieces = {
        column + by: tuple(
            replace(piece, locations=tuple(place + by for place in piece.locations))
            for piece in held
        )
        for column, held in target.pieces_by_rank.items()
    }
    shapes = {column + by: shape for column, shape in target.shard_shapes.items()}
    return Cut(
        ParamAffineMap(target.logical_shape, shapes, pieces),
        {column + by: shape for column, shape in cut.shapes.items()},
    )


def padded_cut(shape: Shape, widths: Sequence[int]) -> Cut:
    """The cut of a table whose rows are split over ranks and padded at the end.

    Parameters
    ----------
    shape
        Shape of the parameter, without padding.
    widths
        Rows of every rank's shard, padding included.

    Raises
    ------
    LayoutError
        When the ranks have fewer rows than the parameter.

    Examples
    --------
    >>> cut = padded_cut((5, 2), (4, 4))
    >>> dict(cut.map.shard_shapes), cut.shapes
    ({0: (4, 2), 1: (1, 2)}, {0: (4, 2), 1: (4, 2)})
    """
    if sum(widths) < shape[0]:
        raise LayoutError(
            "a padded table has fewer rows than the parameter",
            dim=0,
            expected=f"at least {shape[0]}",
            found=sum(widths),
        )
    real = []
    left = shape[0]
    for width in widths:
        real.append(min(width, left))
        left -= real[-1]
    shapes = {rank: resized(shape, 0, width) for rank, width in enumerate(widths)}
    return Cut(contiguous_split_map(shape, real, 0), shapes)
