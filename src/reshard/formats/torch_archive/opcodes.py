"""What each opcode of a pickle does to the machine.

Theory. A handler takes the machine and the position after the opcode, and returns the position of
the next one. Reading past the last byte and popping from an empty stack raise ``IndexError`` or
``struct.error``, which the machine turns into its error; so handlers need no checks of their own,
except where a slice would be silently short. What cannot occur in a file of torch, or could only be
done by running something (extension registry, out-of-band buffers, textual persistent ids), is
refused. Source: ``pickletools`` of CPython 3.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from reshard.errors import ArchiveError
from reshard.formats.torch_archive.budget import ITEM
from reshard.formats.torch_archive.literals import LITERALS, UINT32, decimal

if TYPE_CHECKING:
    from reshard.formats.torch_archive.machine import Machine

    Handler = Callable[[Machine, int], int]

STOPPED = -1
"""The position that a handler returns at the end of the pickle."""

_HIGHEST_PROTOCOL = 5


# -------------------------------------------------------------------------------- stack, memo


def _mark(machine: Machine, position: int) -> int:
    machine.marks.append(machine.stack)
    machine.stack = []
    return position


def _pop(machine: Machine, position: int) -> int:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()
    return position


def _pop_mark(machine: Machine, position: int) -> int:
    machine.pop_mark()
    return position


def _duplicate(machine: Machine, position: int) -> int:
    machine.stack.append(machine.stack[-1])
    return position


def _put_byte(machine: Machine, position: int) -> int:
    machine.store(machine.data[position])
    return position + 1


def _put_long(machine: Machine, position: int) -> int:
    machine.store(UINT32.unpack_from(machine.data, position)[0])
    return position + 4


def _put_line(machine: Machine, position: int) -> int:
    text, position = machine.line(position)
    machine.store(decimal(text))
    return position


def _memoise(machine: Machine, position: int) -> int:
    machine.store(len(machine.memo) + len(machine.scattered))
    return position


def _get_byte(machine: Machine, position: int) -> int:
    machine.recall(machine.data[position])
    return position + 1


def _get_long(machine: Machine, position: int) -> int:
    machine.recall(UINT32.unpack_from(machine.data, position)[0])
    return position + 4


def _get_line(machine: Machine, position: int) -> int:
    text, position = machine.line(position)
    machine.recall(decimal(text))
    return position


# -------------------------------------------------------------------------------- containers


def _tuple(machine: Machine, position: int) -> int:
    items = tuple(machine.pop_mark())
    machine.stack.append(items)
    return position


def _tuple_of(count: int) -> Handler:
    def push(machine: Machine, position: int) -> int:
        stack = machine.stack
        if len(stack) < count:
            raise IndexError
        items = tuple(stack[-count:])
        del stack[-count:]
        stack.append(items)
        return position

    return push


def _list(machine: Machine, position: int) -> int:
    items = list(machine.pop_mark())
    machine.stack.append(items)
    return position


def _dict(machine: Machine, position: int) -> int:
    items = machine.pop_mark()
    machine.room -= ITEM * len(items)
    made: dict[object, object] = {}
    machine.construction.set_items(made, items)
    machine.stack.append(made)
    return position


def _frozenset(machine: Machine, position: int) -> int:
    items = machine.pop_mark()
    machine.room -= ITEM * len(items)
    machine.stack.append(frozenset(machine.construction.hashable(items)))
    return position


def _append(machine: Machine, position: int) -> int:
    item = machine.stack.pop()
    machine.construction.append(machine.stack[-1], [item])
    return position


def _appends(machine: Machine, position: int) -> int:
    items = machine.pop_mark()
    machine.construction.append(machine.stack[-1], items)
    return position


def _add_items(machine: Machine, position: int) -> int:
    items = machine.pop_mark()
    machine.room -= ITEM * len(items)
    machine.construction.add(machine.stack[-1], items)
    return position


def _set_item(machine: Machine, position: int) -> int:
    value = machine.stack.pop()
    key = machine.stack.pop()
    machine.construction.set_items(machine.stack[-1], [key, value])
    return position


def _set_items(machine: Machine, position: int) -> int:
    items = machine.pop_mark()
    machine.room -= ITEM * len(items) // 2
    machine.construction.set_items(machine.stack[-1], items)
    return position


# -------------------------------------------------------------------------------- objects


def _global(machine: Machine, position: int) -> int:
    named, position = _named_global(machine, position)
    machine.stack.append(named)
    return position


def _named_global(machine: Machine, position: int) -> tuple[object, int]:
    module, position = machine.line(position)
    name, position = machine.line(position)
    named = machine.construction.find_global(
        module.decode("utf-8"), name.decode("utf-8"), machine.protocol
    )
    return named, position


def _stack_global(machine: Machine, position: int) -> int:
    name = machine.stack.pop()
    module = machine.stack.pop()
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError("the name of a global is not text")
    machine.stack.append(machine.construction.find_global(module, name, machine.protocol))
    return position


def _reduce(machine: Machine, position: int) -> int:
    args = _arguments(machine.stack.pop())
    machine.stack[-1] = machine.construction.call(machine.stack[-1], args)
    return position


def _new_object(machine: Machine, position: int) -> int:
    args = _arguments(machine.stack.pop())
    machine.stack[-1] = machine.construction.new(machine.stack[-1], args, None)
    return position


def _new_object_keywords(machine: Machine, position: int) -> int:
    kwargs = machine.stack.pop()
    args = _arguments(machine.stack.pop())
    if type(kwargs) is not dict:
        raise ValueError("keyword arguments that are not a dict")
    machine.construction.spend(len(kwargs))
    if not all(isinstance(key, str) for key in kwargs):
        raise ValueError("keyword arguments that are not named by text")
    machine.stack[-1] = machine.construction.new(machine.stack[-1], args, kwargs)
    return position


def _arguments(value: object) -> tuple[object, ...]:
    if not isinstance(value, tuple):
        raise ValueError(f"arguments that are a {type(value).__name__} and not a tuple")
    return value


def _instance(machine: Machine, position: int) -> int:
    named, position = _named_global(machine, position)
    args = tuple(machine.pop_mark())
    machine.stack.append(machine.construction.instance(named, args))
    return position


def _object(machine: Machine, position: int) -> int:
    cls, *args = machine.pop_mark()
    machine.stack.append(machine.construction.instance(cls, tuple(args)))
    return position


def _build(machine: Machine, position: int) -> int:
    state = machine.stack.pop()
    machine.construction.set_state(machine.stack[-1], state)
    return position


def _persistent(machine: Machine, position: int) -> int:
    machine.stack[-1] = machine.construction.storage(machine.stack[-1])
    return position


# -------------------------------------------------------------------------------- framing


def _protocol(machine: Machine, position: int) -> int:
    machine.protocol = machine.data[position]
    if machine.protocol > _HIGHEST_PROTOCOL:
        raise ValueError(f"pickle protocol {machine.protocol}")
    return position + 1


def _frame(machine: Machine, position: int) -> int:
    machine.take(position, 8)
    return position + 8


def _stop(_machine: Machine, _position: int) -> int:
    return STOPPED


def _refused(what: str) -> Handler:
    def refuse(machine: Machine, _position: int) -> int:
        raise ArchiveError(
            f"the pickle uses {what}, which torch never writes",
            file=machine.construction.file,
            next_step="do not open it with torch.load; get the file again from a source you trust",
        )

    return refuse


def _unknown(machine: Machine, position: int) -> int:
    raise ValueError(f"unknown opcode {machine.data[position - 1]:#04x}")


HANDLERS: list[Handler] = [_unknown] * 256
_BY_OPCODE: dict[bytes, Handler] = {
    **LITERALS,
    b"(": _mark,
    b".": _stop,
    b"0": _pop,
    b"1": _pop_mark,
    b"2": _duplicate,
    b"P": _refused("a textual persistent id"),
    b"Q": _persistent,
    b"R": _reduce,
    b"a": _append,
    b"b": _build,
    b"c": _global,
    b"d": _dict,
    b"e": _appends,
    b"g": _get_line,
    b"h": _get_byte,
    b"i": _instance,
    b"j": _get_long,
    b"l": _list,
    b"o": _object,
    b"p": _put_line,
    b"q": _put_byte,
    b"r": _put_long,
    b"s": _set_item,
    b"t": _tuple,
    b"u": _set_items,
    b"\x80": _protocol,
    b"\x81": _new_object,
    b"\x82": _refused("the extension registry"),
    b"\x83": _refused("the extension registry"),
    b"\x84": _refused("the extension registry"),
    b"\x85": _tuple_of(1),
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"\x90": _add_items,
    b"\x91": _frozenset,
    b"\x92": _new_object_keywords,
    b"\x93": _stack_global,
    b"\x94": _memoise,
    b"\x95": _frame,
    b"\x97": _refused("an out-of-band buffer"),
    b"\x98": _refused("an out-of-band buffer"),
}
for _opcode, _handler in _BY_OPCODE.items():
    HANDLERS[_opcode[0]] = _handler
