"""Arguments as callers give them, made what the verbs work with.

Theory. Two mistakes are made by everybody once. A text is a sequence too, so ``include="*.bias"``
would be six patterns of one letter: one text is taken as a list of one. And sizes are thought of as
``"2GB"``: that is understood as on the command line, a letter alone being decimal, so that a cap is
never larger than what was meant. Anything else is refused before a file is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

from reshard.api.budgets import default_workers
from reshard.errors import UsageError
from reshard.execution.destination import resolved

_FACTORS = {
    "": 1,
    **{letter: 1000 ** (power + 1) for power, letter in enumerate("kmgtp")},
    **{f"{letter}i": 1024 ** (power + 1) for power, letter in enumerate("kmgtp")},
}
LARGEST = 1 << 63
"""No size is as large: nothing addresses it."""

_MOST_DIGITS = 40
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgtp]?i?)b?\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return the number of bytes that a size such as ``512MB`` or ``2GiB`` means.

    Raises
    ------
    UsageError
        The text is not a size, or is less than one byte or 2^63 and more.

    Examples
    --------
    >>> parse_bytes("512MB"), parse_bytes("2GiB"), parse_bytes("64k"), parse_bytes("4096")
    (512000000, 2147483648, 64000, 4096)
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or not factor or not _is_few(match.group(1)):
        raise _no_size(text)
    nbytes = int(float(match.group(1)) * factor)
    if not 1 <= nbytes < LARGEST:
        raise _no_size(text)
    return nbytes


def _is_few(digits: str) -> bool:
    """Whether a number is short enough to be one that somebody meant."""
    return len(digits) <= _MOST_DIGITS


def _no_size(text: str) -> UsageError:
    return UsageError(
        "not a size",
        found=_shown(text),
        next_step="write it like 512MB, 2GiB or 1000000000",
    )


def _shown(value: object) -> str:
    """What was given, cut to what a line can hold; a number of any length is not written out."""
    if isinstance(value, int) and not -LARGEST <= value < LARGEST:
        return "a number beyond 2^63"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def size_of(value: object) -> int:
    """Return a number of bytes, given as a whole number or as a text.

    Raises
    ------
    UsageError
        It is neither.

    Examples
    --------
    >>> size_of(4096), size_of("2GB")
    (4096, 2000000000)
    """
    if isinstance(value, str):
        return parse_bytes(value)
    if _is_number(value):
        return value
    raise UsageError(
        "max_memory is not a size",
        expected="a whole number of bytes, or a text like '512MB'",
        found=_shown(value),
    )


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value < LARGEST


def workers_of(value: object) -> int:
    """Return a number of workers; one a CPU where none is given.

    Raises
    ------
    UsageError
        It is no whole number.

    Examples
    --------
    >>> workers_of(3)
    3
    """
    if value is None:
        return default_workers()
    if _is_number(value):
        return value
    raise UsageError("workers is not a whole number", found=_shown(value))


def text_of(what: str, value: object) -> str:
    """Return a text.

    Raises
    ------
    UsageError
        It is something else.

    Examples
    --------
    >>> text_of("state", "fp32")
    'fp32'
    """
    if isinstance(value, str):
        return value
    raise UsageError(f"{what} is not a text", expected="one text", found=_shown(value))


def destination_of(value: object) -> Path:
    """Return the folder to write, absolute.

    Raises
    ------
    UsageError
        It is no path, is empty, or has a NUL in it, which no path can have. An empty text, such
        as a variable of a shell that is not set, would mean the folder one is in.

    Examples
    --------
    >>> destination_of("/tmp/a/../b").name
    'b'
    """
    if not isinstance(value, str | os.PathLike):
        raise UsageError("the output is not a path", found=_shown(value))
    text = os.fspath(value)
    if not isinstance(text, str) or "\0" in text or not text:
        raise UsageError("the output is not a path", found=_shown(text))
    return resolved(text)


def texts_of(what: str, value: object) -> tuple[str, ...]:
    """Return several texts, given as such or as one.

    Parameters
    ----------
    what
        The argument, for the message.
    value
        A text, or an iterable of texts.

    Raises
    ------
    UsageError
        It is neither.

    Examples
    --------
    >>> texts_of("include", "*.bias"), texts_of("include", ["a", "b"])
    (('*.bias',), ('a', 'b'))
    """
    listed = _several(value, str)
    if listed is None:
        raise UsageError(
            f"{what} is not a list of texts", expected="texts, or one text", found=_shown(value)
        )
    return listed


def paths_of(what: str, value: object) -> tuple[str, ...]:
    """Return several paths, given as such or as one.

    Raises
    ------
    UsageError
        It is neither.

    Examples
    --------
    >>> paths_of("also", "node1"), paths_of("also", [])
    (('node1',), ())
    """
    listed = _several(value, (str, os.PathLike))
    if listed is None:
        raise UsageError(
            f"{what} is not a list of folders", expected="paths, or one path", found=_shown(value)
        )
    return tuple(os.fspath(path) for path in listed)


def _several(value: object, kind: type | tuple[type, ...]) -> tuple[Any, ...] | None:
    """One thing as a list of one, several as they are; None where one is of another kind."""
    if isinstance(value, kind):
        return (value,)
    if not isinstance(value, Iterable) or isinstance(value, bytes):
        return None
    listed = tuple(value)
    return listed if all(isinstance(entry, kind) for entry in listed) else None
