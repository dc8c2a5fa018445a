"""Making two checkpoints comparable when one of them is an export.

Theory. A checkpoint and an export of it hold the same in three other respects: the export lacks
whole states (the moments, the step), holds weights in another element type, and keeps tied names
twice or not. None of that is a difference, and all of it is said: what the export does not hold is
listed, and rounded weights are compared in the export's type, after the same rounding (of two
exports, in the smaller type). A *name* that the export lacks is a difference, for nobody leaves
weights out on purpose without saying so.

Two checkpoints of which neither is an export are compared as they are, bit for bit; what a
conversion rounded because it was told to is compared after that rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from reshard.execution import Comparison, Progress, compare
from reshard.formats.checkpoint import Checkpoint, TensorKey
from reshard.formats.dtypes import DType

if TYPE_CHECKING:
    from reshard.planning import Plan


@dataclass(frozen=True, slots=True)
class Pair:
    """Two checkpoints, ready to be compared."""

    left: Checkpoint
    right: Checkpoint
    """What is compared of each."""
    dtypes: Mapping[TensorKey, DType] = field(default_factory=dict)
    """The element type in which a tensor is compared, where the two sides have different ones."""
    not_held: Mapping[str, int] = field(default_factory=dict)
    """States that only the other side of an export has: state -> number of tensors and scalars."""

    def rounded_by(self, plan: Plan) -> Pair:
        """The pair, with what a plan rounded between the two compared in the type it gave it."""
        given = {fill.key: fill.dtype for fill in plan.fills() if fill.stored is not None}
        rounded = {key: dtype for key, dtype in given.items() if self._is_now(key, dtype)}
        return replace(self, dtypes={**rounded, **self.dtypes})

    def _is_now(self, key: TensorKey, dtype: DType) -> bool:
        """Whether a tensor has a type on the right only; a master has its own on both sides."""
        left, right = self.left.tensors.get(key), self.right.tensors.get(key)
        return left is not None and right is not None and right.dtype == dtype != left.dtype

    def compared(
        self, *, workers: int, max_memory: int, progress: Progress | None = None
    ) -> Comparison:
        """Compare the two."""
        found = compare(
            self.left,
            self.right,
            dtypes=self.dtypes,
            workers=workers,
            max_memory=max_memory,
            progress=progress,
        )
        return replace(found, not_held=dict(self.not_held))


def comparable(left: Checkpoint, right: Checkpoint) -> Pair:
    """Prepare two checkpoints for their comparison."""
    not_held: Counter[str] = Counter()
    for export, other in ((left, right), (right, left)):
        if export.is_export:
            not_held += _absent(other, export)
    left, right = _untied(left, right), _untied(right, left)
    if not (left.is_export or right.is_export):
        return Pair(left, right)
    left, right = _once_tied(left, right), _once_tied(right, left)
    left, right = _narrowed(left, not_held), _narrowed(right, not_held)
    return Pair(left, right, _common_dtypes(left, right), not_held)


def _untied(side: Checkpoint, other: Checkpoint) -> Checkpoint:
    """The side with every state of a tied name as a tensor that the other side has as one."""
    added = {
        (alias, state): replace(tensor, name=alias)
        for alias, owner in side.aliases.items()
        for (name, state), tensor in side.tensors.items()
        if name == owner and (alias, state) in other.tensors
    }
    return replace(side, tensors={**side.tensors, **added}) if added else side


def _once_tied(side: Checkpoint, other: Checkpoint) -> Checkpoint:
    """The side without an owner whose tensor an export holds under a tied name alone.

    Which of the names it keeps is the choice of whoever writes an export.
    """
    if not other.is_export:
        return side
    spared = {
        (owner, state)
        for alias, owner in side.aliases.items()
        for name, state in side.tensors
        if name == owner and (alias, state) in other.tensors
    }
    kept = {k: t for k, t in side.tensors.items() if k not in spared or k in other.tensors}
    return replace(side, tensors=kept)


def _absent(other: Checkpoint, export: Checkpoint) -> Counter[str]:
    """States of the other side that an export has for no name at all."""
    held = {state for _, state in export.tensors}
    keys = (*other.tensors, *other.scalars)
    return Counter(state for _, state in keys if state not in held)


def _narrowed(side: Checkpoint, not_held: Mapping[str, int]) -> Checkpoint:
    return replace(
        side,
        tensors={key: value for key, value in side.tensors.items() if key[1] not in not_held},
        scalars={key: value for key, value in side.scalars.items() if key[1] not in not_held},
    )


def _common_dtypes(left: Checkpoint, right: Checkpoint) -> dict[TensorKey, DType]:
    """The type to compare each floating-point tensor in that is stored in two types."""
    found = {}
    for key, tensor in left.tensors.items():
        ours, theirs = tensor.dtype, right.tensors[key].dtype if key in right.tensors else None
        if theirs is None or ours == theirs or not (ours.is_floating and theirs.is_floating):
            continue
        if left.is_export and right.is_export:
            found[key] = ours if ours.itemsize < theirs.itemsize else theirs
        else:
            found[key] = theirs if right.is_export else ours
    return found
