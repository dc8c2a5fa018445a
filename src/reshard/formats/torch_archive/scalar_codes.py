"""The opcodes that push single numbers and texts, as CPython's pickler chooses them.

Theory. The shortest opcode that holds the value is taken. Source: ``Modules/_pickle.c`` of CPython
3.13 (``save_long``, ``save_float``, ``save_unicode``), protocol 2.
"""

from __future__ import annotations

import struct


def int_code(number: int) -> bytes:
    r"""Return the opcode that pushes an integer.

    >>> int_code(7), int_code(-1), int_code(1 << 40)
    (b'K\x07', b'J\xff\xff\xff\xff', b'\x8a\x06\x00\x00\x00\x00\x00\x01')
    """
    if 0 <= number < 1 << 8:
        return b"K" + bytes((number,))
    if 0 <= number < 1 << 16:
        return b"M" + number.to_bytes(2, "little")
    if -(1 << 31) <= number < 1 << 31:
        return b"J" + number.to_bytes(4, "little", signed=True)
    # The fewest bytes that hold the number and its sign.
    bits = (number if number >= 0 else ~number).bit_length()
    raw = number.to_bytes(bits // 8 + 1, "little", signed=True)
    if len(raw) < 1 << 8:
        return b"\x8a" + bytes((len(raw),)) + raw
    return b"\x8b" + len(raw).to_bytes(4, "little") + raw


def float_code(number: float) -> bytes:
    """Return the opcode that pushes a float."""
    return b"G" + struct.pack(">d", number)


def text_code(text: str) -> bytes:
    """Return the opcode that pushes a text."""
    raw = text.encode("utf-8", "surrogatepass")
    return b"X" + len(raw).to_bytes(4, "little") + raw
