"""Writing a picture: whole or not at all, and never over something else.

Theory. The file's ending must say what it is. So a mistyped argument cannot replace a file of a
checkpoint, and what is replaced is an older picture.
"""

from __future__ import annotations

import os
from pathlib import Path

from reshard.errors import OutputError, UsageError


def require_ending(path: str, ending: str) -> None:
    """Refuse a path that does not end in ``.svg``, ``.png`` or ``.html``, as its option says.

    Raises
    ------
    UsageError
        It ends otherwise.

    Examples
    --------
    >>> require_ending("w.svg", ".svg")
    """
    if Path(path).suffix.lower() != ending:
        raise UsageError(
            "the name of the picture does not say what it is",
            file=path,
            expected=f"a name that ends in {ending}",
            next_step=f"give it a name like picture{ending}",
        )


def write_picture(path: str, content: str | bytes) -> None:
    """Write a picture under a temporary name beside its place, then rename it.

    Raises
    ------
    OutputError
        It cannot be written there.
    """
    final = Path(path)
    fresh = final.with_name(f".{final.name}.{os.getpid()}.new")
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    try:
        fresh.write_bytes(data)
        fresh.replace(final)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise OutputError(
            "the picture cannot be written",
            file=final,
            found=error.strerror or str(error),
            next_step="choose a folder that exists and can be written",
        ) from error
