"""Progress: bytes, rate and time left, to the right readers, in the right measure."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from reshard import convert
from reshard.cli.progress import LineMeter, Pace, meter
from tests.truth import EXAMPLE


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_plain_line_is_written_every_few_seconds_and_at_the_end() -> None:
    clock, stream = Clock(), io.StringIO()
    report = LineMeter(stream, clock)
    for second in range(13):
        clock.now = 100.0 + second
        report(second * 1_000_000_000, 12_000_000_000, "convert")
    assert stream.getvalue().splitlines() == [
        "convert: 5.00 GB of 12.0 GB (41 %), 1.00 GB/s, 7.0 s left",
        "convert: 10.0 GB of 12.0 GB (83 %), 1.00 GB/s, 2.0 s left",
        "convert: 12.0 GB of 12.0 GB (100 %), 1.00 GB/s, 0.00 s left",
    ]


def test_a_short_run_leaves_no_line() -> None:
    clock, stream = Clock(), io.StringIO()
    report = LineMeter(stream, clock)
    report(0, 10, "convert")
    clock.now += 4
    report(10, 10, "convert")
    assert stream.getvalue() == ""


def test_the_last_line_is_written_once() -> None:
    clock, stream = Clock(), io.StringIO()
    report = LineMeter(stream, clock)
    report(0, 10, "convert")
    clock.now += 6
    report(5, 10, "convert")
    report(10, 10, "convert")
    report(10, 10, "convert")
    assert len(stream.getvalue().splitlines()) == 2


def test_each_phase_has_its_own_start() -> None:
    clock, stream = Clock(), io.StringIO()
    report = LineMeter(stream, clock)
    report(0, 10, "convert")
    clock.now += 6
    report(10, 10, "convert")
    report(0, 20, "verify")
    clock.now += 6
    report(12, 20, "verify")
    assert stream.getvalue().splitlines() == [
        "convert: 10 B of 10 B (100 %), 2 B/s, 0.00 s left",
        "verify: 12 B of 20 B (60 %), 2 B/s, 4.0 s left",
    ]


def test_bytes_that_a_resumed_run_found_done_are_no_speed() -> None:
    clock, stream = Clock(), io.StringIO()
    report = LineMeter(stream, clock)
    report(8_000_000_000, 10_000_000_000, "convert")
    clock.now += 10
    report(9_000_000_000, 10_000_000_000, "convert")
    assert stream.getvalue() == ("convert: 9.00 GB of 10.0 GB (90 %), 100 MB/s, 10 s left\n")


def test_no_rate_and_no_time_left_before_anything_is_done() -> None:
    pace = Pace(0, 10, 0, 5.0)
    assert pace.seconds_left is None
    assert str(pace) == "0 B of 10 B (0 %)"


def test_nothing_to_do_is_all_done() -> None:
    assert "100 %" in str(Pace(0, 0, 0, 0.0))


def test_quiet_gives_no_callback_and_writes_nothing() -> None:
    stream = Terminal()
    with meter(quiet=True, stream=stream) as report:
        assert report is None
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    with meter(stream=stream) as report:
        assert report is not None
        report(5, 10, "convert")
        report(10, 10, "convert")
    assert "convert" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K")


def test_a_pipe_gets_plain_lines() -> None:
    with meter(stream=io.StringIO()) as report:
        assert isinstance(report, LineMeter)


def test_every_phase_of_a_run_counts_bytes(tmp_path: Path) -> None:
    last: dict[str, tuple[int, int]] = {}
    report = convert(
        EXAMPLE,
        tmp_path / "out",
        verify=True,
        progress=lambda done, total, phase: last.update({phase: (done, total)}),
    )
    assert last["convert"] == last["compare"] == (report.source.nbytes, report.source.nbytes)
    assert last["sync"] == (report.cost.write_nbytes, report.cost.write_nbytes)
