"""Whole executions: right bytes, whatever the workers and the cap; bounded memory; destinations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard.errors import (
    ArchiveError,
    CheckpointError,
    InternalError,
    MissingFileError,
    OutputError,
    ReshardError,
    UsageError,
)
from reshard.execution import MANIFEST_NAME, check_manifest, execute, sizes_for, staging_path
from reshard.execution.buffers import KIB, MIB, BufferPool, workspaces
from reshard.execution.destination import check_case
from reshard.formats.target import OutputFile, Target
from reshard.geometry import ParamAffineMap
from reshard.planning import Plan, plan
from tests.execution.raw import (
    Array,
    expected_file,
    replicated,
    split,
    target_for,
    tree,
    write_checkpoint,
)
from tests.execution.strategies import layout_pairs

Keyed = dict[tuple[str, str], Array]


def mixed(folder: Path) -> tuple[Keyed, Plan, Target]:
    """Row splits, column splits, replicas and small tensors; some larger than a leaf."""
    rng = np.random.default_rng(1)
    layouts = {
        ("rows", "fp32"): split((700, 400), 0, (300, 400)),
        ("columns", "fp32"): split((1500, 1000), 1, (500, 400, 100)),
        ("columns", "exp_avg"): split((1500, 1000), 1, (500, 400, 100)),
        ("norm", "fp32"): replicated((33,), 3),
        ("empty", "fp32"): replicated((0, 5), 2),
        ("number", "fp32"): replicated((), 1),
    }
    fulls = {k: rng.standard_normal(m.logical_shape).astype("f4") for k, m in layouts.items()}
    checkpoint = write_checkpoint(folder, {k: (fulls[k], layouts[k]) for k in layouts})
    target = target_for(checkpoint)
    return fulls, plan(checkpoint, target), target


def _allow_threads(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let so many threads of each crew start, as a limit on tasks would."""
    real = threading.Thread.start
    started: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        if sum(other.is_alive() for other in started) >= count:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)


