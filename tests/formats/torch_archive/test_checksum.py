"""Checksums are those of zlib, and those of parts give that of the whole."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from reshard.formats.torch_archive import crc32, crc32_combine


@given(st.binary(), st.binary())
def test_checksum_of_parts_gives_that_of_the_whole(first: bytes, second: bytes) -> None:
    assert crc32(first) == zlib.crc32(first)
    assert crc32(second, crc32(first)) == zlib.crc32(first + second)
    assert crc32_combine(crc32(first), crc32(second), len(second)) == zlib.crc32(first + second)


@given(st.lists(st.binary(max_size=9)))
def test_any_number_of_parts(parts: list[bytes]) -> None:
    whole = 0
    for part in parts:
        whole = crc32_combine(whole, crc32(part), len(part))
    assert whole == zlib.crc32(b"".join(parts))


def test_large_blocks() -> None:
    first, second = b"x" * 12_345, bytes(5_000_000)
    assert crc32_combine(crc32(first), crc32(second), len(second)) == zlib.crc32(first + second)
    # Zeros, from the checksums of two halves of them and so on.
    checksum, length = zlib.crc32(bytes(1 << 16)), 1 << 16
    while length < 32 << 20:
        checksum = crc32_combine(checksum, checksum, length)
        length *= 2
    assert checksum == zlib.crc32(bytes(length))
    # The checksum of nothing is 0, so zeros of any length can be put before and after.
    assert crc32_combine(0, checksum, 1 << 40) == checksum
    assert crc32_combine(checksum, 0, 0) == checksum


def test_any_buffer() -> None:
    data = b"0123456789" * 1000
    assert crc32(bytearray(data)) == crc32(memoryview(data)) == zlib.crc32(data)
