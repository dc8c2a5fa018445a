"""Faults: full disks, files unreadable or changing. One clear line, and no result."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reshard.errors import CheckpointError, OutputError
from reshard.execution import execute, measured_rate, staging_path
from reshard.execution.buffers import KIB, MIB
from reshard.execution.sources import SourceFiles
from reshard.planning import PlannedSource
from tests.execution.raw import tree
from tests.execution.victim import Order, Server, job_of

CAP = 256 * KIB


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB, too small for the output."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


class TestFullDisk:
    def test_a_disk_too_small_is_refused_beforehand(self, tmp_path: Path, small_disk: Path) -> None:
        with pytest.raises(OutputError, match="no room for the output"):
            execute(job_of(tmp_path / "in"), small_disk / "out", workers=2, max_memory=CAP)
        assert list(small_disk.iterdir()) == []

    def test_a_disk_that_fills_up_stops_cleanly_and_resumes(
        self, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = job_of(tmp_path / "in")
        out = small_disk / "out"
        with monkeypatch.context() as patch:
            patch.setattr("reshard.execution.destination.check_room", lambda *_: None)
            with pytest.raises(OutputError, match=r"no room left.*continue with --resume"):
                execute(job, out, workers=2, max_memory=CAP)
        assert not out.exists()
        assert not (small_disk / "latest").exists()
        assert staging_path(out).exists()
        subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
        report = execute(job, out, workers=2, max_memory=CAP, resume=True)
        assert 0 < report.kept < report.tensors
        execute(job, tmp_path / "undisturbed", workers=1, max_memory=MIB)
        assert tree(out) == tree(tmp_path / "undisturbed")

    def test_a_mount_point_is_refused_beforehand(self, tmp_path: Path, small_disk: Path) -> None:
        with pytest.raises(OutputError) as caught:
            execute(job_of(tmp_path / "in"), small_disk, workers=2, max_memory=CAP)
        assert str(caught.value) == (
            "the output is a mount point, and a finished folder cannot take its name: "
            f"{small_disk}; next: choose a folder inside it"
        )
        assert not staging_path(small_disk).exists()

    def test_a_limit_on_file_size_is_a_full_disk(self, tmp_path: Path) -> None:
        server = Server(tmp_path / "in")
        out = tmp_path / "out"
        refused = server.run(Order(str(out), file_limit=600_000))
        assert refused.code == 2
        assert "OutputError: there is no room left for the output" in refused.text
        assert "fp32.0.bin" in refused.text or "exp_avg.0.bin" in refused.text
        assert not out.exists()
        assert server.run(Order(str(out), resume=True)).code == 0
        server.close()
        execute(job_of(tmp_path / "in"), tmp_path / "whole", workers=1, max_memory=MIB)
        assert tree(out) == tree(tmp_path / "whole")

    @pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOSPC])
    @pytest.mark.parametrize("call", ["pwrite", "ftruncate", "fsync"])
    def test_any_error_of_writing_is_told_in_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
    ) -> None:
        job, out = job_of(tmp_path / "in"), tmp_path / "out"
        with monkeypatch.context() as patch:
            patch.setattr(os, call, _failing(getattr(os, call), 3, number))
            with pytest.raises(OutputError) as caught:
                execute(job, out, workers=2, max_memory=CAP)
        assert os.strerror(number) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not out.exists()
        execute(job, out, workers=2, max_memory=CAP, resume=True)


def _failing(real: Callable[..., int], after: int, number: int) -> Callable[..., int]:
    """A system call that works a few times and then fails for good."""
    calls = iter(range(after))
    lock = threading.Lock()

    def call(*words: object) -> int:
        with lock:
            left = next(calls, None)
        if left is None:
            raise OSError(number, os.strerror(number))
        return real(*words)

    return call


def _bad_sector(name: str, place: int) -> Callable[..., int]:
    """Reading a file fails wherever a read touches one byte."""
    real = os.preadv

    def call(handle: int, buffers: list[memoryview], offset: int) -> int:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if path.name == name and offset <= place < offset + len(buffers[0]):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(handle, buffers, offset)

    return call


class TestSourceFaults:
    def test_a_read_error_names_the_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job, out = job_of(tmp_path / "in"), tmp_path / "out"
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", _bad_sector("rank_1.bin", 900_000))
            with pytest.raises(CheckpointError, match=r"cannot be read: .*rank_\d\.bin.*Input/"):
                execute(job, out, workers=2, max_memory=CAP)
        assert not out.exists()
        report = execute(job, out, workers=2, max_memory=CAP, resume=True)
        execute(job, tmp_path / "whole", workers=1, max_memory=MIB)
        assert tree(out) == tree(tmp_path / "whole")
        assert report.kept < report.tensors

    def test_a_file_that_shrinks_while_it_is_read_is_named(self, tmp_path: Path) -> None:
        job, out = job_of(tmp_path / "in"), tmp_path / "out"
        victim = tmp_path / "in" / "rank_1.bin"
        data = victim.read_bytes()

        def shrink(stage: str) -> None:
            if stage == "folders":
                os.truncate(victim, len(data) // 2)

        with pytest.raises(CheckpointError, match=r"became shorter while it was read.*rank_1\.bin"):
            execute(job, out, workers=2, max_memory=CAP, stage=shrink)
        assert not out.exists()
        victim.write_bytes(data)
        execute(job, out, workers=2, max_memory=CAP, resume=True)
        execute(job, tmp_path / "whole", workers=1, max_memory=MIB)
        assert tree(out) == tree(tmp_path / "whole")

    def test_a_file_that_is_written_to_meanwhile_is_named(self, tmp_path: Path) -> None:
        job, out = job_of(tmp_path / "in"), tmp_path / "out"
        victim = tmp_path / "in" / "rank_0.bin"

        def touch(stage: str) -> None:
            if stage == "filled":
                with victim.open("r+b") as file:
                    file.write(b"\xbb")
                os.utime(victim, ns=(1, 1))

        with pytest.raises(CheckpointError, match=r"written to while it was read.*rank_0\.bin"):
            execute(job, out, workers=2, max_memory=CAP, stage=touch)
        assert not out.exists()

    def test_a_file_that_is_replaced_meanwhile_is_named(self, tmp_path: Path) -> None:
        job, out = job_of(tmp_path / "in"), tmp_path / "out"
        victim = tmp_path / "in" / "rank_0.bin"

        def replace(stage: str) -> None:
            if stage == "filled":  # by one of the same size and time, as `cp -p` and `mv` would
                fresh = tmp_path / "fresh"
                fresh.write_bytes(bytes(victim.stat().st_size))
                times = victim.stat().st_atime_ns, victim.stat().st_mtime_ns
                os.utime(fresh, ns=times)
                fresh.rename(victim)

        with pytest.raises(CheckpointError, match=r"was replaced while it was read.*rank_0\.bin"):
            execute(job, out, workers=2, max_memory=CAP, stage=replace)
        assert not out.exists()

    def test_a_file_that_goes_away_while_it_is_read_is_named(self, tmp_path: Path) -> None:
        job, out = job_of(tmp_path / "in"), tmp_path / "out"
        victim = tmp_path / "in" / "rank_0.bin"
        with pytest.raises(CheckpointError, match=r"is gone: .*rank_0\.bin"):
            execute(
                job,
                out,
                workers=2,
                max_memory=CAP,
                stage=lambda stage: victim.unlink() if stage == "filled" else None,
            )
        assert not out.exists()

    def test_short_reads_are_read_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "file"
        path.write_bytes(bytes(range(256)))
        real = os.preadv
        monkeypatch.setattr(os, "preadv", lambda f, b, o: real(f, [b[0][:7]], o))
        with SourceFiles([PlannedSource(str(path), "file", 256)]) as files:
            out = bytearray(200)
            files.read_into(0, 20, memoryview(out))
        assert out == bytes(range(20, 220))


class TestProbe:
    @pytest.mark.parametrize("fsync", [True, False])
    def test_it_measures_and_leaves_nothing(self, tmp_path: Path, fsync: bool) -> None:
        job = job_of(tmp_path / "in")
        before = sorted(tmp_path.rglob("*"))
        rate = measured_rate(job, tmp_path / "not" / "there" / "yet", fsync=fsync, nbytes=MIB)
        assert rate is not None
        assert 0 < rate < 1e12
        assert sorted(tmp_path.rglob("*")) == before

    def test_without_a_place_to_write_there_is_no_rate(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "pwrite", _failing(os.pwrite, 0, errno.EROFS))
        assert measured_rate(job_of(tmp_path / "in"), tmp_path, fsync=False) is None
