"""Crashes: killed at any moment, output is absent, old, or whole, and resume finishes it."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from reshard.execution import MANIFEST_NAME, check_manifest, execute, staging_path
from reshard.execution.buffers import MIB
from reshard.execution.journal import read_journal
from tests.execution.raw import tree
from tests.execution.victim import STAGES, TENSORS, Order, Outcome, Server, job_of

KILLED = -signal.SIGKILL

MOMENTS = int(os.environ.get("RESHARD_CRASHES", "8"))
"""Random moments to be killed at; `make test-crash` asks for many."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Two servers, and the output of a run that nothing happened to."""

    server: Server
    second: Server
    whole: dict[str, bytes]
    names: list[str]
    source: Path


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("undisturbed")
    job = job_of(folder / "in")
    execute(job, folder / "out", workers=2, max_memory=MIB)
    server, second = Server(folder / "in"), Server(folder / "in")
    names = [file.path for file in job.files]
    yield Bench(server, second, tree(folder / "out"), names, folder / "in")
    server.close()
    second.close()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def finished(out: Path) -> int:
    """Tensors that the journal of an interrupted run says are finished."""
    found = read_journal(staging_path(out) / "journal")
    return len(found.records.slots) if found else 0


def check_resume(bench: Bench, out: Path) -> None:
    """Resume, compare with the undisturbed output, and see that nothing finished was redone."""
    known = finished(out)
    found = read_journal(staging_path(out) / "journal")
    kept = {bench.names[number] for number in found.records.files} if found else set()
    data = staging_path(out) / "data"
    before = {name: (data / name).stat().st_mtime_ns for name in kept if data.exists()}
    result = bench.server.run(Order(str(out), resume=True))
    assert result == Outcome(0, f"tensors {TENSORS} kept {known}")
    assert tree(out) == bench.whole
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before
    assert (out.parent / "latest").read_text() == "out"
    assert not staging_path(out).exists()


OLD = {"old": b"old", MANIFEST_NAME: b"old"}
"""What `--overwrite` may replace: a folder with a manifest in it."""


def old_result(out: Path) -> None:
    out.mkdir()
    for name, content in OLD.items():
        (out / name).write_bytes(content)


