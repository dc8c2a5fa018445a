"""Numbers with units, the one place where they are written.

Theory. Sizes are powers of ten (1 MB is 1,000,000 bytes), as disks and networks count, and carry
three significant digits; exact byte counts belong in ``--json``.
Sizes are read in :mod:`reshard.api.arguments`.
"""

from __future__ import annotations

_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")


def format_bytes(nbytes: float) -> str:
    """Return a size with three significant digits.

    Examples
    --------
    >>> format_bytes(0), format_bytes(999), format_bytes(1500), format_bytes(2_400_000_000)
    ('0 B', '999 B', '1.50 kB', '2.40 GB')
    >>> format_bytes(999_999)
    '1.00 MB'
    """
    value, power = float(nbytes), 0
    while value >= (999.5 if power else 1000) and power < len(_DECIMAL) - 1:
        value, power = value / 1000, power + 1
    return f"{_three_digits(value) if power else round(value)} {_DECIMAL[power]}"


def format_rate(nbytes: float, seconds: float) -> str:
    """Return bytes per second, or a dash when no time has passed.

    Examples
    --------
    >>> format_rate(3e9, 2.0), format_rate(1, 0.0)
    ('1.50 GB/s', '-')
    """
    return f"{format_bytes(nbytes / seconds)}/s" if seconds > 0 else "-"


def format_count(number: int) -> str:
    """Return a whole number with thousands apart.

    Examples
    --------
    >>> format_count(1234567)
    '1,234,567'
    """
    return f"{number:,}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun.

    Examples
    --------
    >>> counted(1, "file"), counted(1200, "file"), counted(2, "copy", "copies")
    ('1 file', '1,200 files', '2 copies')
    """
    return f"{format_count(number)} {noun if number == 1 else plural or noun + 's'}"


def format_seconds(seconds: float) -> str:
    """Return a duration, as fine as it is short.

    Examples
    --------
    >>> [format_seconds(s) for s in (0.0304, 2.51, 59.7, 61, 3725, 90061)]
    ['0.03 s', '2.5 s', '1 min 00 s', '1 min 01 s', '1 h 02 min', '25 h 01 min']
    """
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_shape(shape: tuple[int, ...]) -> str:
    """Return a shape in square brackets.

    Examples
    --------
    >>> format_shape((4, 2)), format_shape(())
    ('[4, 2]', '[]')
    """
    return f"[{', '.join(map(str, shape))}]"


def _three_digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"
