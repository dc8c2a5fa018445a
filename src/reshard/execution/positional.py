"""Reading and writing at a position, however many calls that takes.

Theory. One call may move fewer bytes than it was asked to, on FUSE and on network disks at any
size: only a read that gives nothing is the end of a file. So whoever moves bytes calls these, and
what is short afterwards is short in the file.
"""

from __future__ import annotations

import errno
import os


def read_at(handle: int, buffer: memoryview, offset: int) -> int:
    """Fill ``buffer`` with the bytes from ``offset`` on; returns how many there were."""
    done = os.preadv(handle, [buffer], offset)
    step = done
    while step and done < len(buffer):
        step = os.preadv(handle, [buffer[done:]], offset + done)
        done += step
    return done


def write_all(handle: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    done = os.pwrite(handle, data, offset)
    while done < len(data):
        step = os.pwrite(handle, memoryview(data)[done:], offset + done)
        if not step:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done += step