class TestKilled:
    @pytest.mark.parametrize("stage", STAGES)
    def test_at_a_stage(self, out: Path, bench: Bench, stage: str) -> None:
        assert bench.server.run(Order(str(out), at=stage)).code == KILLED
        reached = STAGES.index(stage)
        if reached < STAGES.index("renamed"):
            assert not out.exists()
        else:
            assert tree(out) == bench.whole
            assert check_manifest(out, workers=1, max_memory=MIB) == ()
        if reached < STAGES.index("pointed"):
            assert not (out.parent / "latest").exists()
        check_resume(bench, out)

    @pytest.mark.parametrize("stage", STAGES)
    def test_while_it_replaces_an_old_result(self, out: Path, bench: Bench, stage: str) -> None:
        old_result(out)
        order = Order(str(out), overwrite=True)
        assert bench.server.run(replace(order, at=stage)).code == KILLED
        after = STAGES.index(stage) >= STAGES.index("renamed")
        assert tree(out) == (bench.whole if after else OLD)
        assert bench.server.run(replace(order, resume=True)).code == 0
        assert tree(out) == bench.whole
        assert not staging_path(out).exists()

    @pytest.mark.parametrize("stage", ["replaced", "renamed", "pointed"])
    @pytest.mark.parametrize("overwrite", [True, False])
    def test_where_two_names_cannot_be_exchanged(
        self, out: Path, bench: Bench, stage: str, overwrite: bool
    ) -> None:
        old_result(out)
        killed = bench.server.run(Order(str(out), at=stage, overwrite=True, exchange=False))
        assert killed.code == KILLED
        assert out.exists() == (stage != "replaced")
        assert bench.server.run(Order(str(out), resume=True, overwrite=overwrite)).code == 0
        assert tree(out) == bench.whole
        assert not staging_path(out).exists()

    def test_an_old_result_moved_aside_comes_back(self, out: Path, bench: Bench) -> None:
        old_result(out)
        bench.server.run(Order(str(out), at="replaced", overwrite=True, exchange=False))
        bench.server.run(Order(str(out), at="folders", overwrite=True))
        assert tree(out) == OLD

    @pytest.mark.parametrize("stage", ["complete", "renamed"])
    def test_a_damaged_output_of_the_same_conversion_is_not_taken_for_the_new_one(
        self, out: Path, bench: Bench, stage: str
    ) -> None:
        assert bench.server.run(Order(str(out))).code == 0
        victim = out / "columns1" / "fp32.0.bin"
        victim.write_bytes(victim.read_bytes()[:-1] + b"X")
        assert tree(out) != bench.whole
        order = Order(str(out), overwrite=True)
        assert bench.server.run(replace(order, at=stage)).code == KILLED
        result = bench.server.run(replace(order, resume=True))
        assert result == Outcome(0, f"tensors {TENSORS} kept {TENSORS}")
        assert tree(out) == bench.whole
        assert not staging_path(out).exists()

    def test_a_damaged_output_is_not_replaced_unasked(self, out: Path, bench: Bench) -> None:
        bench.server.run(Order(str(out)))
        victim = out / "norm0" / "fp32.0.bin"
        victim.write_bytes(victim.read_bytes()[:-1] + b"X")
        before = tree(out)
        bench.server.run(Order(str(out), overwrite=True, at="complete"))
        result = bench.server.run(Order(str(out), resume=True))
        assert result == Outcome(
            2,
            f"OutputError: the output exists already: {out}; "
            "next: choose another name, or replace it with --overwrite",
        )
        assert tree(out) == before
        assert finished(out) == TENSORS

    @pytest.mark.parametrize("seed", range(MOMENTS))
    def test_at_a_random_moment(self, out: Path, bench: Bench, seed: int) -> None:
        moment = random.Random(seed).uniform(0, 30)
        assert bench.server.run(Order(str(out), after=moment)).code in (0, KILLED)
        if out.exists():
            assert tree(out) == bench.whole
        if staging_path(out).exists():
            check_resume(bench, out)
        assert tree(out) == bench.whole

    @pytest.mark.parametrize("seed", range(5))
    def test_again_and_again(self, out: Path, bench: Bench, seed: int) -> None:
        counts = []
        moments = random.Random(seed)
        for _ in range(6):
            bench.server.run(Order(str(out), after=moments.uniform(1, 12), resume=True))
            if out.exists():
                break
            counts.append(finished(out))
        assert counts == sorted(counts)
        if not out.exists():
            check_resume(bench, out)
        assert tree(out) == bench.whole


