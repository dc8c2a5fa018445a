"""Replicas that differ: found to the bit, refused with the numbers, or resolved as asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import OutputError, ReplicaMismatchError, UnsupportedError
from reshard.execution import execute, staging_path
from reshard.execution.buffers import KIB, MIB
from reshard.execution.replicas import ReplicaFinding, larger
from reshard.formats.checkpoint import Checkpoint
from reshard.geometry import AffinePiece, ParamAffineMap
from reshard.planning import plan
from tests.execution.raw import Array, replicated, split, target_for, tree, write_checkpoint

KEY = ("w", "fp32")


def drifted(
    folder: Path,
    full: Array,
    layout: ParamAffineMap,
    changes: Mapping[int, Mapping[int, Any]],
    dtype: str = "float32",
) -> Checkpoint:
    """A checkpoint some of whose copies were changed: rank -> element of the shard -> value."""
    checkpoint = write_checkpoint(folder, {KEY: (full, layout)}, dtype=dtype)
    for rank, values in changes.items():
        region = checkpoint.tensors[KEY].regions[rank]
        path = Path(region.file)
        data = bytearray(path.read_bytes())
        shard = np.frombuffer(data, full.dtype, region.nbytes // full.itemsize, region.offset)
        for element, value in values.items():
            shard[element] = value
        path.write_bytes(data)
    return checkpoint


def output(folder: Path, dtype: str = "f4") -> Array:
    data = (folder / "w" / "fp32.0.bin").read_bytes()
    return np.frombuffer(data[12:-5], dtype)


@pytest.fixture
def full() -> Array:
    return np.random.default_rng(0).standard_normal((30, 700)).astype("f4")


class TestRefuse:
    def test_the_error_says_all_there_is_to_say(self, tmp_path: Path, full: Array) -> None:
        layout = replicated(full.shape, 3)
        changes: dict[int, dict[int, Any]] = {
            1: {777: 5.0, 20_000: full.flat[20_000] + 2},
            2: {900: np.float32(np.nan)},
        }
        job = plan(*_both(drifted(tmp_path / "in", full, layout, changes)))
        with pytest.raises(ReplicaMismatchError) as caught:
            execute(job, tmp_path / "out", workers=2, max_memory=64 * KIB)
        error = caught.value
        assert (error.parameter, error.state, error.offset, error.ranks) == (*KEY, 777, (0, 1))
        largest = max(abs(5.0 - float(full.flat[777])), 2.0)
        assert f"3 elements differing, the first at offset 777, by at most {largest:.6g}" in str(
            error
        )
        assert "rank_0.bin and rank_1.bin" in str(error)
        assert not (tmp_path / "out").exists()
        assert not staging_path(tmp_path / "out").exists()

    @pytest.mark.parametrize("small", [True, False])
    def test_the_same_mismatch_is_told_whoever_finds_one_first(
        self, tmp_path: Path, small: bool
    ) -> None:
        shape = (20, 30) if small else (700, 900)
        fulls = {
            (f"w{k:02d}", "fp32"): np.random.default_rng(k).standard_normal(shape).astype("f4")
            for k in range(12)
        }
        layout = replicated(shape, 2)
        tensors = {key: (full, layout) for key, full in fulls.items()}
        checkpoint = write_checkpoint(tmp_path / "in", tensors)
        for key in list(fulls)[3:]:
            region = checkpoint.tensors[key].regions[1]
            with Path(region.file).open("r+b") as file:
                file.seek(region.offset + region.nbytes - 4)
                file.write(b"\1\2\3\4")
        job = plan(checkpoint, target_for(checkpoint))
        said = set()
        for turn, workers in enumerate((1, 2, 4, 7, 2, 3)):
            with pytest.raises(ReplicaMismatchError, match="w03") as caught:
                execute(job, tmp_path / f"out{turn}", workers=workers, max_memory=MIB)
            said.add(str(caught.value))
        assert len(said) == 1

    @pytest.mark.parametrize("bits", [0x80000000, 0x7FC00001, 0x00000001])
    def test_one_bit_is_enough(self, tmp_path: Path, bits: int) -> None:
        full = np.zeros(1000, "f4")
        full[3:] = np.float32("nan")
        changed = np.array([bits], "u4").view("f4")[0]
        job = plan(
            *_both(drifted(tmp_path / "in", full, replicated((1000,), 2), {1: {1: changed}}))
        )
        with pytest.raises(ReplicaMismatchError, match="1 element differing"):
            execute(job, tmp_path / "out", workers=1, max_memory=MIB)

    def test_equal_nans_are_no_difference(self, tmp_path: Path) -> None:
        full = np.full(1000, np.nan, "f4")
        job = plan(*_both(drifted(tmp_path / "in", full, replicated((1000,), 2), {})))
        execute(job, tmp_path / "out", workers=1, max_memory=MIB)

    def test_the_offset_is_one_of_the_logical_tensor(self, tmp_path: Path) -> None:
        full = np.arange(12 * 10, dtype="f4").reshape(12, 10)
        checkpoint = drifted(tmp_path / "in", full, replicated(full.shape, 2), {1: {57: -1.0}})
        target = target_for(checkpoint, {KEY: split(full.shape, 1, (4, 6))})
        with pytest.raises(ReplicaMismatchError) as caught:
            execute(plan(checkpoint, target), tmp_path / "out", workers=1, max_memory=MIB)
        assert caught.value.offset == 57


def _both(checkpoint: Checkpoint):  # type: ignore[no-untyped-def]
    return checkpoint, target_for(checkpoint)


class TestFirst:
    def test_the_lowest_rank_wins_and_the_report_tells(self, tmp_path: Path, full: Array) -> None:
        changes = {0: {5: 1.5}, 2: {6: 2.5, 20_999: 3.5}}
        checkpoint = drifted(tmp_path / "in", full, replicated(full.shape, 3), changes)
        job = plan(checkpoint, target_for(checkpoint), replicas="first")
        for cap, workers in ((64 * KIB, 1), (MIB, 3)):
            out = tmp_path / f"out{cap}"
            report = execute(job, out, workers=workers, max_memory=cap)
            expected = full.reshape(-1).copy()
            expected[5] = 1.5
            assert output(out).tobytes() == expected.tobytes()
            (finding,) = report.replicas
            assert (finding.key, finding.count, finding.first) == (KEY, 3, 5)
            assert finding.largest == max(
                abs(1.5 - full.flat[5]), abs(2.5 - full.flat[6]), abs(3.5 - full.flat[20_999])
            )

    def test_elements_that_are_written_several_times_count_once(
        self, tmp_path: Path, full: Array
    ) -> None:
        changes = {2: {6: 2.5, 20_999: 3.5}}
        checkpoint = drifted(tmp_path / "in", full, replicated(full.shape, 3), changes)
        layout = split(full.shape, 0, (10, 20))
        twice = {0: (0, 1), 1: (2, 3)}
        everywhere = ParamAffineMap(
            full.shape,
            {r: layout.shard_shapes[old] for old, new in twice.items() for r in new},
            {
                r: tuple(replace(piece, locations=new) for piece in layout.pieces_by_rank[old])
                for old, new in twice.items()
                for r in new
            },
        )
        job = plan(checkpoint, target_for(checkpoint, {KEY: everywhere}), replicas="first")
        report = execute(job, tmp_path / "out", workers=2, max_memory=MIB)
        (finding,) = report.replicas
        assert (finding.count, finding.first) == (2, 6)

    def test_elements_that_are_written_again_in_part_count_once(
        self, tmp_path: Path, full: Array
    ) -> None:
        changes = {1: {6: 2.5, 7_500: 1.5, 20_999: 3.5}}
        checkpoint = drifted(tmp_path / "in", full, replicated(full.shape, 2), changes)
        layout = ParamAffineMap(  # rows 0 to 20 and 10 to 30: both have the middle ones
            full.shape,
            {0: (20, 700), 1: (20, 700)},
            {
                0: (
                    AffinePiece((10, 700), 0, (700, 1), 0, (700, 1), (0,)),
                    AffinePiece((10, 700), 7_000, (700, 1), 7_000, (700, 1), (0, 1)),
                ),
                1: (
                    AffinePiece((10, 700), 7_000, (700, 1), 0, (700, 1), (0, 1)),
                    AffinePiece((10, 700), 14_000, (700, 1), 7_000, (700, 1), (1,)),
                ),
            },
        )
        job = plan(checkpoint, target_for(checkpoint, {KEY: layout}), replicas="first")
        (finding,) = execute(job, tmp_path / "out", workers=2, max_memory=MIB).replicas
        assert (finding.count, finding.first) == (3, 6)

    def test_sources_are_not_read_again_once_the_output_has_its_name(
        self, tmp_path: Path, full: Array
    ) -> None:
        checkpoint = drifted(tmp_path / "in", full, replicated(full.shape, 2), {1: {5: 1.5}})
        files = {Path(region.file) for region in checkpoint.tensors[KEY].regions.values()}

        def overwritten(stage: str) -> None:
            if stage == "renamed":
                for file in files:
                    file.write_bytes(bytes(file.stat().st_size))

        job = plan(checkpoint, target_for(checkpoint), replicas="first")
        report = execute(job, tmp_path / "out", workers=1, max_memory=MIB, stage=overwritten)
        assert [finding.count for finding in report.replicas] == [1]
        assert not any(any(file.read_bytes()) for file in files)

    def test_the_manifest_tells_too(self, tmp_path: Path, full: Array) -> None:
        checkpoint = drifted(tmp_path / "in", full, replicated(full.shape, 2), {1: {5: 1.5}})
        job = plan(checkpoint, target_for(checkpoint), replicas="first")
        execute(job, tmp_path / "out", workers=1, max_memory=MIB)
        text = tree(tmp_path / "out")["reshard_manifest.json"].decode()
        assert '"policy": "first", "differ": [{"name": "w", "state": "fp32", "count": 1' in text

    def test_what_was_found_before_a_crash_is_not_forgotten(
        self, tmp_path: Path, full: Array
    ) -> None:
        changes = {1: {5: 1.5, 20_000: float("nan")}}
        checkpoint = drifted(tmp_path / "in", full, replicated(full.shape, 2), changes)
        job = plan(checkpoint, target_for(checkpoint), replicas="first")
        execute(job, tmp_path / "whole", workers=1, max_memory=MIB)

        def stop(stage: str) -> None:
            if stage == "filled":
                raise OSError(5, "a fault")

        with pytest.raises(OutputError):
            execute(job, tmp_path / "out", workers=1, max_memory=MIB, stage=stop)
        report = execute(job, tmp_path / "out", workers=1, max_memory=MIB, resume=True)
        assert (report.kept, report.replicas[0].count) == (1, 2)
        assert tree(tmp_path / "out") == tree(tmp_path / "whole")


class TestMean:
    @pytest.mark.parametrize(
        ("dtype", "kind"), [("float32", "f4"), ("float64", "f8"), ("float16", "f2")]
    )
    def test_elements_that_differ_become_the_mean(
        self, tmp_path: Path, dtype: str, kind: str
    ) -> None:
        rng = np.random.default_rng(2)
        full = rng.standard_normal(5000).astype(kind)
        copies = [full.copy() for _ in range(3)]
        copies[1][100:200] += 1
        copies[2][150] = -3
        changes = {rank: {k: copies[rank][k] for k in range(100, 200)} for rank in (1, 2)}
        checkpoint = drifted(tmp_path / "in", full, replicated((5000,), 3), changes, dtype)
        job = plan(checkpoint, target_for(checkpoint), replicas="mean")
        report = execute(job, tmp_path / "out", workers=2, max_memory=64 * KIB)
        mean = np.stack(copies).astype("f8").mean(axis=0).astype(kind)
        expected = full.copy()
        expected[100:200] = mean[100:200]
        assert output(tmp_path / "out", kind).tobytes() == expected.tobytes()
        assert report.replicas[0].count == 100

    def test_equal_nans_keep_their_payload(self, tmp_path: Path) -> None:
        full = np.zeros(100, "f4")
        full.view("u4")[7] = 0x7FC12345
        checkpoint = drifted(tmp_path / "in", full, replicated((100,), 2), {1: {8: 1.0}})
        job = plan(checkpoint, target_for(checkpoint), replicas="mean")
        execute(job, tmp_path / "out", workers=1, max_memory=MIB)
        found = output(tmp_path / "out")
        assert found.view("u4")[7] == 0x7FC12345
        assert found[8] == 0.5

    def test_integers_have_no_mean(self, tmp_path: Path) -> None:
        full = np.zeros(100, "i4")
        checkpoint = drifted(tmp_path / "in", full, replicated((100,), 2), {1: {8: 1}}, "int32")
        job = plan(checkpoint, target_for(checkpoint), replicas="mean")
        with pytest.raises(UnsupportedError, match="have no mean"):
            execute(job, tmp_path / "out", workers=1, max_memory=MIB)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2399), st.floats(-9, 9, width=32)),
        max_size=12,
    ),
    st.sampled_from((64 * KIB, MIB)),
)
def test_findings_equal_a_dense_comparison(
    tmp_path_factory: pytest.TempPathFactory,
    edits: list[tuple[int, int, float]],
    cap: int,
) -> None:
    folder = tmp_path_factory.mktemp("dense")
    full = np.random.default_rng(4).standard_normal((40, 60)).astype("f4")
    copies = np.stack([full.reshape(-1)] * 3)
    changes: dict[int, dict[int, float]] = {0: {}, 1: {}, 2: {}}
    for rank, element, value in edits:
        copies[rank, element] = value
        changes[rank][element] = value
    checkpoint = drifted(folder / "in", full, replicated(full.shape, 3), changes)
    job = plan(checkpoint, target_for(checkpoint), replicas="first")
    report = execute(job, folder / "out", workers=2, max_memory=cap, fsync=False)
    bits = copies.view("u4")
    differs = (bits != bits[0]).any(axis=0)
    if not differs.any():
        assert report.replicas == ()
        return
    (finding,) = report.replicas
    assert finding.count == differs.sum()
    assert finding.first == np.argmax(differs)
    assert finding.largest == np.abs(copies[:, differs] - copies[0, differs].astype("f8")).max()
    assert output(folder / "out").tobytes() == copies[0].tobytes()


def test_partial_replicas_with_other_boundaries(tmp_path: Path) -> None:
    from reshard.geometry import AffinePiece, locate

    full = np.arange(100, dtype="f4")
    pieces = {
        0: [AffinePiece((60,), 0, (1,), 0, (1,), (0,))],
        1: [AffinePiece((60,), 40, (1,), 0, (1,), (1,))],
    }
    layout = locate((100,), {0: (60,), 1: (60,)}, pieces)
    checkpoint = drifted(tmp_path / "in", full, layout, {1: {19: -1.0, 59: 7.0}})
    job = plan(checkpoint, target_for(checkpoint), replicas="first")
    report = execute(job, tmp_path / "out", workers=1, max_memory=MIB)
    (finding,) = report.replicas
    assert (finding.count, finding.first, finding.largest) == (1, 59, 60.0)
    assert output(tmp_path / "out")[99] == 7.0


def test_findings_join() -> None:
    first = ReplicaFinding(KEY, 2, 10, float("nan"), (0, 1), ("a", "b"))
    second = ReplicaFinding(KEY, 3, 4, 2.0, (0, 2), ("a", "c"))
    joined = first.joined(second)
    assert joined == second.joined(first)
    assert (joined.count, joined.first, joined.largest, joined.holders) == (5, 4, 2.0, (0, 2))
    assert larger(1.0, float("nan")) == 1.0