class TestBytes:
    @pytest.mark.parametrize(
        ("workers", "cap"),
        [(1, 64 * KIB), (3, 256 * KIB), (1, MIB), (4, MIB), (2, 256 * MIB), (7, 2 * MIB)],
    )
    def test_workers_and_cap_change_nothing(self, tmp_path: Path, workers: int, cap: int) -> None:
        fulls, job, target = mixed(tmp_path / "in")
        execute(job, tmp_path / "out", workers=workers, max_memory=cap)
        found = tree(tmp_path / "out")
        for file in target.files:
            assert found[file.path] == expected_file(fulls, file)
        execute(job, tmp_path / "again", workers=1, max_memory=256 * MIB)
        assert tree(tmp_path / "again") == found
        assert (tmp_path / "latest").read_text() == "out"

    @settings(
        max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(
        layout_pairs(),
        st.booleans(),
        st.integers(1, 3),
        st.sampled_from((64 * KIB, 200_000)),
    )
    def test_any_layouts(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        pair: tuple[ParamAffineMap, ParamAffineMap],
        together: bool,
        workers: int,
        cap: int,
    ) -> None:
        folder = tmp_path_factory.mktemp("any")
        source, layout = pair
        keys = [("a", "fp32"), ("b", "fp32")]
        rng = np.random.default_rng(0)
        fulls = {k: rng.standard_normal(source.logical_shape).astype("f4") for k in keys}
        checkpoint = write_checkpoint(folder / "in", {k: (fulls[k], source) for k in keys})
        target = target_for(checkpoint, dict.fromkeys(keys, layout), together=together)
        execute(
            plan(checkpoint, target), folder / "out", workers=workers, max_memory=cap, fsync=False
        )
        found = tree(folder / "out")
        for file in target.files:
            assert found[file.path] == expected_file(fulls, file)
        assert check_manifest(folder / "out", workers=1, max_memory=cap) == ()

    def test_fewer_threads_than_wanted_do_the_work(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fulls, job, target = mixed(tmp_path / "in")
        _allow_threads(monkeypatch, 1)
        execute(job, tmp_path / "out", workers=4, max_memory=MIB)
        found = tree(tmp_path / "out")
        assert all(found[file.path] == expected_file(fulls, file) for file in target.files)

    def test_without_a_thread_nothing_is_done(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, job, _ = mixed(tmp_path / "in")
        _allow_threads(monkeypatch, 0)
        with pytest.raises(ReshardError) as caught:
            execute(job, tmp_path / "out", workers=4, max_memory=MIB)
        assert str(caught.value) == (
            "the system starts no thread for the work; next: raise its limits on tasks and memory "
            "(ulimit -u, ulimit -v), or lower --workers and --max-memory"
        )
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]

    def test_many_tensors_in_one_file(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(3)
        keys = [(f"p{k}", "fp32") for k in range(40)]
        fulls = {k: rng.standard_normal((97, 211)).astype("f4") for k in keys}
        layout = split((97, 211), 1, (100, 111))
        checkpoint = write_checkpoint(tmp_path / "in", {k: (fulls[k], layout) for k in keys})
        target = target_for(checkpoint, together=True)
        execute(plan(checkpoint, target), tmp_path / "out", workers=3, max_memory=MIB)
        (file,) = target.files
        assert (tmp_path / "out" / file.path).read_bytes() == expected_file(fulls, file)

    def test_files_without_tensors(self, tmp_path: Path) -> None:
        _, job, _ = mixed(tmp_path / "in")
        plain = (
            OutputFile("small.txt", 5, ((0, b"hello"),)),
            OutputFile("deep/er/large.bin", 3 * MIB, ((1, b"x" * MIB), (2 * MIB, b"y"))),
            OutputFile("nothing", 0, ()),
        )
        checkpoint_plan = replace(job, files=(*job.files, *_planned(plain)))
        execute(checkpoint_plan, tmp_path / "out", workers=2, max_memory=MIB)
        found = tree(tmp_path / "out")
        assert (found["small.txt"], found["nothing"]) == (b"hello", b"")
        large = b"\0" + b"x" * MIB + b"\0" * (MIB - 1) + b"y" + b"\0" * (MIB - 1)
        assert found["deep/er/large.bin"] == large

    def test_progress_is_told_in_bytes_up_to_the_total(self, tmp_path: Path) -> None:
        _, job, _ = mixed(tmp_path / "in")
        told: list[tuple[int, int, str]] = []
        execute(
            job,
            tmp_path / "out",
            workers=2,
            max_memory=MIB,
            progress=lambda *step: told.append(step),
        )
        for what in ("convert", "sync"):
            steps = [(done, total) for done, total, name in told if name == what]
            assert steps[-1][0] == steps[-1][1] > 0
            assert steps == sorted(steps)


def _planned(files: tuple[OutputFile, ...]):  # type: ignore[no-untyped-def]
    from reshard.planning import PlannedFile

    return [PlannedFile(f.path, f.size, f.literals) for f in files]


class TestMemory:
    @pytest.mark.parametrize("cap", [64 * KIB, 300_000, MIB, 64 * MIB, 1 << 40])
    @pytest.mark.parametrize("workers", [1, 2, 7, 1000])
    def test_the_sizes_never_pass_the_cap(self, cap: int, workers: int) -> None:
        sizes = sizes_for(cap, workers)
        assert sizes.total <= cap
        assert 1 <= sizes.workers <= workers
        assert min(sizes.block, sizes.scratch, sizes.flags, sizes.analysis) >= 64

    def test_the_pool_refuses_to_pass_its_cap(self) -> None:
        pool = BufferPool(100)
        pool.take(100)
        with pytest.raises(InternalError, match="memory cap"):
            pool.take(1)

    def test_a_workspace_takes_what_was_announced(self) -> None:
        for space in workspaces(MIB, 3):
            total = len(space.block) + len(space.twin) + len(space.scratch) + space.flags.nbytes
            assert total <= MIB // 3

    def test_a_tensor_larger_than_the_cap_goes_through_in_pieces(self, tmp_path: Path) -> None:
        cap, shape = 256 * KIB, (4096, 1024)
        layouts = {
            ("c", "fp32"): split(shape, 1, (512, 512)),
            ("r", "fp32"): replicated(shape, 2),
        }
        full = np.random.default_rng(0).standard_normal(shape).astype("f4")
        checkpoint = write_checkpoint(tmp_path / "in", {k: (full, m) for k, m in layouts.items()})
        job = plan(checkpoint, target_for(checkpoint))
        del full
        execute(job, tmp_path / "warm", workers=2, max_memory=cap)
        tracemalloc.start()
        execute(job, tmp_path / "out", workers=2, max_memory=cap)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < cap + 512 * KIB

    @pytest.mark.parametrize(("cap", "workers"), [(1000, 1), (MIB, 0)])
    def test_nonsense_is_refused(self, cap: int, workers: int) -> None:
        with pytest.raises(UsageError):
            sizes_for(cap, workers)

    def test_torch_is_never_imported(self) -> None:
        code = "import sys, reshard.execution, reshard.planning; sys.exit('torch' in sys.modules)"
        paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        assert subprocess.run([sys.executable, "-c", code], check=False, env=paths).returncode == 0


class TestDestination:
    def test_a_taken_destination_is_refused_and_untouched(self, tmp_path: Path) -> None:
        _, job, _ = mixed(tmp_path / "in")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("keep")
        with pytest.raises(OutputError, match=r"exists already.*--overwrite"):
            execute(job, tmp_path / "out", workers=1, max_memory=MIB)
        assert tree(tmp_path / "out") == {"mine": b"keep"}
        assert not staging_path(tmp_path / "out").exists()

    def test_an_empty_folder_is_free(self, tmp_path: Path) -> None:
        _, job, _ = mixed(tmp_path / "in")
        (tmp_path / "out").mkdir()
        execute(job, tmp_path / "out", workers=1, max_memory=MIB)
        assert MANIFEST_NAME in tree(tmp_path / "out")

    @pytest.mark.parametrize("exchange", [True, False])
    def test_overwrite_replaces_everything(
        self, tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not exchange:
            monkeypatch.setattr("reshard.execution.staging._exchange", lambda *_: False)
        _, job, _ = mixed(tmp_path / "in")
        (tmp_path / "out").mkdir()
        for name in ("old", MANIFEST_NAME):
            (tmp_path / "out" / name).write_text("old")
        execute(job, tmp_path / "out", workers=1, max_memory=MIB, overwrite=True)
        assert "old" not in tree(tmp_path / "out")
        assert check_manifest(tmp_path / "out", workers=1, max_memory=MIB) == ()
        assert not staging_path(tmp_path / "out").exists()

    @pytest.mark.parametrize("out", ["in", "in/deeper/out", "."])
    def test_the_input_is_not_an_output(self, tmp_path: Path, out: str) -> None:
        _, job, _ = mixed(tmp_path / "in")
        before = tree(tmp_path)
        with pytest.raises(OutputError, match="touch its own input"):
            execute(job, tmp_path / out, workers=1, max_memory=MIB, overwrite=True)
        assert tree(tmp_path) == before

    def test_a_link_to_the_input_is_the_input(self, tmp_path: Path) -> None:
        _, job, _ = mixed(tmp_path / "in")
        (tmp_path / "link").symlink_to(tmp_path / "in")
        with pytest.raises(OutputError, match="touch its own input"):
            execute(job, tmp_path / "link" / "out", workers=1, max_memory=MIB)
        with pytest.raises(OutputError, match="not a folder"):
            execute(job, tmp_path / "link", workers=1, max_memory=MIB, overwrite=True)

    @pytest.mark.parametrize(
        "name", ["../out", "/etc/x", "a/../../b", "", "a//b", "./a", "a\0b", "x" * 300, "a/."]
    )
    def test_names_stay_inside(self, tmp_path: Path, name: str) -> None:
        _, job, _ = mixed(tmp_path / "in")
        evil = replace(job.files[0], path=name)
        with pytest.raises(OutputError):
            execute(replace(job, files=(evil,)), tmp_path / "out", workers=1, max_memory=MIB)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]

    def test_names_do_not_collide(self, tmp_path: Path) -> None:
        _, job, _ = mixed(tmp_path / "in")
        for names in (("a", "a"), ("a", "a/b"), (MANIFEST_NAME, "b")):
            files = tuple(replace(job.files[0], path=name) for name in names)
            with pytest.raises(OutputError):
                execute(replace(job, files=files), tmp_path / "out", workers=1, max_memory=MIB)

    def test_a_pointer_stays_beside_the_output(self, tmp_path: Path) -> None:
        _, job, _ = mixed(tmp_path / "in")
        evil = replace(job, pointer=("../latest", "out"))
        with pytest.raises(OutputError, match="leave its folder"):
            execute(evil, tmp_path / "out", workers=1, max_memory=MIB)

    def test_a_folder_in_the_place_of_the_pointer_is_refused_first(self, tmp_path: Path) -> None:
        _, job, _ = mixed(tmp_path / "in")
        (tmp_path / "latest").mkdir()
        with pytest.raises(OutputError) as caught:
            execute(
                replace(job, pointer=("latest", "out")), tmp_path / "out", workers=1, max_memory=MIB
            )
        assert str(caught.value) == (
            f"the name of the pointer file is taken by a folder: {tmp_path / 'latest'}; "
            "next: move it away, or choose an output in another folder"
        )
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "latest"]

    def test_a_folder_put_there_meanwhile_is_not_replaced(self, tmp_path: Path) -> None:
        _, job, _ = mixed(tmp_path / "in")
        out = tmp_path / "out"

        def write_thesis(stage: str) -> None:
            if stage == "complete":
                out.mkdir()
                (out / "thesis.txt").write_text("mine")

        with pytest.raises(OutputError, match="a folder that no checkpoint converter wrote"):
            execute(job, out, workers=1, max_memory=MIB, overwrite=True, stage=write_thesis)
        assert tree(out) == {"thesis.txt": b"mine"}
        (out / "thesis.txt").unlink()
        report = execute(job, out, workers=1, max_memory=MIB, resume=True)
        assert report.kept == report.tensors
        assert check_manifest(out, workers=1, max_memory=MIB) == ()

    def test_names_that_differ_in_case_need_a_file_system_that_tells_them_apart(
        self, tmp_path: Path
    ) -> None:
        _, job, _ = mixed(tmp_path / "in")
        names = ("norm/w.bin", "NORM/w.bin")
        both = replace(job, files=tuple(replace(job.files[0], path=name) for name in names))
        check_case(both, tmp_path)
        (tmp_path / "LOCK").touch()  # a file `lock` as such a file system shows it
        check_case(job, tmp_path)
        with pytest.raises(OutputError) as caught:
            check_case(both, tmp_path)
        assert str(caught.value) == (
            "two names of the output are one on this file system, which ignores case: "
            f"{tmp_path}: found NORM and norm; next: choose a folder on another file system"
        )

    def test_too_little_room_is_refused_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, job, _ = mixed(tmp_path / "in")
        found = os.statvfs(tmp_path)
        few = os.statvfs_result((*found[:4], 5, *found[5:]))
        monkeypatch.setattr("os.statvfs", lambda _: few)
        with pytest.raises(OutputError, match="no room for the output"):
            execute(job, tmp_path / "out", workers=1, max_memory=MIB)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]

    def test_a_parent_that_is_a_file_is_refused(self, tmp_path: Path) -> None:
        _, job, _ = mixed(tmp_path / "in")
        (tmp_path / "file").write_text("")
        for out in (tmp_path / "file" / "out", tmp_path / "file" / "deep" / "out"):
            with pytest.raises(OutputError) as caught:
                execute(job, out, workers=1, max_memory=MIB)
            assert str(caught.value) == (
                f"the output would lie beneath something that is not a folder: {out}: "
                f"found {tmp_path / 'file'}; next: choose another folder"
            )

    @pytest.mark.parametrize("nbytes", [246, 247, 255])
    def test_a_name_needs_room_for_that_of_the_work_folder(
        self, tmp_path: Path, nbytes: int
    ) -> None:
        _, job, _ = mixed(tmp_path / "in")
        out = tmp_path / ("x" * nbytes)
        if nbytes == 246:  # `.` and `.reshard` are 9 more
            execute(job, out, workers=1, max_memory=MIB)
            assert MANIFEST_NAME in tree(out)
            return
        with pytest.raises(OutputError) as caught:
            execute(job, out, workers=1, max_memory=MIB)
        assert str(caught.value) == (
            f"the name of the output is too long for the folder reshard works in: {out}: "
            f"expected at most 246 bytes, found {nbytes}; next: choose a shorter name"
        )
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]

    def test_links_in_a_circle_above_it_are_refused(self, tmp_path: Path) -> None:
        _, job, _ = mixed(tmp_path / "in")
        (tmp_path / "loop").symlink_to("loop")
        with pytest.raises(OutputError) as caught:
            execute(job, tmp_path / "loop" / "out", workers=1, max_memory=MIB)
        out = tmp_path / "loop" / "out"
        older, newer = (  # Python 3.13 resolves such a path
            f"the output would lie beneath links that lead in a circle: {out}",
            f"the output cannot be written: {out}: found Too many levels of symbolic links",
        )
        said, _, step = str(caught.value).rpartition("; next: ")
        assert (said, step) == (
            newer if sys.version_info >= (3, 13) else older,
            "choose another folder",
        )
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "loop"]


