"""Streaming the parts of a slot through one block buffer.

Theory. Whether a slot is being made from source files or read back to be checked, the same happens:
bytes are produced part by part into a buffer, each leaf is digested as it passes, and whenever the
buffer is full (or the parts are through) it is handed on, to be summed and written or only summed.
The buffer may be smaller than a leaf or hold many small parts; nothing that comes out depends on
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from reshard.execution.blocks import Part

Produce = Callable[["Part", int, int, memoryview], None]
"""Writes slot bytes `[start, stop)`, which lie in a part, into a buffer."""

Leaves = dict[tuple[int, int], bytes]
"""Digest of each leaf, by `(fill, leaf)`."""


def stream(
    parts: Sequence[Part],
    produce: Produce,
    buffer: memoryview,
    leaves: Leaves,
    *,
    first: int | None = None,
) -> Iterator[tuple[int, memoryview]]:
    """Produce parts block by block.

    Parameters
    ----------
    parts
        Neighbouring parts of a slot.
    produce
        Makes the bytes.
    buffer
        Where they are made.
    leaves
        Receives the digest of each leaf.
    first
        Bytes of the first block at most; the others are as large as the buffer.

    Yields
    ------
    tuple of int and memoryview
        Offset in the slot and bytes of a block, valid until the next one is asked for.
    """
    begin = parts[0].start if parts else 0
    used, room = 0, first or len(buffer)
    for part in parts:
        at = part.start
        digest = xxhash.xxh3_128()
        while at < part.stop:
            nbytes = _step(part, at, room - used)
            if nbytes == 0:
                if used:
                    yield begin, buffer[:used]
                begin, used, room = begin + used, 0, len(buffer)
                continue
            view = buffer[used : used + nbytes]
            produce(part, at, at + nbytes, view)
            if part.fill is not None:
                digest.update(view)
            at += nbytes
            used += nbytes
        if part.fill is not None:
            leaves[part.leaf] = digest.digest()
    if used:
        yield begin, buffer[:used]


def _step(part: Part, at: int, room: int) -> int:
    """Bytes to produce next: what there is room for, in whole elements."""
    nbytes = min(room, part.stop - at)
    if part.fill is not None and at + nbytes < part.stop:
        nbytes -= nbytes % part.fill.dtype.itemsize
    return nbytes