class TestResume:
    def test_left_over_work_is_not_thrown_away_unasked(self, out: Path, bench: Bench) -> None:
        bench.server.run(Order(str(out), at="filled"))
        refused = bench.server.run(Order(str(out)))
        assert refused.code == 2
        assert "an interrupted run has left finished work" in refused.text
        assert "24 finished tensors; next: continue it with --resume" in refused.text
        discarded = bench.server.run(Order(str(out), overwrite=True))
        assert discarded == Outcome(0, "tensors 24 kept 0")
        assert tree(out) == bench.whole

    def test_bytes_lost_after_the_crash_are_made_again(self, out: Path, bench: Bench) -> None:
        bench.server.run(Order(str(out), at="filled"))
        data = staging_path(out) / "data"
        lost = data / "columns1" / "fp32.0.bin"
        lost.write_bytes(b"\0" * lost.stat().st_size)
        (data / "rows2" / "exp_avg.0.bin").unlink()
        changed = data / "norm0" / "fp32.0.bin"
        changed.write_bytes(b"X" + changed.read_bytes()[1:])
        longer = data / "norm1" / "fp32.0.bin"
        longer.write_bytes(longer.read_bytes() + b"more")
        result = bench.server.run(Order(str(out), resume=True))
        assert result == Outcome(0, "tensors 24 kept 22")
        assert tree(out) == bench.whole

    @pytest.mark.parametrize("cap", [64 * 1024, 64 * MIB])
    def test_another_cap_may_finish_it(self, out: Path, bench: Bench, cap: int) -> None:
        bench.server.run(Order(str(out), after=6))
        if not out.exists():
            assert bench.server.run(Order(str(out), resume=True, cap=cap)).code == 0
        assert tree(out) == bench.whole

    def test_a_journal_cut_off_in_a_line_counts_up_to_it(self, out: Path, bench: Bench) -> None:
        bench.server.run(Order(str(out), at="filled"))
        journal = staging_path(out) / "journal"
        data = journal.read_bytes()
        counts = []
        for size in (len(data) - 1, len(data) // 2, 20):
            journal.write_bytes(data[:size])
            counts.append(finished(out))
        assert counts[0] == 24 > counts[1] > counts[2] == 0
        assert bench.server.run(Order(str(out), resume=True)).code == 2
        journal.write_bytes(data[: len(data) // 2])
        check_resume(bench, out)

    @pytest.mark.parametrize(
        "line", ['["reshard-journal-1","other","other",[]]', '["reshard-journal-2","x"]', "junk"]
    )
    def test_the_work_of_another_run_is_not_continued(
        self, out: Path, bench: Bench, line: str
    ) -> None:
        bench.server.run(Order(str(out), at="filled"))
        journal = staging_path(out) / "journal"
        journal.write_text("\n".join([line, *journal.read_text().split("\n")[1:]]))
        refused = bench.server.run(Order(str(out), resume=True))
        assert refused.code == 2
        assert "the interrupted run did something else" in refused.text
        refused = bench.server.run(Order(str(out)))
        assert refused.code == 2
        assert "an interrupted run has left finished work" in refused.text
        assert bench.server.run(Order(str(out), overwrite=True)).code == 0
        assert tree(out) == bench.whole

    @pytest.mark.parametrize(
        "line",
        [
            "[" * 100_000,
            '["slot",-1,0,1,["x"],[]]',
            '["slot",0,-1,1,["x"],[]]',
            '["file",-1,"x"]',
        ],
        ids=["deep", "slot of no file", "no slot", "no file"],
    )
    def test_a_line_that_no_run_wrote_ends_the_journal(
        self, out: Path, bench: Bench, line: str
    ) -> None:
        bench.server.run(Order(str(out), at="filled"))
        journal = staging_path(out) / "journal"
        lines = journal.read_text().split("\n")
        half = len(lines) // 2
        journal.write_text("\n".join([*lines[:half], line, *lines[half:]]))
        found = read_journal(journal)
        assert found is not None
        assert len(found.records.slots) + len(found.records.files) == half - 1
        check_resume(bench, out)

    def test_a_line_cut_off_does_not_spoil_the_next_run(self, out: Path, bench: Bench) -> None:
        bench.server.run(Order(str(out), at="filled"))
        journal = staging_path(out) / "journal"
        data = journal.read_bytes()
        journal.write_bytes(data[: len(data) // 2])
        bench.server.run(Order(str(out), at="filled", resume=True))
        assert finished(out) == 24
        check_resume(bench, out)

    def test_sources_touched_since_are_compared_again(self, tmp_path: Path, bench: Bench) -> None:
        out, source = tmp_path / "out", bench.source / "rank_0.bin"
        bench.server.run(Order(str(out), at="filled"))
        data = source.read_bytes()
        middle = len(data) // 2 + 1000  # inside a shard, far from both ends
        source.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        changed = bench.server.run(Order(str(out), resume=True, at="filled"))
        assert changed.code == KILLED
        data_now = {p.read_bytes() for p in (staging_path(out) / "data").rglob("*.bin")}
        assert len(data_now - set(bench.whole.values())) == 1
        source.write_bytes(data)
        result = bench.server.run(Order(str(out), resume=True))
        assert result == Outcome(0, "tensors 24 kept 23")
        assert tree(out) == bench.whole

    @pytest.mark.parametrize("left", ["nothing", "the lock", "the pointer too"])
    def test_killed_while_it_cleaned_up(self, out: Path, bench: Bench, left: str) -> None:
        assert bench.server.run(Order(str(out))).code == 0
        if left != "the pointer too":
            (out.parent / "latest").unlink()
        if left == "the lock":
            staging_path(out).mkdir()
            (staging_path(out) / "lock").touch()
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
        result = bench.server.run(Order(str(out), resume=True))
        assert result == Outcome(0, f"tensors {TENSORS} kept {TENSORS}")
        assert (out.parent / "latest").read_text() == "out"
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
        assert not staging_path(out).exists()

    def test_a_finished_output_that_changed_is_not_taken_for_one(
        self, out: Path, bench: Bench
    ) -> None:
        bench.server.run(Order(str(out)))
        victim = out / "norm0" / "fp32.0.bin"
        victim.write_bytes(victim.read_bytes()[:-1] + b"X")
        refused = bench.server.run(Order(str(out), resume=True))
        assert refused.code == 2
        assert "is no longer what was written" in refused.text
        assert "norm0/fp32.0.bin" in refused.text
        assert "other bytes outside the tensors" in refused.text
        assert not staging_path(out).exists()
        result = bench.server.run(Order(str(out), resume=True, overwrite=True))
        assert result == Outcome(0, f"tensors {TENSORS} kept 0")
        assert tree(out) == bench.whole

    @pytest.mark.parametrize("word", ["plan", "sources"])
    def test_the_output_of_another_run_is_not_taken_for_this_one_s(
        self, out: Path, bench: Bench, word: str
    ) -> None:
        bench.server.run(Order(str(out)))
        manifest = json.loads((out / MANIFEST_NAME).read_text())
        manifest[word] = manifest[word][:-1]
        (out / MANIFEST_NAME).write_text(json.dumps(manifest))
        refused = bench.server.run(Order(str(out), resume=True))
        assert refused.code == 2
        assert "the output exists already" in refused.text
        assert not staging_path(out).exists()

    def test_without_anything_to_resume_it_begins(self, out: Path, bench: Bench) -> None:
        assert bench.server.run(Order(str(out), resume=True)).code == 0
        assert tree(out) == bench.whole


class TestLock:
    def _waiting(self, bench: Bench, out: Path) -> int:
        bench.second.start(Order(str(out), wait=True))
        while not Path(f"{out}.waiting").exists():
            time.sleep(0.01)
        return int(Path(f"{out}.pid").read_text())

    def test_a_second_run_is_kept_out_and_a_dead_one_is_not(self, out: Path, bench: Bench) -> None:
        first = self._waiting(bench, out)
        for words in (
            Order(str(out)),
            Order(str(out), resume=True),
            Order(str(out), overwrite=True),
        ):
            refused = bench.server.run(words)
            assert refused.code == 2
            assert "another process is writing this output" in refused.text
        os.kill(first, signal.SIGKILL)
        assert bench.second.outcome().code == KILLED
        assert bench.server.run(Order(str(out))).code == 0
        assert tree(out) == bench.whole

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_leaves_nothing_like_a_result(
        self, out: Path, bench: Bench, number: signal.Signals
    ) -> None:
        os.kill(self._waiting(bench, out), number)
        assert bench.second.outcome().code != 0
        assert not out.exists()
        assert bench.server.run(Order(str(out))).code == 0
        assert tree(out) == bench.whole

    def test_the_next_run_may_make_its_lock_before_this_one_is_gone(
        self, tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "out"
        real = Path.unlink

        def unlink(path: Path, missing_ok: bool = False) -> None:
            real(path, missing_ok)
            if path == staging_path(out) / "lock":
                path.touch()  # as the next run does

        monkeypatch.setattr(Path, "unlink", unlink)
        execute(job_of(tmp_path / "in"), out, workers=1, max_memory=MIB)
        assert tree(out) == bench.whole
        assert [path.name for path in staging_path(out).iterdir()] == ["lock"]

    @pytest.mark.parametrize("kind", ["a file", "a link"])
    def test_a_stranger_in_place_of_the_folder_is_not_touched(
        self, tmp_path: Path, out: Path, bench: Bench, kind: str
    ) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        if kind == "a file":
            staging_path(out).write_text("mine")
        else:
            staging_path(out).symlink_to(elsewhere)
        for words in (Order(str(out)), Order(str(out), resume=True, overwrite=True)):
            assert bench.server.run(words) == Outcome(
                2,
                "OutputError: the name of the folder reshard works in is taken by something else: "
                f"{staging_path(out)}: found {kind}; next: move it away",
            )
        assert list(elsewhere.iterdir()) == []
        assert staging_path(out).is_symlink() or staging_path(out).read_text() == "mine"

    def test_a_lock_that_leads_elsewhere_is_refused(self, out: Path, bench: Bench) -> None:
        staging_path(out).mkdir()
        (staging_path(out) / "lock").symlink_to("/not/there/at/all")
        assert bench.server.run(Order(str(out))) == Outcome(
            2,
            f"OutputError: the output cannot be written: {out}: "
            "found Too many levels of symbolic links; next: choose another folder",
        )

    def test_a_stranger_s_folder_is_not_touched(self, out: Path, bench: Bench) -> None:
        staging_path(out).mkdir()
        (staging_path(out) / "thesis.txt").write_text("mine")
        for words in (
            Order(str(out)),
            Order(str(out), resume=True),
            Order(str(out), overwrite=True),
        ):
            refused = bench.server.run(words)
            assert refused.code == 2
            assert "holds something else" in refused.text
        assert (staging_path(out) / "thesis.txt").read_text() == "mine"
