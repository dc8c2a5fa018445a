"""The opcodes of a pickle that push numbers, texts and bytes.

Theory. Each kind of number and text has a short, a long and, from protocol 0, a textual opcode. A
length field is never trusted beyond the end of the pickle, and decimal digits, whose conversion
costs quadratic time, are bounded. What most opcodes need is made from a ``struct`` layout and a
decoder. Source: ``pickletools`` of CPython 3.13.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from reshard.formats.torch_archive.machine import Machine

    Handler = Callable[[Machine, int], int]

Number = TypeVar("Number", int, float)

UINT32 = struct.Struct("<I")
_UINT16 = struct.Struct("<H")
_INT32 = struct.Struct("<i")
_UINT64 = struct.Struct("<Q")
_DOUBLE = struct.Struct(">d")
_MOST_DIGITS = 4000
_MOST_BYTES = 1600
TOO_MANY_DIGITS = "a number of too many digits"


# -------------------------------------------------------------------------------- constants


def constant(value: object) -> Handler:
    """Return the handler that pushes always the same value."""

    def push(machine: Machine, position: int) -> int:
        machine.stack.append(value)
        return position

    return push


def _fresh(make: Callable[[], object]) -> Handler:
    def push(machine: Machine, position: int) -> int:
        machine.stack.append(make())
        return position

    return push


def _number(layout: struct.Struct) -> Handler:
    size = layout.size
    unpack = layout.unpack_from

    def push(machine: Machine, position: int) -> int:
        machine.stack.append(unpack(machine.data, position)[0])
        return position + size

    return push


def _byte(machine: Machine, position: int) -> int:
    machine.stack.append(machine.data[position])
    return position + 1


def _long(layout: struct.Struct | None) -> Handler:
    def push(machine: Machine, position: int) -> int:
        count, start = _length(machine, position, layout)
        if count > _MOST_BYTES:
            # Nor can Python show a number of more than 4,300 digits.
            raise ValueError(TOO_MANY_DIGITS)
        machine.stack.append(int.from_bytes(machine.take(start, count), "little", signed=True))
        return start + count

    return push


def _length(machine: Machine, position: int, layout: struct.Struct | None) -> tuple[int, int]:
    """Return the length field at a position (one byte without a layout), and what follows it."""
    if layout is None:
        return machine.data[position], position + 1
    count: int = layout.unpack_from(machine.data, position)[0]
    if count < 0:
        raise ValueError("negative length")
    return count, position + layout.size


def _int_line(machine: Machine, position: int) -> int:
    text, position = machine.line(position)
    machine.stack.append({b"00": False, b"01": True}.get(text, decimal(text)))
    return position


def _long_line(machine: Machine, position: int) -> int:
    text, position = machine.line(position)
    machine.stack.append(decimal(text.removesuffix(b"L")))
    return position


def decimal(text: bytes) -> int:
    """Return the number that a line of text states."""
    if len(text) > _MOST_DIGITS:
        # Decimal digits cost quadratic time.
        raise ValueError(TOO_MANY_DIGITS)
    return _stated(int, text)


def _stated(kind: Callable[[bytes], Number], text: bytes) -> Number:
    try:
        return kind(text)
    except ValueError:
        raise ValueError("a line of text that is no number") from None


def _float_line(machine: Machine, position: int) -> int:
    text, position = machine.line(position)
    machine.stack.append(_stated(float, text))
    return position


# -------------------------------------------------------------------------------- text, bytes


def _as_text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _as_old_text(raw: bytes) -> str:
    """Decode a ``str`` of Python 2, which torch reads as UTF-8."""
    return raw.decode("utf-8")


def _counted(layout: struct.Struct | None, decode: Callable[[bytes], object]) -> Handler:
    def push(machine: Machine, position: int) -> int:
        count, start = _length(machine, position, layout)
        machine.stack.append(decode(machine.take(start, count)))
        return start + count

    return push


def _short_text(machine: Machine, position: int) -> int:
    """BINUNICODE, by far the most frequent of its kind."""
    start = position + 4
    end: int = start + UINT32.unpack_from(machine.data, position)[0]
    if end > len(machine.data):
        raise IndexError
    machine.stack.append(machine.data[start:end].decode("utf-8", "surrogatepass"))
    return end


def _text_line(machine: Machine, position: int) -> int:
    raw, position = machine.line(position)
    machine.stack.append(codecs.raw_unicode_escape_decode(raw)[0])
    return position


def _quoted_line(machine: Machine, position: int) -> int:
    raw, position = machine.line(position)
    if len(raw) < 2 or raw[0] != raw[-1] or raw[:1] not in (b"'", b'"'):
        raise ValueError("a string without quotes")
    machine.stack.append(_as_old_text(codecs.escape_decode(raw[1:-1])[0]))
    return position


LITERALS: dict[bytes, Handler] = {
    b"F": _float_line,
    b"I": _int_line,
    b"J": _number(_INT32),
    b"K": _byte,
    b"L": _long_line,
    b"M": _number(_UINT16),
    b"N": constant(None),
    b"S": _quoted_line,
    b"T": _counted(_INT32, _as_old_text),
    b"U": _counted(None, _as_old_text),
    b"V": _text_line,
    b"X": _short_text,
    b"}": _fresh(dict),
    b"]": _fresh(list),
    b")": constant(()),
    b"G": _number(_DOUBLE),
    b"\x88": constant(value=True),
    b"\x89": constant(value=False),
    b"\x8a": _long(None),
    b"\x8b": _long(_INT32),
    b"B": _counted(UINT32, bytes),
    b"C": _counted(None, bytes),
    b"\x8c": _counted(None, _as_text),
    b"\x8d": _counted(_UINT64, _as_text),
    b"\x8e": _counted(_UINT64, bytes),
    b"\x8f": _fresh(set),
    b"\x96": _counted(_UINT64, bytearray),
}
"""Handlers by opcode."""
