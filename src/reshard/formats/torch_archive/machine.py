"""The pickle machine: reads a pickle as data.

Theory. A pickle is a sequence of opcodes for a machine with a stack, marks and a memo. The standard
machine imports globals and calls them. This one has the same opcodes and no way to do either: a
global is checked by name (:mod:`.policy`) and becomes a :class:`~.values.Global`; a call goes to
:class:`~.construction.Construction`, which makes a value for the few globals it knows and a record
for all others.

Every opcode takes time for its own length at most, with two exceptions that are bounded: calls that
copy their argument draw on a budget (otherwise a kilobyte that is copied a million times fills the
memory), and keys of dicts and sets may be no larger than a few hundred values (hashing a tuple
walks all of it, shared parts again and again). What it makes draws on :mod:`.budget`.

The memo is a list, since picklers number what they store; what is stored out of order lies apart.
"""

from __future__ import annotations

import struct

from reshard.errors import ArchiveError, ReshardError
from reshard.formats.torch_archive.budget import ARCHIVE, COSTS, SCATTERED, Allowance
from reshard.formats.torch_archive.construction import Construction
from reshard.formats.torch_archive.opcodes import HANDLERS, STOPPED

_LONGEST_LINE = 1 << 20


class Machine:
    """Runs one pickle.

    Parameters
    ----------
    data
        The pickle.
    construction
        What calls, attributes and items mean.
    allowance
        How much memory it may take.
    """

    __slots__ = (
        "construction",
        "data",
        "marks",
        "memo",
        "per_byte",
        "protocol",
        "room",
        "scattered",
        "stack",
    )

    def __init__(
        self, data: bytes, construction: Construction, allowance: Allowance = ARCHIVE
    ) -> None:
        self.data = data
        self.construction = construction
        self.stack: list[object] = []
        self.marks: list[list[object]] = []
        self.memo: list[object] = []
        self.scattered: dict[int, object] = {}
        self.protocol = 0
        self.room = allowance.floor
        self.per_byte = allowance.per_byte

    def run(self, start: int = 0) -> tuple[object, int]:
        """Run from ``start`` to the end of the pickle.

        Returns
        -------
        tuple of object and int
            What it builds, and the position after its last opcode.

        Raises
        ------
        ArchiveError
            It is not a valid pickle, asks for too much, or names a hostile global.
        """
        position = end = start
        data, handlers, costs = self.data, HANDLERS, COSTS
        try:
            while position != STOPPED:
                end = position
                opcode = data[position]
                self.room -= costs[opcode]
                if self.room < 0 and self.room + self.per_byte * position < 0:
                    raise _too_large()
                position = handlers[opcode](self, position + 1)
            root = self.stack.pop()
        except ReshardError as error:
            raise self.construction.located(error, end) from error
        except (IndexError, struct.error) as error:
            # Reading past the last byte and popping from an empty stack both end here.
            raise self.broken(end, "it ends early or takes what is not there") from error
        except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise self.broken(end, _why(error)) from error
        return root, end + 1

    def broken(self, position: int, why: str) -> ArchiveError:
        """Return the error for a pickle that is damaged at a position."""
        return ArchiveError(
            f"the pickle cannot be read: at byte {position}: {why}",
            file=self.construction.file,
            next_step="the file is damaged or was made by hand; copy it again",
        )

    def take(self, position: int, count: int) -> bytes:
        """Return ``count`` bytes from ``position`` on."""
        end = position + count
        if end > len(self.data):
            raise IndexError
        return self.data[position:end]

    def line(self, position: int) -> tuple[bytes, int]:
        """Return the line at ``position`` without its end, and the position after it."""
        end = self.data.find(b"\n", position, position + _LONGEST_LINE)
        if end < 0:
            raise IndexError
        return self.data[position:end], end + 1

    def store(self, number: int) -> None:
        """Store the top of the stack in the memo."""
        memo = self.memo
        if number == len(memo):
            memo.append(self.stack[-1])
            self.scattered.pop(number, None)
        elif 0 <= number < len(memo):
            memo[number] = self.stack[-1]
        else:
            self.room -= SCATTERED
            self.scattered[number] = self.stack[-1]

    def recall(self, number: int) -> None:
        """Push what the memo has under a number."""
        memo = self.memo
        self.stack.append(memo[number] if 0 <= number < len(memo) else self.scattered[number])

    def pop_mark(self) -> list[object]:
        """Return what lies above the last mark, and remove both."""
        items = self.stack
        self.stack = self.marks.pop()
        return items


def _too_large() -> ArchiveError:
    return ArchiveError(
        "the pickle makes far more of its bytes than any checkpoint does",
        next_step="the file was made by hand or is damaged; copy it again, or save it anew",
    )


def _why(error: Exception) -> str:
    """What is wrong with the pickle, in words: the names of Python's errors help nobody."""
    if isinstance(error, KeyError):
        return "it takes a value that it never stored"
    if isinstance(error, UnicodeDecodeError):
        return "it has a text that is not UTF-8"
    if isinstance(error, TypeError):
        return "it uses a value where one of that kind cannot stand"
    if isinstance(error, RecursionError):
        return "its values are nested too deep"
    if isinstance(error, OverflowError):
        return "it has a number that is out of range"
    return str(error)[:120]
