"""The document of a plan: its parts as plain scalars and lists, and back.

Theory. A plan is written as one object with a version. What is read comes from elsewhere: every
value is checked once, here, and refused with the path to it (:mod:`reshard.geometry.document`).
"""

from __future__ import annotations

import math

from reshard.errors import DocumentError
from reshard.geometry.document import (
    as_list,
    as_mapping,
    as_number,
    as_offset,
    as_offsets,
    as_rank,
    fields,
    refuse,
)
from reshard.geometry.segments import Segment

PLAN_VERSION = 1
"""The version of the plan document that is written, and the newest that is read."""


def write_segment(segment: Segment) -> dict[str, object]:
    """Return a segment as plain scalars and lists."""
    written: dict[str, object] = {
        "shape": list(segment.shape),
        "source": [segment.source_rank, segment.source_offset, list(segment.source_strides)],
        "target": [segment.target_rank, segment.target_offset, list(segment.target_strides)],
    }
    if segment.scale != 1.0:
        written["scale"] = segment.scale
    return written


def read_segment(value: object, path: str) -> Segment:
    """Return the segment that a document has at a path."""
    shape, source, target, scale = fields(value, path, ("shape", "source", "target"), ("scale",))
    extents = as_offsets(shape, f"{path}.shape")
    source_rank, source_offset, source_strides = _read_end(source, f"{path}.source", extents)
    target_rank, target_offset, target_strides = _read_end(target, f"{path}.target", extents)
    factor = as_number(scale, f"{path}.scale")
    if not math.isfinite(factor) or not factor:
        refuse(f"{path}.scale", "a scale without an inverse", "a finite non-zero number", scale)
    return Segment(
        extents,
        source_rank,
        source_offset,
        source_strides,
        target_rank,
        target_offset,
        target_strides,
        factor,
    )


def _read_end(value: object, path: str, shape: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
    triple = as_list(value, path)
    if len(triple) != 3:
        refuse(path, "not a triple", "[rank, offset, strides]", value)
    strides = as_offsets(triple[2], f"{path}[2]")
    if len(strides) != len(shape):
        raise DocumentError(f"{path}[2]: strides and shape differ in length")
    return as_offset(triple[0], f"{path}[0]"), as_offset(triple[1], f"{path}[1]"), strides


def read_shapes(value: object, path: str) -> dict[int, tuple[int, ...]]:
    """Return the shard shape of every rank that a document has at a path."""
    return {
        as_rank(key, path): as_offsets(shape, f"{path}.{key}")
        for key, shape in as_mapping(value, path).items()
    }


def read_holes(value: object, path: str) -> dict[int, list[range]]:
    """Return the unfilled ranges of every rank that a document has at a path."""
    holes = {}
    for key, listed in as_mapping(value, path).items():
        here = f"{path}.{key}"
        pairs = [as_offsets(pair, here) for pair in as_list(listed, here)]
        if any(len(pair) != 2 or pair[0] >= pair[1] for pair in pairs):
            refuse(here, "not a range", "[start, stop]", listed)
        holes[as_rank(key, path)] = [range(*pair) for pair in pairs]
    return holes
