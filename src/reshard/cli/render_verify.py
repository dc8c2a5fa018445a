"""The report of ``reshard verify``, and the part that ``reshard convert --verify`` shares."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from reshard.cli.blocks import Block, Tone, lines, table
from reshard.cli.units import counted, format_bytes, format_count, format_shape

if TYPE_CHECKING:
    from reshard.api import Comparison, TensorDifference

SHOWN_DIFFERENCES = 20
_SIDES = {"left": "CKPT", "right": "OUT"}
_ONE_SIDED = {f"only in {side}": f"only in {name}" for side, name in _SIDES.items()}


def comparison_blocks(
    found: Comparison, left: str, right: str, policy: str, *, accepted: bool
) -> Iterator[Block]:
    """Give the blocks of a comparison.

    Parameters
    ----------
    found
        The comparison.
    left, right
        Paths of the two checkpoints.
    policy
        What was chosen for copies that differ.
    accepted
        Whether the policy explains all that was found.
    """
    yield from difference_blocks(found)
    yield _replicas(found)
    yield table(
        "files that are not as the manifest beside them says",
        "side file found",
        ((_SIDES[side], c.file, c.said) for side, c in found.changes[:SHOWN_DIFFERENCES]),
    )
    yield _verdict(found, left, right, policy, accepted=accepted)


def difference_blocks(found: Comparison) -> Iterator[Block]:
    """Give the totals by state, and the first differences."""
    yield _states(found)
    yield lines("", cast_lines(found), Tone.NOTICE)
    yield _differences(found)
    yield table(
        "other values that differ",
        "what CKPT OUT",
        ((value.what, value.left, value.right) for value in found.values[:SHOWN_DIFFERENCES]),
    )


def cast_lines(found: Comparison) -> Iterator[str]:
    """Say what was rounded before it was compared, and what one side leaves out by its nature."""
    for (left, right), count in found.casts.items():
        yield (
            f"{counted(count, 'tensor')}, {left} in CKPT and {right} in OUT: compared in the type "
            "of the exported weights, after rounding to nearest"
        )
    if found.not_held:
        held = ", ".join(f"{state} ({count})" for state, count in found.not_held.items())
        yield f"not compared, for exported weights go without: {held}"


def format_largest(value: float) -> str:
    """Return the largest difference, a dash where none can be computed.

    Examples
    --------
    >>> format_largest(0.25), format_largest(float("nan"))
    ('0.25', '-')
    """
    return "-" if math.isnan(value) else f"{value:.6g}"


def _states(found: Comparison) -> Block:
    missing: dict[str, int] = {}
    unlike: dict[str, int] = {}
    for difference in found.differences:
        if difference.what in _ONE_SIDED:
            missing[difference.key[1]] = missing.get(difference.key[1], 0) + 1
        elif difference.what != "values":
            unlike[difference.key[1]] = unlike.get(difference.key[1], 0) + 1
    totals = {total.state: total for total in found.states}
    rows = []
    for state in dict.fromkeys((*totals, *unlike, *missing)):
        total = totals.get(state)
        compared, differing = (total.tensors, total.differing) if total else (0, 0)
        differing += unlike.get(state, 0)
        compared += unlike.get(state, 0)
        rows.append((state, compared, compared - differing, differing, missing.get(state, 0)))
    return table("states", "state >compared >equal >different >missing", rows)


def _differences(found: Comparison) -> Block:
    count = len(found.differences)
    shown = found.differences[:SHOWN_DIFFERENCES]
    return table(
        f"first {len(shown)} of {count} differences" if count > len(shown) else "differences",
        "name state what >elements first CKPT OUT >largest",
        map(_difference_row, shown),
    )


def _difference_row(difference: TensorDifference) -> tuple[str, ...]:
    what = _ONE_SIDED.get(difference.what, difference.what)
    if difference.what != "values":
        return (*difference.key, what, "", "", difference.left, difference.right, "")
    return (
        *difference.key,
        what,
        f"{format_count(difference.count)} of {format_count(difference.numel)}",
        format_shape(difference.index),
        difference.left,
        difference.right,
        format_largest(difference.largest),
    )


def _replicas(found: Comparison) -> Block:
    return table(
        "copies inside one side that differ from each other",
        "side name state >elements >first >largest files",
        (
            (
                _SIDES.get(side, side),
                *finding.key,
                format_count(finding.count),
                finding.first,
                format_largest(finding.largest),
                ", ".join(finding.files),
            )
            for side, finding in found.replicas[:SHOWN_DIFFERENCES]
        ),
    )


def _verdict(found: Comparison, left: str, right: str, policy: str, *, accepted: bool) -> Block:
    compared = (
        f"{counted(found.tensors, 'tensor')} ({format_bytes(found.nbytes)}), "
        f"{counted(found.scalars, 'scalar')}, {counted(found.extras, 'other value')}"
    )
    if found.equal:
        rounded = " after rounding" if found.casts else ""
        return lines("", (f"equal{rounded}: {left} and {right}: {compared}",), Tone.GOOD)
    copies = counted(len(found.replicas), "tensor")
    if accepted:
        said = f"accepted (--replicas {policy}): {left} and {right}: {compared}; {copies} with "
        return lines("", (f"{said}copies that differ inside CKPT",), Tone.NOTICE)
    if not (found.differences or found.values or found.changes):
        said = (
            f"different: {left} and {right} agree, but {copies} with copies that differ from each "
            "other inside one side; next: --replicas first accepts that"
        )
        return lines("", (said,), Tone.BAD)
    wrong = ", ".join(
        counted(count, *words)
        for count, *words in (
            (len(found.differences), "tensor"),
            (len(found.values), "other value"),
            (len(found.replicas), "tensor with unlike copies", "tensors with unlike copies"),
            (len(found.changes), "change against a manifest", "changes against a manifest"),
        )
        if count
    )
    said = f"different: {left} and {right}: {wrong}; compared: {compared}"
    return lines("", (said,), Tone.BAD)
