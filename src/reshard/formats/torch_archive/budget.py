"""How much memory the values of a pickle may take.

Theory. One byte of a pickle can make an object of two hundred: eight megabytes of the opcode for an
empty set take two gigabytes. Nothing in the file says so beforehand, but every opcode makes at most
a certain object, so what a pickle takes is added up opcode by opcode, and may be no more than a
fixed sum and a proportion of what has been read so far. By this count pickles of real archives take
up to 23 bytes for a byte, and are a few megabytes long: far from a sum that lets no file of less
than 100 MB fill a gigabyte. An index of DCP has an entry for every shard of every tensor and takes
up to 34; it may be long, so it has the proportion.

The sizes are those of CPython on 64 bits, with what growing containers hold in reserve.
"""

from __future__ import annotations

from dataclasses import dataclass

_SLOT = 9
"""A place in the stack or in a list; every opcode is charged with one."""

_MADE = (
    (b"\x85\x86\x87t", 64),
    (b"FGIJLM\x8a\x8b", 32),
    (b"BCSTUVX\x8c\x8d\x8e\x96", 56),
    (b"](l", 64),
    (b"}", 72),
    (b"\x8f\x91", 224),
    # The first entry makes the table of a dict.
    (b"dsu", 184),
    # A record, an OrderedDict or a tensor.
    (b"Rio\x81\x92", 260),
    (b"b", 64),
    (b"Q", 200),
)
"""Opcodes, and what each makes at most beside its own bytes."""

ITEM = 100
"""A key with its value in a dict, or a member of a set, beyond the first ones."""

SCATTERED = 150
"""A value that is stored in the memo out of order."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a pickle may take, in bytes: a sum, and so many for each byte read so far."""

    floor: int
    per_byte: int


ARCHIVE = Allowance(512 << 20, 4)
INDEX = Allowance(128 << 20, 40)


def _costs() -> tuple[int, ...]:
    costs = [_SLOT] * 256
    for opcodes, made in _MADE:
        for opcode in opcodes:
            costs[opcode] += made
    return tuple(costs)


COSTS = _costs()
"""The most that an opcode adds to memory, in bytes."""