class TestSources:
    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        _, job, _ = mixed(tmp_path / "in")
        (tmp_path / "in" / "rank_1.bin").unlink()
        with pytest.raises(MissingFileError, match=r"rank_1\.bin"):
            execute(job, tmp_path / "out", workers=1, max_memory=MIB)

    def test_another_size_is_named(self, tmp_path: Path) -> None:
        _, job, _ = mixed(tmp_path / "in")
        with (tmp_path / "in" / "rank_1.bin").open("ab") as file:
            file.write(b"more")
        with pytest.raises(CheckpointError, match=r"changed since it was opened.*rank_1\.bin"):
            execute(job, tmp_path / "out", workers=1, max_memory=MIB)
        assert not (tmp_path / "out").exists()

    def test_more_files_than_handles(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("reshard.execution.sources._handles_allowed", lambda _: 1)
        fulls, job, target = mixed(tmp_path / "in")
        execute(job, tmp_path / "out", workers=2, max_memory=MIB)
        found = tree(tmp_path / "out")
        assert all(found[file.path] == expected_file(fulls, file) for file in target.files)


class TestManifest:
    def test_it_names_no_clock_and_no_place(self, tmp_path: Path) -> None:
        texts = []
        for name in ("one", "two"):
            _, job, _ = mixed(tmp_path / name / "in")
            execute(job, tmp_path / name / "out", workers=1, max_memory=MIB)
            texts.append((tmp_path / name / "out" / MANIFEST_NAME).read_text())
        assert texts[0] == texts[1]
        assert str(tmp_path) not in texts[0]
        content = json.loads(texts[0])
        assert content["source"]["topology"] == "dp3 tp1 pp1 ep1"
        assert {entry["name"] for entry in content["tensors"]} == {
            "rows",
            "columns",
            "norm",
            "empty",
            "number",
        }
        assert ParamAffineMap.from_dict(content["maps"][0]).logical_shape == (700, 400)

    def test_every_later_change_is_found(self, tmp_path: Path) -> None:
        _, job, _ = mixed(tmp_path / "in")
        out = tmp_path / "out"
        execute(job, out, workers=1, max_memory=MIB)

        def found() -> list[tuple[str, str, str]]:
            changes = check_manifest(out, workers=2, max_memory=MIB)
            return [(change.file, change.what, change.name) for change in changes]

        target = out / "columns" / "fp32.0.bin"
        data = bytearray(target.read_bytes())
        data[5_000_000] ^= 1
        target.write_bytes(data)
        assert found() == [("columns/fp32.0.bin", "tensor", "columns")]
        data[5_000_000] ^= 1
        data[3] ^= 1
        target.write_bytes(data)
        assert found() == [("columns/fp32.0.bin", "other bytes", "")]
        target.write_bytes(data[:-1])
        assert found() == [("columns/fp32.0.bin", "size", "")]
        target.unlink()
        (out / "stranger").write_text("")
        assert found() == [("columns/fp32.0.bin", "missing", ""), ("stranger", "extra file", "")]

    def test_zeros_between_the_tensors_of_a_slot_are_covered(self, tmp_path: Path) -> None:
        _, job, _ = mixed(tmp_path / "in")
        norm = next(file for file in job.files if file.path == "norm/fp32.0.bin")
        (slot,) = norm.slots
        (fill,) = slot.fills
        moved = replace(fill, offset=64)
        roomy = replace(slot, nbytes=slot.nbytes + 128, fills=(moved,))
        file = replace(norm, size=norm.size + 128, slots=(roomy,), literals=norm.literals[:1])
        out = tmp_path / "out"
        execute(replace(job, files=(file,)), out, workers=1, max_memory=MIB)
        target = out / file.path
        data = target.read_bytes()
        for place in range(len(data)):
            target.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            inside = 0 <= place - roomy.offset - 64 < fill.nbytes
            expected = ("tensor", "norm") if inside else ("other bytes", "")
            changes = check_manifest(out, workers=1, max_memory=MIB)
            assert [(change.what, change.name) for change in changes] == [expected]

    @pytest.mark.parametrize(
        ("kind", "what"),
        [("pipe", "cannot be read"), ("loop", "cannot be read"), ("folder", "cannot be read")],
    )
    def test_something_else_in_the_place_of_a_file_is_found(
        self, tmp_path: Path, kind: str, what: str
    ) -> None:
        _, job, _ = mixed(tmp_path / "in")
        out = tmp_path / "out"
        execute(job, out, workers=1, max_memory=MIB)
        target = out / "norm" / "fp32.0.bin"
        target.unlink()
        if kind == "pipe":
            os.mkfifo(target)
        elif kind == "loop":
            target.symlink_to(target)
        else:
            target.mkdir()
        changes = check_manifest(out, workers=1, max_memory=MIB)
        assert [(change.file, change.what) for change in changes] == [("norm/fp32.0.bin", what)]

    def test_a_file_in_the_place_of_a_folder_and_an_added_link_are_found(
        self, tmp_path: Path
    ) -> None:
        _, job, _ = mixed(tmp_path / "in")
        out = tmp_path / "out"
        execute(job, out, workers=1, max_memory=MIB)
        (out / "norm").rename(tmp_path / "norm")
        (out / "norm").write_text("")
        (out / "more").symlink_to(tmp_path / "norm")
        changes = check_manifest(out, workers=1, max_memory=MIB)
        assert [(change.file, change.what) for change in changes] == [
            ("more", "extra file"),
            ("norm", "extra file"),
            ("norm/fp32.0.bin", "missing"),
        ]

    def test_a_tensor_beyond_its_file_is_a_malformed_manifest(self, tmp_path: Path) -> None:
        _, job, _ = mixed(tmp_path / "in")
        out = tmp_path / "out"
        execute(job, out, workers=1, max_memory=MIB)
        manifest = json.loads((out / MANIFEST_NAME).read_text())
        manifest["tensors"][0]["offset"] = 1 << 63
        (out / MANIFEST_NAME).write_text(json.dumps(manifest))
        name = manifest["tensors"][0]["name"]
        with pytest.raises(ArchiveError) as caught:
            check_manifest(out, workers=1, max_memory=MIB)
        assert caught.value.expected == "a tensor inside its file"
        assert caught.value.found == json.dumps(name)
