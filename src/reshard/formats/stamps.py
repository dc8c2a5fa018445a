"""Which file it is whose header was read, so that bytes read later are known to be of the same.

Theory. A trainer that saves under the same tag again replaces files, or writes into them, while
somebody converts. Headers of one save and bytes of another make tensors of one and counters of the
other. So a file is stamped *before* anything of it is read: device, inode, and time of the last
change in nanoseconds. Replacing it changes the inode, writing into it the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.formats.checkpoint import SourceFile

if TYPE_CHECKING:
    import os
    from pathlib import Path

Stamp = tuple[int, ...]


def stamp_of(stat: os.stat_result) -> Stamp:
    """Return what tells a file from another one, and from itself after a change."""
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns


def source_file(path: Path, kind: str) -> SourceFile:
    """Return a file of a checkpoint as it is now; call this before its header is read."""
    stat = path.stat()
    return SourceFile(str(path), stat.st_size, kind, stamp_of(stat))
