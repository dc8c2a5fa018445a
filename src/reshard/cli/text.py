"""Making foreign text safe to show.

Theory. Names of parameters, files and globals come out of checkpoints, and a checkpoint may come
from anyone. Printed raw, a control character moves the cursor, an escape sequence repaints the
screen, a bidirectional override turns a name around, a line feed forges a second line of output.
So every piece of text passes here on its way out: what Python does not consider printable is shown
as its escape. JSON escapes on its own.
"""

from __future__ import annotations


def visible(text: object) -> str:
    r"""Return the text on one line, with every unprintable character written as an escape.

    Examples
    --------
    >>> visible("wei\x1b[2Jght\n")
    'wei\\x1b[2Jght\\n'
    >>> visible("größe \u202e")
    'größe \\u202e'
    """
    line = str(text)
    if line.isprintable():
        return line
    return "".join(
        character if character.isprintable() else _escape(character) for character in line
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
