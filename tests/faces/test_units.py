"""Sizes, rates, durations: what is written, and what is understood."""

from __future__ import annotations

import pytest

from reshard.api.arguments import parse_bytes
from reshard.cli.units import counted, format_bytes, format_seconds
from reshard.errors import UsageError


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (2_400_000_000, "2.40 GB"),
        (70_000_000_000_000, "70.0 TB"),
        (5 * 10**18, "5000 PB"),
    ],
)
def test_sizes_carry_three_significant_digits(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("512MB", 512_000_000),
        ("512 MB", 512_000_000),
        ("512mb", 512_000_000),
        ("2GiB", 2 << 30),
        ("2gib", 2 << 30),
        ("1.5k", 1500),
        ("64K", 64_000),
        ("3Ti", 3 << 40),
        ("100B", 100),
    ],
)
def test_sizes_are_understood(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


NO_SIZES = ["", "-1", "0", "0.0001k", "MB", "1XB", "1i", "1 2", "1e9", "½GB"]
BEYOND = ["9" * 400, "9" * 5000, "9223372036854775808", "9" * 40 + "PiB"]


@pytest.mark.parametrize("text", NO_SIZES + BEYOND)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="write it like 512MB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599.6, "1 h 00 min"),
        (7260, "2 h 01 min"),
    ],
)
def test_durations_are_as_fine_as_they_are_short(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_nouns_agree_with_their_number() -> None:
    assert [counted(n, "piece") for n in (0, 1, 2)] == ["0 pieces", "1 piece", "2 pieces"]
