"""Room on the disk: reserved where the system can, refused where there is none."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reshard.execution import durable


@contextmanager
def opened(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        yield handle
    finally:
        os.close(handle)


@pytest.mark.parametrize("before", [b"", b"x" * 10, b"x" * 9000])
def test_a_file_gets_its_size_and_keeps_its_bytes(tmp_path: Path, before: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(before)
    with opened(path) as handle:
        durable.reserve(handle, 5000)
    assert path.read_bytes() == before[:5000].ljust(5000, b"\0")


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR, errno.EINVAL])
def test_a_file_system_that_cannot_reserve_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(durable, "_fallocate", lambda: lambda _handle, _nbytes: number)
    with opened(tmp_path / "file") as handle:
        durable.reserve(handle, 5000)
    assert (tmp_path / "file").read_bytes() == bytes(5000)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_no_room_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(durable, "_fallocate", lambda: lambda _handle, _nbytes: number)
    told = re.escape(os.strerror(number))
    with opened(tmp_path / "file") as handle, pytest.raises(OSError, match=told) as caught:
        durable.reserve(handle, 5000)
    assert caught.value.errno == number


def test_a_system_without_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_fallocate", lambda: None)
    with opened(tmp_path / "file") as handle:
        durable.reserve(handle, 77)
        durable.reserve(handle, 0)
    assert (tmp_path / "file").stat().st_size == 0
